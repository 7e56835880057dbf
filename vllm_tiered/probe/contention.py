# SPDX-License-Identifier: Apache-2.0
"""Measurement of the contention of copies and compute, which overlap in each step.

If near and far memory are the same DRAM, or copy threads take cores from compute, each slows the
other down. A link with its own copy engines has no such contention.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered.devices.base import Copy, Device, Direction
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.probe.gemm import GemmOf, far_gemm
from vllm_tiered.probe.links import PAGE_BYTES
from vllm_tiered.storage.direct_file import aligned_pages

_REPEATS = 5

MOST_COPY_SECONDS = 0.02
"""Longest copy that callers should measure with: on a slow link, some sixty of them take longer
than the seconds that they ask for."""


class Contention(NamedTuple):
    """Slowdown of compute and of a link while both run; 1 means none.

    Attributes:
        compute_slowdown: factor by which GEMMs take longer.
        link_slowdown: factor by which transfers from far to near take longer.
    """

    compute_slowdown: float
    link_slowdown: float


def measure_contention(
    device: Device,
    near_device: torch.device,
    shape: tuple[int, int],
    dtype: torch.dtype,
    seconds: float = 2.0,
    gemm_of: GemmOf = far_gemm,
    source: PageBuffer | None = None,
) -> Contention:
    """Measure GEMMs of one row while a link copies into the two buffers of their weights.

    Args:
        shape: (out, in) of a weight, whose bytes are a multiple of ``PAGE_BYTES``.
        seconds: approximate duration of the whole measurement.
        gemm_of: returns the GEMM of a weight in a weight buffer.
        source: at least four weights that are copied, as of a file; None for far memory.

    Returns:
        Medians of several runs; each run first measures compute and link alone.

    Raises:
        BudgetError: the far tier lacks the memory of four weights.
    """
    pages = pages_of(shape, dtype)
    near = PageBuffer(aligned_pages(2 * pages, PAGE_BYTES, near_device))
    # Bytes of 1 are tiny but normal numbers in every floating-point type.
    near.data.fill_(1)
    far = source
    if far is None:
        far = device.far_buffer(4 * pages, PAGE_BYTES)
        far.data.fill_(1)
    copies = [
        device.prepare(
            Direction.READ, far, _pages(turn * pages, pages), near, _pages(turn % 2 * pages, pages)
        )
        for turn in range(4)
    ]
    x = torch.randn((1, shape[1]), device=near_device).to(dtype)
    weights = near.data.view(2, -1)
    gemms = [gemm_of(weight.view(dtype).view(shape)) for weight in weights]
    share = seconds / _REPEATS / 3

    def compute(turn: int) -> None:
        gemms[turn % 2](x)
        device.compute_event().wait()

    slower: list[Contention] = []
    for _ in range(_REPEATS):
        compute_alone = _rate(compute, share)
        link_alone = _link_rate(device, copies, lambda turn: time.sleep(1e-3), share)
        both = _link_rate(device, copies, compute, share)
        slower.append(
            Contention(
                compute_alone / both.steps_per_s,
                link_alone.copies_per_s / both.copies_per_s,
            )
        )
    return Contention(
        max(1.0, statistics.median(one.compute_slowdown for one in slower)),
        max(1.0, statistics.median(one.link_slowdown for one in slower)),
    )


def pages_of(shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Return the pages of a weight."""
    return shape[0] * shape[1] * dtype.itemsize // PAGE_BYTES


def _rate(run: Callable[[int], None], seconds: float) -> float:
    """Return the measured calls per second."""
    run(0)
    start = time.perf_counter()
    num_calls = 0
    while (elapsed := time.perf_counter() - start) < seconds:
        run(num_calls)
        num_calls += 1
    return num_calls / elapsed


class _Rates(NamedTuple):
    steps_per_s: float
    copies_per_s: float


def _link_rate(
    device: Device, copies: Sequence[Copy], step: Callable[[int], None], seconds: float
) -> _Rates:
    """Measure the rates of steps and of copies that run at the same time, without pauses."""
    under_way = deque(device.submit(copy) for copy in copies)
    under_way.popleft().wait()
    start = last = time.perf_counter()
    num_steps = num_copies = 0
    while (now := time.perf_counter()) < start + seconds or num_copies < 2:
        step(num_steps)
        num_steps += 1
        while under_way[0].done():
            under_way.popleft()
            under_way.append(device.submit(copies[num_copies % len(copies)]))
            num_copies += 1
            last = time.perf_counter()
    for event in under_way:
        event.wait()
    # The rate is from the end of the first copy to the end of the last.
    return _Rates(num_steps / (now - start), num_copies / (last - start))


def _pages(first: int, count: int) -> Pages:
    return Pages(np.arange(first, first + count, dtype=np.int64), ascending=True)
