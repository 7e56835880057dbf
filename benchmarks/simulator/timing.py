# SPDX-License-Identifier: Apache-2.0
"""Model of a step's time: layers compute in order, and offloaded layers wait for their reads.

             ┌ overhead ┐
    compute  │··········│ 0 │ 1 │ 2 │··stall··│ 3 │ 4 │ ...        far layers: 2, 3, ...
    link     │ read 2 │  read 3              │ read 5: layer 2's buffer is free │

The roofline's parts and the overhead are the planner's. The planner adds up the attention and the
matmuls of each sublayer, for one batch of equal requests. Here all layers take the same time, and
attention is inside the roofline (the larger of all memory traffic and all arithmetic). There are
two reasons: the constants of the machine `cpu-2core` were calibrated in this way, and a simulation
times millions of steps. Copies that share the near tier's bandwidth slow compute down, except
copies that compute waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered.kv.policy import interleave
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.step_time import roofline_of, step_overhead_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step, of its stall, and of its reads on the link."""

    seconds: float
    stall_seconds: float
    link_seconds: float


class StepTimer:
    """Timer of one model's steps on one machine; all layers take the same time.

    Without `prefetches` an offloaded layer is read when it is needed, and waits for the whole read
    (`on_demand`).
    """

    def __init__(
        self, machine: Machine, model: ModelShape, page_bytes: int, *, prefetches: bool = True
    ) -> None:
        self._prefetches = prefetches
        self._machine = machine
        self._model = model
        self._page_bytes = page_bytes
        # All weights count, embeddings too, as in the calibration of the constants.
        self._weight_bytes = model.layer_bytes + model.other_bytes
        self._num_weights = self._weight_bytes / model.dtype_bytes
        self._far_layers = [
            interleave(model.num_layers, m).offloaded for m in range(model.num_layers)
        ]

    def step(
        self,
        *,
        num_far: int,
        scheduled_tokens: int,
        context_tokens: int,
        num_requests: int,
        read_blocks: int,
        written_blocks: int = 0,
        num_staging_buffers: int,
        link_share: float = 1.0,
        link_busy_s: float = 0.0,
    ) -> StepTime:
        """Return the time of one step.

        Args:
            num_far: number of offloaded layers.
            scheduled_tokens: tokens that the step computes, decode and prefill.
            context_tokens: tokens whose KV attention reads.
            num_requests: requests in the step.
            read_blocks: blocks that are staged in every far layer.
            written_blocks: the staged blocks that are written out again.
            num_staging_buffers: number of staging buffers.
            link_share: share of the link's bandwidth that other processes leave.
            link_busy_s: seconds from the step's start for which moved layers keep the link busy.
        """
        machine, model = self._machine, self._model
        near = machine.near_gb_per_s * 1e9
        read_bytes = read_blocks * self._page_bytes
        roofline = roofline_of(
            machine,
            weight_bytes=self._weight_bytes,
            num_weights=self._num_weights,
            tokens=scheduled_tokens,
            kv_bytes=context_tokens * model.kv_bytes_per_token,
        )
        copied = (read_blocks + written_blocks) * self._page_bytes * num_far * self._prefetches
        taken = copied * machine.near_bytes_per_copied_byte
        compute_s = max(roofline.weights + roofline.kv, roofline.arithmetic) + taken / near
        compute_s += num_far * machine.far_layer_overhead_us * 1e-6
        overhead_s = step_overhead_seconds(machine, num_requests)
        layer_s = compute_s / model.num_layers
        transfer_s = read_bytes / (machine.read_gb_per_s * 1e9 * link_share)
        if self._prefetches:
            stall_s = self._stall(
                num_far, layer_s, transfer_s, overhead_s, num_staging_buffers, link_busy_s
            )
        else:
            stall_s = link_busy_s + transfer_s * num_far
        return StepTime(
            seconds=overhead_s + compute_s + stall_s,
            stall_seconds=stall_s,
            link_seconds=transfer_s * num_far,
        )

    def _stall(
        self,
        num_far: int,
        layer_s: float,
        transfer_s: float,
        overhead_s: float,
        num_staging_buffers: int,
        link_busy_s: float,
    ) -> float:
        if not num_far or not transfer_s:
            return max(0.0, link_busy_s - overhead_s) if link_busy_s else 0.0
        layers = self._far_layers[num_far]
        done = [0.0] * num_far  # the time at which each far layer was computed
        link_free = link_busy_s
        stall_s = 0.0
        for position, layer in enumerate(layers):
            start = link_free
            if position >= num_staging_buffers and done[position - num_staging_buffers] > start:
                start = done[position - num_staging_buffers]
            link_free = start + transfer_s
            arrives = overhead_s + layer * layer_s + stall_s
            if link_free > arrives:
                stall_s += link_free - arrives
                arrives = link_free
            done[position] = arrives + layer_s
        return stall_s
