# SPDX-License-Identifier: Apache-2.0
"""Prediction of serving a mixture whose routed experts are loaded as they are named.

Near memory holds all weights but the routed experts, the KV cache, and *slots* for as many experts
of each layer (`tiered.experts`). Each layer waits for its router, loads the missing experts, and
computes those in slots meanwhile:

    compute  │ attention, router │ experts in slots │··wait··│ the others │
    link                         │ missing experts            │

All experts are taken to be as likely, so that a layer finds its share of slots. Real routers repeat
themselves, so this is the least that a step finds. The other weights are near, as a step reads each
of their bytes, and an expert's only if it is named: so slots are given up first. Some of these
weights are far where near memory does not hold them beside one token's experts.

What is left of near memory is the KV cache's, which is swapped where that serves more
(:mod:`vllm_tiered.planner.kv_swapping`). Its reads have the share of the link that experts leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from vllm_tiered.errors import BudgetError
from vllm_tiered.planner.fit import NoFit
from vllm_tiered.planner.kv_swapping import PlainSteps, SwappedKv, swap_kv
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.memory_split import (
    MemoryBudget,
    Target,
    baseline,
    cost_of,
    split_for_latency,
)
from vllm_tiered.planner.model_shape import ModelShape, RoutedExperts
from vllm_tiered.planner.pipeline_time import StepTime
from vllm_tiered.planner.serving import (
    NO_LIMITS,
    Limits,
    ServingEstimate,
    Workload,
    estimate_with,
)
from vllm_tiered.planner.step_time import (
    Batch,
    far_link,
    predict_step,
    roofline,
    storage_link,
)
from vllm_tiered.units import format_bytes
from vllm_tiered.weights.layout import Sublayer
from vllm_tiered.weights.placement import Placement

NAME = "experts in slots"
"""What tables call this plan, beside the placements' names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsFit:
    """Slots for experts that fit the budgets, and what is predicted of serving with them.

    Attributes:
        slots: slots of each layer.
        num_experts: experts of each layer.
        slot_bytes: near memory of all slots.
        placement: placement of the layers' other weights, "all near" where these fit.
        near_bytes: near memory of these, weight buffers included.
        weights_far_bytes: far memory of these.
        far_bytes, storage_bytes: experts in far memory and in a file.
        kv_bytes: near memory that is left for the KV cache.
        served: prediction for as many requests as that holds, or as are best.
        alone: prediction for one request, with the same slots.
        swapped: the best level of KV swapping that the engine can hold; None if none gains.
    """

    slots: int
    num_experts: int
    slot_bytes: int
    placement: str
    near_bytes: int
    weights_far_bytes: int
    far_bytes: int
    storage_bytes: int
    kv_bytes: int
    served: ServingEstimate
    alone: ServingEstimate
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
            return self.alone
        return self.swapped.served if self.swapped else self.served


