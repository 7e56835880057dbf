# SPDX-License-Identifier: Apache-2.0
"""Copies that the swapper submits, and their order.

test_machine.py checks that the pages hold the right KV.
"""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.fakes.kv.simulated_device import PreparedCopy, SimulatedDevice
from tests.fakes.kv.step_plans import plan_of
from vllm_tiered.devices.base import Copy, Direction, Event
from vllm_tiered.devices.pages import PageBuffer, PageCodec
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.page_pool import Owner
from vllm_tiered.kv.policy import POLICIES
from vllm_tiered.kv.swapper import Swapper


class LoggingDevice(SimulatedDevice):
    """Device that logs each copy when it is submitted and when it is done.

    A log entry is (direction, index of the first page's far region, pages).
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(random.Random(0), haste=0.0)
        self.log: list[tuple[str, int, int]] = []
        self._done: list[tuple[str, int, int]] = []
        self._num_blocks = num_blocks
        self._far_start = 0

    def far_buffer(
        self,
        num_pages: int,
        page_bytes: int,
        verify: str = "off",
        codec: PageCodec | None = None,
    ) -> PageBuffer:
        far = super().far_buffer(num_pages, page_bytes, codec=codec)
        self._far_start = far.data.data_ptr()
        return far

    def submit(self, copy: Copy, after: tuple[Event, ...] = ()) -> Event:
        assert isinstance(copy, PreparedCopy)
        self.log.append(self._entry(copy))
        return super().submit(copy, after)

    def take_log(self) -> list[tuple[str, int, int]]:
        log, self.log = self.log, []
        return log

    def take_done(self) -> list[tuple[str, int, int]]:
        done, self._done = self._done, []
        return done

    def _entry(self, copy: PreparedCopy) -> tuple[str, int, int]:
        far = copy.src if copy.direction is Direction.READ else copy.dst
        page = (far.data.data_ptr() - self._far_start) // far.page_bytes
        return copy.direction.value, page // self._num_blocks, len(copy.src_pages)

    def _copy_pieces(self, copy: PreparedCopy) -> Iterator[None]:
        yield from super()._copy_pieces(copy)
        self._done.append(self._entry(copy))


def make_swapper(*, num_far=3, policy="interleave", near_pages=60, num_blocks=9, **options):
    """Return a swapper of 5 layers, and its device with an empty log."""
    order = POLICIES[policy](5, num_far)
    device = LoggingDevice(num_blocks)
    swapper = Swapper(
        order=order,
        num_blocks=num_blocks,
        near=PageBuffer(torch.zeros((near_pages, 8), dtype=torch.uint8)),
        device=device,
        **options,
    )
    return swapper, device


def compute(swapper):
    for layer in range(5):
        swapper.wait_layer(layer)
        swapper.layer_done(layer)


def test_layers_are_read_as_far_ahead_as_there_are_buffers():
    """All copies are queued at once, and a read waits until its buffer is computed and written."""
    swapper, device = make_swapper(max_buffers=2)
    assert swapper.order.offloaded == (1, 3, 4)
    swapper.begin_step(plan_of(load=[2, 5], store_new=[7]))
    assert device.take_log() == [
        *[("write", layer, 1) for layer in range(3)],
        *[("read", layer, 2) for layer in range(3)],
    ]
    device.run_all()
    assert device.take_done() == [("read", 0, 2), ("read", 1, 2)]
    swapper.wait_layer(0)
    swapper.layer_done(0)
    swapper.wait_layer(1)
    device.run_all()
    assert device.take_done() == []
    swapper.layer_done(1)  # gives its buffer to layer 4
    device.run_all()
    assert device.take_done() == [("write", 0, 1), ("read", 2, 2)]
    for layer in (2, 3, 4):
        swapper.wait_layer(layer)
        swapper.layer_done(layer)
    device.run_all()
    assert device.take_done() == [("write", 1, 1), ("write", 2, 1)]
    swapper.end_step()
    assert device.take_log() == []
    swapper.check_integrity()


def test_with_many_buffers_layers_take_turns():
    """With three or more buffers, a copy thread is woken once for two layers."""
    swapper, device = make_swapper(num_far=4, max_buffers=3)
    assert swapper.order.offloaded == (1, 2, 3, 4)
    swapper.begin_step(plan_of(load=[2]))
    device.run_all()
    assert device.take_done() == [("read", layer, 1) for layer in range(3)]
    for layer in (0, 1):
        swapper.wait_layer(layer)
        swapper.layer_done(layer)
    device.run_all()
    assert device.take_done() == []
    swapper.wait_layer(2)
    swapper.layer_done(2)
    device.run_all()
    assert device.take_done() == [("read", 3, 1)]


def test_on_demand_reads_when_asked():
    swapper, device = make_swapper(policy="on_demand")
    swapper.begin_step(plan_of(load=[2]))
    device.run_all()
    assert device.take_done() == []
    for layer in range(5):
        swapper.wait_layer(layer)
        assert len(device.take_done()) == (layer in swapper.order.offloaded)
        swapper.layer_done(layer)
    swapper.end_step()


def test_filled_partial_blocks_go_out_in_one_copy():
    swapper, device = make_swapper()
    swapper.begin_step(plan_of(alloc_partial=[4, 6]))
    compute(swapper)
    swapper.end_step()
    assert device.take_log() == []
    assert swapper.pool.count(Owner.PARTIAL) == 2 * 3
    swapper.begin_step(plan_of(store_partial=[4, 6]))
    compute(swapper)
    swapper.end_step()
    assert device.take_log() == [("write", 0, 2 * 3)]
    assert swapper.pool.count(Owner.PARTIAL) == 0
    assert swapper.pool.count(Owner.DRAINING) == 2 * 3
    swapper.check_integrity()


def test_released_partial_blocks_are_not_written():
    swapper, device = make_swapper()
    swapper.begin_step(plan_of(alloc_partial=[4]))
    compute(swapper)
    swapper.end_step()
    swapper.begin_step(plan_of(free_partial=[4]))
    swapper.end_step()
    assert device.take_log() == [] and swapper.pool.count(Owner.PARTIAL) == 0
    swapper.check_integrity()


@pytest.mark.parametrize(
    ("near_pages", "max_buffers", "buffers"),
    [(60, 4, 3), (60, 2, 2), (60, 1, 2), (25, 4, 2), (20, 4, 1)],
)
def test_number_of_buffers(near_pages, max_buffers, buffers):
    """Layers, limit and free pages bound the number; one buffer is always opened.

    16 pages are resident.
    """
    swapper, device = make_swapper(near_pages=near_pages, max_buffers=max_buffers)
    swapper.begin_step(plan_of(load=[1, 2, 3, 4]))
    device.run_all()
    assert len(device.take_done()) == buffers
    assert swapper.pool.count(Owner.STAGING) == 4 * buffers
    compute(swapper)
    swapper.end_step()
    swapper.begin_step(plan_of())
    assert swapper.pool.count(Owner.STAGING) == 0


def test_buffers_stay_while_the_blocks_are_the_same():
    """The step reads and writes through the kept buffers as if they were new."""
    swapper, device = make_swapper(max_buffers=2)
    held = []
    for _ in range(3):
        swapper.begin_step(plan_of(load=[2, 5], load_and_store=[7]))
        held.append(np.flatnonzero(swapper.pool._owner == int(Owner.STAGING)).tolist())
        compute(swapper)
        swapper.end_step()
        assert sorted(device.take_log()) == sorted(
            (direction, layer, pages)
            for layer in range(3)
            for direction, pages in (("read", 3), ("write", 1))
        )
        swapper.check_integrity()
    assert held[0] == held[1] == held[2]


@pytest.mark.parametrize(
    "change",
    [
        {"load": [2, 6]},
        {"load": [2, 5, 6]},
        {"load_and_store": [8]},
        {"load_and_store": []},
        {"store_new": [8]},
        {"alloc_partial": [8]},
        {"reserved": [8]},
    ],
    ids=str,
)
def test_buffers_go_when_blocks_change(change):
    swapper, _ = make_swapper(max_buffers=2)
    blocks = {"load": [2, 5], "load_and_store": [7]}
    swapper.begin_step(plan_of(**blocks))
    assert swapper.keeps_buffers(plan_of(**blocks))
    assert not swapper.keeps_buffers(plan_of(**(blocks | change)))


def test_buffers_with_new_blocks_go():
    """A step's new blocks must be read in the next step."""
    swapper, _ = make_swapper(max_buffers=2)
    swapper.begin_step(plan_of(load=[2], store_new=[5]))
    assert not swapper.keeps_buffers(plan_of(load=[2], store_new=[5]))
    assert not swapper.keeps_buffers(plan_of(load=[2]))


