# SPDX-License-Identifier: Apache-2.0
"""Kept blocks: what a plan loads, writes and gives up with so many near pages."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.fakes.kv.driver import Setup, run_schedule, simulated
from tests.fakes.kv.mutations import Mutation, mutation_id
from tests.fakes.kv.step_plans import plan_of
from tests.fakes.kv.worker_model import WrongKv
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.kept_blocks import KeptBlocks
from vllm_tiered.kv.layout import KvGeometry
from vllm_tiered.kv.step_plan import NO_BLOCKS

RELEASED = 10


def geometry(spare_pages: int, *, resident: bool = True) -> KvGeometry:
    """Sizes of 5 layers, 4 of them offloaded; a block that is kept takes 4 spare pages."""
    return KvGeometry(
        num_layers=5,
        num_resident=1,
        num_staging_buffers=2,
        page_bytes=8,
        block_tokens=4,
        near_pages=RELEASED + spare_pages,
        partial_blocks_resident=resident,
    )


@pytest.fixture
def kept() -> KeptBlocks:
    return KeptBlocks(num_blocks=20)


def ids(block_ids):
    return np.array(block_ids, dtype=np.int64)


def apply(kept, sizes, *, held=(), dropped=(), **classes):
    plan = kept.apply(plan_of(**classes), sizes, RELEASED, lambda: ids(held), ids(dropped))
    fields = ["load", "store_new", "store_partial", "alloc_partial", "free_partial"]
    fields += ["evict_partial", "keep"]
    return {name: found for name in fields if (found := getattr(plan, name).tolist())}


def test_a_block_that_fills_up_is_kept(kept):
    sizes = geometry(40)
    assert apply(kept, sizes, alloc_partial=[3]) == {"alloc_partial": [3]}
    assert apply(kept, sizes, store_partial=[3]) == {"keep": [3]}
    assert apply(kept, sizes, load=[3], alloc_partial=[4]) == {"alloc_partial": [4]}


def test_a_block_of_a_prompt_is_kept_if_there_are_pages_for_it(kept):
    # Four new blocks in two buffers take 8 pages. A kept one takes 4 and gives back 2.
    found = apply(kept, geometry(8 + 5), store_new=[1, 2, 3, 4])
    assert found == {"store_new": [3, 4], "alloc_partial": [1, 2], "keep": [1, 2]}
    assert apply(kept, geometry(8 + 5), load=[1, 2, 3, 4]) == {"load": [3, 4]}


def test_unused_blocks_leave_first_and_then_the_oldest(kept):
    apply(kept, geometry(100), store_new=[1, 2, 3, 4, 5])
    assert kept.block_ids == [1, 2, 3, 4, 5]
    # 5 kept blocks have 20 pages. One that the step does not use gives 4, a used one 4 - 2.
    assert apply(kept, geometry(20), load=[1, 2, 3, 5], alloc_partial=[6]) == {
        "evict_partial": [4],
        "alloc_partial": [6],
    }
    assert apply(kept, geometry(20), load=[1, 2, 3, 5], alloc_partial=[7]) == {
        "evict_partial": [1, 2],
        "load": [1, 2],
        "alloc_partial": [7],
    }


def test_blocks_that_requests_hold_stay_longer_than_those_that_only_the_cache_knows(kept):
    apply(kept, geometry(100), store_new=[1, 2, 3])
    # The step leaves out the request of block 1. There are 4 pages too few, then another 4.
    found = apply(kept, geometry(12), held=[1, 2], load=[2], alloc_partial=[4])
    assert found == {"evict_partial": [3], "alloc_partial": [4]}
    found = apply(kept, geometry(12), held=[1, 2], load=[2], alloc_partial=[5])
    assert found == {"evict_partial": [1], "alloc_partial": [5]}


def test_a_prompt_takes_the_pages_of_blocks_that_no_request_holds(kept):
    apply(kept, geometry(100), store_new=[1, 2, 3])
    # The 12 pages are all in use. Two new blocks take 8, and no buffer.
    found = apply(kept, geometry(12), held=[1], load=[1], store_new=[4, 5])
    assert found == {"evict_partial": [2, 3], "alloc_partial": [4, 5], "keep": [4, 5]}
    # Those that requests hold do not give way: 4 pages for the buffers are missing.
    found = apply(kept, geometry(12), held=[1, 4, 5], load=[1, 4, 5], store_new=[6, 7])
    assert found == {"evict_partial": [1, 4], "load": [1, 4], "store_new": [6, 7]}


def test_a_step_evicts_nothing_that_it_fills(kept):
    apply(kept, geometry(8), alloc_partial=[1, 2])
    found = apply(kept, geometry(8), store_partial=[1, 2], alloc_partial=[3])
    assert found == {"alloc_partial": [3], "keep": [1, 2]}
    found = apply(kept, geometry(8), load=[1, 2])
    assert found == {"evict_partial": [1, 2], "load": [1, 2]}


def test_a_block_with_other_content_is_not_kept(kept):
    apply(kept, geometry(100), store_new=[1, 2, 3, 4])
    assert apply(kept, geometry(100), alloc_partial=[1], reserved=[2]) == {
        "alloc_partial": [1],
        "free_partial": [1, 2],
    }
    assert apply(kept, geometry(100), store_new=[3]) == {
        "alloc_partial": [3],
        "free_partial": [3],
        "keep": [3],
    }
    assert kept.block_ids == [4, 3]


def test_what_no_request_needs_is_freed_without_a_write(kept):
    apply(kept, geometry(100), store_new=[1, 2])
    assert apply(kept, geometry(100), dropped=[2, 9]) == {"free_partial": [2]}
    assert kept.block_ids == [1]


def test_no_block_is_kept_while_partial_blocks_are_far(kept):
    apply(kept, geometry(100), store_new=[1, 2])
    far = geometry(100, resident=False)
    found = apply(kept, far, load=[1, 2], store_new=[3])
    assert found == {"evict_partial": [1, 2], "load": [1, 2], "store_new": [3]}
    assert kept.block_ids == []


def test_an_unchanged_step_loads_the_same_array(kept):
    """By it the workers see that their buffers hold the step's blocks."""
    apply(kept, geometry(10), store_new=[1, 2, 3, 4])
    plan = plan_of(load=[1, 2, 3, 4])
    held = plan.load
    first = kept.apply(plan, geometry(10), RELEASED, lambda: held)
    second = kept.apply(plan_of(load=[1, 2, 3, 4]), geometry(10), RELEASED, lambda: held)
    assert second.load is first.load
    assert kept.apply(plan, geometry(10), RELEASED, lambda: held).load is first.load
    assert len(first.load) > 0


