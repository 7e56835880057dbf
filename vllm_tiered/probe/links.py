# SPDX-License-Identifier: Apache-2.0
"""Measurements of links and compute, on which placements and predictions are based.

Each figure is the median of several runs after a warm-up.
"""

import contextlib
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered.devices.base import Copy, Device, Direction
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.probe.gemm import Gemm, GemmOf, far_gemm
from vllm_tiered.storage.direct_file import aligned_pages
from vllm_tiered.storage.immutable_file import Draft, ImmutableFile
from vllm_tiered.units import KIB, MIB

PAGE_BYTES = 64 * KIB
"""Size of the pages that fill weight buffers."""

SIZES = tuple(64 * KIB << power for power in range(0, 11, 2))
"""Transfer sizes: 64 KiB to 64 MiB."""

STORED_SIZES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
"""Sizes of reads from storage, as sublayers have them."""

SECONDS = 0.1
"""Duration of the measurement of one point; short transfers are repeated."""

_REPEATS = 5


class Sample(NamedTuple):
    """Measured point of a curve.

    Attributes:
        num_bytes: bytes of a transfer, or of the weights of a GEMM.
        seconds: duration of the transfer or GEMM.
    """

    num_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Rate in 10^9 bytes per second."""
        return self.num_bytes / self.seconds / 1e9


def link_curve(
    device: Device,
    direction: Direction,
    near_device: torch.device,
    sizes: Sequence[int] = SIZES,
    seconds: float = SECONDS,
) -> list[Sample]:
    """Measure transfers between near and far memory, one at a time, by size.

    Args:
        sizes: bytes of the transfers, multiples of ``PAGE_BYTES``.
        seconds: approximate duration for each size.

    Raises:
        BudgetError: the far tier lacks twice the largest size.
    """
    num_pages = 2 * max(sizes) // PAGE_BYTES
    far = device.far_buffer(num_pages, PAGE_BYTES)
    near = PageBuffer(torch.empty((num_pages, PAGE_BYTES), dtype=torch.uint8, device=near_device))
    for buffer in (far, near):
        buffer.data.fill_(1)  # the system allocates memory at the first write
    samples = []
    for size in sizes:
        count = size // PAGE_BYTES
        # Transfers use successive far pages, so that no cache holds them. The near side alternates
        # between two buffers, cached or not.
        places = range(0, num_pages - count + 1, count)
        copies = [
            _copy(device, direction, far, near, first, turn % 2 * count, count)
            for turn, first in enumerate(places)
        ]

        def transfer(turn: int, copies: Sequence[Copy] = copies) -> None:
            device.submit(copies[turn % len(copies)]).wait()

        samples.append(Sample(size, median_seconds(transfer, seconds)))
    return samples


def host_read(num_bytes: int, seconds: float = SECONDS) -> Sample:
    """Measure how fast the host's processor reads its memory, with all of torch's threads."""
    halves = torch.ones((2, num_bytes // 8), dtype=torch.float32)

    def read(turn: int) -> None:
        torch.sum(halves[turn % 2])

    return Sample(num_bytes // 2, median_seconds(read, seconds))


def stored_reads(
    device: Device,
    folder: Path,
    near_device: torch.device,
    sizes: Sequence[int] = STORED_SIZES,
    seconds: float = SECONDS,
    *,
    knob: str,
) -> list[Sample]:
    """Measure reads of an immutable file, as sublayers on storage are read; removes the file.

    The next read begins when one has ended, in which time the disk waits: small reads are slower
    than the disk's bandwidth.

    Args:
        sizes: bytes of the reads, multiples of ``PAGE_BYTES``. The file has twice the largest.
        seconds: approximate duration for each size.
        knob: the configuration key of ``folder``, for messages.

    Raises:
        ConfigError, BudgetError: the file cannot be created in ``folder``.
    """
    num_pages = 2 * max(sizes) // PAGE_BYTES
    samples = []
    with stored_file(folder, num_pages, knob=knob) as file:
        near = PageBuffer(aligned_pages(num_pages, PAGE_BYTES, near_device))
        near.data.fill_(1)  # the system allocates memory at the first write
        for size in sizes:
            count = size // PAGE_BYTES
            copies = [
                device.prepare(
                    Direction.READ, file.buffer(), _pages(first, count), near, _pages(first, count)
                )
                for first in range(0, num_pages - count + 1, count)
            ]

            def read(turn: int, copies: Sequence[Copy] = copies) -> None:
                device.submit(copies[turn % len(copies)]).wait()

            samples.append(Sample(size, median_seconds(read, seconds)))
    return samples


@contextlib.contextmanager
def stored_file(folder: Path, num_pages: int, *, knob: str) -> Iterator[ImmutableFile]:
    """Write a file of pages as weights on storage are, without a name, and close it in the end.

    Its numbers are as random as weights, since the disk may compress them, and no GEMM with them is
    slower than with a model's.

    Args:
        num_pages: of ``PAGE_BYTES``.
        knob: the configuration key of ``folder``, for messages.

    Raises:
        ConfigError, BudgetError: the file cannot be created in ``folder``.
    """
    path = folder / f"{secrets.token_hex(4)}.probe"
    draft = Draft(folder, num_pages, PAGE_BYTES, knob=knob)
    try:
        draft.memory.view(torch.bfloat16).normal_()
        draft.publish(path, {})
        file = ImmutableFile(path)
    finally:
        draft.close()
        path.unlink(missing_ok=True)
    try:
        yield file
    finally:
        file.close()


def gemm_curve(
    shapes: Sequence[tuple[int, int]],
    num_tokens: int,
    dtype: torch.dtype,
    near_device: torch.device,
    gemm_of: GemmOf = far_gemm,
    seconds: float = SECONDS,
) -> list[Sample]:
    """Measure GEMMs of activations [num_tokens, in] with weights [out, in], by the weights' size.

    Args:
        shapes: (out, in) of each weight.
        gemm_of: returns the GEMM of a weight.
        seconds: approximate duration for each shape.
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
    gemm_of: GemmOf = far_gemm,
    seconds: float = SECONDS,
) -> list[Sample]:
    """Measure GEMMs with weights of one shape, by the activations' rows."""
    out_features, in_features = shape
    size = out_features * in_features * dtype.itemsize
    weights = _weights(out_features, in_features, dtype, near_device)
    gemms = [gemm_of(weight) for weight in weights]
    samples = []
    for num_tokens in rows:
        x = torch.randn((num_tokens, in_features), device=near_device).to(dtype)
        run = _in_turn(gemms, x)
        samples.append(Sample(size, median_seconds(run, seconds, synchronizer(near_device))))
    return samples


