# SPDX-License-Identifier: Apache-2.0
"""Asynchronous reader that scatters slots of a file to rows of memory and verifies them.

    file     │ slot 0 │ slot 1 │ slot 2 │ slot 3 │ ...          slots have one size, the stride
                          ╲        ╲
    memory   │ row 0 │ row 1 │ row 2 │ row 3 │ ...              one request reads adjacent slots

Slots of whole blocks are read directly into their rows. For other slots, the blocks around them are
read to a bounce buffer first.

Adjacent slots share a request, so that Python does little for each slot (scatter_plan.py). One
thread submits many requests to the system at once (aio.py). If the system cannot do that, or the
requests are few, threads share them. A caller waits as long as the disk takes, because a model
cannot continue without its weights; page_file.py reads the same plans with a deadline.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered.devices.pages import PageError, PageIds
from vllm_tiered.errors import IntegrityError
from vllm_tiered.storage.aio import AioQueue
from vllm_tiered.storage.direct_file import ALIGNMENT, Bytes, DirectFile, aligned_bytes
from vllm_tiered.storage.io_pool import BouncePool, IoPool
from vllm_tiered.storage.scatter_plan import ScatterPlan, Section
from vllm_tiered.storage.verified_read import Problem, read_extent, verify
from vllm_tiered.units import KIB, MIB

logger = logging.getLogger("vllm.tiered")

EXTENT_BYTES = 256 * KIB
"""Most bytes of slots in one request, unless one slot is larger."""

NUM_READERS = 32
"""Reader threads, as many as in LLM in a flash (section 4)."""

DEPTH = 128
"""Requests that one thread has in flight. A scattered bundle of 16 KiB takes 51 us, 14 us of them
on the CPU, against 68 and 58 with 32 threads; one of 4 KiB takes 46 and 11, against 63 and 56. That
includes its checksum, of 2.2 and 0.9 us (medians of 8 interleaved rounds; 2 cores, busy with other
work; virtio disk, 2026-11-22)."""

MIN_AIO_EXTENTS = 8
"""Fewest extents that are read with asynchronous I/O; for fewer, building requests costs more."""

AREA_BYTES = 4 * MIB
"""Bytes of the bounce buffer for asynchronous reads of slots that are not whole blocks. It holds
about a hundred requests, so that waiting for the last of them costs little. The system allocates
its memory, in huge pages if it has them, only as they are used."""

SILENCE_SECONDS = 10.0
"""Seconds without an answer from the disk after which a warning is logged."""


class ReadStats(NamedTuple):
    """Counts of a file's reads so far.

    Attributes:
        num_bytes: bytes read, including the blocks around small slots.
        num_reads: number of requests.
        seconds: time in which at least one read was pending.
    """

    num_bytes: int
    num_reads: int
    seconds: float


class PendingRead:
    """Pending read of several tasks.

    Args:
        path: the file, for messages.
        num_tasks: number of tasks; each puts its error, or None, into ``results``.
        is_cancelled: set when the wait for a silent disk must end.
    """

    def __init__(self, path: Path, num_tasks: int, is_cancelled: threading.Event) -> None:
        self._path = path
        self._num_tasks = num_tasks
        self._is_cancelled = is_cancelled
        self.results: SimpleQueue[BaseException | None] = SimpleQueue()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether all tasks have ended, also in errors; never blocks."""
        return self.results.qsize() >= self._num_tasks

    def wait(self) -> None:
        """Block until all slots are in their rows.

        Raises:
            IntegrityError: a slot is damaged or cannot be read; the message names file and slot.
        """
        waited = 0.0
        while self._num_tasks:
            try:
                error = self.results.get(timeout=SILENCE_SECONDS)
            except Empty:
                if self._is_cancelled.is_set():
                    raise IntegrityError(
                        f"{self._path} was closed while its disk was silent"
                    ) from None
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


