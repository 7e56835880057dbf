# SPDX-License-Identifier: Apache-2.0
"""Plan of a scattered read or write: slots of a file, cut into extents, and rows of memory.

    file      │    block    │    block    │    block    │    block    │    block    │
    slots       [ 0 ][ 1 ][ 2 ][ 3 ]                        [ 11 ]
    extents   ├──────────── 0 ────────────┤             ├───── 1 ─────┤

An extent is moved in one request: of whole blocks, as direct I/O wants it. Slots in the same block
or in neighbouring ones share it.
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
    """Slots of one size in a file.

    Attributes:
        offset: of slot 0, bytes.
        stride: from one slot to the next. Where it and ``offset`` are multiples of ``ALIGNMENT``
            slots are read straight to their rows; others cost a copy.
        num_bytes: of a slot's content, which the checksum covers.
        checksums: uint64 [num_slots].
        describe: names a slot, for messages.
    """

    offset: int
    stride: int
    num_bytes: int
    checksums: Checksums
    describe: Callable[[int], str]


class ScatterPlan:
    """Slots to move between a file and rows of memory.

    Args:
        slots: int64 [n], in any order; one may come twice.
        rows: int64 [n], of memory.
        memory: all rows, as bytes, if a disk or a reader thread may write to them. None if the
            caller copies between rows and bounce buffers itself.
        extent_bytes: at most of slots in one request, unless one alone is larger.
        hole_bytes: at most read along between two slots, as a request more costs more.

    Attributes:
        slots, rows: in the order of ``slots``.
        is_direct: slots are whole blocks, and the disk writes to the rows. Else it writes to
            bounce buffers.
        cuts: extent i is of the slots cuts[i] to cuts[i + 1].
        offsets, sizes: of the extents in the file, bytes; whole blocks.
        origins: ``offsets`` as a list.
        needed: bytes of each extent that contain its slots: the file may end within the last block.
        errors: why a slot did not arrive, by its index, where its loss is no error.
        reason: what the system said to the last request that failed.
        is_given_up: the rest is not needed any more.
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
    ) -> None:
        if len(slots) > 1 and not (np.diff(slots) > 0).all():
            order = np.argsort(slots, kind="stable")
            slots, rows = slots[order], rows[order]
        self.section, self.slots, self.rows = section, slots, rows
        begins = section.offset + slots * section.stride
        is_whole = not (section.offset % ALIGNMENT or section.stride % ALIGNMENT)
        self.is_direct = is_whole and memory is not None and not memory.ctypes.data % ALIGNMENT
        cuts = cut(
            begins,
            section.stride,
            extent_bytes=extent_bytes,
            hole_bytes=hole_bytes,
            may_repeat=not self.is_direct,
        )
        self.offsets = begins[cuts[:-1]] // ALIGNMENT * ALIGNMENT
        needed = begins[cuts[1:] - 1] + section.stride - self.offsets
        self.sizes = -(-needed // ALIGNMENT) * ALIGNMENT
        self.needed: list[int] = needed.tolist()
        self.origins: list[int] = self.offsets.tolist()
        self.cuts: list[int] = cuts.tolist()
        self.errors: dict[int, PageError] = {}
        self.reason = ""
        self.is_given_up = False
        self._memory = memory
        self._view = None if memory is None else memory.data
        self._begins: list[int] = begins.tolist()
        self._row_begins: list[int] = (rows * section.stride).tolist()
        self._checksums: list[int] = section.checksums[slots].tolist()

    @property
    def num_extents(self) -> int:
        return len(self.sizes)

    def release_memory(self) -> None:
        """Drop the memory, while its owner still waits.

        Otherwise a reader thread could be the last to hold it, and freeing a tensor in a daemon
        thread when Python ends aborts the process.
        """
        self._memory = self._view = None

    def describe(self, index: int) -> str:
        """Name a slot, for messages."""
        return self.section.describe(int(self.slots[index]))

    def span(self, first: int, end: int) -> tuple[int, int, int]:
        """Return where in the file slots ``first`` to ``end`` of one extent are.

        Returns:
            Offset and bytes, in whole blocks, and how many of the bytes contain the slots.
        """
        offset = self._begins[first] // ALIGNMENT * ALIGNMENT
        needed = self._begins[end - 1] + self.section.stride - offset
        return offset, -(-needed // ALIGNMENT) * ALIGNMENT, needed

    # Memory that a disk writes to ---------------------------------------------------------

    def buffers(self, first: int, end: int) -> list[memoryview]:
        """Return the rows of an extent; consecutive ones are one buffer."""
        view, begins, stride = self._view, self._row_begins, self.section.stride
        assert view is not None
        buffers = []
        begin = previous = begins[first]
        for row in begins[first + 1 : end]:
            if row != previous + stride:
                buffers.append(view[begin : previous + stride])
                begin = row
            previous = row
        buffers.append(view[begin : previous + stride])
        return buffers

    def vectors(self) -> npt.NDArray[np.uint64]:
        """Return [n, 2], address and bytes of each row."""
        assert self._memory is not None
        stride = self.section.stride
        vectors = np.empty((len(self.rows), 2), dtype=np.uint64)
        vectors[:, 0] = self._memory.ctypes.data + self.rows * stride
        vectors[:, 1] = stride
        return vectors

    def parts(self, num_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield extents, first and end, that together fit so much memory; at least one."""
        ends = np.cumsum(self.sizes)
        first, before = 0, 0
        while first < len(ends):
            end = max(first + 1, int(np.searchsorted(ends, before + num_bytes, side="right")))
            yield first, end
            first, before = end, int(ends[end - 1])

    # Slots that have arrived --------------------------------------------------------------

    def damaged(self, first: int, end: int, bounce: memoryview | None, origin: int) -> list[int]:
        """Return those of an extent's slots whose bytes do not match their checksums.

        Args:
            bounce: holds the file's bytes from ``origin`` on; None if the slots are in their rows.
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
        """Copy slots to their rows from ``bounce``, the file's bytes from ``origin`` on."""
        begins, rows, stride = self._begins, self._row_begins, self.section.stride
        view = self._view
        assert view is not None
        for index in range(first, end):
            at, to = begins[index] - origin, rows[index]
            view[to : to + stride] = bounce[at : at + stride]


def cut(
    begins: PageIds, stride: int, *, extent_bytes: int, hole_bytes: int = 0, may_repeat: bool = True
) -> PageIds:
    """Cut a list of slots into extents.

    Args:
        begins: of the slots in the file, bytes, ascending.
        may_repeat: an extent may contain a slot twice.

    Returns:
        n + 1 positions for n extents.
    """
    if not len(begins):
        return np.zeros(1, dtype=np.int64)
    firsts = begins // ALIGNMENT
    ends = -(-(begins + stride) // ALIGNMENT)
    is_start = np.ones(len(begins), dtype=np.bool_)
    is_start[1:] = firsts[1:] > ends[:-1] + hole_bytes // ALIGNMENT
    if not may_repeat:
        is_start[1:] |= begins[1:] == begins[:-1]  # to two rows
    origins = (firsts[is_start] * ALIGNMENT)[np.cumsum(is_start) - 1]
    unit = max(stride, ALIGNMENT)
    parts = (begins - origins) // unit // max(1, extent_bytes // unit)
    is_start[1:] |= parts[1:] != parts[:-1]
    return np.append(np.flatnonzero(is_start), len(begins))