def _weights(
    out_features: int, in_features: int, dtype: torch.dtype, near_device: torch.device
) -> list[torch.Tensor]:
    """Create weights of 128 MiB in total, as a model reuses no weight while it is cached."""
    size = out_features * in_features * dtype.itemsize
    first = torch.randn((out_features, in_features), device=near_device).to(dtype)
    count = max(2, -(-128 * MIB // size))
    return [first, *(first.clone() for _ in range(min(count, 64) - 1))]


def _in_turn(gemms: Sequence[Gemm], x: torch.Tensor) -> Callable[[int], None]:
    def run(turn: int) -> None:
        gemms[turn % len(gemms)](x)

    return run


def synchronizer(near_device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the compute submitted so far."""
    if near_device.type == "cpu":
        return lambda: None
    return lambda: torch.accelerator.synchronize(near_device)


def median_seconds(
    run: Callable[[int], None],
    seconds: float = SECONDS,
    finish: Callable[[], None] = lambda: None,
) -> float:
    """Return the median duration of one call; ``run`` gets the number of the call.

    If calls only submit work, ``finish`` waits for it. It is called once for many calls, as a GEMM
    may take less time than waiting for it.

    The measurement takes about ``seconds``, and at most six times that or three calls: a warm-up, a
    call that determines the number of calls in a sample, and a sample.
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
            break  # another process uses the machine, or a call is slow
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
