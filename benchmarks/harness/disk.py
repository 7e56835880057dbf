# SPDX-License-Identifier: Apache-2.0
"""Disk bandwidth: plain sequential O_DIRECT writes and reads.

The traffic of a storage tier is given as a share of it. It is no device benchmark: one thread,
queue depth 1, 1 MiB a call. A device may give more to many concurrent readers, which
`sequential_read_gb_per_s` measures.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from vllm_tiered.storage.direct_file import Bytes, aligned_bytes

_LARGE_CALL_BYTES = 4 << 20
_CALL_BYTES = 1 << 20  # above 256 KiB the call size no longer limits common SSDs


def probe_disk(directory: Path, num_bytes: int) -> dict[str, Any]:
    """Write and read `num_bytes` in `directory`; return GB/s of each, and whether it was direct.

    Where the file system refuses O_DIRECT, `is_direct` is false and the reads may come from the
    page cache. Raises ValueError unless `num_bytes` is a positive multiple of 1 MiB.
    """
    if num_bytes <= 0 or num_bytes % _CALL_BYTES:
        raise ValueError(f"{num_bytes} bytes: expected a multiple of {_CALL_BYTES} above 0")
    handle, name = tempfile.mkstemp(prefix=".disk-probe.", dir=directory)
    os.close(handle)
    try:
        descriptor, is_direct = _open(name)
        try:
            # Anonymous memory is page-aligned, as O_DIRECT requires.
            with mmap.mmap(-1, _CALL_BYTES) as buffer:
                buffer[:] = os.urandom(_CALL_BYTES)  # random, so that no disk compresses it
                write_s = _timed(descriptor, buffer, num_bytes, os.pwritev)
                read_s = _timed(descriptor, buffer, num_bytes, os.preadv)
        finally:
            os.close(descriptor)
    finally:
        os.unlink(name)
    return {
        "write_gb_per_s": num_bytes / write_s / 1e9,
        "read_gb_per_s": num_bytes / read_s / 1e9,
        "num_bytes": num_bytes,
        "is_direct": is_direct,
    }


def sequential_read_gb_per_s(paths: Sequence[Path]) -> float:
    """Return the highest rate of reading all of these files, past the page cache.

    It is the best of 2, 4 and 8 readers with calls of 4 MiB. Each makes one pass over all bytes,
    since repeated reads may come from a cache behind the disk (2.0 GB/s for 2 GiB of a virtual disk
    that gives 1.4 for 7).
    """
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
    try:
        calls = [
            (descriptor, offset)
            for descriptor, path in zip(descriptors, paths, strict=True)
            for offset in range(0, path.stat().st_size - _LARGE_CALL_BYTES, _LARGE_CALL_BYTES)
        ]
        seconds = min(_read_pass(calls, num_readers) for num_readers in (2, 4, 8))
        return len(calls) * _LARGE_CALL_BYTES / seconds / 1e9
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def read_ahead_kib(path: Path) -> int | None:
    """Return what the kernel reads ahead of a page fault on this path's disk; None if unknown."""
    setting = _read_ahead_setting(path)
    return None if setting is None else int(setting.read_text())


@contextmanager
def read_ahead(path: Path, kib: int | None) -> Iterator[None]:
    """Let the kernel read `kib` ahead on this path's disk, and then what it did; None: leave it.

    Files that are open already keep theirs. Raises OSError without the right to set it.
    """
    setting = _read_ahead_setting(path)
    if kib is None or setting is None:
        yield
        return
    before = setting.read_text()
    setting.write_text(str(kib))
    try:
        yield
    finally:
        setting.write_text(before)


def _read_ahead_setting(path: Path) -> Path | None:
    device = os.stat(path).st_dev
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    files = [at / "queue" / "read_ahead_kb" for at in (node, node.parent)]  # or a partition's disk
    return next((file for file in files if file.is_file()), None)


def _read_pass(calls: Sequence[tuple[int, int]], num_readers: int) -> float:
    """Return the seconds that `num_readers` threads take to make the calls in order."""
    buffers: SimpleQueue[Bytes] = SimpleQueue()
    for _ in range(num_readers):
        buffers.put(aligned_bytes(_LARGE_CALL_BYTES))  # in huge pages, as the engine's

    def read(call: tuple[int, int]) -> None:
        buffer = buffers.get()
        if os.preadv(call[0], [buffer.data], call[1]) != _LARGE_CALL_BYTES:
            raise OSError(errno.EIO, f"a short read at offset {call[1]}")
        buffers.put(buffer)

    with ThreadPoolExecutor(num_readers) as readers:
        start = time.perf_counter()
        for _ in readers.map(read, calls):
            pass
        return time.perf_counter() - start


def _open(name: str) -> tuple[int, bool]:
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(name, os.O_RDWR), False


def _timed(descriptor: int, buffer: mmap.mmap, num_bytes: int, call: Any) -> float:
    """Return the seconds of one pass. Raises OSError if a call moved fewer bytes."""
    start = time.perf_counter()
    for offset in range(0, num_bytes, _CALL_BYTES):
        moved = call(descriptor, [buffer], offset)
        if moved != _CALL_BYTES:
            raise OSError(errno.EIO, f"{moved} of {_CALL_BYTES} bytes at offset {offset}")
    os.fdatasync(descriptor)
    return time.perf_counter() - start
