# SPDX-License-Identifier: Apache-2.0
"""A prepared copy on a GPU: by a kernel, or by the copy engines.

The kernel copies any pages in one launch, and takes a few multiprocessors from compute while it
runs. A copy engine takes none, but is given each run of consecutive pages by a call of its own.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cuda.event import CudaEvent
from vllm_tiered.devices.cuda.page_id_buffer import IdRing
from vllm_tiered.devices.cuda.runtime import Runtime, Stream
from vllm_tiered.devices.pages import PageBuffer, Pages


class CudaCopy:
    """Nothing in it changes, so it may be under way more than once.

    Args:
        engine_run_bytes: the copy engines take it if its runs have this many bytes on average.

    Attributes:
        words: source and target, int32 [pages, words].
        runs: (first source page, first target page, number) of each run; None for the kernel.
    """

    __slots__ = ("direction", "dst", "dst_pages", "num_bytes", "runs", "src", "src_pages", "words")

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
        self.num_bytes = len(src_pages) * src.page_bytes
        self.runs: list[tuple[int, int, int]] | None = None
        if self.num_bytes >= engine_run_bytes:
            runs = joint_runs(src_pages, dst_pages)
            if self.num_bytes >= engine_run_bytes * len(runs):
                self.runs = runs
        self.words = src.data.view(torch.int32), dst.data.view(torch.int32)

    def launch(
        self, runtime: Runtime, stream: Stream, ids: IdRing, done: CudaEvent
    ) -> Sequence[object]:
        """Submit it; what the GPU uses beside the pages until ``done``."""
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
        lists = ids.put(self.src_pages.ids, self.dst_pages.ids, done)
        runtime.copy_pages(stream, self.words[0], lists[0], self.words[1], lists[1])
        return lists


def joint_runs(src_pages: Pages, dst_pages: Pages) -> list[tuple[int, int, int]]:
    """(first source page, first target page, number) of runs consecutive in both."""
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
