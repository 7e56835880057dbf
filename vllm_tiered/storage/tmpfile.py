# SPDX-License-Identifier: Apache-2.0
"""A file that no name leads to, with its space reserved, for direct I/O where possible."""

import os
import tempfile
from errno import EINVAL, EISDIR, ENOSPC, EOPNOTSUPP
from pathlib import Path

from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.units import format_bytes

_OWNER_ONLY = 0o600


def open_unnamed(folder: Path, num_bytes: int) -> int:
    """A file of ``num_bytes`` reserved bytes, mode 0600, that goes away when it is closed.

    Returns:
        The file descriptor, for reading and writing through the page cache.

    Raises:
        ConfigError: no file can be made in ``folder``.
        BudgetError: the file system does not have the space.
    """
    try:
        fd = _create(folder)
    except OSError as error:
        raise ConfigError(
            f"kv.path is {folder}: no file can be made there ({error.strerror}); give a writable "
            "folder on a local disk"
        ) from error
    try:
        _reserve(fd, folder, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create(folder: Path) -> int:
    try:
        # O_EXCL: nobody can give it a name later.
        flags = os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC
        return os.open(folder, flags, _OWNER_ONLY)
    except OSError as error:
        # What file systems and kernels without O_TMPFILE say to it.
        if error.errno not in (EOPNOTSUPP, EISDIR, EINVAL):
            raise
    fd, name = tempfile.mkstemp(prefix=".vllm-tiered-", dir=folder)  # mode 0600
    os.unlink(name)
    return fd


def _reserve(fd: int, folder: Path, num_bytes: int) -> None:
    if not num_bytes:
        return
    disk = os.fstatvfs(fd)
    free_bytes = disk.f_bavail * disk.f_frsize
    try:
        # Not tried at all if it cannot work: that would fill the disk for others meanwhile.
        if free_bytes < num_bytes:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        raise BudgetError(
            f"far pages take {format_bytes(num_bytes)} in kv.path {folder}, where "
            f"{format_bytes(free_bytes)} are free ({error.strerror}): raise kv.far_gib, which the "
            "file is the rest of, lower kv.expansion or kv.max_expansion, or give another kv.path"
        ) from error
