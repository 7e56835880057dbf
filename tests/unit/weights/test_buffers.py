# SPDX-License-Identifier: Apache-2.0
"""Sublayers pass through slots: each finds its own weights, however late copies and compute are."""

import random
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fakes.kv.simulated_device import SimulatedDevice
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import IntegrityError
from vllm_tiered.weights.buffers import WeightRing, lay_out
from vllm_tiered.weights.placement import SLOT_ALIGNMENT, moves


class Model:
    """Sublayers whose every page holds their number; modules look at it when they compute.

    Args:
        num_pages: of each sublayer, far ones, or far and stored ones.
        ahead: how many are on their way while one computes.
        device: which computes late; a simulated one if None.
    """

    def __init__(self, num_pages, *, ahead=1, seed=0, haste=0.5, late_compute=True, device=None):
        self.device = device or SimulatedDevice(
            random.Random(seed), haste=haste, late_compute=late_compute
        )
        pairs = [(count, 0) if isinstance(count, int) else count for count in num_pages]
        sizes = [(far * SLOT_ALIGNMENT, stored * SLOT_ALIGNMENT) for far, stored in pairs]
        self.extents = lay_out(sizes, ahead)
        far, stored = (
            PageBuffer(torch.zeros((sum(counts), SLOT_ALIGNMENT), dtype=torch.uint8))
            for counts in zip(*pairs, strict=True)
        )
        slot_pages = max(e.slot_page + e.num_pages for e in self.extents)
        near = PageBuffer(torch.zeros((slot_pages, SLOT_ALIGNMENT), dtype=torch.uint8))
        assert far.words is not None and near.words is not None and stored.words is not None
        for position, extent in enumerate(self.extents):
            far.words[extent.far_page : extent.far_page + extent.num_far] = position
            stored.words[extent.stored_page : extent.stored_page + extent.num_stored] = position
        self.slots = near.words
        self.ring = WeightRing(
            device=self.device,
            far=far,
            stored=stored,
            near=near,
            extents=self.extents,
            ahead=ahead,
        )
        self.wrong: list[tuple[int, int]] = []

    def module(self, position, *, between=None):
        """One module of a sublayer; ``between`` is what a compiler put into its middle."""
        self.ring.enter(position)
        if between is not None:
            between()
        self.device.compute(lambda: self.look(position))
        self.ring.leave(position)
        self.ring.check_integrity()

    def look(self, position):
        extent = self.extents[position]
        pages = self.slots[extent.slot_page : extent.slot_page + extent.num_pages]
        if not (pages == position).all():
            self.wrong.append((position, int(np.unique(pages)[0])))

    def step(self, modules_per_sublayer=2):
        for position in range(len(self.extents)):
            for _ in range(modules_per_sublayer):
                self.module(position)


PAGES = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any)


@settings(max_examples=60, deadline=None)
@given(
    num_pages=st.lists(PAGES, min_size=1, max_size=9),
    ahead=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    haste=st.sampled_from([0.0, 0.3, 0.9]),
    late_compute=st.booleans(),
)
def test_each_sublayer_computes_with_its_own_weights(num_pages, ahead, seed, haste, late_compute):
    model = Model(num_pages, ahead=ahead, seed=seed, haste=haste, late_compute=late_compute)
    model.ring.start()
    for _ in range(3):
        model.step()
    model.device.close()
    assert not model.wrong
    assert model.ring.num_misses == 0, "all were queued before compute came to them"


