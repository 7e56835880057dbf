# SPDX-License-Identifier: Apache-2.0
"""Ring buffer in pinned memory from which the GPU reads the page ids of copies.

┌──────┬───────────┬───────────┬─────────┐
│ free │ copy 7    │ copy 8    │  free   │     an entry becomes free when its copy is done, in
└──────┴───────────┴───────────┴─────────┘     the order of submission, in which copies run
       └ oldest                └ next
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_tiered.devices.base import Event
from vllm_tiered.devices.pages import PageIds

_ALIGNMENT_IDS = 2
"""Alignment of 16 bytes, for which Triton compiles the kernel."""


class _Entry(NamedTuple):
    begin: int
    end: int
    copy: Event


class PageIdBuffer:
    """Ring buffer of the page ids of one direction's copies.

    It never waits: it grows when copies under way need more ids than it holds.

    Args:
        allocate: returns pinned memory of a given number of bytes, uint8.
        num_ids: initial capacity.

    Attributes:
        num_ids: current capacity.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], num_ids: int) -> None:
        self.num_ids = num_ids
        self._allocate = allocate
        # No memory is allocated for a direction that is never used.
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._values: PageIds = self._ids.numpy()
        self._entries: deque[_Entry] = deque()
        self._next = 0

    def store(
        self, src_ids: PageIds, dst_ids: PageIds, copy: Event
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store both lists until ``copy`` is done.

        The caller keeps the returned tensors until then, as a buffer that grows drops their memory.

        Returns:
            Source and target ids, int64 [n] each, in pinned memory.
        """
        count = len(src_ids)
        stride = -(-count // _ALIGNMENT_IDS) * _ALIGNMENT_IDS
        first = self._reserve(2 * stride, copy)
        second = first + stride
        self._values[first : first + count] = src_ids
        self._values[second : second + count] = dst_ids
        return self._ids[first : first + count], self._ids[second : second + count]

    def _reserve(self, length: int, copy: Event) -> int:
        while self._entries and self._entries[0].copy.done():
            self._entries.popleft()
        begin = self._find_free(length) if len(self._ids) else None
        if begin is None:
            self._grow(length)
            begin = 0
        self._next = begin + length
        self._entries.append(_Entry(begin, self._next, copy))
        return begin

    def _find_free(self, length: int) -> int | None:
        """Find the index of ``length`` contiguous free places; None if there are none."""
        if not self._entries:
            return 0 if length <= self.num_ids else None
        oldest = self._entries[0].begin
        if self._next <= oldest:  # free places lie between the newest and the oldest entry
            return self._next if length <= oldest - self._next else None
        if length <= self.num_ids - self._next:
            return self._next
        return 0 if length <= oldest else None

    def _grow(self, length: int) -> None:
        under_way = sum(entry.end - entry.begin for entry in self._entries)
        while len(self._ids) and self.num_ids < 2 * length + under_way:
            self.num_ids *= 2
        self.num_ids = max(self.num_ids, length)
        self._ids = self._allocate(8 * self.num_ids).view(torch.int64)
        self._values = self._ids.numpy()
        self._entries.clear()
