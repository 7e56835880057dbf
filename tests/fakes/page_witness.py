# SPDX-License-Identifier: Apache-2.0
"""Witness of narrow far pages: what is read back must be the reference's rounding of what left."""

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from vllm_tiered.devices.copy_thread import CopyJob, CopyThread
from vllm_tiered.devices.narrow_pages import NarrowCodec
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.kv.swapper import Swapper


class PageWitness:
    """Record of all pages that were written to the far tier, as near pages, before the copy.

    Attributes:
        num_read, num_written: pages that copies moved.
        num_seen: staged pages that a layer was about to read.
    """

    def __init__(self) -> None:
        self.num_read = self.num_written = self.num_seen = 0
        self._sent: dict[Hashable, bytes] = {}

    def record(self, job: CopyJob) -> None:
        """Record the near pages of a write that is about to run."""
        copy = job.copy
        words = copy.src.words
        assert words is not None
        pairs = zip(copy.src_pages.ids.tolist(), copy.dst_pages.ids.tolist(), strict=True)
        for near_id, far_id in pairs:
            self._sent[_place(copy.dst, far_id)] = words[near_id].tobytes()
        self.num_written += len(copy.src_pages)

    def check_read(self, job: CopyJob) -> None:
        """Check the near pages of a read that has ended."""
        copy = job.copy
        lost = set(job.done.failed_pages.tolist())
        pairs = zip(copy.src_pages.ids.tolist(), copy.dst_pages.ids.tolist(), strict=True)
        kept = [(near_id, far_id) for far_id, near_id in pairs if far_id not in lost]
        self._check(copy.src, copy.dst, kept)
        self.num_read += len(copy.src_pages)

    def check_layer(self, swapper: Swapper, layer: int) -> None:
        """Check the staged pages of an offloaded layer that is about to be computed."""
        blocks = swapper._staging.read_ids
        pages = swapper.table.pages[layer, blocks].tolist()
        slots = swapper.far.slots_of(blocks).tolist()
        far = swapper.far.far_region(layer)
        self._check(far, swapper._staging._near, list(zip(pages, slots, strict=True)))
        self.num_seen += len(blocks)

    def _check(self, far: PageBuffer, near: PageBuffer, pairs: list[tuple[int, int]]) -> None:
        """Check near pages against the pages sent to the far ones; the pairs are (near, far)."""
        if not pairs:
            return
        assert near.words is not None
        sent = b"".join(self._sent[_place(far, far_id)] for _, far_id in pairs)
        expected = rounded(far.codec, np.frombuffer(sent, np.int64).reshape(len(pairs), -1))
        arrived = near.words[[near_id for near_id, _ in pairs]]
        np.testing.assert_array_equal(arrived, expected)


def rounded(codec: Any, words: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return near pages as the reference gives them back."""
    reference = NarrowCodec(codec.page_format, None)
    ids = np.arange(len(words), dtype=np.int64)
    far = np.zeros((len(words), codec.far_bytes // 8), np.int64)
    reference.encode(words.copy(), ids, far, ids)
    found = np.zeros_like(words)
    reference.decode(far, ids, found, ids)
    return found


def install(monkeypatch: pytest.MonkeyPatch) -> PageWitness:
    """Let a new witness watch all copies of CPU devices, and the layers of swappers."""
    witness = PageWitness()
    run, wait_layer = CopyThread.run, Swapper.wait_layer

    def watched_run(self: CopyThread, job: CopyJob) -> None:
        for event in job.after:
            event.wait()
        if job.copy.dst.codec is not None:
            witness.record(job)
        run(self, job)
        if job.copy.src.codec is not None:  # otherwise a probe of the link
            witness.check_read(job)

    def watched_wait(self: Swapper, layer: int) -> None:
        is_staged = self.pending_read(layer) is not None
        wait_layer(self, layer)
        if is_staged:
            witness.check_layer(self, layer)

    monkeypatch.setattr(CopyThread, "run", watched_run)
    monkeypatch.setattr(Swapper, "wait_layer", watched_wait)
    return witness


def _place(far: PageBuffer, page_id: int) -> Hashable:
    """Return what identifies a far page among all regions."""
    if far.store is not None:
        return id(far.store), far.first_page + page_id
    return far.data.data_ptr() + page_id * far.page_bytes
