# SPDX-License-Identifier: Apache-2.0
"""Predicted time of a step on a machine: compute of each sublayer, and transfers that overlap it.

On a probed machine, a sublayer takes the measured time of its GEMMs. On other machines, it takes
the longer of its memory traffic and its arithmetic (roofline). Attention follows: it
reads the KV cache, and multiplies each new token with all earlier ones, at the rates that a probe's
small engine measured or at those of other memory traffic and arithmetic. While copies run, compute
and link slow down by measured factors, or because they share the near tier's bandwidth. The time of
a step outside the layers is a figure of the machine, plus the time to read the weights of the head.

Tensor-parallel ranks add up each sublayer's outputs (all-reduce): two times the bytes of a rank's
share, over the link between near tiers or, without one, through the far tier.

Our weights in 4 bit (``compress="int4"``) have shorter transfers. Their GEMMs are measured by an
engine and by `vllm-tiered probe`. On a machine of a profile they take as many times those of 16 bit
as its ``int4_compute_factor`` says. A 4-bit checkpoint's GEMMs are measured by the probe, too. On
a machine of a profile, and in other formats, a checkpoint's weights are assumed to need the
arithmetic of 16 bit, and memory traffic of their bytes: its kernels depend on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.measured_curves import MeasuredCurves
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.pipeline_time import (
    ComputeTimes,
    Link,
    Slowdown,
    StepTime,
    pipeline_step_time,
    transfer_seconds,
)
from vllm_tiered.weights.layout import Kind, Parameter, Role, Sublayer, extent_bytes_of
from vllm_tiered.weights.placement import Placement

ALL_REDUCE_SECONDS = 20e-6
"""Assumed latency of an all-reduce of few bytes, as NCCL has it over PCIe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Batch of a step.

    Attributes:
        requests: number of requests in the step.
        new_tokens: new tokens of each request: 1 in decoding, the prompt in prefill.
        context_tokens: earlier tokens of each request, whose KV attention reads.
    """

    requests: int
    new_tokens: int
    context_tokens: int

    @property
    def tokens(self) -> int:
        return self.requests * self.new_tokens


def far_link(machine: Machine, far_bytes: int) -> Link:
    """Return the far-to-near link of weight transfers if so many bytes are far."""
    latency_s = machine.far_layer_overhead_us * 1e-6 / 2  # a layer has two transfers
    return Link(bytes_per_s=machine.far_gb_per_s(far_bytes) * 1e9, latency_s=latency_s)


def storage_link(machine: Machine) -> Link | None:
    """Return the storage-to-near link; None if its bandwidth is unknown."""
    rate = machine.storage_read_gb_per_s
    return None if rate is None else Link(rate * 1e9, machine.storage_latency_us * 1e-6)


class Roofline(NamedTuple):
    """Seconds of a sublayer's parts: weight reads overlap GEMMs, attention follows."""

    weights: float
    arithmetic: float
    attention: float

    @property
    def seconds(self) -> float:
        return max(self.weights, self.arithmetic) + self.attention

    @property
    def is_arithmetic(self) -> bool:
        """Whether the arithmetic of GEMMs takes longest."""
        return self.arithmetic > max(self.weights, self.attention)


def roofline_of(
    machine: Machine,
    *,
    weight_bytes: float,
    num_weights: float,
    tokens: float,
    kv_bytes: float,
    attention_operations: float = 0.0,
) -> Roofline:
    """Return the roofline of multiplying weights with ``tokens`` rows, and of attention."""
    near, peak = machine.near_gb_per_s * 1e9, machine.tflops * 1e12
    return Roofline(
        weights=weight_bytes / near,
        arithmetic=2 * num_weights * tokens / peak,
        attention=max(kv_bytes / near, attention_operations / peak),
    )


def step_overhead_seconds(machine: Machine, requests: int) -> float:
    """Return the seconds of a step outside the model's layers and head."""
    return machine.step_overhead_ms * 1e-3 + requests * machine.request_overhead_us * 1e-6


