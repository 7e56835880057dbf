# SPDX-License-Identifier: Apache-2.0
"""What the swapper submits, and when. That the pages hold the right KV is test_machine.py's."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.kv.simulated_device import PreparedCopy, SimulatedDevice
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.page_pool import Owner
from vllm_tiered.kv.policy import POLICIES
from vllm_tiered.kv.step_plan import StepPlan
from vllm_tiered.kv.swapper import Swapper
from vllm_tiered.tiers.base import Copy, Direction, Event, PageBuffer


class LoggingDevice(SimulatedDevice):
    """Notes each copy as it is submitted: direction, far layer of the first page, pages."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(random.Random(0), haste=0.0)
        self.log: list[tuple[str, int, int]] = []
        self._num_blocks = num_blocks
        self._far_start = 0

    def far_buffer(self, num_pages: int, page_bytes: int, verify: str = "off") -> PageBuffer:
        far = super().far_buffer(num_pages, page_bytes)
        self._far_start = far.data.data_ptr()
        return far

    def submit(self, copy: Copy, after: tuple[Event, ...] = ()) -> Event:
        assert isinstance(copy, PreparedCopy)
        far = copy.src if copy.direction is Direction.READ else copy.dst
        page = (far.data.data_ptr() - self._far_start) // far.page_bytes
        self.log.append((copy.direction.value, page // self._num_blocks, len(copy.src_pages)))
        return super().submit(copy, after)

    def take_log(self) -> list[tuple[str, int, int]]:
        log, self.log = self.log, []
        return log


def make_swapper(*, far_layers=3, policy="interleave", near_pages=60, num_blocks=9, **options):
    """A swapper of 5 layers, whose log starts empty."""
    order = POLICIES[policy](5, far_layers)
    device = LoggingDevice(num_blocks)
    swapper = Swapper(
        order=order,
        num_blocks=num_blocks,
        near=PageBuffer(torch.zeros((near_pages, 8), dtype=torch.uint8)),
        device=device,
        **options,
    )
    return swapper, device


def plan_of(**classes):
    arrays: dict[str, Any] = {name: np.array(ids, dtype=np.int64) for name, ids in classes.items()}
    return dataclasses.replace(StepPlan(), **arrays)


def compute(swapper):
    for layer in range(5):
        swapper.wait_layer(layer)
        swapper.layer_done(layer)


def test_layers_are_read_as_far_ahead_as_there_are_areas():
    swapper, device = make_swapper(max_areas=2)
    assert swapper.order.rotating == (1, 3, 4)
    swapper.begin_step(plan_of(read=[2, 5], ring=[7]))
    assert device.take_log() == [("read", 0, 2), ("read", 1, 2)]
    swapper.wait_layer(0)
    swapper.layer_done(0)
    swapper.wait_layer(1)
    assert device.take_log() == []
    swapper.layer_done(1)  # gives its area to layer 4
    assert device.take_log() == [("write", 0, 1), ("read", 2, 2)]
    for layer in (2, 3, 4):
        swapper.wait_layer(layer)
        swapper.layer_done(layer)
    assert device.take_log() == [("write", 1, 1), ("write", 2, 1)]
    swapper.end_step()
    assert device.take_log() == []
    swapper.check_integrity()


def test_filled_tails_go_out_in_one_copy():
    swapper, device = make_swapper()
    swapper.begin_step(plan_of(tail_acquire=[4, 6]))
    compute(swapper)
    swapper.end_step()
    assert device.take_log() == []
    assert swapper.pool.count(Owner.TAIL) == 2 * 3
    swapper.begin_step(plan_of(tail_flush=[4, 6]))
    compute(swapper)
    swapper.end_step()
    assert device.take_log() == [("write", 0, 2 * 3)]
    assert swapper.pool.count(Owner.TAIL) == 0
    assert swapper.pool.count(Owner.DRAINING) == 2 * 3
    swapper.check_integrity()


def test_released_tails_are_not_written():
    swapper, device = make_swapper()
    swapper.begin_step(plan_of(tail_acquire=[4]))
    compute(swapper)
    swapper.end_step()
    swapper.begin_step(plan_of(tail_release=[4]))
    swapper.end_step()
    assert device.take_log() == [] and swapper.pool.count(Owner.TAIL) == 0
    swapper.check_integrity()


@pytest.mark.parametrize(
    ("near_pages", "max_areas", "areas"),
    [(60, 4, 3), (60, 2, 2), (60, 1, 2), (25, 4, 2), (20, 4, 1)],
)
def test_number_of_areas(near_pages, max_areas, areas):
    """As many as layers, limit and free pages give, and one if it must be. 16 pages are pinned."""
    swapper, device = make_swapper(near_pages=near_pages, max_areas=max_areas)
    swapper.begin_step(plan_of(read=[1, 2, 3, 4]))
    assert len(device.take_log()) == areas
    assert swapper.pool.count(Owner.STAGING) == 4 * areas
    compute(swapper)
    swapper.end_step()
    assert swapper.pool.count(Owner.STAGING) == 0


def test_fifo_has_the_areas_of_all_near_layers():
    swapper, device = make_swapper(policy="fifo", far_layers=3)
    swapper.begin_step(plan_of(read=[1, 2]))
    assert swapper.order.areas == 4
    assert device.take_log() == [("read", layer, 2) for layer in range(4)]
    compute(swapper)
    assert device.take_log() == [("read", 4, 2)]
    swapper.end_step()


def test_nothing_rotates_without_far_layers():
    swapper, device = make_swapper(far_layers=0)
    swapper.begin_step(plan_of(read=[1], ring=[2], tail_acquire=[3]))
    compute(swapper)
    swapper.end_step()
    assert device.take_log() == []
    assert swapper.pool.count(Owner.PINNED) == 5 * 8 and swapper.pool.num_free == 20


def test_withheld_blocks_give_their_pages_until_they_are_granted():
    swapper, _ = make_swapper()
    swapper.begin_step(plan_of(withheld=[3, 8]))
    swapper.end_step()
    assert swapper.pool.count(Owner.PINNED) == 2 * 6
    assert (swapper.table.pages[:, [3, 8]] == swapper.table.HOLE).all()
    swapper.begin_step(plan_of(granted=[8], withheld=[1]))
    swapper.end_step()
    assert swapper.pool.count(Owner.PINNED) == 2 * 6
    swapper.check_integrity()


def test_the_time_that_compute_waits_is_counted():
    swapper, _ = make_swapper()
    swapper.begin_step(plan_of(read=[1]))
    compute(swapper)
    swapper.end_step()
    assert swapper.stall_seconds == pytest.approx(3e-3)  # the simulation says 1e-3 for each


def test_a_plan_that_does_not_fit_is_refused():
    swapper, _ = make_swapper(near_pages=19)
    with pytest.raises(IntegrityError, match="4 pages asked for STAGING, 3 of 19 free"):
        swapper.begin_step(plan_of(read=[1, 2, 3, 4]))


def test_a_layer_that_was_staged_must_be_computed():
    swapper, _ = make_swapper()
    swapper.begin_step(plan_of(read=[1]))
    with pytest.raises(IntegrityError, match="never computed"):
        swapper.end_step()


def test_a_layer_must_be_waited_for():
    swapper, _ = make_swapper()
    swapper.begin_step(plan_of(read=[1]))
    with pytest.raises(IntegrityError, match=r"layer 1 .* is SWAP_IN, cannot become IN_FAR"):
        swapper.layer_done(1)
