# SPDX-License-Identifier: Apache-2.0
"""Thread and buffer pools for disk I/O that may never return.

A read that hangs in the kernel cannot be cancelled, but its caller may give up. The hanging
thread's buffer and descriptor are not reused until the read returns. Under a deadline a silent disk
causes misses, not a hang.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeAlias

from vllm_tiered.storage.direct_file import Bytes, aligned_bytes
from vllm_tiered.storage.scatter_plan import ScatterPlan

PROBE_SECONDS = 0.1
PROBING_SECONDS = 3.0
"""After a copy has given up, the next copies wait only ``PROBE_SECONDS`` each, until the disk
answers or ``PROBING_SECONDS`` have passed. The deadline is short because a step copies many layers,
and vLLM gives up on a step that takes minutes. The period is short because requests that lose pages
too often in a short time stop the engine."""

Move: TypeAlias = Callable[[ScatterPlan, int, Bytes], None]
"""Part of the work on an extent: takes the plan, the extent's index and its bounce buffer."""


class IoPool:
    """Pool of at most ``size`` daemon threads, which are started on demand.

    Tasks must not raise.

    Attributes:
        size: most threads.
        num_finished: number of tasks that the threads have finished.
    """

    def __init__(self, name: str, size: int) -> None:
        self.size = size
        self._name = name
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_unfinished = 0
        self.num_finished = 0
        self._is_closed = False

    @property
    def num_threads(self) -> int:
        """The number of threads started so far."""
        return len(self._threads)

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` in one of the threads; after :meth:`close`, in the caller's thread."""
        with self._lock:
            if not self._is_closed:
                self._num_unfinished += 1
                if self._num_unfinished > len(self._threads) < self.size:
                    self._start_thread()
                self._tasks.put(task)
                return
        task()

    def close(self, timeout_seconds: float) -> bool:
        """End the threads after the tasks submitted so far. Idempotent.

        Returns:
            Whether all threads have ended; the others end with their tasks.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in self._threads:
                    self._tasks.put(None)
        end = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start_thread(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            # Otherwise the task's buffer would live until the next task arrives.
            del task
            with self._lock:
                self._num_unfinished -= 1
                self.num_finished += 1


class BouncePool:
    """Pool of bounce buffers of one size, aligned for O_DIRECT; allocated on demand."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._free: deque[Bytes] = deque()

    def take(self, at_least: int = 0) -> Bytes:
        """Return a buffer, uint8 [num_bytes], aligned to memory pages; contents are undefined.

        Args:
            at_least: if it exceeds the pool's size, a buffer of ``at_least`` bytes is returned;
                the pool will not keep it.
        """
        if at_least <= self._num_bytes and self._free:
            try:
                return self._free.pop()
            except IndexError:
                pass  # another thread has taken the last one
        return aligned_bytes(max(at_least, self._num_bytes))

    def give(self, buffer: Bytes) -> None:
        """Return a buffer to the pool; no I/O may use it. A buffer of another size is dropped."""
        if len(buffer) == self._num_bytes:
            self._free.append(buffer)

    def clear(self) -> None:
        """Free all buffers that are not in use."""
        self._free.clear()


class DeadlinePool(IoPool):
    """Thread pool whose callers wait for work until a deadline.

    Args:
        name: name of the threads.
        size: most threads.
        deadline_seconds: longest time without a completed extent. It does not limit the whole
            copy: a slow disk that works would then fail again and again. After a copy that gave
            up, ``PROBE_SECONDS`` applies.
    """

    def __init__(self, name: str, size: int, deadline_seconds: float) -> None:
        super().__init__(name, size)
        self.deadline_seconds = deadline_seconds
        self.probe_seconds = min(PROBE_SECONDS, deadline_seconds)
        self._silent_since: float | None = None
        # The tasks that the pool had finished when a copy last gave up, and the time until which
        # copies use the short deadline.
        self._num_finished_then, self._probing_until = -1, 0.0

    @property
    def silent_seconds(self) -> float:
        """Seconds of the present outage, in which no thread has finished a task; 0 without one."""
        if self._silent_since is None or self._num_finished_then != self.num_finished:
            return 0.0
        return time.monotonic() - self._silent_since

    def run(
        self,
        plan: ScatterPlan,
        bounce: BouncePool,
        *,
        move: Move,
        end: Move,
        begin: Move | None = None,
    ) -> list[int]:
        """Call ``move`` for each extent in the pool; call ``begin`` and ``end`` in this thread.

        Returns:
            Extents that are late. The plan is given up then, and ``end`` is not called for them.
            Their bounce buffers are never reused, since a thread may still write to them.
        """
        deadline, most = self.deadline_seconds, 2 * self.size  # keeps every thread busy
        if self._num_finished_then == self.num_finished and time.monotonic() < self._probing_until:
            deadline, most = self.probe_seconds, 1
        done: SimpleQueue[tuple[int, BaseException | None]] = SimpleQueue()

        def work(extent: int, buffer: Bytes) -> None:
            failure: BaseException | None = None
            try:
                if not plan.is_given_up:
                    move(plan, extent, buffer)
            except BaseException as error:
                failure = error
            done.put((extent, failure))

        waiting = deque(range(plan.num_extents))
        under_way: dict[int, Bytes] = {}
        try:
            while waiting or under_way:
                while waiting and len(under_way) < most:
                    extent = waiting.popleft()
                    under_way[extent] = buffer = bounce.take()
                    if begin is not None:
                        begin(plan, extent, buffer)
                    self.submit(partial(work, extent, buffer))
                extent, failure = done.get(timeout=deadline)
                deadline, most = self.deadline_seconds, 2 * self.size
                buffer = under_way.pop(extent)
                if failure is not None:
                    raise failure
                end(plan, extent, buffer)
                bounce.give(buffer)
        except Empty:
            now = time.monotonic()
            if deadline == self.deadline_seconds:
                self._probing_until = now + PROBING_SECONDS
            if self._num_finished_then != self.num_finished:
                self._num_finished_then, self._silent_since = self.num_finished, now - deadline
        finally:
            plan.is_given_up = bool(waiting or under_way)
        return [*under_way, *waiting]
