# SPDX-License-Identifier: Apache-2.0
"""Weight buffers: each sublayer reads its own weights, however late copies and compute are."""

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
from vllm_tiered.weights.buffers import WeightBufferPool
from vllm_tiered.weights.layout import BUFFER_ALIGNMENT, assign_extents, moved_each_step


class Model:
    """Model whose pages hold the number of their sublayer, which modules check when they compute.

    Args:
        num_pages: pages of each sublayer: far pages, or a pair of far and stored pages.
        prefetch_depth: number of sublayers in transfer while one computes.
        device: device that computes late; None for a simulated device.
    """

    def __init__(
        self, num_pages, *, prefetch_depth=1, seed=0, haste=0.5, defers_compute=True, device=None
    ):
        self.device = device or SimulatedDevice(
            random.Random(seed), haste=haste, defers_compute=defers_compute
        )
        pairs = [(count, 0) if isinstance(count, int) else count for count in num_pages]
        sizes = [(far * BUFFER_ALIGNMENT, stored * BUFFER_ALIGNMENT) for far, stored in pairs]
        self.extents = assign_extents(sizes, prefetch_depth)
        far, stored = (
            PageBuffer(torch.zeros((sum(counts), BUFFER_ALIGNMENT), dtype=torch.uint8))
            for counts in zip(*pairs, strict=True)
        )
        num_buffer_pages = max(e.buffer_page + e.num_pages for e in self.extents)
        near = PageBuffer(torch.zeros((num_buffer_pages, BUFFER_ALIGNMENT), dtype=torch.uint8))
        assert far.words is not None and near.words is not None and stored.words is not None
        for position, extent in enumerate(self.extents):
            far.words[extent.far_page : extent.far_page + extent.num_far_pages] = position
            stored.words[extent.stored_page : extent.stored_page + extent.num_stored_pages] = (
                position
            )
        self.memory = near.words
        self.buffer_pool = WeightBufferPool(
            device=self.device,
            far=far,
            stored=stored,
            near=near,
            extents=self.extents,
            prefetch_depth=prefetch_depth,
        )
        self.wrong: list[tuple[int, int]] = []

    def module(self, position, *, between=None):
        """Run one module of a sublayer; ``between`` is work that a compiler put into its middle."""
        self.buffer_pool.acquire(position)
        if between is not None:
            between()
        self.device.compute(lambda: self.look(position))
        self.buffer_pool.release(position)
        self.buffer_pool.check_integrity()

    def look(self, position):
        extent = self.extents[position]
        pages = self.memory[extent.buffer_page : extent.buffer_page + extent.num_pages]
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
    prefetch_depth=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    haste=st.sampled_from([0.0, 0.3, 0.9]),
    defers_compute=st.booleans(),
)
def test_each_sublayer_computes_with_its_own_weights(
    num_pages, prefetch_depth, seed, haste, defers_compute
):
    model = Model(
        num_pages,
        prefetch_depth=prefetch_depth,
        seed=seed,
        haste=haste,
        defers_compute=defers_compute,
    )
    model.buffer_pool.start()
    for _ in range(3):
        model.step()
    model.device.close()
    assert not model.wrong
    assert model.buffer_pool.num_misses == 0, "all were queued before compute came to them"