SETUPS = (
    Setup(num_layers=5, num_far=4, sure_blocks=5, spare_pages=16, keeps_blocks=True),
    Setup(
        num_layers=5,
        num_far=4,
        sure_blocks=5,
        spare_pages=20,
        unused_blocks=2,
        keeps_blocks=True,
        has_cache=False,
        ahead=True,
    ),
    Setup(num_layers=4, num_far=3, sure_blocks=4, spare_pages=9, keeps_blocks=True, adaptive=True),
    Setup(
        num_layers=6,
        num_far=5,
        block_tokens=3,
        sure_blocks=4,
        spare_pages=9,
        keeps_blocks=True,
        adaptive=True,
        ahead=True,
        offloads_partial_blocks=True,
    ),
    Setup(num_layers=4, num_far=3, sure_blocks=4, spare_pages=12, spare_slots=8, keeps_blocks=True),
    Setup(
        num_layers=3, num_far=2, sure_blocks=4, spare_pages=9, window_tokens=3, keeps_blocks=True
    ),
    Setup(num_layers=5, num_far=4, sure_blocks=5, spare_pages=20, num_drafts=3, keeps_blocks=True),
)


def run_all():
    drivers = []
    for seed in range(4):
        for setup in SETUPS:
            drivers.append(simulated(setup, seed, haste=(0.0, 0.4, 1.0)[seed % 3]))
            run_schedule(drivers[-1], random.Random(seed), num_steps=40)
    return drivers


def never_lost(original):
    return lambda self, plan, dropped: ([], [])


def lost_without_freeing(original):
    return lambda self, plan, dropped: ([], original(self, plan, dropped)[1])


def lost_to_the_store_unwritten(original):
    def lose(self, plan, dropped):
        freed, evicted = original(self, plan, dropped)
        return [*freed, *evicted], []

    return lose


def evicted_unwritten(original):
    def apply(self, plan, *args):
        made = original(self, plan, *args)
        return replace(made, evict_partial=plan.evict_partial)

    return apply


def far_blocks_are_not_loaded(original):
    return lambda self, block_ids: NO_BLOCKS


def kept_blocks_are_loaded(original):
    return lambda self, block_ids: block_ids


def evict_what_is_being_filled(original):
    def oldest(self, count, of, num_old, *, is_in):
        return original(self, count, of, len(self._oldest_first), is_in=is_in)

    return oldest


def never_make_room(original):
    return lambda self, *args, **options: []


@pytest.mark.slow
def test_unbroken_passes():
    drivers = run_all()
    assert sum(len(driver.engine.kept.block_ids) for driver in drivers) > 100
    assert sum(driver.engine.num_preemptions for driver in drivers) > 20
    assert sum(driver.engine.num_hits for driver in drivers) > 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [
        Mutation(KeptBlocks, "_lose", never_lost, IntegrityError),
        Mutation(KeptBlocks, "_lose", lost_without_freeing, IntegrityError),
        Mutation(KeptBlocks, "_lose", lost_to_the_store_unwritten, AssertionError),
        Mutation(KeptBlocks, "apply", evicted_unwritten, IntegrityError),
        Mutation(KeptBlocks, "_oldest", evict_what_is_being_filled, AssertionError),
        Mutation(KeptBlocks, "_oldest", never_make_room, IntegrityError),
        Mutation(KeptBlocks, "_far_of", far_blocks_are_not_loaded, WrongKv),
        Mutation(KeptBlocks, "_far_of", kept_blocks_are_loaded, IntegrityError),
    ],
    ids=mutation_id,
)
def test_mutations_are_found(mutation, monkeypatch):
    mutation.apply(monkeypatch)
    with pytest.raises(mutation.kind):
        run_all()
