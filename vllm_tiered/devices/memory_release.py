# SPDX-License-Identifier: Apache-2.0
"""Return of a process's memory to the system."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from vllm_tiered.units import MIB


def give_back(address: int, num_bytes: int) -> int:
    """Return memory of this process to the system; its contents are undefined from then on.

    Only whole system pages inside the range are returned: what shares a page with others stays.

    Returns:
        Bytes given back; 0 if the system does not take them (locked or registered memory).
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= begin:
        return 0
    refused = _libc().madvise(
        ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(mmap.MADV_DONTNEED)
    )
    return 0 if refused else end - begin


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Memory of a MiB and more goes back to the system when it is freed, in all of this process.

    glibc's malloc keeps what was freed once, up to 32 MiB a piece: a model's parameters that were
    loaded, packed and dropped would stay beside the packed ones. It costs page faults, so not for
    long. Afterwards malloc keeps what it kept at most before; it does not adapt by itself any more.
    """
    _set_mmap_threshold(MIB)
    try:
        yield
    finally:
        _set_mmap_threshold(_MOST_KEPT_BYTES)


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MOST_KEPT_BYTES = 32 * MIB
"""To which malloc raises its threshold by itself."""


def _set_mmap_threshold(num_bytes: int) -> None:
    mallopt = getattr(_libc(), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(ctypes.c_int(_M_MMAP_THRESHOLD), ctypes.c_int(num_bytes))
        mallopt(ctypes.c_int(_M_TRIM_THRESHOLD), ctypes.c_int(2 * num_bytes))  # malloc's own rule


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
