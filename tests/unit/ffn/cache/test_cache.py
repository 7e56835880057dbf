# SPDX-License-Identifier: Apache-2.0
"""Neuron caches: for all sequences of tokens, each used slot holds its neuron's bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered.errors import BudgetError, ConfigError, IntegrityError
from vllm_tiered.ffn.cache.atu import AdjacentTokenCache
from vllm_tiered.ffn.cache.layer_cache import LayerCache
from vllm_tiered.ffn.cache.none import NoCache
from vllm_tiered.ffn.cache.window import WindowCache
from vllm_tiered.ffn.layout import Precision

NUM_NEURONS = 40
CACHES = {
    "atu": AdjacentTokenCache,
    "window1": lambda capacity, n: WindowCache(capacity, n, 1),
    "window3": lambda capacity, n: WindowCache(capacity, n, 3),
    "window8": lambda capacity, n: WindowCache(capacity, n, 8),
    "none": NoCache,
}
POISON = -1


def ids(*neurons):
    return np.array(sorted(neurons), dtype=np.int64)


class ModelBuffer:
    """A buffer of one number a slot, the neuron's own, and everything else poisoned."""

    def __init__(self, capacity):
        self.slots = np.full(capacity, POISON)

    def replay(self, plan):
        assert not set(plan.src_slots.tolist()) & set(plan.dst_slots.tolist())
        self.slots[plan.dst_slots] = self.slots[plan.src_slots]
        self.slots[plan.num_resident :] = POISON
        self.slots[plan.load_slots] = plan.load_neurons

    def check(self, cache):
        assert self.slots[: cache.num_resident].tolist() == cache.resident().tolist()
        assert (self.slots[cache.num_resident :] == POISON).all()


wants = st.sets(st.integers(0, NUM_NEURONS - 1), max_size=12)
schedules = st.lists(st.tuples(wants, wants, st.booleans()), max_size=30)


@pytest.mark.parametrize("name", CACHES)
@given(capacity=st.integers(12, NUM_NEURONS), schedule=schedules)
@settings(deadline=None)
def test_every_slot_holds_its_neuron(name, capacity, schedule):
    cache, buffer = CACHES[name](capacity, NUM_NEURONS), ModelBuffer(capacity)
    for wanted, others, evicts in schedule:
        if evicts:
            buffer.replay(cache.evict(ids(*others)))
            gone = set()
            assert not set(cache.resident().tolist()) & others
        else:
            before = set(cache.resident().tolist())
            gone = others - wanted
            plan = cache.plan(ids(*wanted), ids(*gone))
            assert set(cache.resident().tolist()) == before, "planning changes nothing"
            usable = before if name != "none" else set()
            assert plan.hits == len(wanted & usable)
            assert plan.load_neurons.tolist() == sorted(wanted - usable)
            assert cache.missing(ids(*wanted)).tolist() == plan.load_neurons.tolist()
            buffer.replay(plan)
            cache.commit(plan)
            now = set(cache.resident().tolist())
            assert wanted <= now <= before | wanted
            assert set(plan.dropped.tolist()) == before - (now & usable)
        cache.check_integrity()
        buffer.check(cache)
        assert not gone & set(cache.resident().tolist())


@given(capacity=st.integers(12, NUM_NEURONS), schedule=st.lists(wants, max_size=20))
@settings(deadline=None)
def test_atu_keeps_only_the_tokens_neurons(capacity, schedule):
    cache = AdjacentTokenCache(capacity, NUM_NEURONS)
    for wanted in schedule:
        before = cache.num_resident
        plan = cache.plan(ids(*wanted))
        cache.commit(plan)
        assert set(cache.resident().tolist()) == wanted
        assert len(plan.src_slots) <= max(0, before - len(wanted))


@given(
    capacity=st.integers(12, NUM_NEURONS),
    num_tokens=st.integers(1, 6),
    schedule=st.lists(wants, max_size=20),
)
@settings(deadline=None)
def test_the_window_is_the_union_of_the_last_tokens_that_fit(capacity, num_tokens, schedule):
    cache = WindowCache(capacity, NUM_NEURONS, num_tokens)
    kept: list[set[int]] = []
    for wanted in schedule:
        cache.commit(cache.plan(ids(*wanted)))
        kept = [*kept, wanted][-num_tokens:]
        while len(set().union(*kept)) > capacity:
            del kept[0]
        assert set(cache.resident().tolist()) == set().union(*kept)