def plan_slots(
    shape: ModelShape,
    machine: Machine,
    load: Workload,
    near_bytes: int,
    far_bytes: int,
    *,
    target: Target,
    has_storage: bool = False,
    limits: Limits = NO_LIMITS,
) -> SlotsFit | NoFit | None:
    """Return the division of near memory into slots and KV cache that is best for a target.

    Args:
        shape: shape of the model.
        machine: machine to predict for.
        load: the workload.
        near_bytes, far_bytes: the budgets; near memory includes embeddings, head and KV cache.
        target: the time of one request's decode step, or tokens/s.
        has_storage: whether experts that exceed ``far_bytes`` are in a file.
        limits: times that may not be exceeded.

    Returns:
        None if the model has no routed experts, all fit near memory, or the engine does not place
        experts in the checkpoint's format.
    """
    if shape.experts is None or not shape.may_be_far:
        return None
    mixture = _Mixture(shape=shape, machine=machine, load=load, experts=shape.experts)
    found = _layouts(mixture, near_bytes, far_bytes, has_storage=has_storage)
    if isinstance(found, NoFit):
        return found
    fits = [
        replace(fit, swapped=_swap(fit, layout, target, limits))
        for layout in found
        for fit in _divisions(layout, limits)
    ]
    if not fits:
        alone = found[0].estimate(found[0].slots_beside(1), 1)
        return NoFit(placement=NAME, reason=str(limits.excess(alone)), budget="time", short_bytes=0)
    best = min(fits, key=lambda fit: cost_of(fit.served_for(target), target))
    return None if best.slots == shape.experts.num_experts else best


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mixture:
    """A mixture, and what it is to serve."""

    shape: ModelShape
    machine: Machine
    load: Workload
    experts: RoutedExperts

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of each layer, in all layers."""
        routed = sum(_routed_bytes(part, self.experts) for part in self.shape.sublayers)
        return -(-routed // self.experts.num_experts)

    @property
    def routed_bytes(self) -> int:
        """Bytes of all routed experts."""
        return self.experts.num_experts * self.expert_bytes

    @property
    def least_bytes(self) -> int:
        """Near bytes of one token's experts of each layer, and of one request's KV cache."""
        return self.experts.per_token * self.expert_bytes + self.load.kv_bytes(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """What lies where, before near memory is divided.

    Attributes:
        weights: placement of all weights, in which routed experts count as near.
        room: near memory for slots and the KV cache.
        far_share: share of the experts in far memory; the others are in a file.
        far_left: far memory that weights and experts leave.
    """

    mixture: _Mixture
    weights: Placement
    room: int
    far_share: float
    far_left: int

    @property
    def expert_far_bytes(self) -> int:
        return round(self.far_share * self.mixture.routed_bytes)

    def slots_beside(self, requests: int) -> int:
        """Return the slots beside the KV cache of so many requests."""
        mixture = self.mixture
        room = self.room - mixture.load.kv_bytes(mixture.shape, requests)
        return min(mixture.experts.num_experts, room // mixture.expert_bytes)

    def steps(self, slots: int) -> PlainSteps:
        """Return the steps with so many slots."""
        mixture = self.mixture

        def predict(batch: Batch) -> StepTime:
            return slots_step(
                mixture.shape, mixture.machine, batch, slots, self.far_share, self.weights
            )

        return PlainSteps(predict, self.expert_far_bytes + self.weights.far_bytes)

    def estimate(self, slots: int, requests: int) -> ServingEstimate:
        """Predict serving so many requests with so many slots."""
        steps, mixture = self.steps(slots), self.mixture
        return estimate_with(
            steps.predict,
            mixture.machine,
            mixture.load,
            requests,
            steps.far_bytes,
            num_ranks=mixture.shape.num_ranks,
        )


def _layouts(
    mixture: _Mixture, near_bytes: int, far_bytes: int, *, has_storage: bool
) -> list[_Layout] | NoFit:
    """Return what may lie where: all other weights near, or some far if that does not fit."""
    shape, routed = mixture.shape, mixture.routed_bytes
    if routed > far_bytes and not has_storage:
        return NoFit(
            placement=NAME,
            reason=f"{format_bytes(routed)} of experts exceed {format_bytes(far_bytes)} of far "
            "memory (--storage keeps the others in a file)",
            budget="far",
            short_bytes=routed - far_bytes,
        )

    def layout(weights: Placement) -> _Layout:
        for_experts = far_bytes - weights.far_bytes
        far_share = min(1.0, for_experts / routed)
        return _Layout(
            mixture=mixture,
            weights=weights,
            room=near_bytes - shape.other_bytes - (weights.near_bytes - routed),
            far_share=far_share,
            far_left=for_experts - round(far_share * routed),
        )

    all_near = layout(baseline("all near", shape))
    if all_near.room >= mixture.least_bytes:
        return [all_near]
    room = MemoryBudget(
        near_bytes=all_near.room
        + shape.layer_bytes
        - mixture.least_bytes
        + mixture.load.kv_bytes(shape),
        far_bytes=far_bytes if has_storage else far_bytes - routed,
    )
    placements = [baseline("all_far", shape)]
    with suppress(BudgetError):
        placements.append(split_for_latency(shape, mixture.machine, mixture.load, room).placement)
    found = [layout(weights) for weights in placements]
    assert room.far_bytes is not None
    fitting = [
        one
        for one in found
        if one.room >= mixture.least_bytes and one.weights.far_bytes <= room.far_bytes
    ]
    if fitting:
        return fitting
    far = found[0].weights.far_bytes
    if found[0].room >= mixture.least_bytes:
        return NoFit(
            placement=NAME,
            reason=f"{format_bytes(far)} of other weights beside {format_bytes(routed)} of experts "
            f"exceed {format_bytes(far_bytes)} of far memory",
            budget="far",
            short_bytes=far - room.far_bytes,
        )
    # Weight buffers of a small model may take more than its far weights.
    roomiest = max(all_near, found[0], key=lambda one: one.room)
    least = near_bytes - roomiest.room + mixture.least_bytes
    return NoFit(
        placement=NAME,
        reason=f"{format_bytes(near_bytes - roomiest.room)} of other weights, one token's experts "
        f"of each layer and the KV cache of one request take {format_bytes(least)}",
        budget="near",
        short_bytes=least - near_bytes,
    )


def _divisions(layout: _Layout, limits: Limits) -> Iterator[SlotsFit]:
    """Yield divisions of a layout's room for 1, 2, 4, ... requests at a time."""
    mixture, weights = layout.mixture, layout.weights
    routed, load = mixture.routed_bytes, mixture.load
    requests = 1
    while requests <= load.max_requests:
        slots = layout.slots_beside(requests)
        if slots < mixture.experts.per_token:
            return
        kv_bytes = layout.room - slots * mixture.expert_bytes
        most = load.max_requests_in(mixture.shape, kv_bytes)
        estimate = partial(layout.estimate, slots)
        served = limits.most_requests(most, estimate)
        if served is None:
            return  # fewer slots are no faster
        yield SlotsFit(
            slots=slots,
            num_experts=mixture.experts.num_experts,
            slot_bytes=slots * mixture.expert_bytes,
            near_bytes=weights.near_bytes - routed,
            weights_far_bytes=weights.far_bytes,
            far_bytes=layout.expert_far_bytes,
            storage_bytes=routed - layout.expert_far_bytes,
            kv_bytes=kv_bytes,
            served=served,
            alone=estimate(1),
            swapped=None,
            placement=weights.policy,
        )
        requests = max(2 * requests, most + 1)


