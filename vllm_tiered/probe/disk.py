# SPDX-License-Identifier: Apache-2.0
"""Read throughput of a disk by request size and number of readers (LLM in a flash, figure 2b)."""

import os
import random
import threading
import time
from collections.abc import Sequence
from enum import Enum
from errno import EIO
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.storage.direct_file import (
    Bytes,
    Transfer,
    aligned_bytes,
    make_direct,
    transfer,
)
from vllm_tiered.storage.tmpfile import open_tmpfile
from vllm_tiered.units import MIB, format_bytes

_WRITE_BYTES = 4 * MIB


class Pattern(Enum):
    """Order of the requests' offsets."""

    SEQUENTIAL = "sequential"
    RANDOM = "random"


class Read(NamedTuple):
    """Measured point of a curve.

    Attributes:
        request_bytes: bytes of one request.
        readers: number of threads; each has one request at a time.
        gb_per_s: rate of all readers together, in 10^9 bytes per second.
        latency_s: duration of one request.
    """

    pattern: Pattern
    request_bytes: int
    readers: int
    gb_per_s: float
    latency_s: float


class StorageCurves(NamedTuple):
    """Measured rates of a disk.

    Attributes:
        is_direct: whether reads bypass the page cache; otherwise they may be from memory.
        write_gb_per_s: rate of one sequential write of the file, until it is on the disk.
    """

    is_direct: bool
    file_bytes: int
    write_gb_per_s: float
    reads: tuple[Read, ...]


def storage_curves(
    folder: Path,
    request_sizes: Sequence[int],
    readers: Sequence[int],
    *,
    file_bytes: int,
    seconds: float,
) -> StorageCurves:
    """Write a temporary file without a name (O_TMPFILE) and measure reads of it.

    Args:
        request_sizes: multiples of 4 KiB, as O_DIRECT needs.
        file_bytes: a multiple of all ``request_sizes`` and of 4 MiB. It should exceed the disk's
            own cache; otherwise that cache is measured.
        seconds: duration for each point.

    Raises:
        ConfigError: no file can be created in ``folder``, or the disk reports an error.
        BudgetError: the disk lacks the space.
    """
    try:
        fd = open_tmpfile(folder, file_bytes)
    except BudgetError as error:
        raise BudgetError(
            f"the probe's file takes {format_bytes(file_bytes)} in {folder}, where "
            f"{format_bytes(_free_bytes(folder))} are free: free some, or name a folder on another "
            "disk with --path"
        ) from error
    except ConfigError as error:
        raise ConfigError(
            f"no file can be made in {folder} ({_reason(error)}): name a writable folder on a "
            "local disk with --path"
        ) from error
    try:
        is_direct = make_direct(fd)
        write_gb_per_s = _write(fd, file_bytes)
        reads = tuple(
            _read(fd, pattern, size, number, file_bytes, seconds)
            for pattern in Pattern
            for size in request_sizes
            for number in readers
        )
    except OSError as error:
        raise ConfigError(
            f"the disk of {folder} failed while it was measured: {error.strerror}"
        ) from error
    finally:
        os.close(fd)
    return StorageCurves(is_direct, file_bytes, write_gb_per_s, reads)


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _reason(error: BaseException) -> str:
    cause = error.__cause__
    return (cause.strerror or str(cause)) if isinstance(cause, OSError) else str(error)


def _write(fd: int, file_bytes: int) -> float:
    """Write every byte, as unwritten space is not read from the disk; return the GB/s."""
    buffer = aligned_bytes(_WRITE_BYTES)
    buffer[:] = np.frombuffer(random.Random(0).randbytes(_WRITE_BYTES), dtype=np.uint8)
    start = time.perf_counter()
    for offset in range(0, file_bytes, _WRITE_BYTES):
        _move_all(os.pwritev, fd, buffer, offset)
    os.fdatasync(fd)
    seconds = time.perf_counter() - start
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # needed if the page cache is used
    return file_bytes / seconds / 1e9


def _read(
    fd: int, pattern: Pattern, request_bytes: int, readers: int, file_bytes: int, seconds: float
) -> Read:
    offsets = list(range(0, file_bytes, request_bytes))
    if pattern is Pattern.RANDOM:
        random.Random(request_bytes).shuffle(offsets)
    turns = count()  # next() is atomic
    failures: list[OSError] = []
    finished = [0] * readers
    start = time.perf_counter()
    end = start + seconds

    def read(reader: int, buffer: Bytes) -> None:
        try:
            while time.perf_counter() < end or not finished[reader]:
                _move_all(os.preadv, fd, buffer, offsets[next(turns) % len(offsets)])
                finished[reader] += 1
        except OSError as error:
            failures.append(error)

    threads = [
        threading.Thread(target=read, args=(reader, aligned_bytes(request_bytes)), daemon=True)
        for reader in range(readers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    elapsed = time.perf_counter() - start
    return Read(
        pattern=pattern,
        request_bytes=request_bytes,
        readers=readers,
        gb_per_s=sum(finished) * request_bytes / elapsed / 1e9,
        latency_s=elapsed * readers / sum(finished),
    )


def _move_all(call: Transfer, fd: int, buffer: Bytes, offset: int) -> None:
    moved = transfer(call, fd, buffer.data, offset)
    if moved != len(buffer):
        raise OSError(EIO, f"{moved} of {len(buffer)} bytes at offset {offset}")
