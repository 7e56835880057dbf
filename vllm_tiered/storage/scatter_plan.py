# SPDX-License-Identifier: Apache-2.0
"""Plan of a scattered read or write: slots of a file, cut into extents, and rows of memory.

    file      │    block    │    block    │    block    │    block    │    block    │
    slots       [ 0 ][ 1 ][ 2 ][ 3 ]                        [ 11 ]
    extents   ├──────────── 0 ────────────┤             ├───── 1 ─────┤

An extent is moved in one request of whole blocks, as direct I/O requires; where slots are moved
directly, blocks are what the disk calls one, mostly 512 bytes. Slots in the same block
or in adjacent blocks share an extent, and so may slots with a short hole between them: what is read
there is dropped.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tiered.devices.pages import PageError, PageIds
from vllm_tiered.storage.checksums import Checksums, checksum
from vllm_tiered.storage.direct_file import ALIGNMENT, Bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Section of a file with slots of one size.

    Attributes:
        offset: offset of slot 0 in bytes.
        stride: bytes from one slot to the next. If it and ``offset`` are multiples of the file's
            alignment, slots are read directly into their rows; otherwise they are copied.
        num_bytes: bytes of a slot's content, which the checksum covers.
        checksums: uint64 [num_slots].
        describe: names a slot, for messages.
    """

    offset: int
    stride: int
    num_bytes: int
    checksums: Checksums
    describe: Callable[[int], str]