@settings(max_examples=60, deadline=None)
@given(
    num_pages=st.lists(PAGES, min_size=1, max_size=8),
    prefetch_depth=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_any_order_gives_right_weights(num_pages, prefetch_depth, seed, data):
    model = Model(num_pages, prefetch_depth=prefetch_depth, seed=seed)
    order = data.draw(st.lists(st.integers(0, len(num_pages) - 1), max_size=20))
    for position in order:
        model.module(position)
    model.device.close()
    assert not model.wrong


@pytest.mark.parametrize("haste", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("engine_run_bytes", [1, 1 << 60], ids=["engines", "kernel"])
@pytest.mark.parametrize("prefetch_depth", [1, 2, 3])
def test_each_sublayer_computes_with_its_own_weights_on_a_gpu(
    prefetch_depth, engine_run_bytes, haste
):
    for seed in range(5):
        device = SimulatedCudaDevice(
            random.Random(seed), haste=haste, engine_run_bytes=engine_run_bytes, checks_memory=False
        )
        model = Model(
            [2, (1, 2), 3, (0, 1), 2, 3, 1, (2, 1), 2, 3],
            prefetch_depth=prefetch_depth,
            device=device,
        )
        model.buffer_pool.start()
        for _ in range(3):
            model.step()
        model.device.close()
        assert not model.wrong and model.buffer_pool.num_misses == 0


@pytest.mark.parametrize(("prefetch_depth", "next_pages"), [(1, 2), (2, 2 + 3), (3, 2 + 3 + 2)])
def test_a_step_moves_each_sublayer_once(prefetch_depth, next_pages):
    model = Model([2, 3] * 4, prefetch_depth=prefetch_depth)
    model.buffer_pool.start()
    for _ in range(5):
        model.step()
    model.device.close()
    # When a step ends, the first sublayers of the next step are in transfer.
    num_pages = 5 * 20 + next_pages
    assert model.device.use(Direction.READ).num_bytes == num_pages * BUFFER_ALIGNMENT


def test_weights_with_a_buffer_of_their_own_are_loaded_once():
    model = Model([2, 3] * 5, prefetch_depth=3)  # rounds of 4 and 6
    model.buffer_pool.start()
    for _ in range(5):
        model.step()
    model.device.close()
    num_pages = (2 + 3) + 5 * 20 + (2 + 3 + 2)
    assert model.device.use(Direction.READ).num_bytes == num_pages * BUFFER_ALIGNMENT
    assert moved_each_step(10, 3) == [True] * 8 + [False] * 2


@pytest.mark.parametrize("prefetch_depth", [1, 2, 3])
def test_so_many_are_on_their_way_while_one_computes(prefetch_depth):
    model = Model([1] * 12, prefetch_depth=prefetch_depth)
    model.buffer_pool.start()
    for position in range(12):
        model.buffer_pool.acquire(position)
        queued = {buffer.holds for buffer in model.buffer_pool._buffers}
        assert queued == {(position + further) % 12 for further in range(prefetch_depth + 1)}
        model.buffer_pool.release(position)
    model.device.close()


@pytest.mark.parametrize(
    ("num_pages", "prefetch_depth"), [([3], 1), ([3, 2], 1), ([3, 2, 3], 1), ([1, 2, 3, 4], 3)]
)
def test_weights_that_fit_the_buffers_are_read_once(num_pages, prefetch_depth):
    model = Model(num_pages, prefetch_depth=prefetch_depth)
    model.buffer_pool.start()
    for _ in range(5):
        model.step()
    model.device.close()
    assert model.device.use(Direction.READ).num_bytes == sum(num_pages) * BUFFER_ALIGNMENT


def test_a_buffer_in_use_is_not_filled_however_a_compiler_orders_modules():
    """The FFN's first module may begin before attention's last module ends."""
    for seed in range(30):
        model = Model(
            [2] * 12,
            prefetch_depth=1 + seed % 3,
            seed=seed,
            haste=0.9,
            defers_compute=bool(seed % 2),
        )
        model.buffer_pool.start()
        for _ in range(3):
            for position in range(0, 12, 2):
                model.module(position)
                model.module(position, between=partial(model.module, position + 1))
                model.module(position + 1)
        model.device.close()
        assert not model.wrong


def test_overlapping_layers_are_an_error_not_wrong_weights():
    model = Model([2, 2, 2, 2])
    model.buffer_pool.start()
    with pytest.raises(IntegrityError, match="this model's layers overlap"):
        model.module(0, between=lambda: model.module(2))


def test_leaving_without_entering_is_found():
    model = Model([2, 2])
    model.buffer_pool.start()
    with pytest.raises(IntegrityError, match="was not computing"):
        model.buffer_pool.release(0)


@pytest.mark.parametrize("broken", ["fills a buffer in use", "does not wait"])
@pytest.mark.parametrize("prefetch_depth", [1, 3])
def test_the_model_sees_wrong_weights(prefetch_depth, broken, monkeypatch):
    """The fake model detects wrong weights, on which the other tests rely."""
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
        model = Model([2] * 8, prefetch_depth=prefetch_depth, seed=seed, haste=0.6)
        model.buffer_pool.start()
        for _ in range(3):
            model.step()
        model.device.close()
        wrong += model.wrong
    assert wrong
