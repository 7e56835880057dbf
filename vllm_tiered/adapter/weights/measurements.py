# SPDX-License-Identifier: Apache-2.0
"""Measurements on the machine that will run the model: GEMM times, links, and their contention.

``measure_sublayers`` times the GEMMs of all the layers' shapes at one number of rows, which is
enough for a step of one request. ``measure_machine`` is for a plan for many requests: it times the
GEMMs of the smallest and the largest matrix by rows, and the contention of copies and compute.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from vllm_tiered.adapter.weights.engine_gemm import (
    engine_far_gemm,
    engine_near_gemm,
    int4_seconds,
)
from vllm_tiered.devices.base import Device, Direction
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.measured_curves import GemmCurve, MeasuredCurves
from vllm_tiered.planner.pipeline_time import ComputeTimes, Link, fitted_link
from vllm_tiered.probe.contention import MOST_COPY_SECONDS, measure_contention, pages_of
from vllm_tiered.probe.links import (
    PAGE_BYTES,
    SECONDS,
    SIZES,
    Sample,
    gemm_by_rows,
    link_curve,
    stored_file,
    stored_reads,
)
from vllm_tiered.weights.layout import Sublayer, extent_bytes
from vllm_tiered.weights.store import KNOB

ROWS = (1, 4, 16, 64, 256)
"""Numbers of activation rows of the measured GEMMs, as in a probe."""

_POINT_SECONDS = 0.05
"""Time for each measured GEMM, of which there are 20 to 30."""

_BESIDE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSublayers:
    """Measured compute times and links for a placement.

    Attributes:
        times: compute time of each sublayer with ``num_tokens`` rows and weights near.
        link: link from far to near, measured with the bytes of the largest sublayer.
        storage: link from storage to near; None if there is no storage.
    """

    times: ComputeTimes
    link: Link
    storage: Link | None = None


class Matrix(NamedTuple):
    """Properties of a matrix that determine the time of its GEMM.

    Attributes:
        shape: (out, in).
        dtype: dtype of the activations, and of the weights if they are not compressed.
        is_compressed: whether the weights will be in 4 bit.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    is_compressed: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrix without compression."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


def measure_sublayers(
    device: Device,
    layers: Sequence[nn.Module],
    sublayers: Sequence[Sublayer],
    near_device: torch.device,
    *,
    compressed: Sequence[Collection[str]],
    storage_folder: Path | None = None,
    num_tokens: int = 1,
    known_seconds: Sequence[Mapping[str, float]] | None = None,
) -> MeasuredSublayers:
    """Measure each link once, and the GEMM of each distinct shape, in a second or two.

    The attention operation is not counted. It reads the KV cache, whose length is not known yet.

    Args:
        device: the device whose links are measured.
        layers: the decoder layers.
        sublayers: sublayers of the layers, in the order of computation.
        near_device: torch device that computes.
        compressed: for each layer, the matrices that will be in 4 bit.
        storage_folder: folder of the file of stored weights; None if there is none.
        num_tokens: number of activation rows.
        known_seconds: for each layer, times by the names of parameters; None to measure them.
    """
    if known_seconds is None:
        by_name = matrices_of(layers, compressed)
        seconds = {
            matrix: _seconds(matrix, [num_tokens], near_device)[0]
            for matrix in {matrix for layer in by_name for matrix in layer.values()}
        }
        known_seconds = [
            {name: seconds[matrix] for name, matrix in layer.items()} for layer in by_name
        ]
    compute = tuple(
        math.fsum(
            known_seconds[sublayer.layer].get(parameter.name, 0.0)
            for parameter in sublayer.parameters
        )
        for sublayer in sublayers
    )
    (sample,) = link_curve(device, Direction.READ, near_device, [link_bytes(sublayers)])
    return MeasuredSublayers(
        times=ComputeTimes(compute=compute),
        link=link_of(sample),
        storage=_storage(device, storage_folder, near_device),
    )


