# SPDX-License-Identifier: Apache-2.0
"""Copies of unused pages, to measure what the plugin's copies cost the model."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable
from types import TracebackType

import numpy as np
import torch

from vllm_tiered.devices.copy_thread import copy_pages
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.devices.throttle import Throttle

PAGE_BYTES = 23_040  # one block of 32 tokens in a layer of the demo model
PAGES_PER_COPY = 75  # the used blocks of a layer, at an eighth of the demand


class Copier:
    """Context in which a thread copies pages within host memory, as the plugin's threads do.

    Args:
        gb_per_s: the largest rate; math.inf for no limit.
        cpus: where the thread may run; if None, where the current one may.

    Attributes:
        num_bytes: bytes copied since the start.
    """

    def __init__(self, gb_per_s: float, cpus: Iterable[int] | None = None) -> None:
        self.num_bytes = 0
        self._throttle = None if math.isinf(gb_per_s) else Throttle(gb_per_s * 1e9)
        self._cpus = cpus
        # Far larger than the caches, as the far tier is.
        shape = (40 * PAGES_PER_COPY, PAGE_BYTES)
        self._far = PageBuffer(torch.ones(shape, dtype=torch.uint8))
        self._near = PageBuffer(torch.ones((2 * PAGES_PER_COPY, PAGE_BYTES), dtype=torch.uint8))
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Copier:
        self._is_over.clear()
        self._thread = threading.Thread(target=self._loop, name="copier", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)
        near_chunks = [
            Pages(np.arange(first, first + PAGES_PER_COPY), ascending=True)
            for first in range(0, self._near.num_pages, PAGES_PER_COPY)
        ]
        far_chunks = [
            Pages(np.arange(first, first + PAGES_PER_COPY), ascending=True)
            for first in range(0, self._far.num_pages, PAGES_PER_COPY)
        ]
        turn = 0
        while not self._is_over.is_set():
            ticket = 0.0
            if self._throttle:
                ticket = self._throttle.admit(PAGES_PER_COPY * PAGE_BYTES, time.perf_counter())
            copy_pages(
                self._far,
                far_chunks[turn % len(far_chunks)],
                self._near,
                near_chunks[turn % len(near_chunks)],
            )
            if self._throttle:
                self._throttle.hold(ticket)
            self.num_bytes += PAGES_PER_COPY * PAGE_BYTES
            turn += 1


def idle_gb_per_s(seconds: float = 1.0) -> float:
    """Return the rate of the copies while nothing else runs."""
    start = time.perf_counter()
    with Copier(math.inf) as copier:
        time.sleep(seconds)
    return copier.num_bytes / (time.perf_counter() - start) / 1e9
