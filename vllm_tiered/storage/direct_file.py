# SPDX-License-Identifier: Apache-2.0
"""Files read and written past the page cache, where their file system supports that."""

import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable
from errno import EBADF
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import psutil
import torch

logger = logging.getLogger("vllm.tiered")

Bytes: TypeAlias = npt.NDArray[np.uint8]

Transfer: TypeAlias = Callable[[int, list[memoryview], int], int]
"""``os.preadv`` or ``os.pwritev``: descriptor, buffers, offset; bytes moved."""

ALIGNMENT = 4096
"""Bytes in which O_DIRECT counts: the blocks of all but very old or exotic disks divide it."""


class DirectFile:
    """An open file as a context manager: ``with file as fd`` keeps the descriptor open.

    The descriptor is closed when its last user has left. The system gives a closed descriptor's
    number to the next file, so a late write would hit a file of somebody else.

    Args:
        fd: owned from now on; O_DIRECT is set where the file system supports it.
        path: of the file or its folder, for messages.

    Attributes:
        is_direct: reads and writes bypass the page cache.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self.path = path
        self._fd = fd
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_closed = False
        self.is_direct = make_direct(fd)
        if file_system(path) in ("tmpfs", "ramfs"):
            logger.warning(
                "tiered: %s is in a file system that is memory itself: give a folder on an SSD",
                path,
            )
        elif not self.is_direct:
            logger.warning(
                "tiered: the file system of %s does not take O_DIRECT: reads and writes use memory "
                "of the page cache too",
                path,
            )

    @classmethod
    def open(cls, path: Path) -> "DirectFile":
        """Open a file for reading.

        Raises:
            OSError: it cannot be opened.
        """
        return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)

    def __enter__(self) -> int:
        with self._lock:
            if self._is_closed:
                raise OSError(EBADF, "the file is closed")
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
        """Refuse new users, and close the descriptor when the last one leaves. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closed and not self._num_users:
            os.close(self._fd)


def make_direct(fd: int) -> bool:
    """Set O_DIRECT on a descriptor and read a block, as some file systems take only the flag.

    Returns:
        Whether the file system supports it; nothing changes if not.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(fd, [aligned_bytes(ALIGNMENT).data], 0)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True


def file_system(path: Path) -> str:
    """Return the type of the file system that holds a path; "" where the system does not say."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[str(f)] for f in (path, *path.resolve().parents) if str(f) in mounts), "")


def transfer(call: Transfer, fd: int, buffer: memoryview, offset: int) -> int:
    """Move all of ``buffer``, if need be in several calls.

    Returns:
        Bytes moved; fewer at the end of the file.

    Raises:
        OSError: the system call failed.
    """
    moved = 0
    while moved < len(buffer):
        count = call(fd, [buffer[moved:]], offset + moved)
        moved += count
        if not count or count % ALIGNMENT:
            break
    return moved


def aligned_bytes(num_bytes: int) -> Bytes:
    """Allocate uint8 [num_bytes] at an address that O_DIRECT takes, zeros."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)


def aligned_pages(num_pages: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate uint8 [num_pages, page_bytes] to which a disk can write; contents undefined."""
    memory = torch.empty(num_pages * page_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    begin = -memory.data_ptr() % ALIGNMENT
    return memory[begin : begin + num_pages * page_bytes].view(num_pages, page_bytes)
