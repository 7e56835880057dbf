# SPDX-License-Identifier: Apache-2.0
"""Threads, memory and a file descriptor for disk I/O that may never come back.

A read that hangs in the kernel cannot be called off. So whoever waits may give up, and nothing that
the hanging thread holds (its buffer, the descriptor) is used for anything else until it returns.
"""

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from errno import EBADF
from queue import SimpleQueue
from types import TracebackType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]

Transfer: TypeAlias = Callable[[int, list[memoryview], int], int]
"""``os.preadv`` or ``os.pwritev``: descriptor, buffers, offset; bytes moved."""


class IoPool:
    """Runs tasks in at most ``size`` daemon threads, started when there is work for them.

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
            # Not until the next task, or its buffer would live as long.
            del task
            with self._lock:
                self._num_unfinished -= 1
                self.num_finished += 1


class BouncePool:
    """Buffers of one size at addresses that O_DIRECT takes; made when needed, used again."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._free: deque[Bytes] = deque()

    def take(self, at_least: int = 0) -> Bytes:
        """uint8 [num_bytes], aligned to the system's pages; contents undefined.

        Args:
            at_least: where it is more, the buffer is larger, and not kept.
        """
        if at_least <= self._num_bytes and self._free:
            try:
                return self._free.pop()
            except IndexError:
                pass  # another thread was faster
        num_bytes = max(at_least, self._num_bytes)
        return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)

    def give(self, buffer: Bytes) -> None:
        """A buffer that no I/O uses any more. Others are just dropped."""
        if len(buffer) == self._num_bytes:
            self._free.append(buffer)

    def clear(self) -> None:
        self._free.clear()


class SharedFd:
    """A file descriptor that is closed when its last user has left it.

    The system gives a closed descriptor's number to the next file: a write that comes late would
    hit a stranger's.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_closed = False

    def __enter__(self) -> int:
        with self._lock:
            if self._is_closed:
                raise OSError(EBADF, "the file of far pages is closed")
            self._num_users += 1
            return self._fd

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._num_users -= 1
            self._close_if_unused()

    def close(self) -> None:
        """No use from now on. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closed and not self._num_users:
            os.close(self._fd)


def transfer(call: Transfer, fd: int, buffer: Bytes, offset: int, alignment: int) -> int:
    """Move all of ``buffer``, if need be in several calls.

    Returns:
        Bytes moved; fewer at the end of the file.

    Raises:
        OSError: as the system says.
    """
    moved = 0
    while moved < len(buffer):
        count = call(fd, [buffer[moved:].data], offset + moved)
        moved += count
        if not count or count % alignment:
            break
    return moved
