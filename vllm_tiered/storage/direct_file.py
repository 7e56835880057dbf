# SPDX-License-Identifier: Apache-2.0
"""Files with direct I/O (O_DIRECT), where the file system supports it."""

import contextlib
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

from vllm_tiered.units import MIB

logger = logging.getLogger("vllm.tiered")

Bytes: TypeAlias = npt.NDArray[np.uint8]

Transfer: TypeAlias = Callable[[int, list[memoryview], int], int]
"""``os.preadv`` or ``os.pwritev``: takes a descriptor, buffers and an offset; returns the bytes
moved."""

ALIGNMENT = 4096
"""Alignment for O_DIRECT in bytes, a multiple of the block size of all but very unusual disks."""

SECTOR_BYTES = 512
"""Alignment that most disks and file systems take, too."""

HUGE_PAGE_BYTES = 2 * MIB
"""Bytes of a huge page of Linux, where memory pages have 4 KiB."""

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
"""File systems whose files are memory."""


class DirectFile:
    """Open file as a context manager: ``with file as fd`` keeps the descriptor open.

    After :meth:`close`, the descriptor is closed when its last user leaves. The system reuses the
    number of a closed descriptor, so a late write could otherwise go to another file.

    Args:
        fd: the descriptor, which this object now owns; O_DIRECT is set on it if possible.
        path: the file or its folder, for messages.

    Attributes:
        path: as given.
        is_direct: reads and writes bypass the page cache.
        alignment: of their offsets, sizes and memory in bytes.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self.path = path
        self._fd = fd
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_closed = False
        self.is_direct = make_direct(fd)
        self.alignment = SECTOR_BYTES if self.is_direct and _takes_sectors(fd) else ALIGNMENT
        if file_system(path) in MEMORY_FILE_SYSTEMS:
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
            OSError: the file cannot be opened.
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
    """Set O_DIRECT on a descriptor, and test it with a read.

    Some file systems accept the flag but not the reads.

    Returns:
        Whether the file system supports O_DIRECT; if not, the flags are restored.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(fd, [aligned_bytes(ALIGNMENT).data], 0)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True


def _takes_sectors(fd: int) -> bool:
    """Return whether a descriptor with O_DIRECT reads single sectors to memory aligned to them."""
    try:
        os.preadv(
            fd, [aligned_bytes(ALIGNMENT)[SECTOR_BYTES : 2 * SECTOR_BYTES].data], SECTOR_BYTES
        )
    except OSError:
        return False
    return True


def file_system(path: Path) -> str:
    """Return the type of the file system that holds a path; "" if it is not known."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[str(f)] for f in (path, *path.resolve().parents) if str(f) in mounts), "")


def transfer(call: Transfer, fd: int, buffer: memoryview, offset: int) -> int:
    """Move all of ``buffer``, in several calls if necessary.

    Returns:
        Bytes moved; fewer than the buffer's at the end of the file.

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
    """Allocate zeros, uint8 [num_bytes], at an address that is aligned for O_DIRECT.

    A disk writes to memory in physically contiguous segments, and its requests have a limited
    number of them. So as much of the memory as possible is in huge pages, if the system has them.
    Other memory may lie in descending or scattered 4-KiB pages, to which a virtio disk read at
    half the speed (docs/notes/weights.md).
    """
    if num_bytes < HUGE_PAGE_BYTES:
        return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    # The address space before and after is never written to, and takes no memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages by default
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags)
    data = np.frombuffer(memory, dtype=np.uint8)
    begin = -data.ctypes.data % HUGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # a system without huge pages
        # Only whole ones, so that a buffer takes no more memory than it has bytes.
        whole = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return data[begin : begin + num_bytes]


def aligned_pages(num_pages: int, page_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate uint8 [num_pages, page_bytes], aligned for O_DIRECT; contents are undefined.

    On the CPU it is memory of :func:`aligned_bytes`.
    """
    num_bytes = num_pages * page_bytes
    if device.type == "cpu" and num_bytes:
        return torch.from_numpy(aligned_bytes(num_bytes)).view(num_pages, page_bytes)
    memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    begin = -memory.data_ptr() % ALIGNMENT
    return memory[begin : begin + num_bytes].view(num_pages, page_bytes)