def test_more_buffers_are_taken_when_pages_have_drained():
    swapper, _ = make_swapper(near_pages=28, max_buffers=3)
    partial, _ = swapper.pool.allocate(
        6, Owner.PARTIAL
    )  # 16 pages are resident: two buffers of 3 are left
    blocks = {"load": [2, 5, 7]}
    swapper.begin_step(plan_of(**blocks))
    assert swapper.pool.count(Owner.STAGING) == 2 * 3
    compute(swapper)
    swapper.end_step()
    assert swapper.keeps_buffers(plan_of(**blocks))
    swapper.pool.free(partial, Owner.PARTIAL)
    assert not swapper.keeps_buffers(plan_of(**blocks))
    swapper.begin_step(plan_of(**blocks))
    assert swapper.pool.count(Owner.STAGING) == 3 * 3


def test_nothing_is_copied_without_far_layers():
    swapper, device = make_swapper(num_far=0)
    swapper.begin_step(plan_of(load=[1], store_new=[2], alloc_partial=[3]))
    compute(swapper)
    swapper.end_step()
    assert device.take_log() == []
    assert swapper.pool.count(Owner.RESIDENT) == 5 * 8 and swapper.pool.num_free == 20


def test_reserved_blocks_give_back_their_pages_until_they_are_released():
    swapper, _ = make_swapper()
    swapper.begin_step(plan_of(reserved=[3, 8]))
    swapper.end_step()
    assert swapper.pool.count(Owner.RESIDENT) == 2 * 6
    assert (swapper.table.pages[:, [3, 8]] == swapper.table.HOLE).all()
    swapper.begin_step(plan_of(released=[8], reserved=[1]))
    swapper.end_step()
    assert swapper.pool.count(Owner.RESIDENT) == 2 * 6
    swapper.check_integrity()


def test_the_time_that_compute_waits_is_counted():
    swapper, _ = make_swapper()
    swapper.begin_step(plan_of(load=[1]))
    compute(swapper)
    swapper.end_step()
    assert swapper.stall_seconds == pytest.approx(3e-3)  # the simulated device returns 1e-3 each


def test_a_plan_that_does_not_fit_is_refused():
    swapper, _ = make_swapper(near_pages=19)
    with pytest.raises(IntegrityError, match="4 pages asked for STAGING, 3 of 19 available"):
        swapper.begin_step(plan_of(load=[1, 2, 3, 4]))


def test_a_layer_that_was_staged_must_be_computed():
    swapper, _ = make_swapper()
    swapper.begin_step(plan_of(load=[1]))
    with pytest.raises(IntegrityError, match="staged, never computed"):
        swapper.end_step()


def test_a_layer_must_be_waited_for():
    swapper, _ = make_swapper()
    swapper.begin_step(plan_of(load=[1]))
    with pytest.raises(IntegrityError, match=r"layer 1 .* is SWAP_IN, cannot become IN_FAR"):
        swapper.layer_done(1)
