# SPDX-License-Identifier: Apache-2.0
"""Machine from a file of `vllm-tiered probe`, with estimates for what a probe cannot measure.

A probe measures memory, links and GEMMs, and starts small engines for the rest of an engine's
work: attention, scheduling, sampling, norms, and the calls of a layer. Where no engine runs, that
work is estimated as a multiple of the smallest operation's time, and attention by its bytes and
operations. The multiples are estimates too (docs/notes/weights.md), and the provenance of such a
figure is "assumed". On a GPU, where graphs replace single calls, the estimates are fixed times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_tiered.errors import ConfigError
from vllm_tiered.planner.far_tiers import NO_TIERS, FarTier, FarTiers
from vllm_tiered.planner.machine import (
    Figures,
    Machine,
    load_profile,
    profile_names,
    provenance,
    read_profile,
)
from vllm_tiered.planner.measured_curves import GemmCurve, MeasuredAttention, MeasuredCurves
from vllm_tiered.planner.pipeline_time import Link, fitted_link
from vllm_tiered.units import MIB, format_bytes
from vllm_tiered.untrusted import parse_json, read_regular_file

FORMAT = "vllm-tiered probe"
VERSION = 5

MAX_FILE_BYTES = 4 * MIB
"""Most bytes of a probe's file, which has some tens of KB."""

STEP_CALLS = 2000
REQUEST_CALLS = 300
LAYER_CALLS = 200
"""Overhead of a step, of a request and of a layer, in calls of the smallest operation."""

_ON_A_GPU = {"step_seconds": 4e-3, "request_seconds": 15e-6, "layer_seconds": 30e-6}
"""The same on a GPU, as in the profiles of GPUs; a layer has some ten small kernels in a graph."""

_AGAIN = "measure again with vllm-tiered probe"


def load_machine(name_or_path: str) -> tuple[Machine, Figures]:
    """Load a machine by its profile's name or from a file, with its figures' provenance.

    A file that ends in `.toml` has the form of the profiles; another is a probe's.

    Raises:
        ConfigError: the file cannot be read, or a figure in it is not as it must be; see
            :func:`read_probe_file`.
    """
    if name_or_path in profile_names():
        return load_profile(name_or_path), provenance(name_or_path)
    path = Path(name_or_path)
    if path.suffix != ".toml":
        return read_probe_file(path)
    try:
        return read_profile(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix(f'{path.name}: ')}") from error


def read_probe_file(path: Path) -> tuple[Machine, Figures]:
    """Return the machine that a probe's file describes, with its figures' provenance.

    Raises:
        ConfigError: the file cannot be read, is no probe result, is damaged, or has another
            version.
    """
    try:
        text = read_regular_file(path, max_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}: not a probe's result") from error
    try:
        probe = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}; {_AGAIN}") from error
    if not isinstance(probe, dict) or probe.get("format") != FORMAT:
        raise ConfigError(f"{path}: is not a probe's result; {_AGAIN}")
    if probe.get("version") != VERSION:
        raise ConfigError(
            f"{path}: has version {probe.get('version')!r}, and this reads {VERSION}; {_AGAIN}"
        )
    try:
        return machine_from_probe(probe)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path}: is damaged: {what}; {_AGAIN}") from error


