# SPDX-License-Identifier: Apache-2.0
"""Evaluation of every placement of a model in a near and a far budget: fit and speed.

Near memory holds embeddings and head, resident weights, weight buffers and the KV cache. The size
of the KV cache decides how many requests run at a time. For throughput, more requests are worth
more than more weights in near memory (HeLM V-C).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.planner.kv_swapping import PlainSteps, SwappedKv, swap_kv
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.memory_split import (
    BASELINES,
    MemoryBudget,
    MemorySplit,
    Target,
    baseline,
    milp_placements,
    pick_split,
    split_for_latency,
    split_with,
)
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.serving import (
    NO_LIMITS,
    Limits,
    ServingEstimate,
    Workload,
    estimate_serving,
)
from vllm_tiered.planner.step_time import storage_link
from vllm_tiered.planner.throughput_split import split_for_throughput

_PLANS = {"latency": split_for_latency, "throughput": split_for_throughput}

NAMES = (*BASELINES, *_PLANS)
"""All placements, the papers' first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Placement that fits the budgets, with as many requests as its KV cache holds.

    Attributes:
        near_bytes: bytes of resident weights, without ``buffer_bytes`` and ``other_bytes``.
        kv_bytes: bytes of the near budget that are left for the KV cache.
        requests: number of requests that run at a time. The following figures are for this number
            (:class:`ServingEstimate`).
        batches: estimates for 1, 2, 4, ... requests, up to ``requests``.
        split: the memory split that the figures come from.
        swapped: the best level of KV swapping that the engine can hold; None if none gains.
    """

    placement: str
    near_bytes: int
    buffer_bytes: int
    far_bytes: int
    storage_bytes: int
    other_bytes: int
    kv_bytes: int
    requests: int
    prefill_seconds: float
    decode_seconds: float
    stall_share: float
    tokens_per_s: float
    joules_per_token: float | None
    batches: tuple[ServingEstimate, ...]
    split: MemorySplit
    swapped: SwappedKv | None

    @property
    def most_requests(self) -> int:
        """Requests at a time, with the KV cache swapped where that gains."""
        return self.served_for("throughput").requests

    def served_for(self, target: Target) -> ServingEstimate:
        """Return the prediction that counts for a target.

        For latency it is of one request, otherwise of all, with the KV cache swapped if that gains.
        """
        if target == "latency":
            return self.split.alone
        return (self.swapped or self.split).served


@dataclass(frozen=True, kw_only=True, slots=True)
class NoFit:
    """Reason why a placement does not fit, or is too slow for the limits.

    Attributes:
        budget: the budget that is too small.
        short_bytes: the missing bytes.
    """

    placement: str
    reason: str
    budget: Literal["near", "far", "time"]
    short_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What is asked of every placement; see :func:`evaluate_placements`."""

    shape: ModelShape
    machine: Machine
    load: Workload
    room: MemoryBudget
    limits: Limits
    target: Target

    def for_requests(self, most: int) -> _Asked:
        """Return the same for at most so many requests at a time."""
        return replace(self, load=replace(self.load, max_requests=most))


def evaluate_placements(
    shape: ModelShape,
    machine: Machine,
    load: Workload,
    near_bytes: int,
    far_bytes: int,
    *,
    has_storage: bool = False,
    limits: Limits = NO_LIMITS,
    target: Target = "throughput",
    names: Sequence[str] = NAMES,
) -> Iterator[Fit | NoFit]:
    """Yield a result for each placement as the engine would make it, beginning with all near.

    The engine refuses the plan for throughput for some models (``ModelShape.may_share_with_kv``),
    and all but the first for others (``ModelShape.may_be_far``).

    Args:
        shape: shape of the model.
        machine: machine to predict for.
        load: the workload.
        near_bytes, far_bytes: the budgets; near memory includes embeddings, head and KV cache.
        has_storage: whether weights that exceed ``far_bytes`` are stored.
        limits: times that may not be exceeded; fewer requests are then served at a time.
        target: what is optimised; for latency no level of KV swapping is fixed.
        names: the placements to evaluate.

    Raises:
        ConfigError: storage is used, but the machine's storage bandwidth is not known.
    """
    if has_storage and storage_link(machine) is None:
        raise ConfigError(
            "it is not known how fast this machine reads from storage: measure it with "
            "vllm-tiered probe --path FOLDER, or plan without storage"
        )
    room = MemoryBudget(
        near_bytes=near_bytes - shape.other_bytes, far_bytes=far_bytes, has_storage=has_storage
    )
    asked = _Asked(shape=shape, machine=machine, load=load, room=room, limits=limits, target=target)
    for name in names if shape.may_be_far else NAMES[:1]:
        if name != "throughput":
            yield _evaluate(name, asked)
        elif shape.may_share_with_kv:
            yield _evaluate_throughput(asked)


def _evaluate_throughput(asked: _Asked) -> Fit | NoFit:
    """Return the result of the plan for throughput that the engine makes as it is then started.

    It plans for ``--max-num-seqs`` requests, so the plan has to be that for the requests it serves.
    """
    if asked.limits != NO_LIMITS:
        # More requests than are best without limits are slower, and get no more tokens/s.
        free = _evaluate_throughput(replace(asked, limits=NO_LIMITS))
        if isinstance(free, Fit):
            asked = asked.for_requests(free.most_requests)
    result = _evaluate("throughput", asked)
    while isinstance(result, Fit) and result.most_requests < asked.load.max_requests:
        asked = asked.for_requests(result.most_requests)
        result = _evaluate("throughput", asked)
    return result


