# SPDX-License-Identifier: Apache-2.0
"""Prepared and submitted copies of a GPU, by a kernel, copy engines, or through bounce buffers.

The kernel copies scattered pages in one launch and occupies a few multiprocessors while it runs. A
copy engine occupies none, but each run of consecutive pages takes a separate call. Only a kernel
can convert pages on the way. A copy between the GPU and a page store uses bounce buffers
(``bounce_copy.py``).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cuda.event import CudaEvent
from vllm_tiered.devices.cuda.page_id_buffer import PageIdBuffer
from vllm_tiered.devices.cuda.runtime import RawEvent, Runtime, Stream
from vllm_tiered.devices.pages import PageBuffer, PageCodec, Pages, link_bytes


class CudaCopy:
    """Prepared copy between the GPU and pinned memory; immutable, so it may run more than once.

    Args:
        engine_run_bytes: copy engines do the copy if its runs have at least this many bytes on
            average.

    Attributes:
        codec: what the kernel converts the pages with; None to copy them.
        num_bytes: bytes on the link.
        words: source and target, int32 [pages, words].
        runs: (first source page, first target page, number of pages) of each run; None if the
            kernel does the copy.
    """

    __slots__ = (
        "codec",
        "direction",
        "dst",
        "dst_pages",
        "num_bytes",
        "runs",
        "src",
        "src_pages",
        "words",
    )

    def __init__(
        self,
        direction: Direction,
        src: PageBuffer,
        src_pages: Pages,
        dst: PageBuffer,
        dst_pages: Pages,
        *,
        engine_run_bytes: int,
    ) -> None:
        self.direction = direction
        self.src = src
        self.src_pages = src_pages
        self.dst = dst
        self.dst_pages = dst_pages
        self.num_bytes = len(src_pages) * link_bytes(src, dst)
        self.codec: PageCodec | None = None
        if src.page_bytes != dst.page_bytes:
            self.codec = dst.codec if src.codec is None else src.codec
        self.runs: list[tuple[int, int, int]] | None = None
        if self.codec is None and self.num_bytes >= engine_run_bytes:
            runs = joint_runs(src_pages, dst_pages)
            if self.num_bytes >= engine_run_bytes * len(runs):
                self.runs = runs
        self.words = src.data.view(torch.int32), dst.data.view(torch.int32)

    def launch(
        self, runtime: Runtime, stream: Stream, ids: PageIdBuffer, done: CudaEvent
    ) -> Sequence[object]:
        """Submit the copy; return the tensors besides pages that the GPU uses until ``done``."""
        if not self.num_bytes:
            return ()
        if self.runs is not None:
            for src_page, dst_page, count in self.runs:
                runtime.copy_run(
                    stream,
                    self.src.data[src_page : src_page + count],
                    self.dst.data[dst_page : dst_page + count],
                )
            return ()
        lists = ids.store(self.src_pages.ids, self.dst_pages.ids, done)
        src, dst = self.words
        if self.codec is None:
            runtime.copy_pages(stream, src, lists[0], dst, lists[1])
        else:
            runtime.convert_pages(stream, src, lists[0], dst, lists[1], self.codec)
        return lists


class BounceCopy(NamedTuple):
    """Prepared copy between a page store and the GPU."""

    direction: Direction
    src: PageBuffer
    src_pages: Pages
    dst: PageBuffer
    dst_pages: Pages
    engine_run_bytes: int

    @property
    def num_bytes(self) -> int:
        return len(self.src_pages) * link_bytes(self.src, self.dst)


class CopyJob:
    """Submitted copy; it keeps all tensors that the GPU uses alive until it is done.

    Attributes:
        begun: event that is done when the copy begins.
        in_use: tensors, besides the pages, that the GPU reads or writes.
    """

    __slots__ = ("after", "begun", "copy", "done", "in_use")

    def __init__(
        self,
        copy: CudaCopy | BounceCopy,
        after: tuple[CudaEvent, ...],
        done: CudaEvent,
        begun: RawEvent,
    ) -> None:
        self.copy = copy
        self.after = after
        self.done = done
        self.begun = begun
        self.in_use: Sequence[object] = ()


def joint_runs(src_pages: Pages, dst_pages: Pages) -> list[tuple[int, int, int]]:
    """List runs consecutive on both sides: (first source page, first target page, page count)."""
    src, dst = src_pages.ids, dst_pages.ids
    if not len(src):
        return []
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(src)]
    return [
        (int(src[start]), int(dst[start]), end - start)
        for start, end in zip(starts, ends, strict=True)
    ]