@settings(max_examples=60, deadline=None)
@given(
    num_pages=st.lists(PAGES, min_size=1, max_size=8),
    ahead=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_any_order_gives_right_weights(num_pages, ahead, seed, data):
    model = Model(num_pages, ahead=ahead, seed=seed)
    order = data.draw(st.lists(st.integers(0, len(num_pages) - 1), max_size=20))
    for position in order:
        model.module(position)
    model.device.close()
    assert not model.wrong


@pytest.mark.parametrize("haste", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("engine_run_bytes", [1, 1 << 60], ids=["engines", "kernel"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_each_sublayer_computes_with_its_own_weights_on_a_gpu(ahead, engine_run_bytes, haste):
    for seed in range(5):
        device = SimulatedCudaDevice(
            random.Random(seed), haste=haste, engine_run_bytes=engine_run_bytes, checks_memory=False
        )
        model = Model([2, (1, 2), 3, (0, 1), 2, 3, 1, (2, 1), 2, 3], ahead=ahead, device=device)
        model.ring.start()
        for _ in range(3):
            model.step()
        model.device.close()
        assert not model.wrong and model.ring.num_misses == 0


@pytest.mark.parametrize(("ahead", "next_pages"), [(1, 2), (2, 2 + 3), (3, 2 + 3 + 2)])
def test_a_step_moves_each_sublayer_once(ahead, next_pages):
    model = Model([2, 3] * 4, ahead=ahead)
    model.ring.start()
    for _ in range(5):
        model.step()
    model.device.close()
    # The next step's first sublayers are on their way when a step ends.
    num_pages = 5 * 20 + next_pages
    assert model.device.use(Direction.READ).num_bytes == num_pages * SLOT_ALIGNMENT


def test_what_has_a_slot_for_itself_in_a_longer_round_is_moved_once():
    model = Model([2, 3] * 5, ahead=3)  # rounds of 4 and 6
    model.ring.start()
    for _ in range(5):
        model.step()
    model.device.close()
    num_pages = (2 + 3) + 5 * 20 + (2 + 3 + 2)
    assert model.device.use(Direction.READ).num_bytes == num_pages * SLOT_ALIGNMENT
    assert moves(10, 3) == [True] * 8 + [False] * 2


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_so_many_are_on_their_way_while_one_computes(ahead):
    model = Model([1] * 12, ahead=ahead)
    model.ring.start()
    for position in range(12):
        model.ring.enter(position)
        queued = {slot.resident for slot in model.ring._slots}
        assert queued == {(position + further) % 12 for further in range(ahead + 1)}
        model.ring.leave(position)
    model.device.close()


@pytest.mark.parametrize(
    ("num_pages", "ahead"), [([3], 1), ([3, 2], 1), ([3, 2, 3], 1), ([1, 2, 3, 4], 3)]
)
def test_what_fits_the_slots_is_read_once(num_pages, ahead):
    model = Model(num_pages, ahead=ahead)
    model.ring.start()
    for _ in range(5):
        model.step()
    model.device.close()
    assert model.device.use(Direction.READ).num_bytes == sum(num_pages) * SLOT_ALIGNMENT


def test_a_slot_in_use_is_not_filled_however_a_compiler_orders_modules():
    """The FFN's first module may begin between the beginning and the end of attention's last."""
    for seed in range(30):
        model = Model(
            [2] * 12, ahead=1 + seed % 3, seed=seed, haste=0.9, late_compute=bool(seed % 2)
        )
        model.ring.start()
        for _ in range(3):
            for position in range(0, 12, 2):
                model.module(position)
                model.module(position, between=partial(model.module, position + 1))
                model.module(position + 1)
        model.device.close()
        assert not model.wrong


def test_overlapping_layers_are_an_error_not_wrong_weights():
    model = Model([2, 2, 2, 2])
    model.ring.start()
    with pytest.raises(IntegrityError, match="this model's layers overlap"):
        model.module(0, between=lambda: model.module(2))


def test_leaving_without_entering_is_found():
    model = Model([2, 2])
    model.ring.start()
    with pytest.raises(IntegrityError, match="was not computing"):
        model.ring.leave(0)


@pytest.mark.parametrize("broken", ["fills a slot in use", "does not wait"])
@pytest.mark.parametrize("ahead", [1, 3])
def test_the_model_sees_wrong_weights(ahead, broken, monkeypatch):
    """What the other tests rely on."""
    if broken == "does not wait":
        monkeypatch.setattr(SimulatedDevice, "wait", lambda self, event: 0.0)
    else:
        monkeypatch.setattr(
            SimulatedDevice,
            "compute_event",
            lambda self: self._enqueue(self._queues[Direction.WRITE], (), iter(())),
        )
    wrong = []
    for seed in range(10):
        model = Model([2] * 8, ahead=ahead, seed=seed, haste=0.6)
        model.ring.start()
        for _ in range(3):
            model.step()
        model.device.close()
        wrong += model.wrong
    assert wrong