def test_a_missing_neuron_overwrites_one_that_leaves():
    cache = AdjacentTokenCache(8, NUM_NEURONS)
    cache.commit(cache.plan(ids(1, 2, 3, 4)))
    plan = cache.plan(ids(1, 3, 4, 9))
    assert (plan.load_slots.tolist(), plan.load_neurons.tolist()) == ([1], [9])
    assert len(plan.src_slots) == 0


def test_last_slots_fill_the_holes():
    cache = AdjacentTokenCache(8, NUM_NEURONS)
    cache.commit(cache.plan(ids(0, 1, 2, 3, 4, 5, 6, 7)))
    plan = cache.plan(ids(1, 3, 5, 7, 9))
    assert plan.load_slots.tolist() == [0]
    assert (plan.src_slots.tolist(), plan.dst_slots.tolist()) == ([5, 7], [2, 4])


@pytest.mark.parametrize("name", CACHES)
def test_more_wanted_than_there_are_slots(name):
    cache = CACHES[name](4, NUM_NEURONS)
    cache.commit(cache.plan(ids(1, 2)))
    with pytest.raises(BudgetError, match="5 neurons are wanted of a cache that holds 4"):
        cache.plan(ids(1, 2, 3, 4, 5))
    assert cache.resident().tolist() == [1, 2]


def test_bad_cache_settings_are_refused():
    with pytest.raises(BudgetError, match="holds none"):
        AdjacentTokenCache(0, NUM_NEURONS)
    with pytest.raises(ConfigError, match="window of 0"):
        WindowCache(4, NUM_NEURONS, 0)


def test_a_stale_plan_is_refused():
    cache = AdjacentTokenCache(4, NUM_NEURONS)
    stale = cache.plan(ids(1, 2))
    cache.commit(cache.plan(ids(3)))
    with pytest.raises(IntegrityError, match="a plan of state 0 in state 1"):
        cache.commit(stale)
    assert cache.resident().tolist() == [3]


def test_an_inconsistent_index_is_found():
    cache = AdjacentTokenCache(4, NUM_NEURONS)
    cache.commit(cache.plan(ids(1, 2)))
    cache._slot_of[2] = 0
    with pytest.raises(IntegrityError, match="slot 1 holds neuron 2, which is in slot 0"):
        cache.check_integrity()
    cache.num_resident = 1
    with pytest.raises(IntegrityError, match="1 slots of 4 hold 2 resident neurons"):
        cache.check_integrity()


@pytest.mark.parametrize("name", CACHES)
@given(schedule=st.lists(st.tuples(wants, wants, wants), max_size=20))
@settings(deadline=None)
def test_a_neuron_is_in_one_buffer_of_its_layer(name, schedule):
    layer = LayerCache({p: CACHES[name](14, NUM_NEURONS) for p in Precision})
    buffers = {precision: ModelBuffer(14) for precision in Precision}
    for full, int8, int4 in schedule:
        wanted = {
            Precision.FULL: ids(*full),
            Precision.INT8: ids(*(int8 - full)),
            Precision.INT4: ids(*(int4 - int8 - full)),
        }
        plan = layer.plan(wanted)
        for precision, buffer in buffers.items():
            buffer.replay(plan.plans[precision])
        layer.commit(plan)
        layer.check_integrity()
        good_enough: set[int] = set()
        for precision, buffer in buffers.items():
            buffer.check(layer.caches[precision])
            good_enough |= set(layer.caches[precision].resident())
            assert set(wanted[precision]) <= good_enough
        assert plan.hits + plan.num_loads == sum(map(len, wanted.values()))
        assert layer.num_resident == {p: cache.num_resident for p, cache in layer.caches.items()}


def test_a_better_precision_is_kept_while_slots_are_free():
    """Its bytes are there; a neuron that needs more bits than before is loaded."""
    full, int8 = Precision.FULL, Precision.INT8
    layer = LayerCache({full: AdjacentTokenCache(4, 20), int8: AdjacentTokenCache(4, 20)})
    layer.commit(layer.plan({full: ids(1, 2, 3), int8: ids(4, 5)}))
    plan = layer.plan({full: ids(4, 7), int8: ids(1, 2, 3)})
    assert plan.hits == 2 and plan.num_loads == 3  # 1 and 2 stay; 3 does not fit with 4 and 7
    layer.commit(plan)
    assert set(layer.caches[full].resident()) == {1, 2, 4, 7}
    assert set(layer.caches[int8].resident()) == {3}


