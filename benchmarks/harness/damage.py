# SPDX-License-Identifier: Apache-2.0
"""Damages KV pages in far memory at random, in an engine process that asks for it."""

from __future__ import annotations

import random

from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.copy_thread import CopyJob, CopyThread
from vllm_tiered.devices.cpu import CpuDevice

_pages_damaged = 0


def num_damaged() -> int:
    """Return how many pages were damaged in this process."""
    return _pages_damaged


def install(share: float, seed: int) -> None:
    """Flip one bit of a page before this share of the reads from far memory (call once)."""
    rng = random.Random(seed)

    class DamagingThread(CopyThread):
        def run(self, job: CopyJob) -> None:
            global _pages_damaged
            copy = job.copy
            is_read = self.name.endswith(Direction.READ.value)
            if is_read and len(copy.src_pages) and copy.src.store is None and rng.random() < share:
                page = copy.src.data[rng.choice(copy.src_pages.ids.tolist())]
                page[rng.randrange(len(page))] ^= 1 << rng.randrange(7)
                _pages_damaged += 1
            super().run(job)

    CpuDevice.thread_class = DamagingThread
