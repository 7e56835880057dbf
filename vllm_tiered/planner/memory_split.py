# SPDX-License-Identifier: Apache-2.0
"""Split of near memory between layers and KV cache, and the choice of a plan for a target.

``auto`` makes a plan for latency and a plan for throughput. It takes the plan of its own target,
unless the other plan is predicted to be better by more than the accuracy of the predictions. The
engine and ``vllm-tiered plan`` use the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

from vllm_tiered.errors import BudgetError
from vllm_tiered.planner.latency_placement import (
    DEPTH_ONE_EFFORT,
    FULL_EFFORT,
    SearchEffort,
    place_for_latency,
)
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.pipeline_time import ComputeTimes, ExpectedStep
from vllm_tiered.planner.serving import ServingEstimate, Workload, estimate_serving
from vllm_tiered.planner.step_time import compute_times, far_link, slowdown, storage_link
from vllm_tiered.units import format_bytes
from vllm_tiered.weights.placement import Placement, place, spill_to_storage

Target = Literal["latency", "throughput"]
TARGETS: tuple[Target, ...] = get_args(Target)

P = TypeVar("P")

FLEXGEN_PERCENTS = (20, 80, 0)
"""Near, far and storage percents that HeLM's paper gives to FlexGen (section V-A)."""

_AS_GOOD = 1.01
"""Ratio below which two predictions count as equal.

Predictions depend on measured figures, so a smaller difference between two plans may be chance."""

BASELINES = ("all near", "flexgen", "helm", "all_far")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """Budgets of a plan.

    Attributes:
        near_bytes: near memory for layers, weight buffers and the KV cache, without
            ``ModelShape.other_bytes``.
        far_bytes: far memory; None for no limit.
        has_storage: whether weights that exceed far memory are stored.
    """

    near_bytes: int
    far_bytes: int | None = None
    has_storage: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySplit:
    """Memory split: a placement, the size of the KV cache, and predictions for both.

    Attributes:
        placement: placement of the weights.
        kv_bytes: bytes of the KV cache, which is the rest of near memory.
        served: prediction for as many requests as fit the KV cache, or as the workload has.
        alone: prediction for one request.
    """

    placement: Placement
    kv_bytes: int
    served: ServingEstimate
    alone: ServingEstimate

    def expected_step(self, target: Target) -> ExpectedStep:
        """Return the decode step that was planned for: of one request, or of all."""
        estimate = self.alone if target == "latency" else self.served
        return ExpectedStep(
            requests=estimate.requests,
            seconds=estimate.decode_seconds,
            stall_share=estimate.stall_share,
        )


def baseline(name: str, shape: ModelShape) -> Placement:
    """Return one of the papers' placements, or "all near"."""
    if name == "all near":
        none: tuple[()] = ()
        return Placement(policy=name, sublayers=shape.sublayers, far=(none,) * len(shape.sublayers))
    return place(name, shape.sublayers, FLEXGEN_PERCENTS if name == "flexgen" else None)


def split_with(
    placement: Placement, shape: ModelShape, machine: Machine, load: Workload, room: MemoryBudget
) -> MemorySplit | None:
    """Return the split in which the KV cache gets the near memory that the placement leaves.

    Returns:
        None if that does not hold one request, or if the layers do not fit far memory.
    """
    if room.has_storage and room.far_bytes is not None:
        placement = spill_to_storage(placement, room.far_bytes)
    kv_bytes = room.near_bytes - placement.near_bytes
    requests = load.max_requests_in(shape, kv_bytes)
    if not requests or (room.far_bytes is not None and placement.far_bytes > room.far_bytes):
        return None
    return MemorySplit(
        placement=placement,
        kv_bytes=kv_bytes,
        served=estimate_serving(shape, machine, placement, load, requests),
        alone=estimate_serving(shape, machine, placement, load, 1),
    )


def split_for_latency(
    shape: ModelShape, machine: Machine, load: Workload, room: MemoryBudget
) -> MemorySplit:
    """Return the split with the shortest predicted decode step of one request.

    Raises:
        BudgetError: no placement fits together with the KV cache of one request.
    """
    candidates = [*(baseline(name, shape) for name in BASELINES)]
    candidates += milp_placements(shape, machine, load, room, 1)
    splits = [split_with(c, shape, machine, load, room) for c in candidates]
    fitting = [split for split in splits if split]
    if not fitting:
        raise no_room(shape, load, room)
    best = min(
        fitting,
        key=lambda s: (
            round(s.alone.decode_seconds, 12),
            s.placement.storage_bytes,
            s.placement.far_bytes,
            s.placement.buffer_bytes,
        ),
    )
    return replace(best, placement=replace(best.placement, policy="latency"))