class ScatterPlan:
    """Plan to move slots between a file and rows of memory.

    Args:
        section: the slots of the file.
        slots: int64 [n], in any order; a slot may be repeated.
        rows: int64 [n], the rows of memory.
        memory: all rows as bytes, if the disk or a reader thread may write to them. None if the
            caller copies between rows and bounce buffers itself.
        extent_bytes: most bytes of slots in one request, unless one slot is larger.
        hole_bytes: longest hole between two slots that one request may cover.
        alignment: of direct I/O, bytes.
        waste: memory for what a direct read finds in holes, ``hole_bytes`` in whole blocks. Several
            requests may write to it at once.

    Attributes:
        section: as given.
        slots, rows: as given, sorted by slot.
        is_direct: slots are whole blocks, and the disk writes to the rows. Otherwise it writes to
            bounce buffers.
        cuts: extent i has the slots with indexes cuts[i] .. cuts[i + 1] - 1.
        offsets, sizes: offsets and bytes of the extents in the file, whole blocks.
        origins: ``offsets`` as a list.
        needed: bytes of each extent up to the end of its last slot. A shorter read has lost slots;
            the file may end within the last block.
        errors: errors of lost slots by index, if the failure policy records them.
        reason: the system's message for the last failed request.
        is_given_up: the remaining extents need not be moved.
    """

    def __init__(
        self,
        section: Section,
        slots: PageIds,
        rows: PageIds,
        memory: Bytes | None = None,
        *,
        extent_bytes: int,
        hole_bytes: int = 0,
        alignment: int = ALIGNMENT,
        waste: Bytes | None = None,
    ) -> None:
        if len(slots) > 1 and not (np.diff(slots) > 0).all():
            order = np.argsort(slots, kind="stable")
            slots, rows = slots[order], rows[order]
        self.section, self.slots, self.rows = section, slots, rows
        begins = section.offset + slots * section.stride
        is_whole = not (section.offset % alignment or section.stride % alignment)
        self.is_direct = is_whole and memory is not None and not memory.ctypes.data % alignment
        self._block_bytes = block = alignment if self.is_direct else ALIGNMENT
        if self.is_direct and waste is None:
            hole_bytes = 0
        cuts = cut(
            begins,
            section.stride,
            extent_bytes=extent_bytes,
            hole_bytes=hole_bytes,
            may_repeat=not self.is_direct,
            block_bytes=block,
        )
        self.offsets = begins[cuts[:-1]] // block * block
        needed = begins[cuts[1:] - 1] + section.stride - self.offsets
        self.sizes = -(-needed // block) * block
        self.needed: list[int] = needed.tolist()
        self.origins: list[int] = self.offsets.tolist()
        self.cuts: list[int] = cuts.tolist()
        self.errors: dict[int, PageError] = {}
        self.reason = ""
        self.is_given_up = False
        self._memory = memory
        self._view = None if memory is None else memory.data
        self._waste = waste
        self._holes = np.zeros(len(slots), dtype=np.int64)  # bytes in front of each slot
        if self.is_direct and hole_bytes:
            self._holes[1:] = np.diff(begins) - section.stride
            self._holes[cuts[:-1]] = 0
        self._begins: list[int] = begins.tolist()
        self._row_begins: list[int] = (rows * section.stride).tolist()
        self._checksums: list[int] = section.checksums[slots].tolist()

    @property
    def num_extents(self) -> int:
        return len(self.sizes)

    def part(self, extent: int) -> slice:
        """Return the indexes of an extent's slots."""
        return slice(*self.cuts[extent : extent + 2])

    def release_memory(self) -> None:
        """Drop the references to the memory, while its owner still waits.

        Otherwise a reader thread could hold the last reference, and freeing a tensor in a daemon
        thread when Python ends aborts the process.
        """
        self._memory = self._view = self._waste = None

    def describe(self, index: int) -> str:
        """Return the name of the slot with an index in the plan, for messages."""
        return self.section.describe(int(self.slots[index]))

    def span(self, first: int, end: int) -> tuple[int, int, int]:
        """Return the range of the file that holds slots ``first`` .. ``end - 1`` of one extent.

        Returns:
            Offset and bytes, in whole blocks, and the bytes up to the end of the last slot.
        """
        block = self._block_bytes
        offset = self._begins[first] // block * block
        needed = self._begins[end - 1] + self.section.stride - offset
        return offset, -(-needed // block) * block, needed

    # Memory that a disk writes to ---------------------------------------------------------

    def buffers(self, first: int, end: int) -> list[memoryview]:
        """Return the memory of slots ``first`` .. ``end - 1`` and of the holes between them.

        Consecutive rows share a buffer.
        """
        view, begins, stride = self._view, self._row_begins, self.section.stride
        assert view is not None
        buffers = []
        begin = previous = begins[first]
        for index in range(first + 1, end):
            row, hole = begins[index], int(self._holes[index])
            if hole or row != previous + stride:
                buffers.append(view[begin : previous + stride])
                begin = row
            if hole:
                assert self._waste is not None
                buffers.append(self._waste.data[:hole])
            previous = row
        buffers.append(view[begin : previous + stride])
        return buffers

    def vectors(self) -> tuple[npt.NDArray[np.uint64], PageIds]:
        """Return the memory of each row and each hole in the order of the file.

        Returns:
            Addresses and bytes, uint64 [m, 2], and where each extent's begin, int64 [n + 1].
        """
        assert self._memory is not None
        stride = self.section.stride
        has_hole = self._holes > 0
        places = np.arange(len(self.rows)) + np.cumsum(has_hole)
        count = len(self.rows) + int(has_hole.sum())
        vectors = np.empty((count, 2), dtype=np.uint64)
        vectors[places, 0] = self._memory.ctypes.data + self.rows * stride
        vectors[places, 1] = stride
        if count > len(self.rows):
            assert self._waste is not None
            vectors[places[has_hole] - 1, 0] = self._waste.ctypes.data
            vectors[places[has_hole] - 1, 1] = self._holes[has_hole]
        return vectors, np.append(places, count)[self.cuts]

    def parts(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of extents, first and end, that fit in ``num_bytes``; at least one each."""
        ends = np.cumsum(self.sizes)
        first, before = 0, 0
        while first < len(ends):
            end = max(first + 1, int(np.searchsorted(ends, before + num_bytes, side="right")))
            yield first, end
            first, before = end, int(ends[end - 1])

    # Slots that have arrived --------------------------------------------------------------

    def damaged(self, first: int, end: int, bounce: memoryview | None, origin: int) -> list[int]:
        """Return the indexes from ``first`` to ``end - 1`` of slots that fail their checksums.

        Args:
            bounce: the file's bytes from ``origin`` on; None if the slots are in their rows.
        """
        if bounce is None:
            view, begins, origin = self._view, self._row_begins, 0
        else:
            view, begins = bounce, self._begins
        assert view is not None
        num_bytes, expected = self.section.num_bytes, self._checksums
        return [
            index
            for index in range(first, end)
            if checksum(view[(at := begins[index] - origin) : at + num_bytes]) != expected[index]
        ]

    def copy_to_rows(self, bounce: memoryview, origin: int, first: int, end: int) -> None:
        """Copy slots to their rows from ``bounce``, which has the file's bytes from ``origin``."""
        begins, rows, stride = self._begins, self._row_begins, self.section.stride
        view = self._view
        assert view is not None
        for index in range(first, end):
            at, to = begins[index] - origin, rows[index]
            view[to : to + stride] = bounce[at : at + stride]


def cut(
    begins: PageIds,
    stride: int,
    *,
    extent_bytes: int,
    hole_bytes: int = 0,
    may_repeat: bool = True,
    block_bytes: int = ALIGNMENT,
) -> PageIds:
    """Cut a list of slots into extents.

    Args:
        begins: offsets of the slots in the file, bytes, ascending.
        stride, extent_bytes, hole_bytes: as in :class:`Section` and :class:`ScatterPlan`.
        may_repeat: an extent may contain a slot twice.
        block_bytes: unit of requests.

    Returns:
        n + 1 positions in the list for n extents.
    """
    if not len(begins):
        return np.zeros(1, dtype=np.int64)
    firsts = begins // block_bytes
    ends = -(-(begins + stride) // block_bytes)
    is_start = np.ones(len(begins), dtype=np.bool_)
    is_start[1:] = firsts[1:] > ends[:-1] + hole_bytes // block_bytes
    if not may_repeat:
        is_start[1:] |= begins[1:] == begins[:-1]  # one slot for two rows: two reads
    origins = (firsts[is_start] * block_bytes)[np.cumsum(is_start) - 1]
    unit = max(stride, block_bytes)
    parts = (begins - origins) // unit // max(1, extent_bytes // unit)
    is_start[1:] |= parts[1:] != parts[:-1]
    return np.append(np.flatnonzero(is_start), len(begins))
