# SPDX-License-Identifier: Apache-2.0
"""Allocation of draining pages, which a write to the far tier still reads.

Compute and reads run as far as events allow before any write advances. Then the content written
out must still be the computed one. Near memory has no spare page, so every allocated page drains.
"""

import random
from functools import partial

import numpy as np
import pytest
import torch

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fakes.kv.mutations import compute_does_not_wait_for_drains, hand_over_as_if_free
from tests.fakes.kv.simulated_device import SimulatedDevice
from tests.fakes.kv.step_plans import plan_of
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.kv.far_tier import FarTier
from vllm_tiered.kv.near_pages import NearPages
from vllm_tiered.kv.page_pool import Owner, PagePool
from vllm_tiered.kv.policy import interleave
from vllm_tiered.kv.swapper import Swapper

NUM_LAYERS, NUM_BLOCKS, NUM_FAR = 5, 9, 3
NUM_RELEASED = 4
PARTIAL_BLOCKS = (1, 2)
NEAR_PAGES = (NUM_LAYERS - NUM_FAR) * NUM_RELEASED + NUM_FAR * len(PARTIAL_BLOCKS)

PLANS = {
    "released": ({"released": [5, 6]}, Owner.RESIDENT),
    "partial blocks": ({"alloc_partial": [3, 4]}, Owner.PARTIAL),
    "buffers": ({"store_new": [3]}, Owner.STAGING),
    "layers-return": (
        {"store_new": [3, 4], "reserved": [*PARTIAL_BLOCKS], "num_far": 0},
        Owner.RESIDENT,
    ),
}


class Cuda(SimulatedCudaDevice):
    """Fake CUDA device whose writes do not advance before ``run_all``."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), haste=0.0)

    def run_all_but_writes(self) -> None:
        streams = [self.cuda._compute, self._queues[Direction.READ]._stream]
        while ready := [one[0] for one in streams if one and not one[0].is_blocked()]:
            self.cuda._advance(ready[0])

    def run_all(self) -> None:
        self.cuda.run_all()


class Deferred(SimulatedDevice):
    """Deferred-execution fake whose writes do not advance before ``run_all``."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), haste=0.0, defers_compute=True)

    def run_all_but_writes(self) -> None:
        queues = [self._compute, self._queues[Direction.READ]]
        while ready := [one[0] for one in queues if one and one[0].blocker() is None]:
            ready[0].advance()
            self._drop_finished()


class Model:
    """Model whose layers store their own number in every block of a step."""

    def __init__(self, device: Cuda | Deferred) -> None:
        near = PageBuffer(torch.zeros((NEAR_PAGES, 64), dtype=torch.uint8))
        assert near.words is not None
        self.words = near.words
        self.device = device
        self.swapper = Swapper(
            order=interleave(NUM_LAYERS, NUM_FAR),
            num_blocks=NUM_BLOCKS,
            near=near,
            device=device,
            offloadable_layers=interleave(NUM_LAYERS, NUM_FAR).offloaded,
            orders=[interleave(NUM_LAYERS, num_far) for num_far in range(NUM_FAR + 1)],
            released=NUM_RELEASED,
        )

    def step(self, number, block_ids, **plan) -> None:
        swapper = self.swapper
        swapper.begin_step(plan_of(**plan))
        swapper.check_integrity()
        for layer in range(NUM_LAYERS):
            swapper.wait_layer(layer)
            pages = swapper.table.pages[layer, list(block_ids)].astype(np.int64)
            pages = pages[pages != swapper.table.HOLE]
            self.device.compute(partial(self._store, pages, number + layer))
            swapper.layer_done(layer)
            self.device.run_all_but_writes()
        swapper.end_step()
        self.device.run_all_but_writes()

    def _store(self, pages, value) -> None:
        self.words[pages] = value

    def far(self, layer, block_id):
        far_region = self.swapper.far.far_region(layer).words
        assert far_region is not None
        return far_region[block_id]


def run(device, plan):
    """Write out partial blocks in one step, and allocate their draining pages in the next."""
    model = Model(device)
    offloaded = model.swapper.order.offloaded
    model.step(
        100, PARTIAL_BLOCKS, alloc_partial=list(PARTIAL_BLOCKS), store_partial=list(PARTIAL_BLOCKS)
    )
    pool = model.swapper.pool
    assert pool.num_free == 0 and pool.count(Owner.DRAINING) == NUM_FAR * len(PARTIAL_BLOCKS)
    blocks = {*plan.get("released", ()), *plan.get("alloc_partial", ()), *plan.get("store_new", ())}
    model.step(200, sorted(blocks), **plan)
    device.run_all()
    for layer in offloaded:
        for block_id in PARTIAL_BLOCKS:
            assert (model.far(layer, block_id) == 100 + layer).all(), (layer, block_id)
    device.close()


DEVICES = pytest.mark.parametrize("device_class", [Cuda, Deferred])


@DEVICES
@pytest.mark.parametrize("case", PLANS)
def test_stored_blocks_equal_the_computed_ones(case, device_class, monkeypatch):
    plan, owner = PLANS[case]
    taken = []
    allocate = PagePool.allocate

    def noted(self, num_pages, owner):
        pages, after = allocate(self, num_pages, owner)
        taken.extend([owner] * len(after))
        return pages, after

    monkeypatch.setattr(PagePool, "allocate", noted)
    run(device_class(), plan)
    assert owner in taken


@DEVICES
@pytest.mark.parametrize("case", ["released", "partial blocks", "layers-return"])
def test_without_the_order_it_is_not(case, device_class, monkeypatch):
    monkeypatch.setattr(PagePool, "allocate", hand_over_as_if_free(PagePool.allocate))
    with pytest.raises(AssertionError):
        run(device_class(), PLANS[case][0])


@DEVICES
@pytest.mark.parametrize(
    ("case", "owner", "name", "broken"),
    [
        ("released", NearPages, "_allocate", compute_does_not_wait_for_drains(None)),
        ("partial blocks", NearPages, "_allocate", compute_does_not_wait_for_drains(None)),
        ("layers-return", FarTier, "wait", lambda self, event: 0.0),
    ],
    ids=["released", "partial blocks", "layers-return"],
)
def test_compute_that_does_not_wait_is_found(case, owner, name, broken, device_class, monkeypatch):
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        run(device_class(), PLANS[case][0])


@DEVICES
@pytest.mark.parametrize("is_handed_over", [True, False])
def test_buffers_wait_for_their_own_pages_too(is_handed_over, device_class, monkeypatch):
    """Buffers' reads wait for their own pages' writes, even without a wait for all writes."""
    original = Swapper._queue_copies

    def without_earlier_writes(self):
        self._written_before = ()
        original(self)

    monkeypatch.setattr(Swapper, "_queue_copies", without_earlier_writes)
    if is_handed_over:
        run(device_class(), PLANS["buffers"][0])
        return
    monkeypatch.setattr(PagePool, "allocate", hand_over_as_if_free(PagePool.allocate))
    with pytest.raises(AssertionError):
        run(device_class(), PLANS["buffers"][0])
