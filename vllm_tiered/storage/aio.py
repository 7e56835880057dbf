# SPDX-License-Identifier: Apache-2.0
"""Asynchronous I/O of Linux (io_submit): one thread with many reads in flight.

With a thread for each read, every completion costs a context switch and the GIL. Here numpy builds
about a hundred requests at a time, and one system call submits them.
"""

import ctypes
import os
import platform
from collections.abc import Generator
from errno import EAGAIN, EINTR, ENOSYS
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]


class _SyscallNumbers(NamedTuple):
    """Numbers of the system calls on one architecture."""

    setup: int
    destroy: int
    submit: int
    getevents: int


_NUMBERS = {"x86_64": _SyscallNumbers(206, 207, 209, 208), "aarch64": _SyscallNumbers(0, 1, 2, 4)}

_PREADV = 7

# struct iocb and struct io_event of linux/aio_abi.h, for little-endian machines.
_REQUEST = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<u4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("buffer", "<u8"),
        ("count", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("eventfd", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("result2", "<i8")])


class AioQueue:
    """Queue of one thread's asynchronous reads.

    Args:
        depth: most reads in flight.

    Raises:
        OSError: the system has no asynchronous I/O, or cannot make another queue.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or platform.system() != "Linux":
            raise OSError(ENOSYS, os.strerror(ENOSYS))
        self._numbers = numbers
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._events = np.zeros(depth, dtype=_EVENT)
        context = ctypes.c_ulong(0)
        self._call(numbers.setup, depth, ctypes.addressof(context))
        self._context = context.value

    def read(
        self, fd: int, vectors: npt.NDArray[np.uint64], cuts: Ints, offsets: Ints
    ) -> Generator[tuple[int, int], None, None]:
        """Read n extents and yield each as it completes.

        Memory and ``fd`` must stay valid until the generator ends or is closed.

        Args:
            fd: a file with O_DIRECT (without it, submitting blocks until the data is read).
            vectors: [m, 2], address and bytes of each piece of memory.
            cuts: [n + 1]; extent i goes to the pieces cuts[i] .. cuts[i + 1] - 1.
            offsets: [n], offsets of the extents in the file.

        Yields:
            The index of a completed extent, and the bytes read or the negative errno.

        Raises:
            OSError: the system rejects requests. Accepted requests have completed by then.
        """
        count = len(offsets)
        requests = np.zeros(count, dtype=_REQUEST)
        requests["data"] = np.arange(count)
        requests["opcode"], requests["fd"] = _PREADV, fd
        requests["buffer"] = vectors.ctypes.data + 16 * cuts[:-1]
        requests["count"], requests["offset"] = np.diff(cuts), offsets
        pointers = requests.ctypes.data + _REQUEST.itemsize * np.arange(count, dtype=np.int64)
        num_submitted = num_under_way = 0
        try:
            while num_submitted < count or num_under_way:
                # Submit before completions are handled, so that the disk stays busy.
                room = min(count - num_submitted, self.depth - num_under_way)
                if room:
                    taken = self._submit(pointers[num_submitted:][:room], num_under_way)
                    num_submitted += taken
                    num_under_way += taken
                arrived, results = self._wait(min(num_under_way, max(1, self.depth // 8)))
                num_under_way -= len(arrived)
                yield from zip(arrived, results, strict=True)
        finally:
            while num_under_way:
                num_under_way -= len(self._wait(num_under_way)[0])

    def close(self) -> None:
        """Destroy the queue, which must have no reads in flight. Idempotent."""
        if self._context:
            self._call(self._numbers.destroy, self._context)
            self._context = 0

    def _submit(self, pointers: Ints, num_under_way: int) -> int:
        try:
            return self._call(
                self._numbers.submit, self._context, len(pointers), pointers.ctypes.data
            )
        except OSError as error:
            if error.errno == EAGAIN and num_under_way:
                return 0  # the next completion makes room again
            raise

    def _wait(self, at_least: int) -> tuple[list[int], list[int]]:
        while True:
            try:
                count = self._call(
                    self._numbers.getevents,
                    self._context,
                    at_least,
                    self.depth,
                    self._events.ctypes.data,
                    0,
                )
            except OSError as error:
                if error.errno != EINTR:
                    raise
                continue
            events = self._events[:count]
            return events["data"].tolist(), events["result"].tolist()

    def _call(self, number: int, *arguments: int) -> int:
        """Make a system call without holding the GIL; raise OSError if it fails."""
        result: int = self._syscall(ctypes.c_long(number), *(ctypes.c_long(a) for a in arguments))
        if result < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return result
