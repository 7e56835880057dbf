# SPDX-License-Identifier: Apache-2.0
"""Deferred compute, which runs after it is submitted: only events order it with copies."""

import random

import pytest

from tests.fakes.kv.deferred_setups import SETUPS
from tests.fakes.kv.driver import Driver, Setup, run_schedule
from tests.fakes.kv.simulated_device import SimulatedDevice
from tests.fakes.kv.worker_model import WorkerModel, WrongKv
from vllm_tiered.devices.base import Direction
from vllm_tiered.kv.swapper import Swapper

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "setup",
    SETUPS,
    ids=[
        "interleave",
        "ahead",
        "small-blocks",
        "staged-partial",
        "adaptive",
        "mixed-partial",
        "on-demand",
        "narrow",
        "readers",
    ],
)
def test_deferred_compute_reads_its_own_kv(setup):
    run_deferred(setup)


def test_reads_into_an_buffer_still_computed_on_are_found(monkeypatch):
    original = Swapper._queue_copies

    def read_at_once(self):
        self._staging.vacated = [()] * self._staging.num_buffers
        original(self)

    monkeypatch.setattr(Swapper, "_queue_copies", read_at_once)
    with pytest.raises(WrongKv):
        run_deferred(SETUPS[0])


def test_a_buffer_that_is_released_before_its_last_reader_is_found(monkeypatch):
    """Layers that read another's KV cache are computed behind it, and the buffer waits for them."""
    read_later, layer_done = WorkerModel._read_later, Swapper.layer_done
    readers = []

    def too_late(self, layer, pages, parts):
        readers.append((self, layer, pages, parts))

    def released(self, layer):
        layer_done(self, layer)
        read_later(*readers.pop())

    monkeypatch.setattr(WorkerModel, "_read_later", too_late)
    monkeypatch.setattr(Swapper, "layer_done", released)
    with pytest.raises(WrongKv):
        run_deferred(SETUPS[-1])


def test_far_memory_is_not_released_while_it_is_read():
    """Layers that return are still being read when the next step has no offloaded layer."""
    for seed in range(60):
        rng = random.Random(seed)
        setup = Setup(
            num_layers=rng.randint(4, 8),
            num_far=3,
            block_tokens=8,
            sure_blocks=rng.randint(4, 12),
            spare_pages=rng.randint(0, 60),
            adaptive=True,
        )
        haste = rng.choice((0.0, 0.2, 0.5, 0.8))
        device = SimulatedDevice(random.Random(seed), haste=haste, defers_compute=True)
        driver = Driver(setup, device, poison_freed=False)
        for _ in range(60):
            if rng.random() < 0.2 and len(driver.requests) < 6:
                driver.add(
                    driver.free_id(rng.randrange(8)),
                    family=0,
                    shared=0,
                    prompt=rng.randint(1, 30),
                    output=rng.randint(1, 40),
                )
            if rng.random() < 0.15:
                driver.aim(rng.randrange(1 << 30))
            driver.step(lambda: rng.choice((1, 1, 1, 1, 1, 1, 1, 8)))  # noqa: B023
        driver.run_out()
        driver.close()


def run_deferred(setup):
    for haste in (0.0, 0.3, 0.7, 1.0):
        for seed in range(8):
            device = SimulatedDevice(random.Random(seed), haste=haste, defers_compute=True)
            driver = Driver(setup, device, poison_freed=False)
            run_schedule(driver, random.Random(seed), num_steps=40)


def test_blocks_of_layers_that_become_far_are_stored_once():
    """This also holds if no layer was far before, and the write ends before the layers are far."""
    setup = Setup(num_layers=5, num_far=3, block_tokens=2, spare_pages=40, adaptive=True)
    driver = Driver(setup, SimulatedDevice(random.Random(0), haste=1.0))
    driver.add("request", family=0, shared=0, prompt=6, output=20)
    driver.step(lambda: 6)  # three full blocks
    driver.aim(3)
    driver.step(lambda: 0)
    driver.worker.device.compute_event().wait()
    driver.step(lambda: 0)
    assert driver.engine.expansion and driver.engine.expansion.level.num_far == 3
    written = driver.worker.device.submitted[Direction.WRITE]
    assert written == 3 * 3 * setup.geometry.page_bytes
    driver.run_out()
    driver.close()