def _swap(fit: SlotsFit, layout: _Layout, target: Target, limits: Limits) -> SwappedKv | None:
    """Return the best level of KV swapping beside a division's slots."""
    mixture = layout.mixture
    return swap_kv(
        mixture.shape,
        mixture.machine,
        layout.steps(fit.slots),
        mixture.load,
        kv_bytes=fit.kv_bytes,
        far_bytes=layout.far_left,
        without=fit.served,
        limits=limits,
        may_fix=target == "throughput",
    )


def slots_step(
    shape: ModelShape,
    machine: Machine,
    batch: Batch,
    slots: int,
    far_share: float = 1.0,
    weights: Placement | None = None,
) -> StepTime:
    """Predict the time of a step with so many slots in each layer.

    While a layer waits for its experts they have the link, so that far weights hide behind compute
    alone.

    Args:
        shape: shape of a mixture.
        machine: machine to predict for.
        batch: batch of the step.
        slots: slots of each layer.
        far_share: share of the experts in far memory; the others are in a file.
        weights: placement of the other weights; None if all are near.
    """
    assert shape.experts is not None
    base = predict_step(shape, machine, weights or baseline("all near", shape), batch)
    num_experts = shape.experts.num_experts
    named = num_experts * shape.experts.share_read(batch.tokens)
    missing = max(named * (1 - slots / num_experts), named - slots)
    routed = sum(_routed_bytes(sublayer, shape.experts) for sublayer in shape.sublayers)
    far_bytes = round(far_share * routed) + (weights.far_bytes if weights else 0)
    link, storage = far_link(machine, far_bytes), storage_link(machine)
    seconds, loading, stall = base
    for sublayer in shape.sublayers:
        size = _routed_bytes(sublayer, shape.experts) / num_experts
        if not size or missing < 1e-9:
            continue
        load = link.seconds(round(missing * size * far_share))
        if storage:
            load += storage.seconds(round(missing * size * (1 - far_share)))
        # Other matrices of the sublayer count as computed beforehand, as its router is.
        products = roofline(_only_routed(sublayer, shape.experts), shape, machine, batch).seconds
        waits = max(0.0, load - products * (1 - missing / named))
        seconds += waits
        stall += waits
        loading += load
    return StepTime(seconds=seconds, link_seconds=loading, stall_seconds=stall)


def _routed_bytes(sublayer: Sublayer, experts: RoutedExperts) -> int:
    return sum(p.num_bytes for p in sublayer.parameters if p.name in experts.names)


def _only_routed(sublayer: Sublayer, experts: RoutedExperts) -> Sublayer:
    routed = tuple(p for p in sublayer.parameters if p.name in experts.names)
    return replace(sublayer, parameters=routed)
