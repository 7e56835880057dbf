# SPDX-License-Identifier: Apache-2.0
"""Compute that runs after it is submitted, as on a GPU: only events order it with copies."""

import random

import pytest

from tests.kv.driver import Driver, Setup, run_schedule
from tests.kv.simulated_device import SimulatedDevice
from tests.kv.worker_model import WrongKv
from vllm_tiered.kv.swapper import Swapper

SETUPS = (
    Setup(num_layers=5, far_layers=4, sure_blocks=5, spare_pages=2),
    Setup(num_layers=4, far_layers=3, policy="fifo", sure_blocks=4, spare_pages=6, ahead=True),
    Setup(num_layers=6, far_layers=4, block_tokens=1, spare_pages=9, ahead=True),
    Setup(num_layers=6, far_layers=5, block_tokens=3, spare_pages=4, tails_stay=False),
    Setup(num_layers=6, far_layers=5, block_tokens=3, spare_pages=4, adaptive=True),
    Setup(num_layers=6, far_layers=5, policy="on_demand", spare_pages=2),
)


@pytest.mark.parametrize(
    "setup",
    SETUPS,
    ids=["interleave", "fifo", "small-blocks", "staged-tails", "adaptive", "on-demand"],
)
def test_late_compute_reads_its_own_kv(setup):
    run_late(setup)


def test_reads_into_an_area_still_computed_on_are_found(monkeypatch):
    original = Swapper._queue_copies

    def read_at_once(self):
        self._staging.vacated = [()] * self._staging.num_areas
        original(self)

    monkeypatch.setattr(Swapper, "_queue_copies", read_at_once)
    with pytest.raises(WrongKv):
        run_late(SETUPS[0])


def run_late(setup):
    for haste in (0.0, 0.3, 0.7, 1.0):
        for seed in range(8):
            device = SimulatedDevice(random.Random(seed), haste=haste, late_compute=True)
            driver = Driver(setup, device, poison_freed=False)
            run_schedule(driver, random.Random(seed), num_steps=40)
