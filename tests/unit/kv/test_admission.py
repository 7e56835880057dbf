# SPDX-License-Identifier: Apache-2.0
"""Admission: the blocks reserved when a request begins, and the changes sent to the workers."""

import dataclasses

import pytest

from tests.fakes.kv.block_pool_model import BlockPool
from vllm_tiered.kv.admission import Admission, StepLevel
from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.expansion import Expansion
from vllm_tiered.kv.layout import KvLevels, Level

LEVELS = KvLevels(
    num_layers=5, page_bytes=8, block_tokens=1, near_pages=30, max_num_far=4, max_blocks=10
)


@pytest.fixture
def pool():
    return BlockPool(11)


@pytest.fixture
def fixed(pool):
    """Return an admission with 4 of 5 layers offloaded.

    The limit is 10 blocks without partial blocks, 8 with two of them, and 7 with four.
    """
    geometry = LEVELS.geometry(Level(4))
    elastic = ElasticBlocks(geometry=geometry, usable_blocks=10)
    admission = Admission(elastic, pool)
    admission.start()
    return admission


def allocate(pool, count):
    """Return an engine's allocation, which gives None if too few blocks would be left over."""
    return lambda left_over: pool.take(count) if count + left_over(0) <= pool.num_free else None


def test_a_request_is_admitted_if_its_blocks_and_its_partial_blocks_fit(fixed, pool):
    reserved = fixed.elastic.blocks_to_reserve("a")
    assert reserved == 2
    assert fixed.admit("a", 4, allocate(pool, 3)) == [1, 2, 3]
    assert len(fixed.elastic.reserved) == reserved
    assert pool.num_free == 10 - 3 - reserved
    assert fixed.used_blocks == 3
    fixed.elastic.check_integrity()


def test_a_refused_request_changes_nothing(fixed, pool):
    free = list(pool.free)
    count = 10 - fixed.elastic.blocks_to_reserve("a") + 1
    assert fixed.admit("a", 4, allocate(pool, count)) is None
    assert list(pool.free) == free and not fixed.elastic.reserved
    assert not fixed.elastic.is_admitted("a") and not fixed.has_changes


def test_workers_get_each_change_once(fixed, pool):
    assert fixed.take_changes() == ([], [])
    fixed.admit("a", 4, allocate(pool, 1))
    reserved = sorted(fixed.elastic.reserved)
    assert fixed.has_changes
    assert fixed.take_changes() == ([], reserved)
    assert not fixed.has_changes
    fixed.end_requests(["a", "unknown"])
    assert fixed.take_changes() == (reserved, [])
    assert fixed.elastic.reserved == []


def test_an_engine_starts_with_the_lowest_block_ids(pool):
    elastic = ElasticBlocks(geometry=LEVELS.geometry(Level(0)), usable_blocks=10)
    expansion = Expansion(LEVELS, elastic, Level(0))
    admission = Admission(elastic, pool, expansion)
    admission.start()
    limit = elastic.limit
    assert limit < 10
    assert list(pool.free) == list(range(1, limit + 1))
    assert admission.take_changes() == ([], []), "the workers begin with these blocks"
    assert admission.change_level() == StepLevel(0, 0, True)


def test_a_level_that_falls_reserves_free_blocks_first(pool):
    elastic = ElasticBlocks(geometry=LEVELS.geometry(Level(4)), usable_blocks=10)
    expansion = Expansion(LEVELS, elastic, Level(4))
    admission = Admission(elastic, pool, expansion)
    admission.start()
    expansion.aim(Level(0))
    held = pool.take(9)
    level = admission.change_level()
    assert level.num_far == 4, "blocks that requests hold do not fit level 0 yet"
    assert len(elastic.reserved) == 1 and pool.num_free == 0
    pool.release(held)
    assert admission.change_level() == StepLevel(0, 0, True)
    assert elastic.released_blocks == elastic.limit


def test_a_fixed_level_has_no_number_of_layers(fixed):
    assert fixed.change_level() == StepLevel(None, None, True)


def test_levels_may_be_withdrawn(pool):
    """The level falls once the blocks above the new limit are free and reserved."""
    expansion = Expansion(
        LEVELS, ElasticBlocks(geometry=LEVELS.geometry(Level(4)), usable_blocks=10), Level(4)
    )
    elastic = expansion._elastic
    admission = Admission(elastic, pool, expansion)
    admission.start()
    held = admission.admit("a", 4, allocate(pool, 6))
    fewer = dataclasses.replace(LEVELS, max_num_far=0, max_blocks=5)
    expansion.restrict(fewer, fewer.ladder[-1])
    admission.reserve_free_excess()
    assert admission.change_level() == StepLevel(4, 4, True), "the request holds too many blocks"
    pool.release(held)
    admission.end_requests(["a"])
    admission.reserve_free_excess()
    assert admission.change_level() == StepLevel(0, 0, True)
    assert elastic.released_blocks == elastic.limit == LEVELS.geometry(Level(0)).block_limit(0) == 5
    elastic.check_integrity()


@pytest.fixture
def with_cached(fixed, pool):
    """Return the admission with six cached blocks of a resident group, and how often it evicts."""
    resident, blocks = fixed.elastic.resident, pool.take(6)
    resident.hold(blocks)
    fixed.reserve_free_excess()
    for block in blocks:
        pool.cache(block, (block,))
    pool.release(blocks)
    for block in blocks:
        resident.cache(block)
    return fixed


def test_cached_blocks_of_resident_groups_give_way_oldest_first(with_cached, pool):
    resident = with_cached.elastic.resident
    oldest = next(iter(resident._cached))
    assert with_cached.admit("a", 4, allocate(pool, 3)) is not None
    assert oldest not in resident and resident.num_cached < 6
    with_cached.elastic.check_integrity()


def test_they_stay_if_pages_are_not_what_is_lacking(with_cached, pool):
    """At level 0 they cost nothing, and free blocks are what a request waits for."""
    with_cached.elastic.geometry = LEVELS.geometry(Level(0))
    with_cached.elastic.end("a")
    with_cached.release_blocks()
    assert with_cached.grow(lambda left_over: None if left_over(0) == 0 else 1) is None
    assert with_cached.elastic.resident.num_cached == 6


def test_they_stay_if_the_engine_waits_for_a_later_step(with_cached):
    more_than_there_are = with_cached.elastic.usable_blocks + 1
    assert with_cached.grow(lambda left_over: left_over(more_than_there_are) and None) is None
    assert with_cached.elastic.resident.num_cached == 6


def test_a_block_that_is_hit_stays(with_cached, pool):
    resident = with_cached.elastic.resident
    hit = set(list(resident._cached)[:2])
    with_cached.admit("a", 4, allocate(pool, 99), hit)
    assert hit == {*resident._cached}
