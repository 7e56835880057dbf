# SPDX-License-Identifier: Apache-2.0
"""Faults for engine tests: damaged pages in far memory, and levels that never settle."""

import itertools
import random

import pytest
import torch

from benchmarks.harness.damage import flip_bit
from vllm_tiered.adapter.kv import adaptive
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.copy_thread import CopyJob, CopyThread
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.kv.controller import Decision
from vllm_tiered.kv.page_pool import PagePool
from vllm_tiered.kv.swapper import Swapper


class FlippingThread(CopyThread):
    """Damages a far page before some reads of it: in one bit, or in memory in every fourth byte."""

    whole = False
    flips: frozenset[int] = frozenset()  # numbers of the reads that it damages
    num_reads = 0

    def run(self, job: CopyJob) -> None:
        if self.name.endswith(Direction.READ.value) and len(job.copy.src_pages):
            cls = type(self)
            cls.num_reads += 1
            if cls.num_reads in cls.flips:
                for event in job.after:  # a write to the page may be among them
                    event.wait()
                src, page = job.copy.src, int(job.copy.src_pages.ids[0])
                if cls.whole:
                    src.data[page, 3::4] ^= 64
                else:
                    flip_bit(src, page, 17 * 8 + 6)
        super().run(job)


def flipping_device(reads: set[int], *, whole_pages: bool = False) -> CpuDevice:
    class Thread(FlippingThread):
        flips = frozenset(reads)
        whole = whole_pages

    class Device(CpuDevice):
        thread_class = Thread

    return Device()


def stuck_device() -> CpuDevice:
    """Return a device with a bad place in far memory, in which nothing is kept.

    It is that of the first page that is read.
    """
    bad: list[torch.Tensor] = []

    class Thread(CopyThread):
        def run(self, job: CopyJob) -> None:
            copy = job.copy
            if self.name.endswith(Direction.READ.value) and len(copy.src_pages):
                for event in job.after:  # a write to the place may be among them
                    event.wait()
                if not bad:
                    bad.append(copy.src.data[copy.src_pages.ids[0]])
                bad[0].fill_(0x3C)
            super().run(job)

    class Device(CpuDevice):
        thread_class = Thread

    return Device()


def walk(monkeypatch: pytest.MonkeyPatch, seed: int, steps_per_level: int = 3) -> None:
    """Replace the controller by one that picks random targets, often before it reached the last."""
    rng = random.Random(seed)
    counter = itertools.count()

    def step(signals, state, levels, tuning):
        if next(counter) % steps_per_level == 0:
            state = rng.randrange(len(levels.ladder))
        return Decision(level_idx=state, reason="a random walk"), state

    monkeypatch.setattr(adaptive.controller, "step", step)
    monkeypatch.setattr(adaptive.controller, "initial_state", lambda levels, tuning: 0)


def fused_kv_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers write new KV without the backend's KV update, as some models' fused operations."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.attention import Attention

    forward = Attention.forward

    def fused(self, query, key, value, *args, **kwargs):
        slots = get_forward_context().slot_mapping
        if not isinstance(slots, dict) or self.layer_name not in slots:
            return forward(self, query, key, value, *args, **kwargs)
        shape = (-1, self.num_kv_heads, self.head_size)
        update = type(self.impl).do_kv_cache_update  # not the wrapped one of the instance
        update(
            self.impl,
            self,
            key.view(shape),
            value.view(shape),
            self.kv_cache,
            slots[self.layer_name],
        )
        return forward(self, query, None, None, *args, **kwargs)

    monkeypatch.setattr(Attention, "forward", fused)


def poison_freed_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill pages with large numbers as they are given back, unless a copy still reads them.

    They must be finite: kernels read slots of a page that nothing was written to, with weight 0.
    """
    make, free = Swapper.__init__, PagePool.free
    near_of: dict[int, PageBuffer] = {}

    def init(self, **kwargs) -> None:
        make(self, **kwargs)
        near_of[id(self.pool)] = kwargs["near"]

    def poisoned(self, pages, owner) -> None:
        free(self, pages, owner)
        if (near := near_of.get(id(self))) is not None:
            near.data[torch.from_numpy(pages)] = 0x46  # 12,690 in float32

    monkeypatch.setattr(Swapper, "__init__", init)
    monkeypatch.setattr(PagePool, "free", poisoned)