def _evaluate(name: str, asked: _Asked) -> Fit | NoFit:
    """Return the result of a placement."""
    split = _split(name, asked)
    if split is None:
        return _explain_no_fit(name, asked)
    excess = asked.limits.excess(split.served)
    within = _split_within_limits(name, split, asked) if excess else split
    if within is None:
        reason = asked.limits.excess(split.alone) or str(excess)
        return NoFit(placement=name, reason=reason, budget="time", short_bytes=0)
    if excess and name == "throughput":  # with more requests it would be another split
        asked = asked.for_requests(within.served.requests)
    return _fit(name, within, asked)


def chosen_placement(target: Target, results: Sequence[Fit | NoFit]) -> str | None:
    """Return the name of the plan that ``placement="auto"`` takes; None if no plan fits.

    The engine compares them without KV swapping.
    """
    plans = [fit for fit in results if isinstance(fit, Fit) and fit.placement in _PLANS]
    if not plans:
        return None
    best = pick_split(target, [fit.split for fit in plans])
    return next(fit.placement for fit in plans if fit.split is best)


def plan_with_unbounded_far(
    shape: ModelShape, machine: Machine, load: Workload, fit: Fit
) -> MemorySplit | None:
    """Return the plan for unlimited far memory; None if it is no better."""
    plan = _PLANS.get(fit.placement)
    if plan is None:
        return None
    room = MemoryBudget(near_bytes=fit.kv_bytes + fit.near_bytes + fit.buffer_bytes)
    unbounded = plan(shape, machine, load, room)
    if unbounded.placement.far_bytes <= fit.far_bytes and not fit.storage_bytes:
        return None
    if fit.placement == "latency":
        is_better = unbounded.alone.decode_seconds < 0.99 * fit.split.alone.decode_seconds
    else:
        is_better = unbounded.served.tokens_per_s > 1.01 * fit.tokens_per_s
    return unbounded if is_better else None


def _split(name: str, asked: _Asked) -> MemorySplit | None:
    """Return the split of a placement; None if it does not fit."""
    given = (asked.shape, asked.machine, asked.load, asked.room)
    if name not in _PLANS:
        return split_with(baseline(name, asked.shape), *given)
    try:
        return _PLANS[name](*given)
    except BudgetError:
        return None


def _split_within_limits(name: str, split: MemorySplit, asked: _Asked) -> MemorySplit | None:
    """Return the split for the most requests within the limits; None if one exceeds them.

    A plan is made anew for each number, as fewer requests leave room for more weights.
    """
    splits: dict[int, MemorySplit] = {}

    def estimate(requests: int) -> ServingEstimate | None:
        made = _split(name, asked.for_requests(requests))
        if made is None:
            return None
        splits[requests] = made
        return made.served

    served = asked.limits.most_requests(split.served.requests, estimate)
    return next((made for made in splits.values() if made.served is served), None)


def _fit(name: str, split: MemorySplit, asked: _Asked) -> Fit:
    shape, machine, load = asked.shape, asked.machine, asked.load
    assert asked.room.far_bytes is not None
    placement, served = split.placement, split.served
    most = served.requests
    sizes = [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
    return Fit(
        placement=name,
        near_bytes=placement.resident_bytes,
        buffer_bytes=placement.buffer_bytes,
        far_bytes=placement.far_bytes,
        storage_bytes=placement.storage_bytes,
        other_bytes=shape.other_bytes,
        kv_bytes=split.kv_bytes,
        requests=most,
        prefill_seconds=served.prefill_seconds,
        decode_seconds=served.decode_seconds,
        stall_share=served.stall_share,
        tokens_per_s=served.tokens_per_s,
        joules_per_token=served.joules_per_token,
        batches=tuple(estimate_serving(shape, machine, placement, load, size) for size in sizes),
        split=split,
        swapped=swap_kv(
            shape,
            machine,
            PlainSteps.of(shape, machine, placement),
            load,
            kv_bytes=split.kv_bytes,
            far_bytes=asked.room.far_bytes - placement.far_bytes,
            without=served,
            limits=asked.limits,
            may_fix=asked.target == "throughput",
        ),
    )


def _explain_no_fit(name: str, asked: _Asked) -> NoFit:
    shape, machine, load, room = asked.shape, asked.machine, asked.load, asked.room
    assert room.far_bytes is not None
    near_bytes, far_bytes = room.near_bytes + shape.other_bytes, room.far_bytes
    one = load.kv_bytes(shape)
    fixed = shape.other_bytes + one
    if fixed > near_bytes:
        return NoFit(
            placement=name,
            reason=f"embeddings, head and the KV cache of one request take {_gib(fixed)} of "
            f"{_gib(near_bytes)} near",
            budget="near",
            short_bytes=fixed - near_bytes,
        )
    least = baseline("all_far" if name in _PLANS else name, shape)
    short = fixed + least.near_bytes - near_bytes
    if short > 0:
        return NoFit(
            placement=name,
            reason=f"{_gib(least.near_bytes)} of layers and buffers, {_gib(shape.other_bytes)} of "
            f"embeddings and head, and {_gib(one)} of KV for one request exceed "
            f"{_gib(near_bytes)} by {_gib(short)}",
            budget="near",
            short_bytes=short,
        )
    if name in _PLANS:
        unbounded = MemoryBudget(near_bytes=room.near_bytes)
        sets = milp_placements(shape, machine, load, unbounded, 1)
        least = min(sets, key=lambda placement: placement.far_bytes, default=least)
    far = least.far_bytes
    return NoFit(
        placement=name,
        reason=f"{_gib(far)} far exceed {_gib(far_bytes)} by {_gib(far - far_bytes)}",
        budget="far",
        short_bytes=far - far_bytes,
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
