# SPDX-License-Identifier: Apache-2.0
"""Figures of a worker's steps: counters for the metrics, and the report to the scheduler."""

from typing import Any

from vllm_tiered.adapter.kv.steps import StepReport
from vllm_tiered.adapter.telemetry.figures import page_errors_figure
from vllm_tiered.adapter.telemetry.metrics import TieredStats
from vllm_tiered.devices.base import Device, Direction, LinkUse


class StepFigures:
    """Counter of what the steps of one rank have taken and moved.

    Args:
        device: runs the copies, and counts their bytes and errors.

    Attributes:
        gauges: figures that never change, which go with each step's counters.
        bookkeeping_seconds: time on the host in this step, without the waits for layers.
        wait_seconds: time in the waits for layers in this step; traced waits are not timed.
        num_lost: blocks that lost a page since the last count.
    """

    def __init__(self, device: Device) -> None:
        self.gauges: dict[str, int] = {}
        self.bookkeeping_seconds = 0.0
        self.wait_seconds = 0.0
        self.num_lost = 0
        self._device = device
        self._stall_before = 0.0
        self._use_before = {direction: LinkUse() for direction in Direction}
        self._errors_before = device.page_errors()
        self._stats = TieredStats()
        self._total = TieredStats()  # without what is not drained yet

    def count(self, stall_seconds: float, step_seconds: float) -> StepReport:
        """Count a step that ends, and return its report.

        Args:
            stall_seconds: seconds for which compute has stalled since the start.
        """
        stalled = stall_seconds - self._stall_before
        self._stall_before = stall_seconds
        # The part of a wait that is not stall counts as bookkeeping.
        waiting_seconds = max(0.0, self.wait_seconds - stalled)
        self.wait_seconds = 0.0
        # Leave out counters that did not change, which are most of them without offloaded layers.
        data: dict[str, Any] = {
            "kv_steps": 1,
            "kv_step_seconds": step_seconds,
            "kv_bookkeeping_seconds": self.bookkeeping_seconds + waiting_seconds,
            **self.gauges,
        }
        if stalled:
            data["kv_stall_seconds"] = stalled
        if self.num_lost:
            data["kv_lost_blocks"], self.num_lost = self.num_lost, 0
        errors = self._device.page_errors()
        if errors != self._errors_before:
            for kind, count in errors.items():
                data[page_errors_figure(kind)] = count - self._errors_before[kind]
            self._errors_before = errors
        report = StepReport(stall_seconds=stalled)
        for direction, before in self._use_before.items():
            use = self._device.use(direction)
            if use == before:
                continue
            num_bytes = use.num_bytes - before.num_bytes
            seconds = use.busy_seconds - before.busy_seconds
            data[f"kv_{direction.value}_bytes"] = num_bytes
            data[f"kv_{direction.value}_seconds"] = seconds
            self._use_before[direction] = use
            if direction is Direction.READ:
                report.read_bytes, report.read_seconds = num_bytes, seconds
            else:
                report.write_bytes, report.write_seconds = num_bytes, seconds
        self._stats.aggregate(TieredStats(data=data))
        return report

    def drain(self) -> TieredStats:
        """Return the counters since the last call."""
        stats, self._stats = self._stats, TieredStats()
        self._total.aggregate(stats)
        return stats

    def total(self) -> dict[str, Any]:
        """Return the counters since the start."""
        return TieredStats(data=dict(self._total.data)).aggregate(self._stats).data
