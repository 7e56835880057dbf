# SPDX-License-Identifier: Apache-2.0
"""Release of a process's memory to the operating system."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from vllm_tiered.units import MIB


def release_pages(address: int, num_bytes: int) -> int:
    """Release a range of memory to the system; its contents are undefined afterwards.

    Only whole system pages inside the range are released, as others hold other data too.

    Returns:
        Bytes released; 0 if the system refuses, as it does for locked and pinned memory.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= begin:
        return 0
    is_refused = _libc().madvise(
        ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED)
    )
    return 0 if is_refused else end - begin


@contextmanager
def immediate_release() -> Iterator[None]:
    """Make malloc release blocks of 1 MiB and more as soon as the process frees them.

    glibc's malloc keeps freed blocks of up to 32 MiB. Without this function, parameters that were
    loaded, packed and dropped would stay in memory next to the packed ones. Immediate release costs
    page faults, so use it for short phases. Afterwards malloc keeps no larger blocks than before,
    but its threshold no longer adapts by itself.
    """
    _set_mmap_threshold(MIB)
    try:
        yield
    finally:
        _set_mmap_threshold(_MAX_DEFAULT_THRESHOLD_BYTES)


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAX_DEFAULT_THRESHOLD_BYTES = 32 * MIB
"""Highest value to which malloc raises its mmap threshold by itself."""


def _set_mmap_threshold(num_bytes: int) -> None:
    mallopt = getattr(_libc(), "mallopt", None)  # glibc only
    if mallopt is not None:
        mallopt(ctypes.c_int(_M_MMAP_THRESHOLD), ctypes.c_int(num_bytes))
        mallopt(ctypes.c_int(_M_TRIM_THRESHOLD), ctypes.c_int(2 * num_bytes))  # malloc's own ratio


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
