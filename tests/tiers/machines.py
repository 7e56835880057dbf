# SPDX-License-Identifier: Apache-2.0
"""Devices under the same tests, each with a way to hold copies up."""

import random
from collections.abc import Callable
from typing import NamedTuple

from tests.cuda_double import SimulatedCudaDevice
from tests.tiers.gate import Gate
from vllm_tiered.devices.base import Device, Event
from vllm_tiered.devices.cpu import CpuDevice


class HeldUp(NamedTuple):
    """An event to wait for.

    Attributes:
        run: let the device do all that it can until then.
    """

    event: Event
    open: Callable[[], None]
    run: Callable[[], object]


class CpuMachine:
    """Threads, and an event that the test finishes."""

    def __init__(self) -> None:
        self.device: Device = CpuDevice()

    def hold_up(self) -> HeldUp:
        gate = Gate()
        return HeldUp(gate, gate.open, lambda: gate.waited_for.wait(timeout=60))


class CudaMachine:
    """``CudaDevice`` on a double of the CUDA runtime.

    Args:
        by_milestone: copies are held up by compute that was not submitted; else by a kernel that
            does not end.
        engine_run_bytes: from which size on copy engines copy.
    """

    def __init__(self, *, by_milestone: bool, engine_run_bytes: int = 1 << 60) -> None:
        self._by_milestone = by_milestone
        self.device: Device
        self.device = self._device = SimulatedCudaDevice(
            random.Random(0),
            haste=0.5,
            engine_run_bytes=engine_run_bytes,
            checks_memory=False,
        )

    def hold_up(self) -> HeldUp:
        run = self._device.cuda.run_all
        if self._by_milestone:
            (milestone,) = self._device.milestones(1)
            return HeldUp(milestone, lambda: self._device.reach(milestone), run)
        open_it = self._device.cuda.hold_compute()
        return HeldUp(self._device.compute_event(), open_it, run)


MACHINES: dict[str, Callable[[], CpuMachine | CudaMachine]] = {
    "cpu": CpuMachine,
    "cuda-milestone": lambda: CudaMachine(by_milestone=True),
    "cuda-kernel": lambda: CudaMachine(by_milestone=False),
    "cuda-engines": lambda: CudaMachine(by_milestone=True, engine_run_bytes=0),
}
