# SPDX-License-Identifier: Apache-2.0
"""A step's experts pass through the slots in waves: each once, and never into a slot in use."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered.experts.policy import POLICIES, Lfu, Lru
from vllm_tiered.experts.slot_table import NONE, SlotTable


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


def table(num_experts, num_slots, policy="lru"):
    return SlotTable(num_slots, POLICIES[policy](num_experts))


@given(st.data(), st.sampled_from(sorted(POLICIES)))
def test_every_wanted_expert_computes_once_from_its_own_slot(data, policy):
    num_experts = data.draw(st.integers(1, 24))
    num_slots = data.draw(st.integers(1, num_experts))
    slots = table(num_experts, num_slots, policy)
    contents = np.full(num_slots, NONE)  # what the copies have brought
    for _ in range(data.draw(st.integers(1, 6))):
        wanted = ids(*sorted(data.draw(st.sets(st.integers(0, num_experts - 1), min_size=1))))
        hits, *loaded = slots.plan(wanted)
        assert np.array_equal(contents[hits.slots], hits.experts)
        computed = [hits.experts]
        in_use = {0: set(hits.slots.tolist())}
        for number, wave in enumerate(loaded, 1):
            done = number if wave.after is None else wave.after
            assert done <= number
            # A load may overwrite only what no wave between the one it follows and itself reads.
            busy = set().union(*(in_use[n] for n in in_use if wave.after is None or n > wave.after))
            assert not busy & set(wave.slots.tolist())
            contents[wave.slots] = wave.experts
            in_use[number] = set(wave.slots.tolist())
            computed.append(wave.experts)
        assert sorted(np.concatenate(computed).tolist()) == wanted.tolist()
        slots.check_integrity()
        held = slots.expert_in[slots.expert_in != NONE]
        assert np.array_equal(contents[slots.slot_of[held]], held)


def test_a_step_that_fits_is_loaded_at_once():
    slots = table(8, 4)
    hits, missed = slots.plan(ids(1, 2, 3))
    assert not len(hits.experts) and missed.after is None
    hits, missed = slots.plan(ids(2, 3, 5, 6))
    assert hits.experts.tolist() == [2, 3] and missed.experts.tolist() == [5, 6]
    assert missed.after is None  # one slot was empty, one held an expert that nobody wants


def test_all_hits_have_one_wave():
    slots = table(8, 4)
    slots.plan(ids(0, 1))
    (hits,) = slots.plan(ids(0, 1))
    assert hits.experts.tolist() == [0, 1]


def test_a_prompt_streams_each_expert_once_in_halves_of_the_slots():
    slots = table(16, 4)
    hits, *loaded = slots.plan(np.arange(16))
    assert not len(hits.experts)
    assert [wave.experts.tolist() for wave in loaded] == [[i, i + 1] for i in range(0, 16, 2)]
    assert [wave.after for wave in loaded] == [None, None, 1, 2, 3, 4, 5, 6]


def test_lru_keeps_what_was_used_last_and_lfu_what_was_used_most():
    kept = {}
    for policy in ("lru", "lfu"):
        slots = table(8, 2, policy)
        for wanted in (0, 0, 0, 1, 2):
            slots.plan(ids(wanted))
        kept[policy] = sorted(slots.expert_in.tolist())
    assert kept == {"lru": [1, 2], "lfu": [0, 2]}


def test_old_uses_count_less():
    policy = Lfu(2)
    for _ in range(3):
        policy.use(ids(0))
    for _ in range(400):
        policy.use(ids())
    policy.use(ids(1))
    assert policy.order(ids(0, 1)).tolist() == [0, 1]


def test_ties_leave_by_number():
    assert Lru(4).order(ids(3, 1)).tolist() == [3, 1]  # a stable order of what it is given
    assert Lfu(4).order(ids(1, 3)).tolist() == [1, 3]


def test_damage_is_found():
    slots = table(4, 2)
    slots.plan(ids(0, 1))
    slots.expert_in[0] = 3
    with pytest.raises(Exception, match="disagree"):
        slots.check_integrity()