def milp_placements(
    shape: ModelShape, machine: Machine, load: Workload, room: MemoryBudget, requests: int
) -> Iterator[Placement]:
    """Yield the MILP's placements that leave room for the KV cache of ``requests`` requests.

    The MILP is solved for a decode step, for a prefill step, and for a step without compute. It
    pairs each transfer with the compute of one sublayer, but in the pipeline a transfer may overlap
    more. So the best placement for one kind of step may be the solution for another kind.
    """
    prompts = max(1, min(requests, load.max_batched_tokens // load.prompt_tokens))
    for times, effort in (
        (compute_times(shape, machine, load.decode(requests)), FULL_EFFORT),
        (compute_times(shape, machine, load.prefill(prompts)), DEPTH_ONE_EFFORT),
        (ComputeTimes(compute=(0.0,) * len(shape.sublayers)), DEPTH_ONE_EFFORT),
    ):
        kv_bytes = load.kv_bytes(shape, requests)
        placement = milp_placement(shape, machine, times, room, kv_bytes, effort)
        if placement:
            yield placement


def milp_placement(
    shape: ModelShape,
    machine: Machine,
    times: ComputeTimes,
    room: MemoryBudget,
    kv_bytes: int,
    effort: SearchEffort = FULL_EFFORT,
) -> Placement | None:
    """Return the MILP's placement that leaves ``kv_bytes`` to the KV cache; None if nothing fits.

    Args:
        shape: shape of the model.
        machine: machine with the links and their contention.
        times: compute times that transfers hide behind.
        room: the budgets.
        kv_bytes: near memory reserved for the KV cache.
        effort: see :func:`~vllm_tiered.planner.latency_placement.place_for_latency`.
    """
    budget = room.near_bytes - kv_bytes
    # With several far tiers the link depends on the solution: as if near memory were full. So do
    # the slowdowns, if weights are stored: as if nothing were near.
    link = far_link(machine, max(0, shape.layer_bytes - budget))
    storage = storage_link(machine) if room.has_storage else None
    far = place("all_far", shape.sublayers)
    if storage is not None and room.far_bytes is not None:
        far = spill_to_storage(far, room.far_bytes)
    try:
        return place_for_latency(
            shape.sublayers,
            times,
            link,
            budget,
            room.far_bytes,
            storage,
            slowdown=slowdown(machine, far),
            effort=effort,
        )
    except BudgetError:
        return None


def pick_split(target: Target, splits: Sequence[MemorySplit]) -> MemorySplit:
    """Return the split with the shortest decode step of one request, or with the most tokens/s.

    The target's own plan wins if its prediction is as good as the best within 1 %.
    """

    def cost(split: MemorySplit) -> float:
        return cost_of(split.alone if target == "latency" else split.served, target)

    return pick(target, splits, cost, lambda split: split.placement.policy)


def pick(
    target: Target,
    plans: Sequence[P],
    cost: Callable[[P], float],
    name: Callable[[P], str],
) -> P:
    """Return the plan with the least cost; the target's own if it costs at most 1 % more."""
    best = min(plans, key=cost)
    own = [p for p in plans if name(p) == target and cost(p) <= _AS_GOOD * cost(best)]
    return min(own, key=cost, default=best)


def cost_of(served: ServingEstimate, target: Target) -> float:
    """Return what a target minimises: seconds of a decode step, or of an output token."""
    return served.decode_seconds if target == "latency" else 1 / served.tokens_per_s


def target_for(max_requests: int) -> Target:
    """Return the default target: latency for one request at a time, otherwise throughput."""
    return "latency" if max_requests == 1 else "throughput"


def no_room(shape: ModelShape, load: Workload, room: MemoryBudget) -> BudgetError:
    """Return the error to raise when no placement fits the budgets."""
    least = baseline("all_far", shape).near_bytes
    one = load.kv_bytes(shape)
    if least + one > room.near_bytes:
        tokens = load.prompt_tokens + load.output_tokens
        return BudgetError(
            f"the least that layers keep near is {format_bytes(least)}, weight buffers included; "
            f"with {format_bytes(one)} of KV cache for one request of {tokens} tokens they exceed "
            f"{format_bytes(room.near_bytes)} by {format_bytes(least + one - room.near_bytes)}: "
            "raise weights.near_gib, or lower --max-model-len"
        )
    return BudgetError(
        f"beside one request's KV cache in {format_bytes(room.near_bytes)} of near memory more "
        f"than {format_bytes(room.far_bytes or 0)} of the layers are far: raise weights.far_gib "
        "or weights.near_gib"
    )