def test_for_each_that_stays_better_one_may_stay_worse():
    """The example of the module: of those that may, the one that scores least."""
    full, int8 = Precision.FULL, Precision.INT8
    layer = LayerCache({full: AdjacentTokenCache(6, 20), int8: AdjacentTokenCache(6, 20)})
    layer.commit(layer.plan({full: ids(1, 2, 4), int8: ids(3, 5, 7)}))
    scores = np.zeros(20, dtype=np.float32)
    scores[[1, 2, 3, 7]] = [9, 9, 7, 8]
    wanted = {full: ids(1, 2, 3, 7), int8: ids(4, 5, 6)}
    assert layer.plan(wanted).num_loads == 3
    plan = layer.plan(wanted, scores)
    assert plan.num_loads == 2  # 3 stays in 8 bit, as 4 stays in 16; 7 and 6 are loaded
    layer.commit(plan)
    assert set(layer.caches[full].resident()) == {1, 2, 4, 7}
    assert set(layer.caches[int8].resident()) == {3, 5, 6}


def test_none_of_the_upper_half_stays_worse():
    """A neuron that is wanted for long would never be loaded in the precision of its rank."""
    full, int8 = Precision.FULL, Precision.INT8
    layer = LayerCache({full: AdjacentTokenCache(6, 20), int8: AdjacentTokenCache(6, 20)})
    layer.commit(layer.plan({full: ids(1, 2, 4, 5), int8: ids(3, 7)}))
    scores = np.zeros(20, dtype=np.float32)
    scores[[1, 2, 3, 7]] = [1, 2, 4, 3]
    plan = layer.plan({full: ids(1, 2, 3, 7), int8: ids(4, 5)}, scores)
    assert plan.plans[full].load_neurons.tolist() == [3, 7]
    scores[[1, 2]] = [5, 6]
    plan = layer.plan({full: ids(1, 2, 3, 7), int8: ids(4, 5)}, scores)
    assert plan.num_loads == 0


@pytest.mark.parametrize("name", CACHES)
@given(
    schedule=st.lists(st.tuples(wants, wants, wants), max_size=20),
    scores=st.permutations(range(NUM_NEURONS)),
)
@settings(deadline=None)
def test_precisions_and_better_ones_have_the_requested_counts(name, schedule, scores):
    """Neurons change places; no more of them are read, and none is missing or there twice."""
    scores_N = np.array(scores, dtype=np.float32)
    layer = LayerCache({p: CACHES[name](14, NUM_NEURONS) for p in Precision})
    for full, int8, int4 in schedule:
        wanted = {
            Precision.FULL: ids(*full),
            Precision.INT8: ids(*(int8 - full)),
            Precision.INT4: ids(*(int4 - int8 - full)),
        }
        without = layer.plan(wanted)
        plan = layer.plan(wanted, scores_N)
        assert plan.num_loads <= without.num_loads
        assert plan.hits + plan.num_loads == sum(map(len, wanted.values()))
        layer.commit(plan)
        layer.check_integrity()
        num_asked = num_there = 0
        for precision in Precision:
            num_asked += len(wanted[precision])
            num_there += len(plan.plans[precision].wanted)
            assert num_there >= num_asked
        planned = np.concatenate([one.wanted for one in plan.plans.values()])
        assert sorted(planned) == sorted(np.concatenate(list(wanted.values())))


def test_a_neuron_in_two_buffers_is_found():
    layer = LayerCache(
        {p: AdjacentTokenCache(4, NUM_NEURONS) for p in (Precision.FULL, Precision.INT8)}
    )
    for cache in layer.caches.values():
        cache.commit(cache.plan(ids(7)))
    with pytest.raises(IntegrityError, match=r"1 neurons are in two buffers, \[7\]"):
        layer.check_integrity()


def test_a_precision_without_a_buffer():
    layer = LayerCache({Precision.FULL: AdjacentTokenCache(4, NUM_NEURONS)})
    with pytest.raises(KeyError, match="no buffer for int4"):
        layer.plan({Precision.INT4: ids(1)})