def measure_machine(
    device: Device,
    layers: Sequence[nn.Module],
    sublayers: Sequence[Sublayer],
    near_device: torch.device,
    *,
    compressed: Sequence[Collection[str]],
    storage_folder: Path | None = None,
) -> Machine:
    """Measure the figures of this machine that a plan for many requests needs.

    Two costs are not known before the model runs: of a step outside the layers, and of a request
    apart from its KV. They are set to 0, because they are equal for every placement.
    """
    all_of = {matrix for layer in matrices_of(layers, compressed) for matrix in layer.values()}
    largest = max(all_of, key=lambda matrix: matrix.num_bytes)._replace(is_compressed=False)
    plain = _ends(matrix for matrix in all_of if not matrix.is_compressed) or [largest]
    packed = _ends(matrix for matrix in all_of if matrix.is_compressed)
    near, far = (_curve(plain, near_device, is_far=is_far) for is_far in (False, True))
    row_seconds = min(curve.by_rows[0][-1][1] for curve in (near, far))
    # Some far GEMMs are faster than near ones (float32 without AVX-512, one row). No weight is to
    # leave near memory for that, nor for noise.
    far = GemmCurve.of({key: max(far.points[key], near.points[key]) for key in near.points})
    # The transfer of one page gives the latency.
    sizes = [PAGE_BYTES, link_bytes(sublayers)]
    smallest, sample = link_curve(device, Direction.READ, near_device, sizes)
    link = link_of(sample)
    slower = measure_contention(
        device,
        near_device,
        _copied_shape(largest, link),
        largest.dtype,
        seconds=_BESIDE_SECONDS,
    )
    storage = _storage(device, storage_folder, near_device)
    slower_stored = None
    if storage_folder is not None and storage is not None:
        shape = _copied_shape(largest, storage)
        with stored_file(storage_folder, 4 * pages_of(shape, largest.dtype), knob=KNOB) as file:
            slower_stored = measure_contention(
                device,
                near_device,
                shape,
                largest.dtype,
                seconds=_BESIDE_SECONDS,
                source=file.buffer(),
            )
    curves = MeasuredCurves(
        near=near,
        far=far,
        compute_slowdown=slower.compute_slowdown,
        link_slowdown=slower.link_slowdown,
        layer_overhead_us=0.0,
        compressed=_curve(packed, near_device) if packed else None,
        storage_slowdown=slower_stored,
    )
    num_bytes, most_seconds = near.by_rows[-1][-1]
    read, near_rate = link.bytes_per_s / 1e9, num_bytes / row_seconds / 1e9
    operations = 2 * num_bytes / largest.dtype.itemsize * near.rows[-1]
    return Machine(
        read_gb_per_s=read,
        write_gb_per_s=read,
        near_gb_per_s=near_rate,
        tflops=operations / most_seconds / 1e12,
        near_bytes_per_copied_byte=curves.near_bytes_per_copied_byte(near_rate, read),
        step_overhead_ms=0.0,
        request_overhead_us=0.0,
        far_layer_overhead_us=2e6 * smallest.seconds,
        storage_read_gb_per_s=None if storage is None else storage.bytes_per_s / 1e9,
        storage_latency_us=0.0 if storage is None else 1e6 * storage.latency_s,
        curves=curves,
    )


def matrices_of(
    layers: Sequence[nn.Module], compressed: Sequence[Collection[str]]
) -> list[dict[str, Matrix]]:
    """Return the matrices of each layer by their names in it."""
    return [
        {
            name: Matrix((p.shape[0], p.shape[1]), p.dtype, name in names)
            for name, p in layer.named_parameters()
            if p.ndim == 2 and p.is_floating_point()
        }
        for layer, names in zip(layers, compressed, strict=True)
    ]


def link_of(sample: Sample) -> Link:
    """Return a link as fast as the measured transfer."""
    return Link(bytes_per_s=sample.num_bytes / sample.seconds)


def link_bytes(sublayers: Sequence[Sublayer]) -> int:
    """Return the transfer size for measuring the link: the bytes of the largest sublayer."""
    largest = max(extent_bytes(p.num_bytes for p in sublayer.parameters) for sublayer in sublayers)
    return min(max(largest, PAGE_BYTES), max(SIZES))


def _storage(device: Device, folder: Path | None, near_device: torch.device) -> Link | None:
    if folder is None:
        return None
    return fitted_link(stored_reads(device, folder, near_device, knob=KNOB))


def _ends(matrices: Iterator[Matrix]) -> list[Matrix]:
    """Return the smallest and the largest matrix, between which GEMM times are interpolated."""
    by_size = {matrix.num_bytes: matrix for matrix in matrices}
    return [by_size[size] for size in sorted({min(by_size), max(by_size)})] if by_size else []


def _curve(
    matrices: Sequence[Matrix], near_device: torch.device, *, is_far: bool = False
) -> GemmCurve:
    """Return GEMM times by the matrices' uncompressed bytes and by rows."""
    found: dict[tuple[int, int], float] = {}
    for matrix in matrices:
        seconds = _seconds(matrix, ROWS, near_device, is_far=is_far, seconds=_POINT_SECONDS)
        found |= {(rows, matrix.num_bytes): took for rows, took in zip(ROWS, seconds, strict=True)}
    return GemmCurve.of(found)


def _seconds(
    matrix: Matrix,
    rows: Sequence[int],
    near_device: torch.device,
    *,
    is_far: bool = False,
    seconds: float = SECONDS,
) -> list[float]:
    """Return the seconds of the matrix's GEMM for each number of activation rows."""
    if matrix.is_compressed:
        return int4_seconds(matrix.shape, rows, matrix.dtype, near_device, seconds)
    gemm_of = engine_far_gemm if is_far else engine_near_gemm
    with near_device:  # for what vLLM's GEMMs allocate
        samples = gemm_by_rows(matrix.shape, rows, matrix.dtype, near_device, gemm_of, seconds)
    return [sample.seconds for sample in samples]


def _copied_shape(matrix: Matrix, link: Link) -> tuple[int, int]:
    """Return the shape of the part of the matrix that is copied during GEMMs, in whole pages."""
    row_bytes = matrix.shape[1] * matrix.dtype.itemsize
    least = PAGE_BYTES // math.gcd(PAGE_BYTES, row_bytes)  # fewest rows that fill whole pages
    wanted = min(matrix.num_bytes, MOST_COPY_SECONDS * link.bytes_per_s) / (least * row_bytes)
    return max(1, round(wanted)) * least, matrix.shape[1]
