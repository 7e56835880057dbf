# SPDX-License-Identifier: Apache-2.0
"""Scattered slots of a published file, read to scattered rows of memory, verified.

    file     │ slot 0 │ slot 1 │ slot 2 │ slot 3 │ ...          slots have one size, the stride
                          ╲        ╲
    memory   │ row 0 │ row 1 │ row 2 │ row 3 │ ...              neighbours travel in one request

Slots of whole blocks go past the page cache straight to their rows. Of others the blocks around
them are read to memory in between first.

A read costs Python little for each slot: the list is cut into as few requests as neighbours allow
(slot_work.py). Many are given to the system at once, by one thread; where that cannot be, or they
are few, threads share them out among themselves.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered.devices.pages import PageIds
from vllm_tiered.storage.aio import AioQueue
from vllm_tiered.storage.direct_io import make_direct, warn_of_memory
from vllm_tiered.storage.immutable_file import ALIGNMENT
from vllm_tiered.storage.io_pool import BouncePool, Bytes, IoPool, SharedFd
from vllm_tiered.storage.slot_fetch import DAMAGED, IN_PART, Fetcher, failed
from vllm_tiered.storage.slot_read import Section, SlotRead
from vllm_tiered.storage.slot_work import Work
from vllm_tiered.units import MIB

logger = logging.getLogger("vllm.tiered")

NUM_READERS = 32
"""Threads, as LLM in a flash has them (its section 4)."""

DEPTH = 128
"""Requests that one thread has under way. Scattered bundles of 16 KiB take 51 us and 14 of the CPU,
read by 32 threads 68 and 58; of 4 KiB 46 and 11, 63 and 56. A checksum, included, takes 2.2 and 0.9
(medians of 8 interleaved rounds; 2 cores, busy with other work; virtio disk, 2026-11-22)."""

MIN_AIO_EXTENTS = 8
"""Fewer are not worth building requests for."""

AREA_BYTES = 4 * MIB
"""To which one thread reads blocks around slots, of which they are copied: some hundred requests,
so that waiting for the last of them costs little. As much memory is used as was needed so far."""


class Use(NamedTuple):
    """What a file's reads have come to.

    Attributes:
        num_bytes: that the disk brought, blocks around small slots included.
        num_reads: requests.
        seconds: in which at least one read was under way.
    """

    num_bytes: int
    num_reads: int
    seconds: float


class SlotFile:
    """A file of slots, open for reading.

    Args:
        path: of the file.
        num_readers: threads.
        use_aio: let one thread have many requests under way, where the system can.

    Attributes:
        is_direct: reads bypass the page cache.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, *, num_readers: int = NUM_READERS, use_aio: bool = True) -> None:
        self.path = path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._areas = BouncePool(AREA_BYTES)
        self.is_direct = make_direct(fd, BouncePool(ALIGNMENT).take())
        self._file = SharedFd(fd)
        self._fetcher = Fetcher(path)
        self._pool = IoPool("tiered-slots", num_readers)
        self._queues: deque[AioQueue] = deque()
        self.use_aio = use_aio and self.is_direct
        self._lock = threading.Lock()
        self._num_bytes = self._num_reads = self._num_tasks = 0
        self._seconds = self._begin = 0.0
        warn_of_memory(path, self.is_direct)

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
        if len(slots):
            assert slots[0] >= 0 and slots[-1] < len(section.sums)
            assert rows.min() >= 0 and rows.max() < len(into)
        memory: Bytes = into.numpy().reshape(-1)
        work = Work(section, slots, rows, memory)
        num_extents = len(work.sizes)
        if num_extents >= MIN_AIO_EXTENTS and (queue := self._take_queue()):
            work.read = SlotRead(self.path, 1)
            tasks = [partial(self._task, work, partial(self._carry_queued, work, queue), queue)]
        else:
            num_tasks = min(self._pool.size, num_extents)
            work.read = SlotRead(self.path, num_tasks)
            tasks = [partial(self._task, work, partial(self._carry, work))] * num_tasks
        work.num_tasks = len(tasks)
        with self._lock:
            if tasks and not self._num_tasks:
                self._begin = time.perf_counter()
            self._num_tasks += len(tasks)
        for task in tasks:
            self._pool.submit(task)
        return work.read

    def close(self) -> None:
        """Reads that are under way come to their end. Idempotent."""
        self._pool.close(timeout_seconds=1.0)
        self._file.close()
        self._fetcher.clear()
        self._areas.clear()
        while self._queues:
            self._queues.pop().close()

    def _take_queue(self) -> AioQueue | None:
        if not self.use_aio:
            return None
        try:
            return self._queues.pop()
        except IndexError:
            pass
        try:
            return AioQueue(DEPTH)
        except OSError as error:
            logger.info("tiered: %s is read by threads (no io_submit: %s)", self.path, error)
            self.use_aio = False
            return None

    # Reader threads ---------------------------------------------------------------------

    def _task(
        self,
        work: Work,
        carry: "partial[tuple[int, int]]",
        queue: AioQueue | None = None,
    ) -> None:
        error: BaseException | None = None
        num_bytes = num_reads = 0
        try:
            num_bytes, num_reads = carry()
        except BaseException as failure:
            work.has_failed, error = True, failure
        if queue is not None:
            self._queues.append(queue)  # nothing is under way in it, whatever happened
        with self._lock:
            self._num_bytes += num_bytes
            self._num_reads += num_reads
            self._num_tasks -= 1
            if not self._num_tasks:
                self._seconds += time.perf_counter() - self._begin
            work.num_tasks -= 1
            if not work.num_tasks:
                work.let_go()
        work.read.results.put(error)

    def _carry_queued(self, work: Work, queue: AioQueue) -> tuple[int, int]:
        """All extents, by this thread; bytes and requests."""
        area = None if work.is_whole else self._areas.take(int(work.sizes.max()))
        # Each has its rows to itself; an area is filled again when it has been emptied.
        parts = [(0, len(work.sizes))] if area is None else work.parts(len(area))
        with self._file as fd:
            try:
                for first, end in parts:
                    self._carry_part(fd, work, queue, area, first, end)
            except OSError as error:
                logger.warning("tiered: %s is read by threads from now on (%s)", self.path, error)
                self.use_aio = False
                return self._carry(work)
            finally:
                if area is not None:
                    self._areas.give(area)
        return int(work.sizes.sum()), len(work.sizes)

    def _carry_part(
        self, fd: int, work: Work, queue: AioQueue, area: Bytes | None, first: int, end: int
    ) -> None:
        """Extents ``first`` to ``end``, to their rows or to ``area`` first; then none is under way.

        Raises:
            OSError: the system does not take requests.
        """
        sizes = work.sizes[first:end]
        places = np.cumsum(sizes) - sizes
        if area is None:
            vectors, cuts = work.vectors(), np.array(work.cuts)
        else:
            vectors = np.stack((area.ctypes.data + places, sizes), axis=1).astype(np.uint64)
            cuts = np.arange(len(sizes) + 1)
        with closing(queue.read(fd, vectors, cuts, work.offsets[first:end])) as reading:
            for turn, result in reading:
                begin, stop = work.cuts[first + turn], work.cuts[first + turn + 1]
                offset, _, needed = work.range_of(begin, stop)
                if result >= needed:
                    if area is not None:
                        work.take(area[places[turn] :].data, offset, begin, stop)
                    wrong: Sequence[int] = work.damaged(begin, stop)
                    reason = DAMAGED
                else:
                    wrong = range(begin, stop)
                    reason = failed(-result) if result < 0 else IN_PART
                self._fetcher.mend(fd, work, wrong, reason)

    def _carry(self, work: Work) -> tuple[int, int]:
        """Extents that nobody has taken yet, one after the other; bytes and requests."""
        num_bytes = num_reads = 0
        with self._file as fd:
            for turn in work.turn:
                if turn >= len(work.sizes) or work.has_failed:
                    break
                first, end = work.cuts[turn], work.cuts[turn + 1]
                num_reads += 1
                try:
                    fetched = self._fetcher.fetch(fd, work, first, end)
                    wrong = work.damaged(first, end) if fetched else range(first, end)
                    reason = DAMAGED if fetched else IN_PART
                    num_bytes += fetched
                except OSError as error:
                    wrong, reason = range(first, end), failed(error.errno)
                self._fetcher.mend(fd, work, wrong, reason)
        return num_bytes, num_reads
