# SPDX-License-Identifier: Apache-2.0
"""Prediction of serving a mixture whose routed experts are loaded as they are named.

Near memory holds all weights but the routed experts, the KV cache, and *slots* for as many experts
of each layer (`tiered.experts`). Each layer waits for its router, loads the missing experts, and
computes those in slots meanwhile:

    compute  │ attention, router │ experts in slots │··wait··│ the others │
    link                         │ missing experts            │

All experts are taken to be as likely, so that a layer finds its share of slots. Real routers repeat
themselves, so this is the least that a step finds. All other weights are near.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from vllm_tiered.planner.fit import NoFit
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.memory_split import Target, baseline, cost_of
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
    compute_times,
    far_link,
    roofline,
    storage_link,
)
from vllm_tiered.units import format_bytes
from vllm_tiered.weights.layout import Sublayer

NAME = "experts in slots"
"""What tables call this plan, beside the placements' names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsFit:
    """Slots for experts that fit the budgets, and what is predicted of serving with them.

    Attributes:
        slots: slots of each layer.
        num_experts: experts of each layer.
        slot_bytes: near memory of all slots.
        near_bytes: near memory of the layers' other weights.
        far_bytes, storage_bytes: experts in far memory and in a file.
        kv_bytes: near memory that is left for the KV cache.
        served: prediction for as many requests as that holds, or as are best.
        alone: prediction for one request, with the same slots.
    """

    slots: int
    num_experts: int
    slot_bytes: int
    near_bytes: int
    far_bytes: int
    storage_bytes: int
    kv_bytes: int
    served: ServingEstimate
    alone: ServingEstimate

    def served_for(self, target: Target) -> ServingEstimate:
        """Return the prediction that counts for a target: of one request for latency, or of all."""
        return self.alone if target == "latency" else self.served


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
        None if the model has no routed experts, or all fit near memory.
    """
    experts = shape.experts
    if experts is None:
        return None
    expert_bytes = _expert_bytes(shape, experts)
    routed = experts.num_experts * expert_bytes
    stored = max(0, routed - far_bytes)
    if stored and not has_storage:
        return NoFit(
            placement=NAME,
            reason=f"{format_bytes(routed)} of experts exceed {format_bytes(far_bytes)} of far "
            "memory (--storage keeps the others in a file)",
            budget="far",
            short_bytes=stored,
        )
    other_layers = shape.layer_bytes - routed
    fixed = shape.other_bytes + other_layers
    least = fixed + experts.per_token * expert_bytes + load.kv_bytes(shape)
    if least > near_bytes:
        return NoFit(
            placement=NAME,
            reason=f"{format_bytes(fixed)} of other weights, one token's experts of each layer and "
            f"the KV cache of one request take {format_bytes(least)}",
            budget="near",
            short_bytes=least - near_bytes,
        )
    room, far_share = near_bytes - fixed, 1 - stored / routed
    fits = list(_divisions(shape, machine, load, experts, room, far_share, limits))
    if not fits:
        slots = (room - load.kv_bytes(shape)) // expert_bytes
        alone = _served(shape, machine, load, min(slots, experts.num_experts), far_share, 1)
        return NoFit(placement=NAME, reason=str(limits.excess(alone)), budget="time", short_bytes=0)
    best = min(fits, key=lambda fit: cost_of(fit.served_for(target), target))
    return None if best.slots == experts.num_experts else best


def _divisions(
    shape: ModelShape,
    machine: Machine,
    load: Workload,
    experts: RoutedExperts,
    room: int,
    far_share: float,
    limits: Limits,
) -> Iterator[SlotsFit]:
    """Yield divisions of ``room`` for 1, 2, 4, ... requests at a time."""
    expert_bytes = _expert_bytes(shape, experts)
    routed = experts.num_experts * expert_bytes
    requests = 1
    while requests <= load.max_requests:
        slots = (room - load.kv_bytes(shape, requests)) // expert_bytes
        slots = min(experts.num_experts, slots)
        if slots < experts.per_token:
            return
        kv_bytes = room - slots * expert_bytes
        most = load.max_requests_in(shape, kv_bytes)
        estimate = partial(_served, shape, machine, load, slots, far_share)
        served = limits.most_requests(most, estimate)
        if served is None:
            return  # fewer slots are no faster
        yield SlotsFit(
            slots=slots,
            num_experts=experts.num_experts,
            slot_bytes=slots * expert_bytes,
            near_bytes=shape.layer_bytes - routed,
            far_bytes=round(far_share * routed),
            storage_bytes=routed - round(far_share * routed),
            kv_bytes=kv_bytes,
            served=served,
            alone=estimate(1),
        )
        requests = max(2 * requests, most + 1)


def _served(
    shape: ModelShape, machine: Machine, load: Workload, slots: int, far_share: float, requests: int
) -> ServingEstimate:
    experts = shape.experts
    assert experts is not None
    far_bytes = round(far_share * experts.num_experts * _expert_bytes(shape, experts))

    def predict(batch: Batch) -> StepTime:
        return slots_step(shape, machine, batch, slots, far_share)

    return estimate_with(predict, machine, load, requests, far_bytes)


def slots_step(
    shape: ModelShape, machine: Machine, batch: Batch, slots: int, far_share: float = 1.0
) -> StepTime:
    """Predict the time of a step with so many slots in each layer.

    Args:
        shape: shape of a mixture.
        machine: machine to predict for.
        batch: batch of the step.
        slots: slots of each layer.
        far_share: share of the experts in far memory; the others are in a file.
    """
    assert shape.experts is not None
    times = compute_times(shape, machine, batch, baseline("all near", shape))
    num_experts = shape.experts.num_experts
    named = num_experts * shape.experts.share_read(batch.tokens)
    missing = max(named * (1 - slots / num_experts), named - slots)
    routed = num_experts * _expert_bytes(shape, shape.experts)
    link, storage = far_link(machine, round(far_share * routed)), storage_link(machine)
    seconds, loading, stall = times.rest, 0.0, 0.0
    for sublayer, compute in zip(shape.sublayers, times.compute, strict=True):
        seconds += compute
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


def _expert_bytes(shape: ModelShape, experts: RoutedExperts) -> int:
    """Return the bytes of one expert of each layer, in all layers."""
    routed = sum(_routed_bytes(sublayer, experts) for sublayer in shape.sublayers)
    return -(-routed // experts.num_experts)


def _routed_bytes(sublayer: Sublayer, experts: RoutedExperts) -> int:
    return sum(p.num_bytes for p in sublayer.parameters if p.name in experts.names)


def _only_routed(sublayer: Sublayer, experts: RoutedExperts) -> Sublayer:
    routed = tuple(p for p in sublayer.parameters if p.name in experts.names)
    return replace(sublayer, parameters=routed)
