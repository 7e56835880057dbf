# SPDX-License-Identifier: Apache-2.0
"""Measures links and compute of this machine: what placements and predictions are made from.

Each figure is the median of several runs, after one that is not counted.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered.tiers.base import Copy, Device, Direction, PageBuffer, Pages
from vllm_tiered.tiers.published import Draft, PublishedPages, aligned_pages
from vllm_tiered.units import KIB, MIB

PAGE_BYTES = 64 * KIB
"""Of what is copied in one piece: as staging slots are filled."""

SIZES = tuple(64 * KIB << power for power in range(0, 11, 2))
"""64 KiB to 64 MiB."""

_REPEATS = 5
_LEAST_SECONDS = 0.02
"""A run lasts at least so long: short transfers are repeated."""


class Sample(NamedTuple):
    """One point of a curve.

    Attributes:
        num_bytes: of a transfer, or of the weights of a product.
        seconds: that it takes.
    """

    num_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes."""
        return self.num_bytes / self.seconds / 1e9


def link_curve(
    device: Device,
    direction: Direction,
    near_device: torch.device,
    sizes: Sequence[int] = SIZES,
) -> list[Sample]:
    """Transfers between near and far memory, one at a time, by their size.

    Args:
        sizes: multiples of ``PAGE_BYTES``.

    Raises:
        BudgetError: the far tier does not have twice the largest.
    """
    num_pages = 2 * max(sizes) // PAGE_BYTES
    far = device.far_buffer(num_pages, PAGE_BYTES)
    near = PageBuffer(torch.empty((num_pages, PAGE_BYTES), dtype=torch.uint8, device=near_device))
    for buffer in (far, near):
        buffer.data.fill_(1)  # the system gives memory when it is first written
    source, target = (far, near) if direction is Direction.READ else (near, far)
    samples = []
    for size in sizes:
        count = size // PAGE_BYTES
        # Two places in turn, so that the source is not always in a cache.
        copies = [
            device.prepare(direction, source, _pages(first, count), target, _pages(first, count))
            for first in (0, num_pages - count)
        ]

        def transfer(turn: int, copies: Sequence[Copy] = copies) -> None:
            device.wait(device.submit(copies[turn % 2]))

        samples.append(Sample(size, median_seconds(transfer)))
    return samples


def published_read(
    device: Device,
    folder: Path,
    near_device: torch.device,
    num_bytes: int = 256 * MIB,
) -> Sample:
    """Reading a published file, as stored weights are read. The file goes away.

    Raises:
        ConfigError, BudgetError: no such file can be made in ``folder``.
    """
    num_pages = num_bytes // PAGE_BYTES
    path = folder / f"{os.getpid()}.probe"
    draft = Draft(folder, num_pages, PAGE_BYTES, knob="the folder to be measured")
    draft.memory.random_()  # no disk compresses it away
    draft.publish(path, {})
    draft.close()
    file = PublishedPages(path)
    path.unlink()
    try:
        near = PageBuffer(aligned_pages(num_pages, PAGE_BYTES, near_device))
        pages = _pages(0, num_pages)
        copy = device.prepare(Direction.READ, file.buffer(), pages, near, pages)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            device.submit(copy).wait()
            seconds.append(time.perf_counter() - start)
        return Sample(num_bytes, statistics.median(seconds))
    finally:
        file.close()


def product_curve(
    shapes: Sequence[tuple[int, int]],
    num_tokens: int,
    dtype: torch.dtype,
    near_device: torch.device,
) -> list[Sample]:
    """Products of activations [num_tokens, in] with weights [out, in], by the weights' size.

    Args:
        shapes: (out, in) of each.
    """
    samples = []
    for out_features, in_features in shapes:
        size = out_features * in_features * dtype.itemsize
        # As many as take 64 MiB: in a model no weight is in a cache when it is needed again.
        count = max(2, -(-64 * MIB // size))
        weights = [
            torch.randn((out_features, in_features), device=near_device).to(dtype)
            for _ in range(min(count, 16))
        ]
        x = torch.randn((num_tokens, in_features), device=near_device).to(dtype)

        def product(
            turn: int, weights: Sequence[torch.Tensor] = weights, x: torch.Tensor = x
        ) -> None:
            torch.nn.functional.linear(x, weights[turn % len(weights)])

        samples.append(Sample(size, median_seconds(product)))
    return samples


def median_seconds(run: Callable[[int], None]) -> float:
    """Of one call; ``run`` gets the number of the call."""
    run(0)
    start = time.perf_counter()
    run(1)
    once = time.perf_counter() - start
    calls = max(1, round(_LEAST_SECONDS / max(once, 1e-7)))
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for turn in range(calls):
            run(turn)
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds)


def _pages(first: int, count: int) -> Pages:
    return Pages(np.arange(first, first + count, dtype=np.int64), ascending=True)