class ScatterReader:
    """Reader of a file of slots. Every slot is verified, and read again once if it is damaged.

    Args:
        file: the file; closed with the reader.
        name: name of the threads.
        remedy: what the user can do about a lost slot, for messages.
        num_readers: most threads.
        extent_bytes: see :class:`ScatterPlan`.
        hole_bytes: longest hole between two slots that is read and dropped, bytes.
        use_aio: use asynchronous I/O if the system supports it.

    Attributes:
        is_direct: reads bypass the page cache.
        use_aio: asynchronous I/O is used; it becomes False if the system rejects it.
    """

    def __init__(
        self,
        file: DirectFile,
        *,
        name: str,
        remedy: str,
        num_readers: int = NUM_READERS,
        extent_bytes: int = EXTENT_BYTES,
        hole_bytes: int = 0,
        use_aio: bool = True,
    ) -> None:
        self.is_direct = file.is_direct
        self.use_aio = use_aio and file.is_direct
        self._file = file
        self._remedy = remedy
        self._extent_bytes = extent_bytes
        self._hole_bytes = hole_bytes // ALIGNMENT * ALIGNMENT
        self._waste = aligned_bytes(self._hole_bytes) if self._hole_bytes else None
        self._bounce = BouncePool(extent_bytes + 2 * ALIGNMENT)  # with the blocks at both ends
        self._areas = BouncePool(AREA_BYTES)
        self._pool = IoPool(name, num_readers)
        self._queues: deque[AioQueue] = deque()
        self._is_cancelled = threading.Event()
        self._lock = threading.Lock()
        self._num_bytes = self._num_reads = self._num_tasks = 0
        self._seconds = self._begin = 0.0

    @property
    def stats(self) -> ReadStats:
        """The counts of the file's reads so far."""
        with self._lock:
            return ReadStats(self._num_bytes, self._num_reads, self._seconds)

    def submit(
        self, section: Section, slots: PageIds, into: torch.Tensor, rows: PageIds
    ) -> PendingRead:
        """Begin to read slot ``slots[i]`` into row ``rows[i]`` of ``into``, for all i.

        Args:
            section: the slots of the file.
            slots: int64 [n], in any order.
            into: uint8 [num_rows, stride], contiguous, in host memory. Do not use these rows until
                the read is done.
            rows: int64 [n], unique.
        """
        assert into.dtype == torch.uint8 and into.is_contiguous()
        assert into.shape[1] == section.stride and len(slots) == len(rows)
        memory: Bytes = into.numpy().reshape(-1)
        plan = ScatterPlan(
            section,
            slots,
            rows,
            memory,
            extent_bytes=self._extent_bytes,
            hole_bytes=self._hole_bytes,
            alignment=self._file.alignment,
            waste=self._waste,
        )
        if len(slots):
            assert plan.slots[0] >= 0 and plan.slots[-1] < len(section.checksums)
            assert rows.min() >= 0 and rows.max() < len(into)
        queue = self._acquire_queue() if plan.num_extents >= MIN_AIO_EXTENTS else None
        if queue:
            works = [partial(self._read_queued, plan, queue)]
        else:
            extents = iter(range(plan.num_extents))  # shared by the threads: next() is atomic
            num_works = min(self._pool.size, plan.num_extents)
            works = [partial(self._read_extents, plan, extents)] * num_works
        read = PendingRead(self._file.path, len(works), self._is_cancelled)
        with self._lock:
            if works and not self._num_tasks:
                self._begin = time.perf_counter()
            self._num_tasks += len(works)
        unfinished = [len(works)]
        for work in works:
            self._pool.submit(partial(self._run, plan, work, unfinished, read.results))
        return read

    def cancel(self) -> None:
        """Let pending reads of a silent disk fail soon."""
        self._is_cancelled.set()

    def close(self) -> None:
        """Let pending reads end, and close the file. Idempotent."""
        self._pool.close(timeout_seconds=1.0)
        self._file.close()
        self._bounce.clear()
        self._areas.clear()
        while self._queues:
            self._queues.pop().close()

    def _acquire_queue(self) -> AioQueue | None:
        if not self.use_aio:
            return None
        try:
            return self._queues.pop()
        except IndexError:
            pass
        try:
            return AioQueue(DEPTH)
        except OSError as error:
            logger.info("tiered: %s is read by threads (no io_submit: %s)", self._file.path, error)
            self.use_aio = False
            return None

    # Reader threads ---------------------------------------------------------------------

    def _run(
        self,
        plan: ScatterPlan,
        work: Callable[[], tuple[int, int]],
        unfinished: list[int],
        results: "SimpleQueue[BaseException | None]",
    ) -> None:
        """Run a task of a read and put its error, or None, into ``results``.

        Args:
            work: reads and returns the number of bytes and of requests.
            unfinished: the number of the read's unfinished tasks, shared by all of them.
        """
        error: BaseException | None = None
        num_bytes = num_reads = 0
        try:
            if not plan.is_given_up:
                num_bytes, num_reads = work()
        except OSError as failure:
            plan.is_given_up = True
            error = IntegrityError(f"{self._file.path} cannot be read ({failure.strerror})")
        except BaseException as failure:
            plan.is_given_up, error = True, failure
        with self._lock:
            self._num_bytes += num_bytes
            self._num_reads += num_reads
            self._num_tasks -= 1
            if not self._num_tasks:
                self._seconds += time.perf_counter() - self._begin
            unfinished[0] -= 1
            if not unfinished[0]:
                plan.release_memory()
        results.put(error)

    def _read_extents(self, plan: ScatterPlan, extents: Iterator[int]) -> tuple[int, int]:
        """Read extents from the shared iterator, one after the other; return bytes and requests."""
        num_bytes = num_reads = 0
        with self._file as fd:
            for extent in extents:
                if plan.is_given_up:
                    break
                size = int(plan.sizes[extent])
                if plan.is_direct:
                    read_extent(fd, plan, extent, None, self._on_problem)
                else:
                    bounce = self._bounce.take(size)
                    read_extent(fd, plan, extent, bounce.data, self._on_problem)
                    slots = plan.cuts[extent : extent + 2]
                    plan.copy_to_rows(bounce.data, plan.origins[extent], *slots)
                    self._bounce.give(bounce)
                num_bytes += size
                num_reads += 1
        return num_bytes, num_reads

    def _on_problem(self, plan: ScatterPlan, problem: Problem, is_lost: bool) -> None:
        """Log a problem before the second read; raise if that failed too."""
        slot = plan.describe(problem.indexes[0])
        if is_lost:
            raise IntegrityError(f"{self._file.path}: {slot} {problem}: {self._remedy}")
        others = len(problem.indexes) - 1
        logger.warning(
            "tiered: %s: %s%s %s; reading it again",
            self._file.path,
            slot,
            f" and {others} more" if others else "",
            "came in part" if problem.error is PageError.SHORT else problem,
        )

    def _read_queued(self, plan: ScatterPlan, queue: AioQueue) -> tuple[int, int]:
        """Read all extents with asynchronous I/O; return bytes and requests."""
        area = None if plan.is_direct else self._areas.take(int(plan.sizes.max()))
        # Direct reads need one pass. A bounce buffer is filled and copied from, part by part.
        parts = [(0, plan.num_extents)] if area is None else plan.parts(len(area))
        try:
            with self._file as fd:
                for first, end in parts:
                    self._read_part(fd, plan, queue, area, first, end)
        except OSError as error:
            logger.warning("tiered: %s is read by threads from now on (%s)", self._file.path, error)
            self.use_aio = False
            return self._read_extents(plan, iter(range(plan.num_extents)))
        finally:
            self._queues.append(queue)  # no read is in flight, even after an error
            if area is not None:
                self._areas.give(area)
        return int(plan.sizes.sum()), plan.num_extents

    def _read_part(
        self, fd: int, plan: ScatterPlan, queue: AioQueue, area: Bytes | None, first: int, end: int
    ) -> None:
        """Read extents ``first`` .. ``end - 1`` to their rows, through ``area`` if there is one.

        No read is in flight afterwards.

        Raises:
            OSError: the system rejects requests.
        """
        sizes = plan.sizes[first:end]
        places = np.cumsum(sizes) - sizes
        if area is None:
            vectors, cuts = plan.vectors()
        else:
            vectors = np.stack((area.ctypes.data + places, sizes), axis=1).astype(np.uint64)
            cuts = np.arange(len(sizes) + 1)
        begins: list[int] = places.tolist()
        with closing(queue.read(fd, vectors, cuts, plan.offsets[first:end])) as reading:
            for turn, result in reading:
                extent = first + turn
                if area is None:
                    verify(fd, plan, extent, result, None, self._on_problem)
                    continue
                bounce = area.data[begins[turn] :]
                verify(fd, plan, extent, result, bounce, self._on_problem)
                slots = plan.cuts[extent : extent + 2]
                plan.copy_to_rows(bounce, plan.origins[extent], *slots)
