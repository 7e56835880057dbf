# SPDX-License-Identifier: Apache-2.0
"""One read of slots: what is wanted, how it is cut into system calls, and who waits for it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_tiered.tiers.base import PageIds
from vllm_tiered.tiers.checksums import checksum_of
from vllm_tiered.tiers.io_pool import Bytes
from vllm_tiered.tiers.published import ALIGNMENT
from vllm_tiered.units import KIB

logger = logging.getLogger("vllm.tiered")

EXTENT_BYTES = 256 * KIB
"""At most in one system call."""

_MAX_BUFFERS = 512  # of a system call; Linux takes 1024
SILENCE_SECONDS = 10.0

Sums: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Slots of one size in a file.

    Attributes:
        offset: of slot 0, bytes; a multiple of ``ALIGNMENT``.
        stride: from one slot to the next; a multiple of ``ALIGNMENT``, or a divisor of it.
        num_bytes: of a slot's content, which the checksum is of.
        sums: uint64 [num_slots].
        where: names a slot, for messages.
    """

    offset: int
    stride: int
    num_bytes: int
    sums: Sums
    where: Callable[[int], str]


class SlotRead:
    """A read that is under way, from :meth:`SlotFile.submit` (slots.py)."""

    def __init__(self, path: Path, num_tasks: int) -> None:
        self._path = path
        self._num_tasks = num_tasks
        self.results: SimpleQueue[BaseException | None] = SimpleQueue()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether all slots have arrived, or failed to; never blocks."""
        return self.results.qsize() >= self._num_tasks

    def wait(self) -> None:
        """Block until all slots are in their rows.

        Raises:
            IntegrityError: naming the file and the slot that is damaged, or cannot be read.
        """
        waited = 0.0
        while self._num_tasks:
            try:
                error = self.results.get(timeout=SILENCE_SECONDS)
            except Empty:
                waited += SILENCE_SECONDS
                logger.warning(
                    "tiered: %s has been silent for %.0f s; the model waits for its weights",
                    self._path,
                    waited,
                )
                continue
            self._num_tasks -= 1
            self._error = self._error or error
        if self._error is not None:
            raise self._error


class Work:
    """A list of slots that tasks share out among themselves.

    Attributes:
        slots: ascending.
        rows: where they go.
        memory: all rows, as bytes.
        cuts: extent i is of the slots cuts[i] to cuts[i + 1].
        is_whole: the disk may write to the rows.
        turn: the next extent that nobody has taken; next() of it is one step for all threads.
        num_tasks: that have not ended.
        read: who waits.
        has_failed: nobody needs the rest any more.
    """

    read: SlotRead

    def __init__(
        self,
        section: Section,
        slots: PageIds,
        rows: PageIds,
        memory: Bytes,
        cuts: list[int],
        *,
        is_whole: bool,
    ) -> None:
        self.section = section
        self.slots = slots
        self.rows: list[int] = rows.tolist()
        self.memory = memory
        self.cuts = cuts
        self.is_whole = is_whole
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

    def vectors(self) -> npt.NDArray[np.uint64]:
        """[n, 2], address and bytes of each row."""
        stride = self.section.stride
        vectors = np.empty((len(self.rows), 2), dtype=np.uint64)
        vectors[:, 0] = self.memory.ctypes.data + np.array(self.rows, dtype=np.int64) * stride
        vectors[:, 1] = stride
        return vectors

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

    def damaged(self, first: int, end: int) -> list[int]:
        """Of an extent's slots, those whose rows do not have what was published."""
        view, stride, num_bytes = self._view, self.section.stride, self.section.num_bytes
        rows, sums = self.rows, self._sums
        return [
            index
            for index in range(first, end)
            if checksum_of(view[(at := rows[index] * stride) : at + num_bytes]) != sums[index]
        ]


def cut(slots: PageIds, stride: int) -> list[int]:
    """Where a list of ascending slots is cut into extents: n + 1 positions for n extents.

    Those in the same block or in neighbouring ones travel together.
    """
    if not len(slots):
        return [0]
    blocks = slots // max(1, ALIGNMENT // stride)
    at_most = max(1, min(EXTENT_BYTES // max(stride, ALIGNMENT), _MAX_BUFFERS))
    is_start = np.diff(blocks, prepend=blocks[0] - 2) > 1
    if stride >= ALIGNMENT:
        is_start |= np.diff(slots, prepend=-1) == 0  # twice, to two rows
    runs = np.cumsum(is_start) - 1
    parts = (blocks - blocks[is_start][runs]) // at_most
    is_cut = is_start | (np.diff(parts, prepend=-1) != 0)
    cuts: list[int] = np.flatnonzero(is_cut).tolist()
    return [*cuts, len(slots)]
