# SPDX-License-Identifier: Apache-2.0
"""Probe run: all measurements that `vllm-tiered probe` makes of a machine, in order.

The result is plain data for a file. :mod:`vllm_tiered.planner.from_probe` builds a machine from it.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from vllm_tiered.devices.base import Device, Direction
from vllm_tiered.probe.contention import MOST_COPY_SECONDS, measure_contention, pages_of
from vllm_tiered.probe.disk import storage_curves
from vllm_tiered.probe.gemm import TORCH, GemmSeconds, Products
from vllm_tiered.probe.links import (
    PAGE_BYTES,
    SIZES,
    STORED_SIZES,
    Sample,
    gemm_curve,
    host_read,
    link_curve,
    median_seconds,
    stored_file,
    stored_reads,
    synchronizer,
)
from vllm_tiered.probe.nodes import MOST_BYTES, NodeRead, measure_nodes
from vllm_tiered.units import KIB, MIB

FORMAT = "vllm-tiered probe"
VERSION = 5
"""Version of the probe file; a reader refuses other versions."""

StepCosts = Mapping[str, Any]
"""What small engines measured of their steps (:mod:`vllm_tiered.probe.step_costs`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Sizes and durations of a probe run.

    Attributes:
        transfer_bytes: sizes of transfers between near and far memory.
        gemm_shapes: (out, in) of weights, by ascending size.
        rows: numbers of rows of the activations, which are the tokens in a step.
        dtype: data type of weights and activations.
        contention_shape: (out, in) of the weights used while a link copies; far larger than the
            caches.
        node_bytes: size of the buffer that is read of each NUMA node, if memory has several.
        request_bytes, readers: sizes and parallelism of reads from storage.
        file_bytes: size of the file that is read.
        stored_bytes: sizes of the reads that are made as weights are read.
        host_bytes: bytes that the host's processor reads for each figure, beside a GPU.
        point_seconds: duration for one point of a curve.
        contention_seconds: duration of the contention measurement.
    """

    transfer_bytes: tuple[int, ...] = SIZES
    gemm_shapes: tuple[tuple[int, int], ...] = (
        (512, 2048),
        (2048, 2048),
        (4096, 4096),
        (8192, 4096),
    )
    rows: tuple[int, ...] = (1, 4, 16, 64, 256)
    dtype: torch.dtype = torch.bfloat16
    contention_shape: tuple[int, int] = (4096, 4096)
    node_bytes: int = MOST_BYTES
    request_bytes: tuple[int, ...] = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
    readers: tuple[int, ...] = (1, 4, 16, 32)
    file_bytes: int = 512 * MIB
    stored_bytes: tuple[int, ...] = STORED_SIZES
    host_bytes: int = 512 * MIB
    point_seconds: float = 0.15
    contention_seconds: float = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrices:
    """Name of a sublayer and its matrices, (out, in) each."""

    name: str
    shapes: Sequence[tuple[int, int]] = field(default_factory=tuple)


def run_probe(
    device: Device,
    near_device: torch.device,
    scope: Scope,
    *,
    folder: Path | None = None,
    sublayers: Sequence[Matrices] = (),
    step: Callable[[str], None] = lambda _: None,
    products: Products = TORCH,
    step_costs: Callable[[], StepCosts | None] = lambda: None,
) -> dict[str, Any]:
    """Run all measurements.

    Args:
        folder: folder whose disk is measured; None leaves storage out.
        sublayers: a model's sublayers, whose GEMMs are measured at their own shapes.
        step: called with the name of the next measurement.
        products: the GEMMs to time.
        step_costs: returns what an engine's steps take beside its GEMMs; None if no engine can
            run.

    Returns:
        The file's content, JSON-safe. Its keys name the units: seconds, bytes, GB/s (10^9 bytes).

    Raises:
        ConfigError, BudgetError: as :func:`storage_curves` and :meth:`Device.far_buffer`.
    """
    start, cpu_before = time.perf_counter(), _cpu_seconds()
    storage = None
    if folder is not None:  # first, so that errors appear at once
        step(f"reads from {folder}")
        storage = _storage(device, near_device, folder, scope, products)
    # Before the links: copies are then measured with the node that far memory uses first.
    nodes = []
    if device.far_nodes():
        step("reads from each memory node")
        nodes = measure_nodes(device, near_device, scope.node_bytes)
    links = {}
    for direction in Direction:
        step(f"transfers, {_ENDS[direction]}")
        curve = link_curve(
            device, direction, near_device, scope.transfer_bytes, scope.point_seconds
        )
        links[direction.value] = [sample._asdict() for sample in curve]
    host = None
    if near_device.type != "cpu":
        step("reads by the host's processor")
        host = host_read(scope.host_bytes, scope.point_seconds)._asdict()
    gemms: dict[str, list[dict[str, float]]] = {}
    for where, gemm_of in (("near", products.near), ("far", products.far)):
        step(f"GEMMs with {where} weights")
        gemms[where] = [
            {"rows": rows, **sample._asdict()}
            for rows in scope.rows
            for sample in gemm_curve(
                scope.gemm_shapes,
                rows,
                scope.dtype,
                near_device,
                gemm_of,
                scope.point_seconds,
            )
        ]
    for kind, seconds_of in (("int4", products.int4_seconds), ("w4a16", products.w4a16_seconds)):
        if seconds_of:
            step(f"GEMMs with weights in 4 bit ({kind})")
            found = _narrow_gemms(seconds_of, scope, near_device)
            gemms |= {kind: found} if found else {}
    step("contention of copies and compute")
    contention = measure_contention(
        device,
        near_device,
        scope.contention_shape,
        scope.dtype,
        seconds=scope.contention_seconds,
        gemm_of=products.far,
    )
    if sublayers:
        step("the model's sublayers")
    at_model = _sublayers(sublayers, scope, near_device, products)
    call_seconds = _call_seconds(near_device)
    # Before the engine, which computes in a process of its own.
    foreign = _foreign_share(cpu_before, _cpu_seconds(), time.perf_counter() - start)
    step("steps of small engines")
    costs = step_costs()
    seconds = time.perf_counter() - start
    return {
        "format": FORMAT,
        "version": VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe(near_device),
        "dtype": str(scope.dtype).removeprefix("torch."),
        "links": links,
        **({"far_tiers": _far_tiers(device, nodes)} if nodes else {}),
        "host_read": host,
        "gemms": gemms,
        "gemms_of": products.source,
        "contention": contention._asdict(),
        "call_seconds": call_seconds,
        "step_costs": None if costs is None else dict(costs),
        "storage": storage,
        "sublayers": at_model,
        "seconds": seconds,
        "foreign_cpu_share": foreign,
    }


_ENDS = {Direction.READ: "far to near", Direction.WRITE: "near to far"}


def describe(near_device: torch.device) -> dict[str, Any]:
    """Describe the machine, to distinguish its file from another machine's."""
    name = _cpu_name()
    if near_device.type != "cpu":
        name = torch.cuda.get_device_name(near_device)
    return {
        "name": name,
        "device": near_device.type,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _far_tiers(device: Device, nodes: Sequence[NodeRead]) -> dict[str, Any]:
    return {
        "read_at_once": device.reads_nodes_at_once,
        "nodes": [read._asdict() for read in nodes],
    }


def _storage(
    device: Device, near_device: torch.device, folder: Path, scope: Scope, products: Products
) -> dict[str, Any]:
    curves = storage_curves(
        folder,
        scope.request_bytes,
        scope.readers,
        file_bytes=scope.file_bytes,
        seconds=scope.point_seconds,
    )
    reads = [{**read._asdict(), "pattern": read.pattern.value} for read in curves.reads]
    weights = stored_reads(
        device, folder, near_device, scope.stored_bytes, scope.point_seconds, knob="--path"
    )
    shape = _read_shape(scope, weights[-1])
    with stored_file(folder, 4 * pages_of(shape, scope.dtype), knob="--path") as file:
        contention = measure_contention(
            device,
            near_device,
            shape,
            scope.dtype,
            seconds=scope.contention_seconds,
            gemm_of=products.far,
            source=file.buffer(),
        )
    return {
        **curves._asdict(),
        "path": str(folder),
        "reads": reads,
        "weight_reads": [sample._asdict() for sample in weights],
        "contention": contention._asdict(),
    }


def _read_shape(scope: Scope, largest: Sample) -> tuple[int, int]:
    """Return the weights that are read while compute runs: fewer rows if the disk is slow."""
    rows, columns = scope.contention_shape
    rate = largest.num_bytes / largest.seconds
    while rows % 2 == 0 and rows // 2 * columns * scope.dtype.itemsize % PAGE_BYTES == 0:
        if rows * columns * scope.dtype.itemsize <= MOST_COPY_SECONDS * rate:
            break
        rows //= 2
    return rows, columns


def _cpu_seconds() -> tuple[float, float]:
    """Return the CPU seconds used so far by the whole machine and by this process."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return machine.user + machine.nice + machine.system, own.user + own.system


def _foreign_share(
    before: tuple[float, float], after: tuple[float, float], seconds: float
) -> float:
    """Return the share of all cores' time used by other processes, which lowers figures."""
    machine, own = after[0] - before[0], after[1] - before[1]
    return min(1.0, max(0.0, (machine - own) / (seconds * (os.cpu_count() or 1))))


def _call_seconds(near_device: torch.device) -> float:
    """Measure the overhead of a call with the smallest operation."""
    x = torch.ones((1, 64), device=near_device)

    def call(turn: int) -> None:
        torch.add(x, x)

    return median_seconds(call, finish=synchronizer(near_device))


def _narrow_gemms(
    seconds_of: GemmSeconds, scope: Scope, near_device: torch.device
) -> list[dict[str, float]]:
    """Time GEMMs with weights in few bits; ``num_bytes`` are those of the weight in the dtype.

    Returns nothing if there is no such GEMM here.
    """
    found: list[dict[str, float]] = []
    for out_features, in_features in scope.gemm_shapes:
        seconds = seconds_of(
            (out_features, in_features), scope.rows, scope.dtype, near_device, scope.point_seconds
        )
        num_bytes = out_features * in_features * scope.dtype.itemsize
        found += [
            {"rows": rows, "num_bytes": num_bytes, "seconds": took}
            for rows, took in zip(scope.rows if seconds else (), seconds, strict=True)
        ]
    return found


def _sublayers(
    sublayers: Sequence[Matrices], scope: Scope, near_device: torch.device, products: Products
) -> list[dict[str, Any]]:
    """Measure each sublayer with all weights near, for every number of rows."""
    shapes = sorted({shape for sublayer in sublayers for shape in sublayer.shapes})
    seconds = {
        (shape, rows): gemm_curve(
            [shape], rows, scope.dtype, near_device, products.near, scope.point_seconds
        )[0].seconds
        for shape in shapes
        for rows in scope.rows
    }
    return [
        {
            "name": sublayer.name,
            "shapes": [list(shape) for shape in sublayer.shapes],
            "rows": rows,
            "seconds": sum(seconds[shape, rows] for shape in sublayer.shapes),
        }
        for sublayer in sublayers
        for rows in scope.rows
    ]
