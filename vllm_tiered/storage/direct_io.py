# SPDX-License-Identifier: Apache-2.0
"""Files read past the page cache, where their file system lets that happen."""

import fcntl
import logging
import os
from pathlib import Path

import psutil

from vllm_tiered.storage.io_pool import Bytes

logger = logging.getLogger("vllm.tiered")


def make_direct(fd: int, probe: Bytes) -> bool:
    """Let the file's I/O bypass the page cache.

    Args:
        probe: an aligned buffer, overwritten by the file's first bytes. Some file systems take the
            flag and then refuse the reads.

    Returns:
        Whether the file system can; nothing changes if not.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(fd, [probe.data], 0)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True


def warn_of_memory(path: Path, is_direct: bool) -> None:
    """Say so where what is read from a file takes memory beside its reader's."""
    if file_system(path) in ("tmpfs", "ramfs"):
        logger.warning(
            "tiered: %s is in a file system that is memory itself: give a folder on an SSD", path
        )
    elif not is_direct:
        logger.warning(
            "tiered: the file system of %s has no direct I/O: what is read takes memory of the "
            "page cache too",
            path,
        )


def file_system(path: Path) -> str:
    """The type of the file system that holds a path; "" where the system does not say."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[str(f)] for f in (path, *path.resolve().parents) if str(f) in mounts), "")
