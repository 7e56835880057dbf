# SPDX-License-Identifier: Apache-2.0
"""Machine from a file of `vllm-tiered probe`, with estimates for what a probe cannot measure.

A probe measures memory, links and GEMMs. It cannot measure the rest of an engine's work, such as
scheduling, sampling, norms, and the calls of a layer. That work consists of Python and calls of
small operations, so it is estimated as a multiple of the smallest operation's time. The multiples
are estimates too (docs/notes/weights.md), and the provenance of such a figure is "assumed".
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
from vllm_tiered.planner.measured_curves import GemmCurve, MeasuredCurves
from vllm_tiered.units import format_bytes
from vllm_tiered.untrusted import parse_json

FORMAT = "vllm-tiered probe"
VERSION = 2

STEP_CALLS = 2000
REQUEST_CALLS = 300
LAYER_CALLS = 200
"""Overhead of a step, of a request and of a layer, in calls of the smallest operation."""

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
        probe = parse_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
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
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path}: is damaged: {what}; {_AGAIN}") from error


def machine_from_probe(probe: Mapping[str, Any]) -> tuple[Machine, Figures]:
    """Return the machine of a probe file's contents, with its figures' provenance.

    Raises:
        KeyError, TypeError, ValueError, IndexError: a value is missing or not a number above 0.
    """
    near, far = (_gemm_curve(probe["gemms"][where]) for where in ("near", "far"))
    call_us = 1e6 * _positive(probe["call_seconds"], "call_seconds")
    links = {name: _samples(probe["links"][name]) for name in ("read", "write")}
    largest, one_row = near.by_rows[0][-1]
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
    measured, assumed = figures.measured, figures.assumed
    curves = MeasuredCurves(
        near=near,
        far=far,
        compute_slowdown=max(
            1.0, measured("compute_slowdown", compute_slowdown, "GEMMs during copies")
        ),
        link_slowdown=max(1.0, measured("link_slowdown", link_slowdown, "copies during GEMMs")),
        layer_overhead_us=assumed("layer_overhead_us", LAYER_CALLS),
    )
    machine = Machine(
        read_gb_per_s=measured("read_gb_per_s", read_gb_per_s, "the largest transfer"),
        write_gb_per_s=measured("write_gb_per_s", write_gb_per_s, "the largest transfer"),
        near_gb_per_s=measured("near_gb_per_s", near_gb_per_s, "the largest GEMM, 1 row"),
        tflops=measured(
            "tflops",
            2 * most_bytes / width * most_rows / most_seconds / 1e12,
            f"the largest GEMM, {most_rows} rows",
        ),
        storage_read_gb_per_s=_storage(probe.get("storage"), measured),
        near_bytes_per_copied_byte=measured(
            "near_bytes_per_copied_byte",
            curves.near_bytes_per_copied_byte(near_gb_per_s, read_gb_per_s),
            "GEMMs during copies",
        ),
        step_overhead_ms=assumed("step_overhead_ms", STEP_CALLS, 1e-3),
        request_overhead_us=assumed("request_overhead_us", REQUEST_CALLS),
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

    def assumed(self, name: str, calls: int, unit: float = 1.0) -> float:
        rule = f"{calls} times the {self._call_us:.2f} us of the smallest operation, an estimate"
        return self._note(name, calls * self._call_us * unit, "assumed", rule)

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


def _storage(curves: Mapping[str, Any] | None, measured: Callable[..., float]) -> float | None:
    """Return the rate of the fastest sequential reads; None if storage was not measured."""
    if curves is None:
        return None
    rates = [
        _positive(read["gb_per_s"], "gb_per_s")
        for read in curves["reads"]
        if read["pattern"] == "sequential"
    ]
    return measured("storage_read_gb_per_s", max(rates), "the fastest sequential reads")


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
