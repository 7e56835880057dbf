# SPDX-License-Identifier: Apache-2.0
"""Model of a step's time: layers compute in order, and offloaded layers wait for their reads.

The waits are those of a policy (`policies/`). The roofline's parts and the overhead are the
planner's. The planner adds up the attention and the matmuls of each sublayer, for one batch of
equal requests. Here all layers take the same time, and attention is inside the roofline (the larger
of all memory traffic and all arithmetic). There are two reasons: the constants of the machine
`cpu-2core` were calibrated in this way, and a simulation times millions of steps. Copies that share
the near tier's bandwidth slow compute down, except copies that compute waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulator.policies.base import Pace, StepBlocks, TimedPolicy
from vllm_tiered.kv.layout import Level
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.step_time import roofline_of, step_overhead_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step, of its stall, and of its reads on the link; bytes that it copied."""

    seconds: float
    stall_seconds: float
    link_seconds: float
    read_bytes: float = 0.0
    written_bytes: float = 0.0


class StepTimer:
    """Timer of one model's steps on one machine; all layers take the same time.

    Args:
        page_bytes: bytes that the copy of one page moves.
        policy: reads the far layers.
    """

    def __init__(
        self, machine: Machine, model: ModelShape, page_bytes: float, policy: TimedPolicy
    ) -> None:
        self._machine = machine
        self._model = model
        self._page_bytes = page_bytes
        self._policy = policy
        # All weights count, embeddings too, as in the calibration of the constants.
        self._weight_bytes = model.layer_bytes + model.other_bytes
        self._num_weights = self._weight_bytes / model.dtype_bytes

    def step(
        self,
        *,
        level: Level,
        blocks: StepBlocks,
        scheduled_tokens: int,
        context_tokens: int,
        num_requests: int,
        link_share: float = 1.0,
        link_busy_s: float = 0.0,
        fetched_pages: int = 0,
    ) -> StepTime:
        """Return the time of one step; call it for the steps in order.

        Args:
            scheduled_tokens: tokens that the step computes, decode and prefill.
            context_tokens: tokens whose KV attention reads.
            num_requests: requests in the step.
            link_share: share of the link's bandwidth that other processes leave.
            link_busy_s: seconds from the step's start for which moved layers keep the link busy.
            fetched_pages: pages of resident layers that are read before those of far layers.
        """
        machine, model = self._machine, self._model
        near = machine.near_gb_per_s * 1e9
        roofline = roofline_of(
            machine,
            weight_bytes=self._weight_bytes,
            num_weights=self._num_weights,
            tokens=scheduled_tokens,
            kv_bytes=context_tokens * model.kv_bytes_per_token,
        )
        burden = self._policy.burden(level, blocks)
        copied = (burden.pages + fetched_pages) * self._page_bytes
        taken = copied * machine.near_bytes_per_copied_byte
        compute_s = max(roofline.weights + roofline.attention, roofline.arithmetic) + taken / near
        compute_s += burden.layers * machine.far_layer_overhead_us * 1e-6
        pace = Pace(
            overhead_s=step_overhead_seconds(machine, num_requests),
            layer_s=compute_s / model.num_layers,
            page_bytes=self._page_bytes,
            read_bytes_per_s=machine.read_gb_per_s * 1e9 * link_share,
            write_bytes_per_s=machine.write_gb_per_s * 1e9 * link_share,
            link_busy_s=link_busy_s,
        )
        if fetched_pages:
            pace = pace._replace(link_busy_s=link_busy_s + pace.read_s(fetched_pages))
        outcome = self._policy.step(level, blocks, pace)
        return StepTime(
            seconds=pace.overhead_s + compute_s + outcome.stall_s,
            stall_seconds=outcome.stall_s,
            link_seconds=pace.read_s(outcome.read_pages + fetched_pages),
            read_bytes=(outcome.read_pages + fetched_pages) * self._page_bytes,
            written_bytes=outcome.written_pages * self._page_bytes,
        )
