# SPDX-License-Identifier: Apache-2.0
"""What would make a model fit, or serve faster: more memory, a disk, fewer tokens, fewer bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from vllm_tiered.planner.far_tiers import FarTier
from vllm_tiered.planner.fit import NAMES, NoFit
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.plan import Case, is_better
from vllm_tiered.planner.serving import ServingEstimate
from vllm_tiered.units import format_bytes
from vllm_tiered.weights.layout import Parameter, Role

BITS = {"8-bit (FP8, int8)": 8.25, "4-bit (AWQ, GPTQ, MXFP4)": 4.5}
"""Bits of a weight in quantised variants, their scales included (groups of 32 to 128)."""

_CXL_GB_PER_S = 28
"""Bandwidth of CXL memory behind an ASIC (HeLM, table III)."""

_FEWEST_TOKENS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A change, and what is predicted of serving with it.

    Attributes:
        change: what to change, as a sentence's object.
        served: the prediction for the best plan then.
    """

    change: str
    served: ServingEstimate


def suggest(case: Case) -> list[Suggestion]:
    """Return changes with which the model fits, or is predicted to be served faster."""
    now = best_served(case)
    found = [
        Suggestion(change=change, served=served)
        for change, changed in _changes(case, fits=now is not None)
        if (served := best_served(changed)) and (now is None or is_better(served, now, case.target))
    ]
    if now is None and (tokens := _longest(case)) is not None:
        served = best_served(replace(case, load=replace(case.load, prompt_tokens=tokens)))
        assert served is not None
        found.append(Suggestion(change=f"prompts of at most {tokens} tokens", served=served))
    return found


def requantised(shape: ModelShape, bits: float) -> ModelShape:
    """Return the shape with matrices and routed experts of ``bits`` bits a weight."""
    routed = shape.experts.names if shape.experts else frozenset()

    def smaller(parameter: Parameter) -> Parameter:
        if parameter.name not in routed and parameter.role not in (Role.MATRIX, Role.FFN_FIRST):
            return parameter
        count = round(shape.weights_in(parameter))
        num_bytes = min(parameter.num_bytes, round(count * bits / 8))
        return replace(parameter, num_bytes=num_bytes, num_weights=count)

    return replace(
        shape,
        quantization=f"{bits:g} bits",
        sublayers=tuple(
            replace(sublayer, parameters=tuple(map(smaller, sublayer.parameters)))
            for sublayer in shape.sublayers
        ),
    )


def _changes(case: Case, *, fits: bool) -> Iterator[tuple[str, Case]]:
    if case.shape.quantization is None:
        for name, bits in BITS.items():
            yield f"a variant in {name}", replace(case, shape=requantised(case.shape, bits))
    if fits:
        near = case.near_bytes + case.near_bytes // 2
        yield (
            f"half as much near memory more ({format_bytes(near)})",
            replace(case, near_bytes=near),
        )
        return
    if not case.has_storage and case.machine.storage_read_gb_per_s:
        yield "weights on an SSD (--storage)", replace(case, has_storage=True)
    if (near_bytes := _enough(case, "near")) is not None:
        more = format_bytes(near_bytes - case.near_bytes)
        change = f"{more} more near memory ({format_bytes(near_bytes)})"
        yield change, replace(case, near_bytes=near_bytes)
    if (far_bytes := _enough(case, "far")) is not None:
        more = format_bytes(far_bytes - case.far_bytes)
        change = f"{more} more far memory ({format_bytes(far_bytes)})"
        yield change, replace(case, far_bytes=far_bytes)
        machine = _with_cxl(case, far_bytes - case.far_bytes)
        change = f"one more tier, {more} of CXL memory at {_CXL_GB_PER_S:g} GB/s"
        yield change, replace(case, far_bytes=far_bytes, machine=machine)


def _with_cxl(case: Case, num_bytes: int) -> Machine:
    """Return the machine with so much CXL memory for what exceeds its far memory."""
    machine = case.machine
    present = [FarTier("DRAM", case.far_bytes, machine.read_gb_per_s)]
    if machine.far_tiers:  # as much of them as there may be now
        parts = machine.far_tiers.bytes_by_tier(case.far_bytes)
        present = [
            tier._replace(capacity_bytes=part)
            for tier, part in zip(machine.far_tiers, parts, strict=True)
            if part
        ]
    cxl = FarTier("CXL", num_bytes, min(_CXL_GB_PER_S, machine.read_gb_per_s))
    tiers = sorted((*present, cxl), key=lambda tier: -tier.gb_per_s)
    return replace(machine, far_tiers=replace(machine.far_tiers, tiers=tuple(tiers)))


def _enough(case: Case, budget: Literal["near", "far"]) -> int | None:
    """Return the least bytes of one budget, the other being as it is; None if none are enough."""

    def with_more(changed: Case, num_bytes: int) -> Case:
        if budget == "near":
            return replace(changed, near_bytes=changed.near_bytes + num_bytes)
        return replace(changed, far_bytes=changed.far_bytes + num_bytes)

    found = []
    for short in case.plan(("latency",)).not_fitting:
        changed = case
        lacking: NoFit | None = short
        while lacking is not None and lacking.budget == budget:
            changed = with_more(changed, lacking.short_bytes)
            plan = changed.plan(("latency",))
            lacking = None if plan.fits else plan.not_fitting[0]
        if lacking is None:
            found.append(changed.near_bytes if budget == "near" else changed.far_bytes)
    return min(found, default=None)


def _longest(case: Case) -> int | None:
    """Return the longest prompt that fits; None if not even a short one does."""

    def fits(tokens: int) -> bool:
        shorter = replace(case, load=replace(case.load, prompt_tokens=tokens))
        return shorter.plan(("latency",)).fits

    low, high = _FEWEST_TOKENS, case.load.prompt_tokens - 1
    if high < low or not fits(low):
        return None
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def best_served(case: Case) -> ServingEstimate | None:
    """Return the prediction for the best placement, or experts in slots; None if none fits."""
    # The papers' placements are candidates of the plan for latency.
    return case.plan(("latency",) if case.target == "latency" else NAMES).best
