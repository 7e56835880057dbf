# SPDX-License-Identifier: Apache-2.0
"""A failed copy stops the engine with its error; attention never reads pages that are missing."""

import random

import pytest

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fakes.kv.driver import Driver, Setup, run_schedule
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.copy_thread import CopyThread
from vllm_tiered.devices.cpu import CpuDevice

SETUPS = (
    Setup(num_layers=5, num_far=3, spare_pages=12),
    Setup(num_layers=5, num_far=3, spare_pages=12, offloads_partial_blocks=True),
    Setup(num_layers=5, num_far=4, spare_pages=4, offloads_partial_blocks=True, adaptive=True),
)


SETUP_IDS = ["fixed", "staged-partial", "adaptive"]


class LinkDown(OSError):
    pass


def failing_device(direction: Direction, number: int) -> CpuDevice:
    """Return a device on which the ``number``-th copy of ``direction`` fails, and no other."""

    class FailingThread(CopyThread):
        num_jobs = 0

        def run(self, job):
            if self.name.endswith(direction.value):
                self.num_jobs += 1
                if self.num_jobs == number:
                    raise LinkDown
            super().run(job)

    class FailingDevice(CpuDevice):
        thread_class = FailingThread

    return FailingDevice()


@pytest.mark.parametrize("setup", SETUPS, ids=SETUP_IDS)
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("first", [1, 11, 21])
def test_one_failed_copy(direction, first, setup):
    for number in range(first, first + 10):
        device = failing_device(direction, number)
        try:
            with pytest.raises(LinkDown):
                driver = Driver(setup, device, check_bytes=False)
                run_schedule(driver, random.Random(5), num_steps=40)
        finally:
            device.close()


@pytest.mark.parametrize("setup", SETUPS, ids=SETUP_IDS)
@pytest.mark.parametrize("haste", [0.0, 0.5, 1.0])
def test_one_launch_that_failed_on_a_gpu(haste, setup):
    for number in range(1, 31, 3):
        engine_run_bytes = (1 << 60, 0)[number % 2]
        device = SimulatedCudaDevice(
            random.Random(number), haste=haste, engine_run_bytes=engine_run_bytes
        )
        device.cuda.failures[number] = LinkDown()
        driver = Driver(setup, device, check_bytes=False, poison_freed=False)
        with pytest.raises(LinkDown):
            run_schedule(driver, random.Random(5), num_steps=40)
        device.close()
        assert not device.cuda.pinned
