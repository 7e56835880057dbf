# SPDX-License-Identifier: Apache-2.0
"""The checks of the state machine detect the mistakes that they are made for.

Each mutation makes one likely mistake. A fixed set of random schedules must fail with it, and pass
without it.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.fakes.devices import DelayedDevice
from tests.fakes.kv.driver import Driver, Setup, run_schedule
from tests.fakes.kv.mutations import (
    Mutation,
    compute_does_not_wait_for_drains,
    hand_over_as_if_free,
    mutation_id,
)
from tests.fakes.kv.simulated_device import SimulatedDevice
from tests.fakes.kv.worker_model import CountedDevice, WrongKv
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.pages import Pages
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.far_tier import FarTier
from vllm_tiered.kv.layout import PartialBlocks
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.near_pages import NearPages
from vllm_tiered.kv.page_pool import PagePool
from vllm_tiered.kv.prefix_pages import PrefixPages
from vllm_tiered.kv.prefix_store import PrefixStore
from vllm_tiered.kv.relocator import Relocator
from vllm_tiered.kv.resident_blocks import ResidentBlocks
from vllm_tiered.kv.staging import Staging
from vllm_tiered.kv.state_columns import StateColumns
from vllm_tiered.kv.step_planner import StepPlanner
from vllm_tiered.kv.swapper import Swapper

pytestmark = pytest.mark.slow

SETUPS = (
    Setup(num_layers=5, num_far=4, sure_blocks=5, spare_pages=2),
    Setup(num_layers=4, num_far=3, sure_blocks=4, spare_pages=6, ahead=True),
    Setup(num_layers=3, num_far=1, block_tokens=3, sure_blocks=3, spare_pages=20),
    Setup(num_layers=9, num_far=8, block_tokens=4, sure_blocks=3, spare_pages=8),
    Setup(num_layers=6, num_far=4, block_tokens=1, spare_pages=9, ahead=True, defer_frees=True),
    Setup(num_layers=5, num_far=4, sure_blocks=4, spare_pages=4, adaptive=True),
    Setup(num_layers=7, num_far=6, block_tokens=3, sure_blocks=3, ahead=True, adaptive=True),
    Setup(num_layers=6, num_far=5, sure_blocks=4, spare_pages=3, offloads_partial_blocks=True),
    Setup(num_layers=6, num_far=5, policy="on_demand", sure_blocks=4, spare_pages=2),
    Setup(
        num_layers=9,
        num_far=8,
        block_tokens=4,
        ahead=True,
        adaptive=True,
        offloads_partial_blocks=True,
    ),
    Setup(num_layers=3, num_far=3, sure_blocks=4, window_tokens=4, staging_buffers=1),
    Setup(num_layers=4, num_far=3, sure_blocks=4, window_tokens=5, adaptive=True),
    Setup(num_layers=2, num_far=1, sure_blocks=5, spare_pages=26, has_states=True, adaptive=True),
    Setup(
        num_layers=5,
        num_far=4,
        block_tokens=3,
        sure_blocks=3,
        spare_pages=22,
        has_states=True,
        staging_buffers=1,
        ahead=True,
        adaptive=True,
    ),
    Setup(num_layers=4, num_far=3, sure_blocks=3, has_states=True, ahead=True),
    Setup(
        num_layers=3,
        num_far=3,
        sure_blocks=4,
        window_tokens=3,
        staging_buffers=1,
        ahead=True,
        adaptive=True,
        offloads_partial_blocks=True,
    ),
    Setup(num_layers=5, num_far=4, block_tokens=3, sure_blocks=5, spare_pages=8, num_drafts=3),
    Setup(
        num_layers=5,
        num_far=4,
        sure_blocks=6,
        spare_pages=40,
        ahead=True,
        num_drafts=6,
    ),
    Setup(
        num_layers=4,
        num_far=3,
        sure_blocks=7,
        spare_pages=9,
        ahead=True,
        adaptive=True,
        offloads_partial_blocks=True,
        num_drafts=4,
    ),
    Setup(num_layers=4, num_far=3, sure_blocks=4, spare_pages=2, spare_slots=8),
    Setup(num_layers=4, num_far=3, sure_blocks=4, spare_pages=9, spare_slots=1, ahead=True),
    Setup(num_layers=5, num_far=4, sure_blocks=4, spare_pages=4, spare_slots=0, adaptive=True),
    Setup(
        num_layers=5,
        num_far=4,
        block_tokens=3,
        sure_blocks=3,
        spare_pages=9,
        spare_slots=9,
        ahead=True,
        adaptive=True,
        offloads_partial_blocks=True,
    ),
    Setup(num_layers=3, num_far=0, sure_blocks=4, spare_pages=2, spare_slots=20, ahead=True),
    Setup(
        num_layers=5,
        num_far=4,
        sure_blocks=6,
        spare_pages=30,
        spare_slots=9,
        ahead=True,
        adaptive=True,
        num_drafts=4,
    ),
    Setup(num_layers=5, num_far=4, block_tokens=8, sure_blocks=2, spare_pages=9),
    Setup(num_layers=5, num_far=4, block_tokens=8, sure_blocks=2, offloads_partial_blocks=True),
    Setup(
        num_layers=5,
        num_far=4,
        block_tokens=8,
        sure_blocks=2,
        spare_pages=9,
        adaptive=True,
        offloads_partial_blocks=True,
    ),
)
HASTES = (0.0, 0.4, 1.0)
SEEDS = range(4)


def run_all(**options: bool) -> list[Driver]:
    """Run a schedule for each setup, haste and seed on the simulated device.

    The setups alternate, because most mutations fail with some setups only, and the first failure
    ends the test.
    """
    drivers = []
    for seed in SEEDS:
        for haste in HASTES:
            for setup in SETUPS:
                device = SimulatedDevice(random.Random(seed), haste=haste)
                drivers.append(Driver(setup, device, **options))
                run_schedule(drivers[-1], random.Random(seed), num_steps=40)
    return drivers


def run_delayed(num_seeds: int, **options: bool) -> None:
    """Run some of the schedules on the real CPU device, with copy threads that sleep at times."""
    for seed in range(num_seeds):
        setup = SETUPS[seed % len(SETUPS)]
        driver = Driver(setup, DelayedDevice(seed, 1e-3), **options)
        try:
            run_schedule(driver, random.Random(seed), num_steps=25)
        finally:
            driver.worker.device.close()


def wait_layer_does_not_wait(original):
    def wait_layer(self, layer):
        position = self._position.get(layer)
        if position is not None and self._reads[position] is not None:
            self._reads[position] = None
            self.table.publish(layer, self.num_steps)

    return wait_layer


def read_before_earlier_writes(original):
    def queue_copies(self):
        self._written_before = ()
        original(self)

    return queue_copies


def write_nothing(original):
    def submit_writes(self, writes):
        self.last_write = (self._device.compute_event(),)
        return [*self.last_write * len(writes)]

    return submit_writes


def write_before_it_is_computed(original):
    def submit_writes(self, writes):
        return original(self, [(copy, ()) for copy, _ in writes])

    return submit_writes


def buffers_do_not_wait_for_writes(original):
    def submit_writes(self, writes):
        return [after[0] for (_, after), _ in zip(writes, original(self, writes), strict=True)]

    return submit_writes


def buffers_do_not_wait_at_all(original):
    def submit_reads(self, reads, block_ids):
        return original(self, [(copy, after[1:]) for copy, after in reads], block_ids)

    return submit_reads


def store_nothing(original):
    def store_partial(self, block_ids):
        pages = self.table.offloaded_pages(block_ids).ravel()
        self.pool.drain(pages, self.pool._owner[pages][0], self._device.compute_event())
        self._near_pages.partial.difference_update(block_ids.tolist())

    return store_partial


def write_all_but_one_page(original):
    def prepare(self, direction, src, src_pages, dst, dst_pages):
        kept = len(src_pages)
        if direction is Direction.WRITE:
            kept = max(1, kept - 1)
        pages = Pages(src_pages.ids[:kept]), Pages(dst_pages.ids[:kept])
        return original(self, direction, src, pages[0], dst, pages[1])

    return prepare


def free_instead_of_drain(original):
    def drain(self, pages, owner, done):
        self.free(pages, owner)

    return drain


def settle_without_looking(original):
    def settle(self):
        while self._draining:
            self._owner[self._draining.popleft()[1]] = 0

    return settle


def read_what_is_written(original):
    def unique(self, read, *written):
        return original(self, read)

    return unique


def read_nothing(original):
    return lambda self, read, *written: np.empty(0, np.int64)


def write_twice(original):
    def submit_writes(self, writes):
        original(self, writes)
        return original(self, writes)

    return submit_writes


def keep_freed_partial_blocks(original):
    def drop(self, request_id):
        original(self, request_id)
        return []

    return drop


def partial_blocks_not_in_table(original):
    def set_offloaded_pages(self, block_ids, pages):
        if len(block_ids) != 1:
            original(self, block_ids, pages)

    return set_offloaded_pages


def one_partial_block_while_prefilling(original):
    def admit(self, request_id, prefill_tokens):
        original(self, request_id, prefill_tokens)
        self._charges[request_id] -= 1

    return admit


def drafts_begin_no_block(original):
    return classmethod(lambda cls, num_drafts, in_doubt, block_tokens: cls())


def drafts_count_as_certain(original):
    def classify(self, part, request, written):
        num_tokens = part.scheduled_tokens + part.draft_tokens
        original(self, part._replace(scheduled_tokens=num_tokens, draft_tokens=0), request, written)

    return classify


def forget_what_accepted_drafts_filled(original):
    return lambda self, request_id, freed, evicted: freed.extend(self._drop(request_id))


def reserve_one_too_few(original):
    return lambda self, request_id, new: max(0, original(self, request_id, new) - 1)


def grow_without_pages(original):
    return lambda self, new_resident: 0


def free_the_pages_of_cached_blocks(original):
    return lambda self, block_id: self.drop([block_id])


def lose_one_block(original):
    def take_changes(self):
        changes = original(self)
        return changes._replace(lost=changes.lost + sorted(self._held - self._states)[:1])

    return take_changes


def drop_blocks_that_are_being_hit(original):
    return lambda self, count, keep=(): original(self, count)


def leave_pages_where_they_are(original):
    return lambda self, buffer, src, dst: None


def move_pages_under_copies(original):
    return lambda self: 0.0


def assign_one_column_to_all(original):
    def assign(self, block_id):
        self._column_of[block_id] = 1
        return 1

    return assign


def reserve_nothing_in_the_worker(original):
    return lambda self, block_ids, read_until=None: None


def move_without_what_was_filled_since(original):
    def move(self, order, released, partial):
        self.write_out_one = lambda: [self.leaving.pop()][:0]
        seconds = original(self, order, released, partial)
        del self.write_out_one
        return seconds

    return move


def return_without_reading(original):
    def read(self, layers, block_ids, pages, drained=()):
        return [self._device.compute_event()] * len(layers)

    return read


def use_returning_layers_at_once(original):
    def wait(self, layer):
        self.returning.pop(layer, None)
        return 0.0

    return wait


def ignore_that_blocks_are_reused(original):
    return lambda self, plan: None


def ignore_that_partial_blocks_change(original):
    def end_step(self, plan):
        original(self, replace(plan, load_and_store=plan.load_and_store[:0]))

    return end_step


def partial_blocks_become_far_unwritten(original):
    def evict_partial(self):
        original(self)
        return []

    return evict_partial


def partial_blocks_that_left_count_as_near(original):
    def evict_partial(self):
        before = {name: request.num_far for name, request in self._requests.items()}
        partial = original(self)
        for name, num_far in before.items():
            self._requests[name].num_far = num_far
        return partial

    return evict_partial


def ignore_that_partial_blocks_left(original):
    return lambda self, block_ids: None


def keep_buffers_of_other_blocks(original):
    def fits(self, plan):
        same_numbers = len(plan.load) == len(self._load) and len(plan.load_and_store) == len(
            self._load_and_store
        )
        return (
            original(self, replace(plan, load=self._load, load_and_store=self._load_and_store))
            and same_numbers
        )

    return fits


def keep_buffers_that_had_new_blocks(original):
    def fits(self, plan):
        self._stores_new = False
        return original(self, plan)

    return fits


def keep_without_writing(original):
    return lambda self, block_ids: None


def fetch_without_reading(original):
    def fetch(self, block_ids, written):
        self._relocator.hold_everywhere(block_ids)

    return fetch


def compute_overwrites_what_is_kept(original):
    def begin(self, plan):
        original(self, plan)

    return begin


def read_back_before_what_is_kept_is_written(original):
    def read(self, *args):
        last_write, self.last_write = self.last_write, ()
        events = original(self, *args)
        self.last_write = last_write
        return events

    return read


def fetched_blocks_hold_what_they_held(original):
    def begin(self, plan):
        event = original(self, plan)
        if plan.prefixes is not None:
            self._relocator._holds[plan.prefixes.fetch] = True
        return event

    return begin


def blocks_stay_in_their_slots(original):
    return lambda self, block_ids, slots: None


def reserved_pages_are_free_at_once(original):
    return lambda self, block_ids, read_until=None: original(self, block_ids)


def drop_matched_content(original):
    def match(self, keys):
        matched = original(self, keys)
        self._matched = frozenset()
        return matched

    return match


def shrink_before_blocks_fit(original):
    return property(lambda self: 0)


MUTATIONS = (
    Mutation(Swapper, "wait_layer", wait_layer_does_not_wait, WrongKv),
    Mutation(Swapper, "_queue_copies", read_before_earlier_writes, WrongKv),
    Mutation(Swapper, "_store_partial", store_nothing, WrongKv),
    Mutation(FarTier, "submit_writes", write_nothing, WrongKv),
    Mutation(FarTier, "submit_writes", write_before_it_is_computed, WrongKv),
    Mutation(FarTier, "submit_writes", buffers_do_not_wait_for_writes, WrongKv),
    Mutation(FarTier, "submit_writes", write_twice, AssertionError, check_bytes=True),
    Mutation(FarTier, "submit_reads", buffers_do_not_wait_at_all, WrongKv),
    Mutation(CountedDevice, "prepare", write_all_but_one_page, WrongKv),
    Mutation(NearPages, "reserve_blocks", reserve_nothing_in_the_worker, AssertionError),
    Mutation(PagePool, "drain", free_instead_of_drain, WrongKv),
    Mutation(PagePool, "settle", settle_without_looking, WrongKv),
    Mutation(PagePool, "allocate", hand_over_as_if_free, WrongKv),
    Mutation(NearPages, "_allocate", compute_does_not_wait_for_drains, WrongKv),
    Mutation(StepPlanner, "_unique", read_nothing, WrongKv),
    Mutation(StepPlanner, "_unique", read_what_is_written, IntegrityError),
    Mutation(StepPlanner, "_drop", keep_freed_partial_blocks, IntegrityError),
    Mutation(MappingTable, "set_offloaded_pages", partial_blocks_not_in_table, IntegrityError),
    Mutation(Relocator, "move", move_without_what_was_filled_since, WrongKv),
    Mutation(FarTier, "read", return_without_reading, WrongKv),
    Mutation(Relocator, "wait", use_returning_layers_at_once, WrongKv),
    Mutation(Relocator, "begin_step", ignore_that_blocks_are_reused, WrongKv),
    Mutation(Relocator, "end_step", ignore_that_partial_blocks_change, WrongKv),
    Mutation(Relocator, "hold", ignore_that_partial_blocks_left, WrongKv),
    Mutation(Relocator, "write_out_blocks", keep_without_writing, WrongKv),
    Mutation(PrefixPages, "fetch", fetch_without_reading, WrongKv),
    Mutation(PrefixPages, "begin", compute_overwrites_what_is_kept, AssertionError),
    Mutation(PrefixPages, "begin", fetched_blocks_hold_what_they_held, WrongKv),
    Mutation(FarTier, "read", read_back_before_what_is_kept_is_written, WrongKv),
    Mutation(FarTier, "assign_slots", blocks_stay_in_their_slots, WrongKv),
    Mutation(NearPages, "reserve_blocks", reserved_pages_are_free_at_once, AssertionError),
    Mutation(PrefixStore, "match", drop_matched_content, IntegrityError),
    Mutation(StepPlanner, "_evict_partial", partial_blocks_become_far_unwritten, IntegrityError),
    Mutation(StepPlanner, "_evict_partial", partial_blocks_that_left_count_as_near, WrongKv),
    Mutation(Staging, "fits", keep_buffers_of_other_blocks, WrongKv),
    Mutation(Staging, "fits", keep_buffers_that_had_new_blocks, IntegrityError),
    Mutation(ElasticBlocks, "excess", shrink_before_blocks_fit, IntegrityError),
    Mutation(ElasticBlocks, "admit", one_partial_block_while_prefilling, IntegrityError),
    Mutation(PartialBlocks, "of_drafts", drafts_begin_no_block, AssertionError),
    Mutation(StepPlanner, "_classify", drafts_count_as_certain, IntegrityError),
    Mutation(StepPlanner, "_end", forget_what_accepted_drafts_filled, AssertionError),
    Mutation(ElasticBlocks, "blocks_to_reserve", reserve_one_too_few, IntegrityError),
    Mutation(ElasticBlocks, "blocks_to_reserve_for_growth", grow_without_pages, IntegrityError),
    Mutation(ResidentBlocks, "cache", free_the_pages_of_cached_blocks, AssertionError),
    Mutation(ResidentBlocks, "take_changes", lose_one_block, IntegrityError),
    Mutation(ResidentBlocks, "drop_oldest", drop_blocks_that_are_being_hit, AssertionError),
    Mutation(SimulatedDevice, "move_pages", leave_pages_where_they_are, WrongKv),
    Mutation(Swapper, "_end_copies", move_pages_under_copies, WrongKv),
    Mutation(StateColumns, "assign", assign_one_column_to_all, IntegrityError),
)


def test_unbroken_passes():
    drivers = run_all()
    # The schedules must contain these events, as checks of events that never happen prove nothing.
    assert sum(driver.engine.num_preemptions for driver in drivers) > 100
    assert sum(driver.engine.num_hits for driver in drivers) > 100
    expansions = [driver.engine.expansion for driver in drivers]
    assert sum(expansion.num_changes for expansion in expansions if expansion) > 100
    assert sum(driver.worker.num_kept for driver in drivers) > 100
    assert sum(driver.engine.num_accepted for driver in drivers) > 100
    assert sum(driver.engine.num_rejected for driver in drivers) > 100
    stores = [driver.engine.store for driver in drivers]
    assert sum(store.num_hits for store in stores if store) > 100


def test_unbroken_passes_on_delayed_threads():
    run_delayed(len(SETUPS))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=mutation_id)
def test_broken_fails(mutation, monkeypatch):
    mutation.apply(monkeypatch)
    with pytest.raises(mutation.kind):
        run_all(check_bytes=mutation.check_bytes)


@pytest.mark.parametrize("mutation", MUTATIONS[:4], ids=mutation_id)
def test_broken_fails_on_delayed_threads(mutation, monkeypatch):
    mutation.apply(monkeypatch)
    with pytest.raises(mutation.kind):
        run_delayed(40, check_bytes=False)