def machine_from_probe(probe: Mapping[str, Any]) -> tuple[Machine, Figures]:
    """Return the machine of a probe file's contents, with its figures' provenance.

    Raises:
        KeyError, TypeError, ValueError, IndexError: a value is missing or not a number above 0.
        ArithmeticError: numbers are so large or small that a figure is none.
    """
    near, far = (_gemm_curve(probe["gemms"][where]) for where in ("near", "far"))
    int4, w4a16 = (probe["gemms"].get(kind) for kind in ("int4", "w4a16"))
    call_us = 1e6 * _positive(probe["call_seconds"], "call_seconds")
    links = {name: _samples(probe["links"][name]) for name in ("read", "write")}
    # The faster GEMM says more about memory: a kernel may not reach its bandwidth.
    largest, one_row = min(curve.by_rows[0][-1] for curve in (near, far))
    most_rows, (most_bytes, most_seconds) = near.rows[-1], near.by_rows[-1][-1]
    width = {"float32": 4, "bfloat16": 2, "float16": 2}[probe["dtype"]]
    read_gb_per_s, write_gb_per_s = (_gb_per_s(links[name][-1]) for name in ("read", "write"))
    near_gb_per_s = largest / one_row / 1e9
    slower = probe["contention"]
    compute_slowdown = _positive(slower["compute_slowdown"], "compute_slowdown")
    link_slowdown = _positive(slower["link_slowdown"], "link_slowdown")
    latency_s = links["read"][0][1]
    where = f"vllm-tiered probe of {probe['machine']['name']}, {probe['date']}"
    figures = _Figures(where, call_us)
    measured = figures.measured
    is_gpu = probe["machine"]["device"] != "cpu"
    step = _StepFigures(figures, probe["step_costs"], is_gpu=is_gpu)
    storage = _storage(probe.get("storage"), measured)
    curves = MeasuredCurves(
        near=near,
        far=far,
        compute_slowdown=max(
            1.0, measured("compute_slowdown", compute_slowdown, "GEMMs during copies")
        ),
        link_slowdown=max(1.0, measured("link_slowdown", link_slowdown, "copies during GEMMs")),
        layer_overhead_us=step.overhead("layer_overhead_us", "layer_seconds", LAYER_CALLS),
        compressed=None if int4 is None else _gemm_curve(int4),
        w4a16=None if w4a16 is None else _gemm_curve(w4a16),
        attention=step.attention(),
        storage_slowdown=_storage_slowdown(probe.get("storage"), measured),
    )
    machine = Machine(
        read_gb_per_s=measured("read_gb_per_s", read_gb_per_s, "the largest transfer"),
        write_gb_per_s=measured("write_gb_per_s", write_gb_per_s, "the largest transfer"),
        near_gb_per_s=measured(
            "near_gb_per_s", near_gb_per_s, "the largest GEMM, 1 row, of the faster kind"
        ),
        tflops=measured(
            "tflops",
            2 * most_bytes / width * most_rows / most_seconds / 1e12,
            f"the largest GEMM, {most_rows} rows, by {probe['gemms_of']}",
        ),
        storage_read_gb_per_s=storage.bytes_per_s / 1e9 if storage else None,
        storage_latency_us=1e6 * storage.latency_s if storage else 0.0,
        host_gb_per_s=_host(probe.get("host_read"), measured),
        near_bytes_per_copied_byte=measured(
            "near_bytes_per_copied_byte",
            curves.near_bytes_per_copied_byte(near_gb_per_s, read_gb_per_s),
            "GEMMs during copies",
        ),
        step_overhead_ms=step.overhead("step_overhead_ms", "step_seconds", STEP_CALLS, 1e3),
        request_overhead_us=step.overhead("request_overhead_us", "request_seconds", REQUEST_CALLS),
        far_layer_overhead_us=measured(
            "far_layer_overhead_us", 2e6 * latency_s, "two of the smallest transfers"
        ),
        far_tiers=_far_tiers(probe.get("far_tiers"), measured),
        curves=curves,
    )
    return machine, figures.found


class _Figures:
    """Recorder of each figure's provenance."""

    def __init__(self, where: str, call_us: float) -> None:
        self.found: dict[str, dict[str, object]] = {}
        self._where = where
        self._call_us = call_us

    def measured(self, name: str, value: float, how: str) -> float:
        return self._note(name, value, "measured", f"{how}; {self._where}")

    def fixed(self, name: str, value: float) -> float:
        return self._note(name, value, "assumed", "as in the profiles of GPUs")

    def assumed(self, name: str, calls: int, per_second: float) -> float:
        rule = f"{calls} times the {self._call_us:.2f} us of the smallest operation, an estimate"
        return self._note(name, calls * self._call_us * 1e-6 * per_second, "assumed", rule)

    def _note(self, name: str, value: float, kind: str, source: str) -> float:
        self.found[name] = {"value": value, "kind": kind, "source": source}
        return value


def _far_tiers(found: Mapping[str, Any] | None, measured: Callable[..., float]) -> FarTiers:
    """Return the NUMA nodes in the order in which far memory uses them."""
    if found is None:
        return NO_TIERS
    tiers = []
    for read in found["nodes"]:
        name, num_bytes = f"node {int(read['node'])}", _positive(read["num_bytes"], "num_bytes")
        rate = num_bytes / _positive(read["seconds"], "seconds") / 1e9
        how = f"{format_bytes(int(num_bytes))} of the node, read once"
        tiers.append(
            FarTier(
                name=name,
                capacity_bytes=int(_positive(read["capacity_bytes"], "capacity_bytes")),
                gb_per_s=measured(f"{name}: read_gb_per_s", rate, how),
            )
        )
    return FarTiers(tuple(tiers), at_once=found["read_at_once"] is True)


