# SPDX-License-Identifier: Apache-2.0
"""Files without a name (O_TMPFILE) and reserved space on a disk."""

import os
import tempfile
from errno import EINVAL, EISDIR, ENOMEM, ENOSPC, EOPNOTSUPP
from pathlib import Path

from vllm_tiered.devices.available_memory import read_host_memory
from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.storage.direct_file import MEMORY_FILE_SYSTEMS, file_system
from vllm_tiered.units import MIB, format_bytes

_OWNER_ONLY = 0o600

_MEMORY_STEP_BYTES = 64 * MIB
"""Bytes of a file in memory that are reserved before the host's memory is read again."""


def open_tmpfile(folder: Path, num_bytes: int) -> int:
    """Open a file of ``num_bytes`` reserved bytes, mode 0600, that is deleted when it is closed.

    Returns:
        The file descriptor, for reading and writing through the page cache.

    Raises:
        ConfigError: no file can be made in ``folder``.
        BudgetError: the file system does not have the space, or it is memory itself, and the host
            (or its cgroup) does not have the memory.
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
    is_memory = file_system(folder) in MEMORY_FILE_SYSTEMS
    try:
        if is_memory:
            _reserve_memory(fd, num_bytes)
        else:
            reserve(fd, num_bytes)
    except OSError as error:
        free_bytes, where = count_free_bytes(fd), ""
        if is_memory:
            free_bytes = min(free_bytes, read_host_memory().usable_bytes)
            where = " in a file system that is memory itself"
        os.close(fd)
        raise BudgetError(
            f"far pages take {format_bytes(num_bytes)} in kv.path {folder}, where "
            f"{format_bytes(free_bytes)} are free{where} ({error.strerror}): raise kv.far_gib, "
            "which the file is the rest of, lower kv.expansion or kv.max_expansion, or give "
            "another kv.path"
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


def _reserve_memory(fd: int, num_bytes: int) -> None:
    """Reserve the first ``num_bytes`` of a file in memory, or none of them.

    The file system may have more space than the host or its cgroup has memory, and the kernel would
    kill the process. Other ranks may reserve theirs at the same time. So each step is taken only if
    there is memory for all that is left.

    Raises:
        OSError: there is not the space, or not the memory.
    """
    if count_free_bytes(fd) < num_bytes:
        raise OSError(ENOSPC, os.strerror(ENOSPC))
    try:
        for begin in range(0, num_bytes, _MEMORY_STEP_BYTES):
            if read_host_memory().usable_bytes < num_bytes - begin:
                raise OSError(ENOMEM, os.strerror(ENOMEM))
            os.posix_fallocate(fd, begin, min(_MEMORY_STEP_BYTES, num_bytes - begin))
    except OSError:
        os.ftruncate(fd, 0)
        raise


def count_free_bytes(fd: int) -> int:
    """Return the free bytes of the file system that holds a file."""
    disk = os.fstatvfs(fd)
    return disk.f_bavail * disk.f_frsize
