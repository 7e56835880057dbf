# SPDX-License-Identifier: Apache-2.0
"""Where the page ids of copies lie while the GPU reads them: registered memory, used in turn.

┌──────┬───────────┬───────────┬─────────┐
│ free │ copy 7    │ copy 8    │  free   │     an entry is free again when its copy is done,
└──────┴───────────┴───────────┴─────────┘     in the order of submission, as copies are
       └ oldest                └ next
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_tiered.devices.base import Event
from vllm_tiered.devices.pages import PageIds

_ALIGNMENT = 2
"""Ids: 16 bytes, to which Triton compiles the kernel."""


class _Entry(NamedTuple):
    begin: int
    end: int
    copy: Event


class IdRing:
    """Ids of one direction's copies.

    Args:
        allocate: registered memory of so many bytes, uint8.
        num_ids: it holds at first.

    Attributes:
        num_ids: it holds now: it grows when more are under way than it holds, rather than wait.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], num_ids: int) -> None:
        self.num_ids = num_ids
        self._allocate = allocate
        # No memory for a direction that is never used.
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._values: PageIds = self._ids.numpy()
        self._entries: deque[_Entry] = deque()
        self._next = 0

    def put(
        self, src_ids: PageIds, dst_ids: PageIds, copy: Event
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both lists, int64 [n], as they are until ``copy`` is done.

        The caller keeps the tensors until then: the ring may have left their memory by growing.
        """
        count = len(src_ids)
        stride = -(-count // _ALIGNMENT) * _ALIGNMENT
        first = self._take(2 * stride, copy)
        second = first + stride
        self._values[first : first + count] = src_ids
        self._values[second : second + count] = dst_ids
        return self._ids[first : first + count], self._ids[second : second + count]

    def _take(self, length: int, copy: Event) -> int:
        while self._entries and self._entries[0].copy.done():
            self._entries.popleft()
        begin = self._room(length) if len(self._ids) else None
        if begin is None:
            self._grow(length)
            begin = 0
        self._next = begin + length
        self._entries.append(_Entry(begin, self._next, copy))
        return begin

    def _room(self, length: int) -> int | None:
        """Where so many free places lie side by side."""
        if not self._entries:
            return 0 if length <= self.num_ids else None
        oldest = self._entries[0].begin
        if self._next <= oldest:  # the free places are between the newest and the oldest
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
