# SPDX-License-Identifier: Apache-2.0
"""Machines as cost models see them: a few figures each, every one with where it comes from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TypeAlias

from vllm_tiered.energy.carbon import Power
from vllm_tiered.planner.measured_curves import MeasuredCurves

_PROFILES = Path(__file__).parent / "profiles"
_MAY_BE_KNOWN = {"storage_read_gb_per_s"}
_KINDS = {"measured", "published", "calibrated", "assumed"}

Figures: TypeAlias = Mapping[str, Mapping[str, object]]
"""Each figure of a machine with its value, its kind and its source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a step's time follows from.

    Attributes:
        read_gb_per_s: far to near, alone on the link (10^9 bytes).
        write_gb_per_s: near to far.
        near_gb_per_s: near-tier bandwidth that decoding reaches.
        tflops: dense 16-bit throughput that large batches reach.
        near_bytes_per_copied_byte: near-tier traffic of a copied byte, which compute then lacks.
        step_overhead_ms: of a step apart from the layers: scheduling, sampling, launches.
        request_overhead_us: of a step, for each request in it.
        far_layer_overhead_us: of a step, for each far layer: submitting and awaiting its copies,
            which are two, of KV in and out, or of the weights of attention and FFN.
        storage_read_gb_per_s: from its disk, in large sequential reads; None where not known.
        power: what it draws; None where that is not known.
        curves: what a probe measured beside these; None of a machine that was not probed.
    """

    read_gb_per_s: float
    write_gb_per_s: float
    near_gb_per_s: float
    tflops: float
    near_bytes_per_copied_byte: float
    step_overhead_ms: float
    request_overhead_us: float
    far_layer_overhead_us: float
    storage_read_gb_per_s: float | None = None
    power: Power | None = None
    curves: MeasuredCurves | None = None


def profile_names() -> list[str]:
    """Return the machines there are files for."""
    return sorted(path.stem for path in _PROFILES.glob("*.toml"))


def provenance(name: str) -> Figures:
    """Each figure of a machine with its value, its kind and its source.

    Raises:
        As :func:`machine`.
    """
    load_profile(name)  # checked there
    return tomllib.loads((_PROFILES / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def load_profile(name: str) -> Machine:
    """Return a machine by name.

    Raises KeyError, naming those there are, for an unknown one, and ValueError for a file with
    figures that are missing, unknown or without a kind and a source.
    """
    path = _PROFILES / f"{name}.toml"
    if not path.is_file():
        raise KeyError(f"no machine {name!r}; there are {', '.join(profile_names())}")
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    watts = {field.name for field in fields(Power)}
    expected = {field.name for field in fields(Machine)} - {"power", "curves"} - _MAY_BE_KNOWN
    if watts & table.keys():  # all of them or none
        expected |= watts
    expected |= _MAY_BE_KNOWN & table.keys()
    if table.keys() != expected:
        odd = sorted(table.keys() ^ expected)
        raise ValueError(f"{path.name}: figures missing or unknown: {', '.join(odd)}")
    for key, figure in table.items():
        if figure.get("kind") not in _KINDS or not figure.get("source"):
            raise ValueError(f"{path.name}: {key} needs a source and a kind of {sorted(_KINDS)}")
    values = {key: float(figure["value"]) for key, figure in table.items()}
    power = Power(**{key: values.pop(key) for key in watts}) if watts & values.keys() else None
    return Machine(**values, power=power, curves=None)
