# SPDX-License-Identifier: Apache-2.0
"""Thread and buffer pools for disk I/O that may never return.

A read that hangs in the kernel cannot be cancelled, but its caller may give up. The hanging
thread's buffer and descriptor are not reused until the read returns.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from vllm_tiered.storage.direct_file import Bytes, aligned_bytes


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
