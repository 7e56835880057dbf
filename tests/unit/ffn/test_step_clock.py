# SPDX-License-Identifier: Apache-2.0
"""Step clock: on the host it reports at once, on a GPU from events and without waiting."""

import random
import time

from tests.fakes.cuda import SimulatedCudaDevice
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.ffn.step_clock import StepClock


def test_on_the_host_a_step_is_over_when_it_was_computed() -> None:
    reported: list[float] = []
    device = CpuDevice()
    clock = StepClock(device)
    begin = clock.now()
    time.sleep(0.01)
    clock.measure(begin, reported.append)
    device.close()
    assert len(reported) == 1 and 0.01 <= reported[0] < 1


def test_on_a_gpu_the_duration_is_reported_when_it_is_known() -> None:
    """Steps that end after the host has gone on are reported later, oldest first."""
    reported: list[tuple[str, float]] = []
    device = SimulatedCudaDevice(random.Random(0), haste=0.0)
    clock = StepClock(device)

    def step(name: str, num_kernels: int) -> None:
        begin = clock.now()
        for _ in range(num_kernels):
            device.compute(lambda: None)
        clock.measure(begin, lambda seconds: reported.append((name, seconds)))

    step("long", 40)
    step("short", 2)
    assert not reported
    device.cuda.run_all()
    assert not reported  # the clock has not been polled since
    step("last", 1)
    (first, long), (second, short) = reported
    assert (first, second) == ("long", "short")
    assert 0.04 <= long < 0.05 and 0 < short < 0.01  # the fake takes 1 ms for each kernel
    device.close()


def test_a_step_that_took_nothing_can_be_divided_by() -> None:
    reported: list[float] = []
    device = SimulatedCudaDevice(random.Random(0), haste=1.0)
    device.cuda.seconds_between = lambda begin, end: 0.0  # type: ignore[method-assign]
    clock = StepClock(device)
    clock.measure(clock.now(), reported.append)
    device.close()
    assert len(reported) == 1 and reported[0] > 0
