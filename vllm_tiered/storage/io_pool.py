# SPDX-License-Identifier: Apache-2.0
"""Threads and buffers for disk I/O that may never return.

A read that hangs in the kernel cannot be cancelled. So a caller may give up, and nothing that the
hanging thread holds (its buffer, the descriptor) is used for anything else until it returns.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from vllm_tiered.storage.direct_file import Bytes, aligned_bytes


class IoPool:
    """Pool of at most ``size`` daemon threads, started when there is work for them.

    Tasks do not raise.

    Attributes:
        num_finished: tasks that have ended in its threads.
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
        """Threads started so far."""
        return len(self._threads)

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` in one of the threads; after ``close`` in the caller's."""
        with self._lock:
            if not self._is_closed:
                self._num_unfinished += 1
                if self._num_unfinished > len(self._threads) < self.size:
                    self._start_thread()
                self._tasks.put(task)
                return
        task()

    def close(self, timeout_seconds: float) -> bool:
        """Let threads end after the tasks submitted so far. Idempotent.

        Returns:
            Whether all have; the others end when their task does.
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
            # Not kept until the next task, or its buffer would live as long.
            del task
            with self._lock:
                self._num_unfinished -= 1
                self.num_finished += 1


class BouncePool:
    """Pool of buffers of one size at addresses that O_DIRECT takes; allocated on demand."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._free: deque[Bytes] = deque()

    def take(self, at_least: int = 0) -> Bytes:
        """Return uint8 [num_bytes], aligned to the system's pages; contents undefined.

        Args:
            at_least: where it is more, the buffer is larger, and not kept.
        """
        if at_least <= self._num_bytes and self._free:
            try:
                return self._free.pop()
            except IndexError:
                pass  # another thread was faster
        return aligned_bytes(max(at_least, self._num_bytes))

    def give(self, buffer: Bytes) -> None:
        """Take back a buffer that no I/O uses any more; one of another size is dropped."""
        if len(buffer) == self._num_bytes:
            self._free.append(buffer)

    def clear(self) -> None:
        """Free all buffers that are not in use."""
        self._free.clear()
