# SPDX-License-Identifier: Apache-2.0
"""Machines for the cost models: a few figures of each, with their provenance."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from vllm_tiered.energy.carbon import Power
from vllm_tiered.planner.far_tiers import NO_TIERS, FarTier, FarTiers
from vllm_tiered.planner.measured_curves import MeasuredCurves
from vllm_tiered.units import MIB, gib_to_bytes
from vllm_tiered.untrusted import parse_toml, read_regular_file

_PROFILES = Path(__file__).parent / "profiles"
_NO_FIGURES = {"far_tiers", "power", "curves"}
_TIER_KEYS = {"name", "capacity_gib", "value", "kind", "source"}
"""Keys of a far tier in a profile; ``value`` is its bandwidth of reads."""
_MAY_BE_KNOWN = {
    "storage_read_gb_per_s",
    "storage_latency_us",
    "peer_gb_per_s",
    "host_gb_per_s",
    "int4_compute_factor",
}
_MAY_BE_ZERO = {
    "near_bytes_per_copied_byte",
    "step_overhead_ms",
    "request_overhead_us",
    "far_layer_overhead_us",
    "storage_latency_us",
}
_KINDS = ("measured", "published", "calibrated", "assumed")

MAX_FILE_BYTES = MIB // 32
"""Most bytes of a machine's file; the longest profile has 3 KB. Python's parser takes time by the
square of a key's length: 3 s for 32 KiB of one dotted key (2026-11-28)."""

_MOST_GIB = 2.0**33
"""Largest capacity of a far tier; its bytes are as many as 63 bits count."""

_MOST_SHOWN = 60
"""Most characters of a wrong value in a message."""

