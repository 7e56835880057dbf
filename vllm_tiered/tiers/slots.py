# SPDX-License-Identifier: Apache-2.0
"""Scattered slots of a published file, read to scattered rows of memory, verified.

    file     │ slot 0 │ slot 1 │ slot 2 │ slot 3 │ ...          slots have one size, the stride
                          ╲        ╲
    memory   │ row 0 │ row 1 │ row 2 │ row 3 │ ...              neighbours travel in one system call

Slots of whole blocks go past the page cache straight to their rows. Of smaller ones the blocks that
hold them are read to a bounce buffer first.

A read costs Python little for each slot: the list is cut into as few system calls as neighbours
allow, and a few tasks of the pool share them out among themselves.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from errno import EIO
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm_tiered.errors import IntegrityError
from vllm_tiered.tiers.base import PageIds
from vllm_tiered.tiers.checksums import checksum_of
from vllm_tiered.tiers.io_pool import BouncePool, Bytes, IoPool, SharedFd, transfer
from vllm_tiered.tiers.published import ALIGNMENT, file_system
from vllm_tiered.tiers.unnamed_file import make_direct
from vllm_tiered.units import KIB

logger = logging.getLogger("vllm.tiered")

NUM_READERS = 32
"""As LLM in a flash has them (its section 4)."""

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


class Use(NamedTuple):
    """What a file's reads have come to.

    Attributes:
        num_bytes: that the disk brought, blocks around small slots included.
        num_reads: system calls.
        seconds: in which at least one read was under way.
    """

    num_bytes: int
    num_reads: int
    seconds: float


class SlotRead:
    """A read that is under way, from :meth:`SlotFile.submit`."""

    def __init__(self, file: "SlotFile", num_tasks: int) -> None:
        self._file = file
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
                    self._file.path,
                    waited,
                )
                continue
            self._num_tasks -= 1
            self._error = self._error or error
        if self._error is not None:
            raise self._error


class SlotFile:
    """A file of slots, open for reading.

    Args:
        path: of the file.
        num_readers: requests at a time.

    Attributes:
        is_direct: reads bypass the page cache.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, num_readers: int = NUM_READERS) -> None:
        self.path = path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._bounce = BouncePool(EXTENT_BYTES)
        self.is_direct = make_direct(fd, self._bounce.take()[:ALIGNMENT])
        self._file = SharedFd(fd)
        self._pool = IoPool("tiered-slots", num_readers)
        self._lock = threading.Lock()
        self._num_bytes = self._num_reads = self._num_tasks = 0
        self._seconds = self._begin = 0.0
        if file_system(path) in ("tmpfs", "ramfs"):
            logger.warning(
                "tiered: %s is in a file system that is memory itself: give a folder on an SSD",
                path,
            )
        elif not self.is_direct:
            logger.warning(
                "tiered: the file system of %s has no direct I/O: what is read takes memory of the "
                "page cache too",
                path,
            )

    @property
    def use(self) -> Use:
        """So far."""
        with self._lock:
            return Use(self._num_bytes, self._num_reads, self._seconds)

    def submit(
        self, section: Section, slots: PageIds, into: torch.Tensor, rows: PageIds
    ) -> SlotRead:
        """Begin to read slot ``slots[i]`` to row ``rows[i]``.

        Args:
            slots: int64 [n], in any order.
            into: uint8 [num_rows, stride], contiguous, in memory that the CPU addresses; not to be
                touched in these rows until the read is done.
            rows: int64 [n], each once.
        """
        assert into.dtype == torch.uint8 and into.is_contiguous()
        assert into.shape[1] == section.stride and len(slots) == len(rows)
        if len(slots) > 1 and not (np.diff(slots) > 0).all():
            order = np.argsort(slots, kind="stable")
            slots, rows = slots[order], rows[order]
        assert not len(slots) or (slots[0] >= 0 and slots[-1] < len(section.sums))
        memory: Bytes = into.numpy().reshape(-1)
        is_whole = section.stride % ALIGNMENT == 0 and memory.ctypes.data % ALIGNMENT == 0
        cuts = _cuts(slots, section.stride)
        num_tasks = min(self._pool.size, len(cuts) - 1)
        read = SlotRead(self, num_tasks)
        if not num_tasks:
            return read
        work = _Work(section, slots, rows.tolist(), memory, cuts, is_whole=is_whole, read=read)
        with self._lock:
            if not self._num_tasks:
                self._begin = time.perf_counter()
            self._num_tasks += num_tasks
        for _ in range(num_tasks):
            self._pool.submit(partial(self._carry, work))
        return read

    def close(self) -> None:
        """Reads that are under way come to their end. Idempotent."""
        self._pool.close(timeout_seconds=1.0)
        self._file.close()
        self._bounce.clear()

    # Reader threads ---------------------------------------------------------------------

    def _carry(self, work: "_Work") -> None:
        error: BaseException | None = None
        num_bytes = num_reads = 0
        try:
            with self._file as fd:
                for turn in work.turn:
                    if turn >= len(work.cuts) - 1 or work.has_failed:
                        break
                    first, end = work.cuts[turn], work.cuts[turn + 1]
                    num_bytes += self._fetch(fd, work, first, end)
                    num_reads += 1
        except BaseException as failure:
            work.has_failed, error = True, failure
        with self._lock:
            self._num_bytes += num_bytes
            self._num_reads += num_reads
            self._num_tasks -= 1
            if not self._num_tasks:
                self._seconds += time.perf_counter() - self._begin
        work.read.results.put(error)

    def _fetch(self, fd: int, work: "_Work", first: int, end: int) -> int:
        """Read and verify an extent, what is wrong in it once more; bytes read."""
        fetch = self._to_rows if work.is_whole else self._through_bounce
        try:
            num_bytes = fetch(fd, work, first, end)
            wrong = work.damaged(first, end) if num_bytes else range(first, end)
            reason = "is damaged (checksum)" if num_bytes else "is cut off"
        except OSError as error:
            num_bytes, wrong, reason = 0, range(first, end), _failed(error)
        for index in wrong:
            where = f"{self.path}: {work.section.where(int(work.slots[index]))}"
            if end - first == 1 or num_bytes:
                logger.warning("tiered: %s %s; reading it again", where, reason)
            try:
                again = fetch(fd, work, index, index + 1)
                reason = "is damaged (checksum)" if again else "is cut off"
                is_good = again and not work.damaged(index, index + 1)
            except OSError as error:
                is_good, reason = False, _failed(error)
            if not is_good:
                raise IntegrityError(f"{where} {reason}: remove the folder, and prepare it again")
        return num_bytes

    def _to_rows(self, fd: int, work: "_Work", first: int, end: int) -> int:
        """Straight to the rows; bytes read, 0 where the file is cut off."""
        stride = work.section.stride
        buffers = work.buffers(first, end)
        offset = work.section.offset + int(work.slots[first]) * stride
        wanted = (end - first) * stride
        moved = os.preadv(fd, buffers, offset)
        if moved == wanted:
            return wanted
        # Rare: the system took a part. One buffer at a time can be gone on with.
        for buffer in buffers:
            bytes_ = np.frombuffer(buffer, dtype=np.uint8)
            if transfer(os.preadv, fd, bytes_, offset, ALIGNMENT) < len(bytes_):
                return 0
            offset += len(bytes_)
        return wanted

    def _through_bounce(self, fd: int, work: "_Work", first: int, end: int) -> int:
        section = work.section
        slots = work.slots[first:end]
        begin = section.offset + int(slots[0]) * section.stride
        until = section.offset + (int(slots[-1]) + 1) * section.stride
        aligned = begin // ALIGNMENT * ALIGNMENT
        wanted = -(-until // ALIGNMENT) * ALIGNMENT - aligned
        whole = self._bounce.take()
        bounce = whole[:wanted] if wanted <= EXTENT_BYTES else BouncePool(wanted).take()
        if transfer(os.preadv, fd, bounce, aligned, ALIGNMENT) < until - aligned:
            return 0
        content = bounce[begin - aligned : until - aligned].reshape(-1, section.stride)
        into = work.memory.reshape(-1, section.stride)
        into[work.rows[first:end]] = content[slots - slots[0]]
        self._bounce.give(whole)
        return wanted


class _Work:
    """A list of slots that some tasks share out among themselves.

    Attributes:
        cuts: extent i is of the slots cuts[i] to cuts[i + 1].
        turn: the next extent that nobody has taken; next() of it is one step for all threads.
    """

    def __init__(
        self,
        section: Section,
        slots: PageIds,
        rows: list[int],
        memory: Bytes,
        cuts: Sequence[int],
        *,
        is_whole: bool,
        read: SlotRead,
    ) -> None:
        self.section = section
        self.slots = slots
        self.rows = rows
        self.memory = memory
        self.view = memory.data
        self.cuts = cuts
        self.is_whole = is_whole
        self.turn = count()
        self.read = read
        self.has_failed = False
        self.sums: list[int] = section.sums[slots].tolist()

    def buffers(self, first: int, end: int) -> list[memoryview]:
        """The rows of an extent; consecutive ones are one buffer."""
        rows, stride = self.rows, self.section.stride
        buffers = []
        begin = previous = rows[first]
        for row in rows[first + 1 : end]:
            if row != previous + 1:
                buffers.append(self.view[begin * stride : (previous + 1) * stride])
                begin = row
            previous = row
        buffers.append(self.view[begin * stride : (previous + 1) * stride])
        return buffers

    def damaged(self, first: int, end: int) -> list[int]:
        """Of an extent's slots, those whose rows do not have what was published."""
        view, stride, num_bytes = self.view, self.section.stride, self.section.num_bytes
        rows, sums = self.rows, self.sums
        return [
            index
            for index in range(first, end)
            if checksum_of(view[(at := rows[index] * stride) : at + num_bytes]) != sums[index]
        ]


def _cuts(slots: PageIds, stride: int) -> list[int]:
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


def _failed(error: OSError) -> str:
    return f"cannot be read ({error.strerror or os.strerror(EIO)})"
