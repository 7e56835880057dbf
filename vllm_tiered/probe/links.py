# SPDX-License-Identifier: Apache-2.0
"""Measures links and compute of this machine: what placements and predictions are made from.

Each figure is the median of several runs, after one that is not counted.
"""

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered.devices.base import Copy, Device, Direction
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.probe.gemm import Gemm, far_gemm
from vllm_tiered.storage.direct_file import aligned_pages
from vllm_tiered.storage.immutable_file import Draft, ImmutableFile
from vllm_tiered.units import KIB, MIB

PAGE_BYTES = 64 * KIB
"""Of what is copied in one piece: as staging slots are filled."""

SIZES = tuple(64 * KIB << power for power in range(0, 11, 2))
"""64 KiB to 64 MiB."""

SECONDS = 0.1
"""For a point of a curve: short transfers are repeated."""

_REPEATS = 5


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
    seconds: float = SECONDS,
) -> list[Sample]:
    """Transfers between near and far memory, one at a time, by their size.

    Args:
        sizes: multiples of ``PAGE_BYTES``.
        seconds: for each size, about.

    Raises:
        BudgetError: the far tier does not have twice the largest.
    """
    num_pages = 2 * max(sizes) // PAGE_BYTES
    far = device.far_buffer(num_pages, PAGE_BYTES)
    near = PageBuffer(torch.empty((num_pages, PAGE_BYTES), dtype=torch.uint8, device=near_device))
    for buffer in (far, near):
        buffer.data.fill_(1)  # the system gives memory when it is first written
    samples = []
    for size in sizes:
        count = size // PAGE_BYTES
        # One place after the other, so that the far side is in no cache; the near side is, or is
        # not, as two slots that take turns.
        places = range(0, num_pages - count + 1, count)
        copies = [
            _copy(device, direction, far, near, first, turn % 2 * count, count)
            for turn, first in enumerate(places)
        ]

        def transfer(turn: int, copies: Sequence[Copy] = copies) -> None:
            device.submit(copies[turn % len(copies)]).wait()

        samples.append(Sample(size, median_seconds(transfer, seconds)))
    return samples


def published_read(
    device: Device,
    folder: Path,
    near_device: torch.device,
    num_bytes: int = 128 * MIB,
    *,
    knob: str,
) -> Sample:
    """Reading a published file, as stored weights are read. The file goes away.

    Args:
        knob: the configuration's key for ``folder``, for messages.

    Raises:
        ConfigError, BudgetError: no such file can be made in ``folder``.
    """
    num_pages = num_bytes // PAGE_BYTES
    path = folder / f"{secrets.token_hex(4)}.probe"
    draft = Draft(folder, num_pages, PAGE_BYTES, knob=knob)
    try:
        draft.memory.random_()  # no disk compresses it away
        draft.publish(path, {})
        file = ImmutableFile(path)
    finally:
        draft.close()
        path.unlink(missing_ok=True)
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


def gemm_curve(
    shapes: Sequence[tuple[int, int]],
    num_tokens: int,
    dtype: torch.dtype,
    near_device: torch.device,
    gemm_of: Callable[[torch.Tensor], Gemm] = far_gemm,
    seconds: float = SECONDS,
) -> list[Sample]:
    """Products of activations [num_tokens, in] with weights [out, in], by the weights' size.

    Args:
        shapes: (out, in) of each.
        product_of: a weight's product.
        seconds: for each shape, about.
    """
    return [
        gemm_by_rows(shape, [num_tokens], dtype, near_device, gemm_of, seconds)[0]
        for shape in shapes
    ]


def gemm_by_rows(
    shape: tuple[int, int],
    rows: Sequence[int],
    dtype: torch.dtype,
    near_device: torch.device,
    gemm_of: Callable[[torch.Tensor], Gemm] = far_gemm,
    seconds: float = SECONDS,
) -> list[Sample]:
    """The same of one shape, by the activations' rows."""
    out_features, in_features = shape
    size = out_features * in_features * dtype.itemsize
    weights = _weights(out_features, in_features, dtype, near_device)
    products = [gemm_of(weight) for weight in weights]
    samples = []
    for num_tokens in rows:
        x = torch.randn((num_tokens, in_features), device=near_device).to(dtype)
        run = _in_turn(products, x)
        samples.append(Sample(size, median_seconds(run, seconds, synchronizer(near_device))))
    return samples


def _weights(
    out_features: int, in_features: int, dtype: torch.dtype, near_device: torch.device
) -> list[torch.Tensor]:
    """As many as take 128 MiB: in a model no weight is in a cache when it is needed again."""
    size = out_features * in_features * dtype.itemsize
    first = torch.randn((out_features, in_features), device=near_device).to(dtype)
    count = max(2, -(-128 * MIB // size))
    return [first, *(first.clone() for _ in range(min(count, 64) - 1))]


def _in_turn(products: Sequence[Gemm], x: torch.Tensor) -> Callable[[int], None]:
    def run(turn: int) -> None:
        products[turn % len(products)](x)

    return run


def synchronizer(near_device: torch.device) -> Callable[[], None]:
    """What waits for the compute submitted so far."""
    if near_device.type == "cpu":
        return lambda: None
    return lambda: torch.accelerator.synchronize(near_device)


def median_seconds(
    run: Callable[[int], None],
    seconds: float = SECONDS,
    finish: Callable[[], None] = lambda: None,
) -> float:
    """Of one call; ``run`` gets the number of the call.

    Where calls only submit work ``finish`` waits for it: once for many calls, as a product may take
    less than waiting for it.

    Takes about ``seconds``, at most six times that or three calls: one that is not counted, one
    that says for how many there is time, and one that counts.
    """
    begin = time.perf_counter()
    run(0)
    finish()
    start = time.perf_counter()
    run(1)
    finish()
    once = time.perf_counter() - start
    calls = max(1, round(seconds / _REPEATS / max(once, 1e-7)))
    samples: list[float] = []
    while len(samples) < _REPEATS:
        start = time.perf_counter()
        for turn in range(calls):
            run(turn)
        finish()
        now = time.perf_counter()
        samples.append((now - start) / calls)
        if now - begin > 5 * seconds:
            break  # somebody else has the machine, or a call is slow
    return statistics.median(samples)


def _copy(
    device: Device,
    direction: Direction,
    far: PageBuffer,
    near: PageBuffer,
    far_page: int,
    near_page: int,
    count: int,
) -> Copy:
    ends = (far, _pages(far_page, count)), (near, _pages(near_page, count))
    (source, source_pages), (target, target_pages) = (
        ends if direction is Direction.READ else ends[::-1]
    )
    return device.prepare(direction, source, source_pages, target, target_pages)


def _pages(first: int, count: int) -> Pages:
    return Pages(np.arange(first, first + count, dtype=np.int64), ascending=True)
