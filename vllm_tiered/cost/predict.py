# SPDX-License-Identifier: Apache-2.0
"""How long a step takes on a machine: compute of each sublayer, and what arrives meanwhile.

A sublayer computes for the longer of its memory traffic and its arithmetic (roofline), and as much
longer as copies take of the near tier's bandwidth. What a step costs beside the layers comes from
the machine, and from the head, which reads its weights like a layer. Of weights in 4 bit the memory
traffic is less; what it takes to expand them is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered.cost.machine import Machine
from vllm_tiered.cost.model import ModelShape
from vllm_tiered.cost.pipeline import Link, StepTime, StepTimes, step_time, transfer_seconds
from vllm_tiered.cost.weights import Kind, Placement, Sublayer


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What a step computes.

    Attributes:
        requests: in the step.
        new_tokens: of each: 1 in decoding, the prompt in prefill.
        context_tokens: of each, whose KV attention reads.
    """

    requests: int
    new_tokens: int
    context_tokens: int

    @property
    def tokens(self) -> int:
        return self.requests * self.new_tokens


def far_link(machine: Machine) -> Link:
    """Far to near, as transfers of weights see it."""
    return Link(bytes_per_s=machine.read_gb_per_s * 1e9)


def compute_times(shape: ModelShape, machine: Machine, batch: Batch) -> StepTimes:
    """Of each sublayer, with all weights near and no copies beside it."""
    requests = batch.requests
    rest = machine.step_overhead_ms * 1e-3 + requests * machine.request_overhead_us * 1e-6
    # Of what is beside the layers, a step reads the head; of the embedding a few rows.
    rest += shape.head_bytes / (machine.near_gb_per_s * 1e9)
    return StepTimes(
        compute=tuple(
            _sublayer_seconds(sublayer, num_weights, shape, machine, batch)
            for sublayer, num_weights in zip(shape.sublayers, shape.num_weights, strict=True)
        ),
        rest=rest,
    )


def predict_step(
    shape: ModelShape, machine: Machine, placement: Placement, batch: Batch
) -> StepTime:
    """A step with the placement's far weights arriving one sublayer ahead."""
    times = compute_times(shape, machine, batch)
    copied = machine.near_bytes_per_copied_byte / (machine.near_gb_per_s * 1e9)
    slowed = StepTimes(
        compute=tuple(
            seconds + copied * sum(parameter.num_bytes for parameter in far)
            for seconds, far in zip(times.compute, placement.far, strict=True)
        ),
        rest=times.rest,
    )
    return step_time(transfer_seconds(placement, far_link(machine)), slowed)


def _sublayer_seconds(
    sublayer: Sublayer, num_weights: int, shape: ModelShape, machine: Machine, batch: Batch
) -> float:
    near = machine.near_gb_per_s * 1e9
    memory = sublayer.num_bytes / near
    operations = 2 * num_weights * batch.tokens
    arithmetic = operations / (machine.tflops * 1e12)
    seconds = max(memory, arithmetic)
    if sublayer.kind is Kind.ATTENTION:
        kv_bytes = shape.kv_bytes_per_token / shape.num_layers
        seconds += batch.requests * batch.context_tokens * kv_bytes / near
    return seconds