Figures: TypeAlias = Mapping[str, Mapping[str, object]]
"""Value, kind and source of each figure of a machine, by the figure's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Figures of a machine that determine the time of a step.

    Attributes:
        read_gb_per_s: bandwidth from far to near without other traffic (10^9 bytes). With
            ``far_tiers`` it is that of the first of them, or of the link.
        write_gb_per_s: bandwidth from near to far.
        near_gb_per_s: near-tier bandwidth that decoding reaches.
        tflops: dense 16-bit throughput that large batches reach.
        near_bytes_per_copied_byte: bytes of near-tier traffic that compute loses per copied byte.
        step_overhead_ms: time of a step outside the layers: scheduling, sampling, launches.
        request_overhead_us: time that each request adds to a step.
        far_layer_overhead_us: time that each far layer adds to a step, to submit and await its two
            copies (KV in and out, or the weights of attention and FFN).
        storage_read_gb_per_s: bandwidth at which weights are read from storage; None if unknown.
        storage_latency_us: time of such a read beside its bytes' at that bandwidth.
        peer_gb_per_s: bandwidth from one near tier to another, of tensor-parallel ranks; None if
            they exchange over the far link.
        host_gb_per_s: bandwidth at which the host's processor reads far memory as it computes; None
            if unknown, or if the processor is the near tier's own.
        far_tiers: tiers of far memory; none if all of it is equally fast.
        int4_compute_factor: how many times as long as in 16 bit a GEMM takes with our weights in 4
            bit; None if it is predicted by the bytes.
        power: power that the machine draws; None if unknown.
        curves: curves that a probe measured; None if the machine was not probed.
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
    storage_latency_us: float = 0.0
    peer_gb_per_s: float | None = None
    host_gb_per_s: float | None = None
    far_tiers: FarTiers = NO_TIERS
    int4_compute_factor: float | None = None
    power: Power | None = None
    curves: MeasuredCurves | None = None

    def far_gb_per_s(self, far_bytes: int) -> float:
        """Return the bandwidth at which weights of so many far bytes are read."""
        return self.far_tiers.gb_per_s(far_bytes) if self.far_tiers else self.read_gb_per_s

    def next_far_gb_per_s(self, far_bytes: int) -> float:
        """Return the bandwidth of far memory beside so many bytes of weights."""
        return self.far_tiers.next_gb_per_s(far_bytes) if self.far_tiers else self.read_gb_per_s


def profile_names() -> list[str]:
    """Return the names of the machine profiles."""
    return sorted(path.stem for path in _PROFILES.glob("*.toml"))


def provenance(name: str) -> Figures:
    """Return the figures of a profile with value, kind and source.

    Raises:
        KeyError, ValueError: see :func:`load_profile`.
    """
    load_profile(name)  # it names the profiles that there are
    return read_profile(_PROFILES / f"{name}.toml")[1]


@cache
def load_profile(name: str) -> Machine:
    """Return the machine of a profile.

    Raises:
        KeyError: there is no such profile; the message names the existing ones.
        ValueError: a figure is missing or unknown, or has no kind and source.
    """
    path = _PROFILES / f"{name}.toml"
    if not path.is_file():
        raise KeyError(f"no machine {name!r}; there are {', '.join(profile_names())}")
    return read_profile(path)[0]


def read_profile(path: Path) -> tuple[Machine, Figures]:
    """Return the machine that a file in the form of the profiles describes, and its figures.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a regular file or too large, it is not TOML, or a figure is missing,
            unknown, no finite number above 0, or has no kind and source.
    """
    table = parse_toml(read_regular_file(path, max_bytes=MAX_FILE_BYTES))
    tiers = _read_tiers(path, table)
    watts = {field.name for field in fields(Power)}
    expected = {field.name for field in fields(Machine)} - _NO_FIGURES - _MAY_BE_KNOWN
    if watts & table.keys():  # all of them or none
        expected |= watts
    expected |= _MAY_BE_KNOWN & table.keys()
    if table.keys() != expected:
        odd = sorted(table.keys() ^ expected)
        raise ValueError(f"{path.name}: figures missing or unknown: {', '.join(odd)}")
    values: dict[str, float] = {}
    table |= {f"{tier['name']}: read_gb_per_s": tier for tier in tiers}
    for key, figure in table.items():
        figure = figure if isinstance(figure, Mapping) else {}
        source = figure.get("source")
        if figure.get("kind") not in _KINDS or not source or not isinstance(source, str):
            raise ValueError(f"{path.name}: {key} needs a source and a kind of {sorted(_KINDS)}")
        value = figure.get("value")
        least = 0.0 if key in _MAY_BE_ZERO | watts else sys.float_info.min
        if not _is_number(value, least, sys.float_info.max):
            raise ValueError(
                f"{path.name}: {key} is {_shown(value)}, and must be a number above 0 and finite"
            )
        values[key] = float(value)
    power = Power(**{key: values.pop(key) for key in watts}) if watts & values.keys() else None
    link = values["read_gb_per_s"]
    far_tiers = [
        FarTier(
            name=str(tier["name"]),
            capacity_bytes=gib_to_bytes(float(str(tier["capacity_gib"]))),
            gb_per_s=min(link, values.pop(f"{tier['name']}: read_gb_per_s")),
        )
        for tier in tiers
    ]
    far_tiers.sort(key=lambda tier: -tier.gb_per_s)  # as the engine uses them
    return Machine(**values, far_tiers=FarTiers(tuple(far_tiers)), power=power, curves=None), table


def _read_tiers(path: Path, table: dict[str, Any]) -> list[dict[str, object]]:
    """Take the list of far tiers, if there is one, out of a profile's table, and check it.

    Raises:
        ValueError: a tier has no name or capacity, or two have the same name.
    """
    tiers = table.pop("far_tiers", [])
    if not isinstance(tiers, list) or not all(isinstance(tier, dict) for tier in tiers):
        raise ValueError(f"{path.name}: far_tiers must be a list: begin each with [[far_tiers]]")
    for tier in tiers:
        if tier.keys() != _TIER_KEYS or not isinstance(tier["name"], str):
            raise ValueError(f"{path.name}: a far tier has {', '.join(sorted(_TIER_KEYS))}")
        size = tier["capacity_gib"]
        if not _is_number(size, sys.float_info.min, _MOST_GIB):
            raise ValueError(
                f"{path.name}: capacity_gib of {tier['name']} is {_shown(size)}, and must be a "
                f"number above 0 and at most {_MOST_GIB:.0f}"
            )
    if len({tier["name"] for tier in tiers}) < len(tiers):
        raise ValueError(f"{path.name}: two far tiers have the same name")
    return tiers


def _is_number(value: object, least: float, most: float) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not write out integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
