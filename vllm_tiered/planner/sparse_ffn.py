# SPDX-License-Identifier: Apache-2.0
"""Prediction of serving with an FFN that is computed from a neuron store (M2Cache, section 5).

Near memory and the bytes of a step are those of the engine's own memory plan
(`ffn/memory_plan.py`). A decode step loads the neurons that are not near, and then multiplies what
its tokens want; a prompt streams all neurons while others are multiplied:

    decode   │ scores │ load missing neurons │ multiply │        or as a prompt, if that is faster
    prompt   │ stream all neurons, multiply those that have arrived │

Times are those of the bytes alone. Reads of single neurons, products in 4 bit and what plans a step
cost more, so the prediction favours the store.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from vllm_tiered.errors import ConfigError
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.memory_split import Target, baseline, cost_of
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.pipeline_time import Link, StepTime
from vllm_tiered.planner.plan import Case, Plan
from vllm_tiered.planner.serving import ServingEstimate, Workload, estimate_with
from vllm_tiered.planner.step_time import (
    Batch,
    all_reduce_seconds,
    compute_times,
    far_link,
    storage_link,
)
from vllm_tiered.planner.suggestions import BITS, best_served, requantised
from vllm_tiered.weights.layout import Kind, Role


class FfnMemory(Protocol):
    """What the prediction asks of the engine's memory plan, `ffn.memory_plan.FfnPlan`."""

    @property
    def near_bytes(self) -> int: ...

    @property
    def far_bytes(self) -> int: ...

    @property
    def num_far_layers(self) -> int: ...

    @property
    def streamed_bytes(self) -> int: ...

    def sparse_bytes(self, layer: int, tokens: int) -> tuple[int, int] | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseFfnFit:
    """Predictions for an FFN from a neuron store.

    Attributes:
        near_bytes: near memory of the FFN.
        dense_bytes: bytes of the model's own FFN matrices, which are never loaded.
        kv_bytes: near memory that is left for the KV cache.
        missing_share: share of what a token wants that a step loads.
        served: prediction for as many requests as fit, or as the workload has.
        alone: prediction for one request.
    """

    near_bytes: int
    dense_bytes: int
    kv_bytes: int
    missing_share: float
    served: ServingEstimate
    alone: ServingEstimate

    def served_for(self, target: Target) -> ServingEstimate:
        """Return the prediction that counts for a target: of one request for latency, or of all."""
        return self.alone if target == "latency" else self.served


def ffn_bytes(shape: ModelShape) -> int:
    """Return the bytes of all FFN matrices."""
    return sum(
        parameter.num_bytes
        for sublayer in shape.sublayers
        for parameter in sublayer.parameters
        if sublayer.kind is Kind.FFN and parameter.role in (Role.MATRIX, Role.FFN_FIRST)
    )


def room_for_ffn(case: Case) -> int:
    """Return the near bytes that the other weights and one request's KV cache leave to the FFN."""
    others = case.shape.other_bytes + case.shape.layer_bytes - ffn_bytes(case.shape)
    return case.near_bytes - others - case.load.kv_bytes(case.shape)


def fit_sparse_ffn(case: Case, ffn: FfnMemory, missing_share: float) -> SparseFfnFit:
    """Predict serving with an FFN from a neuron store, all other weights being near.

    Args:
        case: what is asked.
        ffn: the engine's memory plan, within :func:`room_for_ffn`.
        missing_share: share of the neurons that a token wants and that are not near.

    Raises:
        ConfigError: neurons are read from the store, and the disk's bandwidth is not known.
    """
    shape, machine, load = case.shape, case.machine, case.load
    if ffn.num_far_layers < shape.num_layers and storage_link(machine) is None:
        raise ConfigError(
            f"far memory holds the neurons of {ffn.num_far_layers} of {shape.num_layers} layers, "
            "and it is not known how fast this machine reads the others from storage: measure it "
            "with vllm-tiered probe --path FOLDER, or raise --far-gib"
        )

    def predict(batch: Batch) -> StepTime:
        return sparse_ffn_step(shape, machine, batch, ffn, missing_share)

    def estimate(requests: int) -> ServingEstimate:
        return estimate_with(
            predict, machine, load, requests, ffn.far_bytes, num_ranks=shape.num_ranks
        )

    kv_bytes = room_for_ffn(case) + load.kv_bytes(shape) - ffn.near_bytes
    alone = estimate(1)
    return SparseFfnFit(
        near_bytes=ffn.near_bytes,
        dense_bytes=ffn_bytes(shape),
        kv_bytes=kv_bytes,
        missing_share=missing_share,
        served=case.limits.most_requests(_most(load, shape, kv_bytes), estimate) or alone,
        alone=alone,
    )


def sparse_ffn_step(
    shape: ModelShape, machine: Machine, batch: Batch, ffn: FfnMemory, missing_share: float
) -> StepTime:
    """Predict the time of a step whose FFN is computed from a neuron store.

    Args:
        shape: shape of the model.
        machine: machine to predict for.
        batch: batch of the step.
        ffn: the engine's memory plan.
        missing_share: share of the neurons that a token wants and that are not near.
    """
    times = compute_times(shape, machine, batch, baseline("all near", shape))
    exchange = all_reduce_seconds(shape, machine, batch.tokens)
    far, storage = far_link(machine, ffn.far_bytes), storage_link(machine)
    seconds, loading, stall, layer = times.rest, 0.0, 0.0, 0
    for sublayer, compute in zip(shape.sublayers, times.compute, strict=True):
        if sublayer.kind is not Kind.FFN:
            seconds += compute
            continue
        link = far if layer < ffn.num_far_layers else storage
        assert link is not None, "checked by the caller"
        wanted = ffn.sparse_bytes(layer, batch.tokens) if batch.new_tokens == 1 else None
        layer += 1
        step = _dense(link, ffn.streamed_bytes, compute)
        if wanted is not None:
            sparse = _sparse(link, machine, *wanted, missing_share, exchange)
            step = min(step, sparse, key=lambda one: one.seconds)
        seconds += step.seconds
        loading += step.link_seconds
        stall += step.stall_seconds
    return StepTime(seconds=seconds, link_seconds=loading, stall_seconds=stall)


def best_without(case: Case, plan: Plan) -> tuple[str, ServingEstimate] | None:
    """Return what is best in the same memory without the store: the plan, or fewer bits.

    Returns:
        Its name and prediction; None if nothing fits.
    """
    found = [("the plan above", plan.best)]
    for name, bits in BITS.items():
        changed = replace(case, shape=requantised(case.shape, bits))
        found.append((f"a variant in {name}", best_served(changed)))
    fitting = [(name, served) for name, served in found if served is not None]
    return min(fitting, key=lambda one: cost_of(one[1], case.target), default=None)


def _dense(link: Link, streamed: int, compute: float) -> StepTime:
    transfer = link.seconds(streamed)
    waits = max(0.0, transfer - compute)
    return StepTime(seconds=compute + waits, link_seconds=transfer, stall_seconds=waits)


def _sparse(
    link: Link, machine: Machine, cached: int, scored: int, missing_share: float, exchange: float
) -> StepTime:
    transfer = link.seconds(round(missing_share * cached))
    product = (cached + scored) / (machine.near_gb_per_s * 1e9)
    return StepTime(
        seconds=transfer + product + exchange, link_seconds=transfer, stall_seconds=transfer
    )


def _most(load: Workload, shape: ModelShape, kv_bytes: int) -> int:
    return max(1, load.max_requests_in(shape, kv_bytes))
