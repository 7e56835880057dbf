# SPDX-License-Identifier: Apache-2.0
"""Files without a name (O_TMPFILE) and reserved space on a disk."""

import os
import tempfile
from errno import EINVAL, EISDIR, ENOSPC, EOPNOTSUPP
from pathlib import Path

from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.units import format_bytes

_OWNER_ONLY = 0o600


def open_tmpfile(folder: Path, num_bytes: int) -> int:
    """Open a file of ``num_bytes`` reserved bytes, mode 0600, that is deleted when it is closed.

    Returns:
        The file descriptor, for reading and writing through the page cache.

    Raises:
        ConfigError: no file can be made in ``folder``.
        BudgetError: the file system does not have the space.
    """
    try:
        fd = create_tmpfile(folder, os.O_EXCL)  # O_EXCL: it can never be given a name
        if fd is None:
            fd, name = tempfile.mkstemp(prefix=".vllm-tiered-", dir=folder)  # mode 0600
            os.unlink(name)
    except OSError as error:
        raise ConfigError(
            f"kv.path is {folder}: no file can be made there ({error.strerror}); give a writable "
            "folder on a local disk"
        ) from error
    try:
        reserve(fd, num_bytes)
    except OSError as error:
        free_bytes = count_free_bytes(fd)
        os.close(fd)
        raise BudgetError(
            f"far pages take {format_bytes(num_bytes)} in kv.path {folder}, where "
            f"{format_bytes(free_bytes)} are free ({error.strerror}): raise kv.far_gib, which the "
            "file is the rest of, lower kv.expansion or kv.max_expansion, or give another kv.path"
        ) from error
    return fd


def create_tmpfile(folder: Path, flags: int = 0) -> int | None:
    """Create a file without a name, for reading and writing, mode 0600.

    Args:
        flags: further flags for ``os.open``.

    Returns:
        The file descriptor; None if the file system or the kernel does not support O_TMPFILE.

    Raises:
        OSError: no file can be made in ``folder``.
    """
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, _OWNER_ONLY)
    except OSError as error:
        if error.errno not in (EOPNOTSUPP, EISDIR, EINVAL):
            raise
        return None


def reserve(fd: int, num_bytes: int) -> None:
    """Reserve disk space for the first ``num_bytes`` of a file.

    Raises:
        OSError: the file system does not have the space.
    """
    # An attempt that cannot succeed would fill the disk for other processes until it fails.
    if count_free_bytes(fd) < num_bytes:
        raise OSError(ENOSPC, os.strerror(ENOSPC))
    if num_bytes:
        os.posix_fallocate(fd, 0, num_bytes)


def count_free_bytes(fd: int) -> int:
    """Return the free bytes of the file system that holds a file."""
    disk = os.fstatvfs(fd)
    return disk.f_bavail * disk.f_frsize
