# SPDX-License-Identifier: Apache-2.0
"""A copy that fails stops the engine with its error; attention never reads what is not there."""

import random

import pytest

from tests.kv.driver import Driver, Setup, run_schedule
from vllm_tiered.tiers.base import Direction
from vllm_tiered.tiers.cpu import CopyThread, CpuDevice

SETUPS = (
    Setup(num_layers=5, far_layers=3, spare_pages=12),
    Setup(num_layers=5, far_layers=3, spare_pages=12, moves_tails=True),
    Setup(num_layers=5, far_layers=4, spare_pages=4, moves_tails=True, adaptive=True),
)


class LinkDown(OSError):
    pass


def failing_device(direction: Direction, number: int) -> CpuDevice:
    """The ``number``-th copy of ``direction`` fails; all others are good."""

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


@pytest.mark.parametrize("setup", SETUPS, ids=["fixed", "staged-tails", "adaptive"])
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