def all_reduce_seconds(shape: ModelShape, machine: Machine, tokens: int) -> float:
    """Return the seconds in which ranks add up a sublayer's outputs for so many tokens.

    No computation hides them. Through the far tier each byte takes the link twice.
    """
    ranks = shape.num_ranks
    if ranks == 1:
        return 0.0
    moved = 2 * (ranks - 1) / ranks * tokens * shape.hidden_size * shape.dtype_bytes
    gb_per_s = machine.peer_gb_per_s or machine.read_gb_per_s / 2
    return ALL_REDUCE_SECONDS + moved / (gb_per_s * 1e9)


def roofline(
    sublayer: Sublayer,
    shape: ModelShape,
    machine: Machine,
    batch: Batch,
    far: Sequence[Parameter] = (),
) -> Roofline:
    """Return the seconds of a sublayer's parts without concurrent copies.

    On a probed machine, the time of a GEMM with one row is used as the time of memory traffic.

    Args:
        sublayer: sublayer to predict.
        shape: shape of its model.
        machine: machine to predict for.
        batch: batch of the step.
        far: the sublayer's offloaded parameters, whose GEMMs may take longer.
    """
    kv_bytes = operations = 0.0
    if sublayer.kind is Kind.ATTENTION:
        # Layers of different kinds read different amounts; here each reads the mean.
        of_request = shape.read_kv_bytes(batch.context_tokens) if batch.context_tokens else 0.0
        kv_bytes = batch.requests * of_request / shape.num_attention
        operations = shape.attention_operations(batch.new_tokens, batch.context_tokens)
        operations *= batch.requests / shape.num_attention
    tokens = batch.tokens
    factors = [_int4_factor(machine, shape, p) for p in sublayer.parameters]
    parts = roofline_of(
        machine,
        weight_bytes=sum(
            _read_bytes(shape, p, tokens, factor)
            for p, factor in zip(sublayer.parameters, factors, strict=True)
        ),
        num_weights=sum(
            shape.weights_in(p) * shape.share_computed(p) * factor
            for p, factor in zip(sublayer.parameters, factors, strict=True)
        ),
        tokens=tokens,
        kv_bytes=kv_bytes,
        attention_operations=operations,
    )
    curves = machine.curves
    if curves:
        weights, arithmetic = (
            _measured_seconds(sublayer, shape, far, curves, rows) for rows in (1, tokens)
        )
        parts = parts._replace(weights=weights, arithmetic=arithmetic)
        if curves.attention and sublayer.kind is Kind.ATTENTION:
            attention = curves.attention.seconds(
                operations, kv_bytes, batch.requests, is_decode=batch.new_tokens == 1
            )
            read = kv_bytes / (machine.near_gb_per_s * 1e9)
            parts = parts._replace(attention=max(attention, read))
    return parts


def _int4_factor(machine: Machine, shape: ModelShape, parameter: Parameter) -> float:
    """Return how many times its time in 16 bit a parameter's GEMM takes; 1 if not in our 4 bit."""
    factor = machine.int4_compute_factor
    return 1.0 if factor is None or not shape.is_int4(parameter) else factor


def _read_bytes(shape: ModelShape, parameter: Parameter, tokens: int, factor: float) -> float:
    """Return the bytes that take a parameter's GEMM as long to read as its time for one row.

    They are the parameter's own, or, where a factor says how long a GEMM in 4 bit takes, as many
    times those in 16 bit.
    """
    share = shape.share_read(parameter, tokens)
    if factor == 1.0:
        return share * parameter.num_bytes
    return share * factor * shape.weights_in(parameter) * shape.dtype_bytes


def slowdown(
    machine: Machine, placement: Placement | None = None, hosted: Collection[int] = ()
) -> Slowdown:
    """Return the slowdown of concurrent compute and transfers: measured, or from their bytes.

    Each copied byte takes ``near_bytes_per_copied_byte`` of near-tier traffic. Compute and copies
    share the near tier's bandwidth in proportion to what each would use alone. Reads from storage
    slow compute less, as they move fewer bytes in a second.

    Args:
        machine: machine with the contention.
        placement: offloaded weights; the factors are means over the seconds that their transfers
            take from far memory and from storage. None for far memory alone.
        hosted: sublayers whose far weights stay where they are.
    """
    copies, reads = _slowdowns(machine)
    storage = storage_link(machine)
    if placement is None or storage is None or not placement.storage_bytes:
        return copies
    link = far_link(machine, placement.far_bytes)
    extents = [
        (0 if at in hosted else extent_bytes_of(far), extent_bytes_of(kept))
        for at, (far, kept) in enumerate(placement.offloaded)
    ]
    copied, read = (
        math.fsum(of.seconds(num_bytes) for num_bytes in sizes)
        for of, sizes in zip((link, storage), zip(*extents, strict=True), strict=True)
    )
    share = read / (copied + read)
    return Slowdown(*(a + share * (b - a) for a, b in zip(copies, reads, strict=True)))


