# SPDX-License-Identifier: Apache-2.0
"""Policy `on_demand`: each far layer is read when it is due, and compute waits for all of it."""

from __future__ import annotations

from benchmarks.simulator.policies.base import Burden, Pace, StepBlocks
from benchmarks.simulator.policies.interleave import Interleave
from vllm_tiered.kv.layout import Level


class OnDemand(Interleave):
    """The far layers of `interleave`, read when they are due (the product's)."""

    def burden(self, level: Level, blocks: StepBlocks) -> Burden:
        """Return what the copies cost compute: no bandwidth, as none runs beside it."""
        return Burden(level.num_far, 0)

    def _stall(self, level: Level, read_s: float, blocks: StepBlocks, pace: Pace) -> float:
        return pace.link_busy_s + read_s * level.num_far
