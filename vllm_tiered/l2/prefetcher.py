# SPDX-License-Identifier: Apache-2.0
"""Threads that prefetch memory into the last-level cache.

A prefetch has no result and may be dropped at any time. Memory that was not prefetched is read at
its use, as without prefetching.
"""

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_tiered.errors import UnsupportedError
from vllm_tiered.l2 import native

logger = logging.getLogger("vllm.tiered")

Spans = npt.NDArray[np.int64]
"""Address and bytes of each span, [n, 2], C-contiguous. The memory must stay allocated until the
prefetcher is idle."""

_LINE = 64
_TOUCHED_AT_ONCE = 256 << 10


class Prefetcher(Protocol):
    def begin(self, spans: Spans) -> None:
        """Queue the spans behind those queued before, and return at once."""

    def cancel(self) -> None:
        """Drop all bytes not prefetched yet."""

    def is_idle(self) -> bool:
        """Return whether all queued spans are prefetched or dropped."""

    def counts(self) -> tuple[int, int]:
        """Return the bytes prefetched and the bytes dropped since the start."""

    def close(self) -> None:
        """Stop the thread. Idempotent."""


class NativePrefetcher:
    """Prefetcher whose C++ thread reads a byte of each cache line, without the GIL.

    Args:
        cpus: CPUs on which the thread may run; empty for all.

    Raises:
        UnsupportedError: the library was not built, or no thread could be started.
    """

    def __init__(self, cpus: Collection[int] = ()) -> None:
        library = native.load()
        if library is None:
            raise UnsupportedError(
                "the prefetching thread was not built: install a C++ compiler (g++), then "
                "reinstall vllm-tiered"
            )
        self._library = library
        mask = np.array(sorted(cpus), dtype=np.int32)
        self._worker: int | None = library.tiered_l2_open(mask.ctypes.data, len(mask))
        if not self._worker:
            raise UnsupportedError(
                "no thread for prefetching could be started: set tiered.l2.prefetch to off"
            )
        self._last = (0, 0)

    def begin(self, spans: Spans) -> None:
        self._library.tiered_l2_begin(self._worker, spans.ctypes.data, len(spans))

    def cancel(self) -> None:
        self._library.tiered_l2_cancel(self._worker)

    def is_idle(self) -> bool:
        return self._worker is None or bool(self._library.tiered_l2_idle(self._worker))

    def counts(self) -> tuple[int, int]:
        if self._worker is not None:
            out = np.zeros(2, dtype=np.int64)
            self._library.tiered_l2_counts(self._worker, out.ctypes.data)
            self._last = (int(out[0]), int(out[1]))
        return self._last

    def close(self) -> None:
        if self._worker is not None:
            self.counts()
            self._library.tiered_l2_close(self._worker)
            self._worker = None


class TouchingPrefetcher:
    """Prefetcher with a Python thread, for installations without a compiler.

    numpy releases the GIL while it reads a piece, and takes it between pieces.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[int, int]] = deque()
        self._wake = threading.Condition()
        self._is_busy = self._is_closed = False
        self._fetched = self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="tiered-l2", daemon=True)
        self._thread.start()

    def begin(self, spans: Spans) -> None:
        with self._wake:
            for address, num_bytes in spans.tolist():
                for at in range(0, num_bytes, _TOUCHED_AT_ONCE):
                    piece = min(_TOUCHED_AT_ONCE, num_bytes - at)
                    self._pending.append((address + at, piece))
            self._wake.notify()

    def cancel(self) -> None:
        with self._wake:
            self._dropped += sum(num_bytes for _, num_bytes in self._pending)
            self._pending.clear()

    def is_idle(self) -> bool:
        with self._wake:
            return not self._pending and not self._is_busy

    def counts(self) -> tuple[int, int]:
        with self._wake:
            return self._fetched, self._dropped

    def close(self) -> None:
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._is_busy = False
                self._wake.wait_for(lambda: self._pending or self._is_closed)
                if self._is_closed:
                    return
                self._is_busy = True
                address, num_bytes = self._pending.popleft()
            _touch(address, num_bytes)
            with self._wake:
                self._fetched += num_bytes


def _touch(address: int, num_bytes: int) -> None:
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    np.bitwise_or.reduce(np.ctypeslib.as_array(memory)[::_LINE])


def open_prefetcher(cpus: Collection[int] = ()) -> Prefetcher:
    """Open the native prefetcher; without it, warn once and open the one in Python."""
    try:
        return NativePrefetcher(cpus)
    except UnsupportedError as error:
        logger.warning("tiered l2: %s; until then a Python thread touches memory instead", error)
        return TouchingPrefetcher()