def _slowdowns(machine: Machine) -> tuple[Slowdown, Slowdown]:
    """Return the slowdowns of copies from far memory and of reads from storage."""
    curves = machine.curves
    if curves:
        copies = Slowdown(curves.compute_slowdown, curves.link_slowdown)
        return copies, Slowdown(*curves.storage_slowdown) if curves.storage_slowdown else copies
    rates = (machine.read_gb_per_s, machine.storage_read_gb_per_s or machine.read_gb_per_s)
    copies, reads = (
        Slowdown(shared, shared)
        for rate in rates
        for shared in [1 + machine.near_bytes_per_copied_byte * rate / machine.near_gb_per_s]
    )
    return copies, reads


def compute_times(
    shape: ModelShape, machine: Machine, batch: Batch, placement: Placement | None = None
) -> ComputeTimes:
    """Return the compute time of each sublayer without concurrent copies.

    Args:
        shape: shape of the model.
        machine: machine to predict for.
        batch: batch of the step.
        placement: placement whose offloaded weights may take longer in GEMMs; None for all near.
    """
    requests = batch.requests
    rest = step_overhead_seconds(machine, requests)
    # Outside the layers, a step reads the head and a few rows of the embedding.
    if machine.curves:
        # An engine that places weights keeps one copy of embeddings and head, not packed.
        places = placement is not None and placement.policy != "all near"
        curve = machine.curves.far if places else machine.curves.near
        rest += curve.seconds(shape.head_bytes, requests)
    else:
        rest += shape.head_bytes / (machine.near_gb_per_s * 1e9)
    staged = placement.offloaded if placement else [((), ())] * len(shape.sublayers)
    exchange = all_reduce_seconds(shape, machine, batch.tokens)
    return ComputeTimes(
        compute=tuple(
            roofline(sublayer, shape, machine, batch, (*far, *stored)).seconds + exchange
            for sublayer, (far, stored) in zip(shape.sublayers, staged, strict=True)
        ),
        rest=rest,
    )


def predict_step(
    shape: ModelShape, machine: Machine, placement: Placement, batch: Batch
) -> StepTime:
    """Predict the time of a step in which the placement's weights are prefetched."""
    times = compute_times(shape, machine, batch, placement)
    link = far_link(machine, placement.far_bytes)
    transfers = transfer_seconds(placement, link, storage_link(machine))
    return pipeline_step_time(
        transfers, times, slowdown(machine, placement), placement.prefetch_depth
    )


def _measured_seconds(
    sublayer: Sublayer,
    shape: ModelShape,
    far: Sequence[Parameter],
    curves: MeasuredCurves,
    tokens: int,
) -> float:
    """Return the measured time of a sublayer's GEMMs and rows, and half of a layer's overhead."""
    names = {parameter.name for parameter in far}
    seconds = curves.layer_overhead_us * 1e-6 / 2
    if curves.attention:
        ns = curves.attention.row_ns_per_feature * shape.features_of(sublayer)
        seconds += 1e-9 * tokens * ns
    for parameter in sublayer.parameters:
        if parameter.role not in (Role.MATRIX, Role.FFN_FIRST):
            continue
        curve = curves.far if parameter.name in names else curves.near
        if curves.compressed and shape.is_int4(parameter):
            curve = curves.compressed
        if curves.w4a16 and shape.is_w4a16(parameter):
            curve = curves.w4a16
        seconds += curve.seconds(round(shape.weights_in(parameter) * shape.dtype_bytes), tokens)
    return seconds
