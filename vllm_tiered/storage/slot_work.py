# SPDX-License-Identifier: Apache-2.0
"""The slots that a read wants: how they are cut into requests, and how they come to their rows.

    file      │    block    │    block    │    block    │    block    │    block    │
    slots       [ 0 ][ 1 ][ 2 ][ 3 ]                        [ 11 ]
    extents   ├──────────── 0 ────────────┤             ├───── 1 ─────┤

An extent is read in one request: of whole blocks, as direct I/O wants it. Slots in the same block
or in neighbouring ones share it.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt

from vllm_tiered.devices.pages import PageIds
from vllm_tiered.storage.checksums import checksum_of
from vllm_tiered.storage.immutable_file import ALIGNMENT
from vllm_tiered.storage.io_pool import Bytes
from vllm_tiered.storage.slot_read import Section, SlotRead
from vllm_tiered.units import KIB

EXTENT_BYTES = 256 * KIB
"""Of slots in one request, unless one alone is larger."""

BOUNCE_BYTES = EXTENT_BYTES + 2 * ALIGNMENT
"""Such slots and the rest of their first and last block."""


class Work:
    """A list of slots that tasks share out among themselves.

    Args:
        slots: int64 [n], ascending; one may come twice.
        rows: int64 [n], where they go.
        memory: all rows, as bytes.

    Attributes:
        section: as given.
        rows: as given, as a list.
        is_whole: slots are whole blocks, and the disk may write to the rows. Else it writes to
            memory in between.
        cuts: extent i is of the slots cuts[i] to cuts[i + 1].
        offsets, sizes: of the extents in the file, bytes; whole blocks.
        turn: the next extent that nobody has taken; next() of it is one step for all threads.
        num_tasks: that have not ended.
        read: who waits.
        has_failed: nobody needs the rest any more.
    """

    read: SlotRead

    def __init__(self, section: Section, slots: PageIds, rows: PageIds, memory: Bytes) -> None:
        self.section = section
        self.rows: list[int] = rows.tolist()
        self.memory = memory
        begins = section.offset + slots * section.stride
        self.is_whole = not any(
            number % ALIGNMENT for number in (section.offset, section.stride, memory.ctypes.data)
        )
        cuts = cut(begins, section.stride, is_whole=self.is_whole)
        self.offsets = begins[cuts[:-1]] // ALIGNMENT * ALIGNMENT
        ends = begins[cuts[1:] - 1] + section.stride
        self.sizes = -(-ends // ALIGNMENT) * ALIGNMENT - self.offsets
        self.cuts: list[int] = cuts.tolist()
        self._slots: list[int] = slots.tolist()
        self._begins: list[int] = begins.tolist()
        self.turn = count()
        self.has_failed = False
        self.num_tasks = 0
        self._view = memory.data
        self._sums: list[int] = section.sums[slots].tolist()

    def let_go(self) -> None:
        """Of the memory, while its owner still waits.

        Or a reader would be the last to hold it, and freeing a tensor in a daemon thread when
        Python ends aborts the process.
        """
        del self.memory, self._view

    def where(self, index: int) -> str:
        """Names a slot, for messages."""
        return self.section.where(self._slots[index])

    def range_of(self, first: int, end: int) -> tuple[int, int, int]:
        """Where in the file slots of one extent are, in whole blocks.

        Returns:
            Offset, bytes, and how many of them it takes to have the slots: the file may end
            within the last block.
        """
        offset = self._begins[first] // ALIGNMENT * ALIGNMENT
        needed = self._begins[end - 1] + self.section.stride - offset
        return offset, -(-needed // ALIGNMENT) * ALIGNMENT, needed

    # Where a disk writes to -------------------------------------------------------------

    def buffers(self, first: int, end: int) -> list[memoryview]:
        """The rows of an extent; consecutive ones are one buffer."""
        rows, stride = self.rows, self.section.stride
        buffers = []
        begin = previous = rows[first]
        for row in rows[first + 1 : end]:
            if row != previous + 1:
                buffers.append(self._view[begin * stride : (previous + 1) * stride])
                begin = row
            previous = row
        buffers.append(self._view[begin * stride : (previous + 1) * stride])
        return buffers

    def vectors(self) -> npt.NDArray[np.uint64]:
        """[n, 2], address and bytes of each row."""
        stride = self.section.stride
        vectors = np.empty((len(self.rows), 2), dtype=np.uint64)
        vectors[:, 0] = self.memory.ctypes.data + np.array(self.rows, dtype=np.int64) * stride
        vectors[:, 1] = stride
        return vectors

    def parts(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        """Extents, first and end, that fit so much memory together; one at least."""
        ends = np.cumsum(self.sizes)
        first, before = 0, 0
        while first < len(ends):
            end = max(first + 1, int(np.searchsorted(ends, before + num_bytes, side="right")))
            yield first, end
            first, before = end, int(ends[end - 1])

    # What has come ----------------------------------------------------------------------

    def take(self, blocks: memoryview, offset: int, first: int, end: int) -> None:
        """Copy slots to their rows from the file's bytes that begin at ``offset``."""
        rows, begins, stride = self.rows, self._begins, self.section.stride
        for index in range(first, end):
            at, to = begins[index] - offset, rows[index] * stride
            self._view[to : to + stride] = blocks[at : at + stride]

    def damaged(self, first: int, end: int) -> list[int]:
        """Of an extent's slots, those whose rows do not have what was published."""
        view, stride, num_bytes = self._view, self.section.stride, self.section.num_bytes
        rows, sums = self.rows, self._sums
        return [
            index
            for index in range(first, end)
            if checksum_of(view[(at := rows[index] * stride) : at + num_bytes]) != sums[index]
        ]


def cut(begins: PageIds, stride: int, *, is_whole: bool) -> PageIds:
    """Where a list of slots is cut into extents: n + 1 positions for n extents.

    Args:
        begins: of the slots in the file, bytes, ascending.
        is_whole: they are whole blocks, and must not be in an extent twice.
    """
    if not len(begins):
        return np.zeros(1, dtype=np.int64)
    firsts = begins // ALIGNMENT
    ends = -(-(begins + stride) // ALIGNMENT)
    is_start = np.ones(len(begins), dtype=np.bool_)
    is_start[1:] = firsts[1:] > ends[:-1]
    if is_whole:
        is_start[1:] |= begins[1:] == begins[:-1]  # to two rows
    origins = (firsts[is_start] * ALIGNMENT)[np.cumsum(is_start) - 1]
    unit = max(stride, ALIGNMENT)
    parts = (begins - origins) // unit // max(1, EXTENT_BYTES // unit)
    is_start[1:] |= parts[1:] != parts[:-1]
    return np.append(np.flatnonzero(is_start), len(begins))