class _StepFigures:
    """Figures of an engine's steps: measured if the probe had an engine, else assumed."""

    def __init__(self, figures: _Figures, costs: Mapping[str, Any] | None, *, is_gpu: bool) -> None:
        self._figures = figures
        self._costs = costs
        self._is_gpu = is_gpu

    def overhead(self, name: str, cost: str, calls: int, per_second: float = 1e6) -> float:
        """Return an overhead, in a unit of which ``per_second`` are a second."""
        if self._costs is None and self._is_gpu:
            return self._figures.fixed(name, _ON_A_GPU[cost] * per_second)
        if self._costs is None:
            return self._figures.assumed(name, calls, per_second)
        return self._measured(name, _not_negative(self._costs[cost], cost) * per_second)

    def attention(self) -> MeasuredAttention | None:
        """Return what attention takes; None if it was not measured."""
        costs = self._costs
        if costs is None:
            return None

        def cost(name: str, key: str, per_second: float) -> float:
            return self._measured(name, _not_negative(costs[key], key) * per_second)

        def rate(name: str, key: str) -> float:
            return self._measured(name, _positive(costs[key], key) / 1e9)

        return MeasuredAttention(
            request_us=cost("attention_request_us", "attention_request_seconds", 1e6),
            decode_kv_gb_per_s=rate("decode_attention_kv_gb_per_s", "decode_kv_bytes_per_s"),
            decode_gflops=rate("decode_attention_gflops", "decode_operations_per_s"),
            prompt_gflops=rate("prompt_attention_gflops", "prompt_operations_per_s"),
            row_ns_per_feature=cost("row_ns_per_feature", "row_seconds_per_feature", 1e9),
        )

    def _measured(self, name: str, value: float) -> float:
        return self._figures.measured(name, value, "steps of small engines")


def _storage(curves: Mapping[str, Any] | None, measured: Callable[..., float]) -> Link | None:
    """Return the link of reads as weights are read; None if storage was not measured."""
    if curves is None:
        return None
    samples = _samples(curves["weight_reads"])
    link = fitted_link(samples)
    smallest, largest = (format_bytes(num_bytes) for num_bytes, _ in (samples[0], samples[-1]))
    how = f"reads of {smallest} to {largest}, as weights are read"
    measured("storage_read_gb_per_s", link.bytes_per_s / 1e9, how)
    measured("storage_latency_us", 1e6 * link.latency_s, how)
    return link


def _storage_slowdown(
    curves: Mapping[str, Any] | None, measured: Callable[..., float]
) -> tuple[float, float] | None:
    """Return the factors of compute and of reads while both run; None without storage."""
    if curves is None:
        return None
    compute, reads = (
        max(1.0, measured(f"storage_{name}", _positive(curves["contention"][name], name), how))
        for name, how in (
            ("compute_slowdown", "GEMMs during reads from storage"),
            ("link_slowdown", "reads from storage during GEMMs"),
        )
    )
    return compute, reads


def _host(read: Mapping[str, Any] | None, measured: Callable[..., float]) -> float | None:
    """Return the rate at which the processor beside a GPU reads its memory."""
    if read is None:
        return None
    rate = _positive(read["num_bytes"], "num_bytes") / _positive(read["seconds"], "seconds") / 1e9
    return measured("host_gb_per_s", rate, "the processor reads its memory, all threads")


def _gemm_curve(entries: Sequence[Mapping[str, Any]]) -> GemmCurve:
    seconds = {
        (int(_positive(entry["rows"], "rows")), int(_positive(entry["num_bytes"], "num_bytes"))): (
            _positive(entry["seconds"], "seconds")
        )
        for entry in entries
    }
    if not seconds:
        raise ValueError("no GEMMs")
    return GemmCurve.of(seconds)


def _samples(entries: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return (bytes, seconds) by ascending bytes."""
    return sorted(
        (int(_positive(entry["num_bytes"], "num_bytes")), _positive(entry["seconds"], "seconds"))
        for entry in entries
    )


def _gb_per_s(sample: tuple[int, float]) -> float:
    return sample[0] / sample[1] / 1e9


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}, and must be a number above 0")
    return float(value)


def _not_negative(value: Any, name: str) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else _positive(value, name)
