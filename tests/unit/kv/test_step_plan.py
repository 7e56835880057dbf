# SPDX-License-Identifier: Apache-2.0
"""Classification of a step's blocks, which hold 4 tokens here."""

import dataclasses
import random

import numpy as np
import pytest

from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.step_plan import ScheduledRequest
from vllm_tiered.kv.step_planner import StepPlanner


@pytest.fixture
def planner():
    return StepPlanner(num_blocks=100, block_tokens=4)


def part(name, computed, scheduled, new_blocks=(), *, restarts=False, drafts=0):
    return ScheduledRequest(
        request_id=name,
        new_block_ids=new_blocks,
        restarts=restarts,
        computed_tokens=computed,
        scheduled_tokens=scheduled,
        draft_tokens=drafts,
    )


def classes(plan):
    """The plan's classes that are not empty, as lists; seconds left out."""
    arrays = {
        field.name: getattr(plan, field.name).tolist()
        for field in dataclasses.fields(plan)
        if isinstance(getattr(plan, field.name), np.ndarray)
    }
    return {name: ids for name, ids in arrays.items() if ids}


def test_a_prompt_in_one_chunk(planner):
    plan = planner.plan([part("a", 0, 10, [7, 3, 9], restarts=True)], ())
    assert classes(plan) == {"store_new": [7, 3], "alloc_partial": [9]}
    assert planner.num_partial == 1


def test_the_partial_block_fills_step_by_step(planner):
    planner.plan([part("a", 0, 5, [7, 3], restarts=True)], ())
    assert classes(planner.plan([part("a", 5, 2)], ())) == {"load": [7]}
    assert classes(planner.plan([part("a", 7, 1)], ())) == {"load": [7], "store_partial": [3]}
    assert planner.num_partial == 0
    plan = planner.plan([part("a", 8, 1, [5])], ())
    assert classes(plan) == {"load": [3, 7], "alloc_partial": [5]}


def test_a_chunk_may_finish_a_partial_block_and_begin_another(planner):
    planner.plan([part("a", 0, 3, [7], restarts=True)], ())
    plan = planner.plan([part("a", 3, 7, [3, 9])], ())
    assert classes(plan) == {"store_partial": [7], "store_new": [3], "alloc_partial": [9]}


def test_a_request_that_is_left_out_keeps_its_partial_block_and_is_not_read(planner):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], ())
    assert classes(planner.plan([], ())) == {}
    assert planner.num_partial == 1
    assert classes(planner.plan([part("a", 6, 1)], ())) == {"load": [7]}


def test_shared_blocks_are_read_once(planner):
    planner.plan([part("a", 0, 8, [7, 3], restarts=True)], ())
    plan = planner.plan([part("a", 8, 1, [5]), part("b", 8, 1, [7, 3, 6], restarts=True)], ())
    assert classes(plan) == {"load": [3, 7], "alloc_partial": [5, 6]}


def test_a_prefix_that_another_request_computes_in_this_step_is_not_read(planner):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], ())
    plan = planner.plan(
        [
            part("a", 6, 6, [8]),  # fills its partial block 3 and block 8
            part("b", 12, 2, [7, 3, 8, 6], restarts=True),
        ],
        (),
    )
    assert classes(plan) == {
        "load": [7],
        "store_new": [8],
        "store_partial": [3],
        "alloc_partial": [6],
    }


def test_partial_blocks_leave_when_they_may_not_stay_and_are_far_until_they_are_full():
    planner = StepPlanner(num_blocks=20, block_tokens=4)
    planner.plan([part("a", 0, 2, [1], restarts=True)], (), num_far=2)
    planner.plan([part("b", 0, 2, [2], restarts=True)], (), num_far=2, num_far_next=3)
    parts = [part("a", 2, 1), part("c", 0, 1, [3], restarts=True)]
    plan = planner.plan(parts, (), num_far=3, partial_blocks_resident=False)
    assert classes(plan) == {"evict_partial": [1, 2], "load_and_store": [1], "store_new": [3]}
    plan = planner.plan([part("a", 3, 2, [4]), part("b", 2, 1)], (), num_far=1)
    assert classes(plan) == {"load_and_store": [1, 2], "alloc_partial": [4]}
    plan = planner.plan([part("b", 3, 1)], ["a", "c"], num_far=1)
    assert classes(plan) == {"load_and_store": [2], "free_partial": [4]}


def test_an_ended_request_releases_its_partial_block(planner):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], ())
    assert classes(planner.plan([], ("a", "unknown"))) == {"free_partial": [3]}
    assert classes(planner.plan([], ("a",))) == {}


def test_an_ended_request_without_a_partial_block_releases_nothing(planner):
    planner.plan([part("a", 0, 8, [7, 3], restarts=True)], ())
    assert classes(planner.plan([], ("a",))) == {}


@pytest.mark.parametrize("ended", [(), ("a",)], ids=["resumed", "ended-and-begun-again"])
def test_a_request_that_restarts_has_only_its_new_blocks(planner, ended):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], ())
    plan = planner.plan([part("a", 4, 3, [7, 5], restarts=True)], ended)
    assert classes(plan) == {"load": [7], "alloc_partial": [5], "free_partial": [3]}


def test_a_released_block_may_be_written_in_the_same_step(planner):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], ())
    plan = planner.plan([part("b", 0, 2, [3], restarts=True)], ("a",))
    assert classes(plan) == {"free_partial": [3], "alloc_partial": [3]}


def test_a_block_is_full_when_its_drafts_are_accepted(planner):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], ())
    plan = planner.plan([part("a", 6, 1, [9], drafts=3)], ())
    assert classes(plan) == {"load": [7], "alloc_partial": [9]}
    assert planner.num_partial == 2
    # All drafts are rejected: the same tokens again, in the same blocks.
    plan = planner.plan([part("a", 7, 1, drafts=3)], ())
    assert classes(plan) == {"load": [7], "store_partial": [3]}
    # They are all accepted, and fill no block.
    plan = planner.plan([part("a", 11, 1, [5], drafts=3)], ())
    assert classes(plan) == {"load": [3, 7], "store_partial": [9], "alloc_partial": [5]}


def test_a_block_that_accepted_drafts_filled_is_written_out_later(planner):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], ())
    planner.plan([part("a", 6, 1, [9], drafts=3)], ())
    plan = planner.plan([part("a", 10, 1)], ())
    assert classes(plan) == {"load": [7], "store_partial": [3]}


def test_drafts_in_offloaded_partial_blocks(planner):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], (), partial_blocks_resident=False)
    plan = planner.plan([part("a", 6, 1, [9], drafts=3)], (), partial_blocks_resident=False)
    assert classes(plan) == {"load": [7], "load_and_store": [3], "store_new": [9]}
    plan = planner.plan([part("a", 10, 1)], (), partial_blocks_resident=False)
    assert classes(plan) == {"load": [7], "load_and_store": [3, 9]}
    plan = planner.plan([part("a", 11, 1)], (), partial_blocks_resident=False)
    assert classes(plan) == {"load": [3, 7], "load_and_store": [9]}


def test_what_accepted_drafts_may_have_filled_is_kept():
    """The engine may cache a block that is not known to be full here."""
    planner = StepPlanner(num_blocks=100, block_tokens=4, has_drafts=True)
    planner.plan([part("a", 0, 6, [7, 3, 9], restarts=True, drafts=3)], ())
    hit = part("b", 8, 1, [7, 3, 5], restarts=True)
    plan = planner.plan([hit], ())  # "a" is left out, and its block is near still
    assert classes(plan) == {"load": [7], "alloc_partial": [5]}
    plan = planner.plan([part("b", 9, 1)], ["a"])
    assert classes(plan) == {"load": [3, 7], "free_partial": [9], "evict_partial": [3]}


def test_released_and_reserved_blocks_are_passed_on(planner):
    plan = planner.plan([], (), released=[4, 5], reserved=[6])
    assert classes(plan) == {"released": [4, 5], "reserved": [6]}


def test_many_blocks(planner):
    """The array of a request's blocks grows."""
    planner.plan([part("a", 0, 4 * 17, range(1, 18), restarts=True)], ())
    plan = planner.plan([part("a", 4 * 17, 4 * 60, range(18, 78))], ())
    assert classes(plan) == {"load": [*range(1, 18)], "store_new": [*range(18, 78)]}


def test_block_tokens_of_one_never_have_partial_blocks():
    planner = StepPlanner(num_blocks=10, block_tokens=1)
    plan = planner.plan([part("a", 0, 3, [1, 2, 3], restarts=True)], ())
    assert classes(plan) == {"store_new": [1, 2, 3]}
    plan = planner.plan([part("a", 3, 1, [4])], ())
    assert classes(plan) == {"load": [1, 2, 3], "store_new": [4]}
    assert planner.num_partial == 0


@pytest.mark.parametrize("scheduled", [2, 1], ids=["fills", "fills-further"])
def test_going_on_behind_a_block_that_is_no_partial_block(planner, scheduled):
    with pytest.raises(IntegrityError, match="continues at token 6, but 1 blocks"):
        planner.plan([part("a", 6, scheduled, [7, 3], restarts=True)], ())


@pytest.mark.parametrize(
    "partial_blocks_resident", [(True,), (False,), (True, True, True, True, False)], ids=str
)
@pytest.mark.parametrize("seed", range(8))
def test_a_continued_plan_equals_a_new_one(seed, partial_blocks_resident):
    """One planner looks only at requests whose blocks change, the other one at all requests."""
    rng = random.Random(seed)
    quick, thorough = (StepPlanner(num_blocks=999, block_tokens=8) for _ in range(2))
    free = iter(range(1, 999))
    lengths: dict[str, int] = {}
    firsts: list[int] = []
    num_again = num_changes = 0
    for at in range(120):
        parts = []
        for name, computed in lengths.items():
            new = [next(free)] if computed % 8 == 0 else []
            parts.append(part(name, computed, 1, new))
            lengths[name] += 1
        if rng.random() < 0.1 or at == 0:
            prompt = rng.randint(1, 20)
            blocks = [next(free) for _ in range(-(-prompt // 8))]
            hits = 0
            if firsts and prompt > 8 and rng.random() < 0.5:  # another request's first block
                blocks[0], hits = rng.choice(firsts), 8
            parts.append(part(f"request-{at}", hits, prompt - hits, blocks, restarts=True))
            lengths[f"request-{at}"] = prompt
            if prompt >= 8:
                firsts.append(blocks[0])
        ended = [name for name in lengths if len(lengths) > 4 and lengths[name] > 30][:1]
        parts = [scheduled for scheduled in parts if scheduled.request_id not in ended]
        for name in ended:
            del lengths[name]
        level = {
            "num_far": rng.choice((3, 3, 3, 3, 3, 0)),
            "num_far_next": rng.choice((5, None)),
            "partial_blocks_resident": rng.choice(partial_blocks_resident),
        }
        again = None
        if not ended and all(p.scheduled_tokens == 1 and not p.restarts for p in parts):
            due = set(quick.due)
            again = quick.plan_on(
                [p for p in parts if p.new_block_ids or p.request_id in due], **level
            )
        plan = thorough.plan(parts, ended, **level)
        if again is None:
            again = quick.plan(parts, ended, **level)
        else:
            num_again += 1
            num_changes += bool(due)
        assert again.load.tolist() == plan.load.tolist()
        found, expected = classes(again), classes(plan)
        assert {name: sorted(ids) for name, ids in found.items()} == {
            name: sorted(ids) for name, ids in expected.items()
        }
        assert (again.num_far, again.num_far_next) == (plan.num_far, plan.num_far_next)
    assert num_again > 20
    assert num_changes > 5


def test_while_nothing_changes_the_same_arrays_come_again():
    """A worker in the same process then need not compare the arrays."""
    planner = StepPlanner(num_blocks=100, block_tokens=8)
    first = planner.plan([part("a", 0, 17, [1, 2, 3], restarts=True)], [], num_far=3)
    second = planner.plan([part("a", 17, 1, [])], [], num_far=3)
    third, fourth = (planner.plan_on(num_far=3) for _ in range(2))
    assert third is not None and fourth is not None
    assert second.load.tolist() == [1, 2] and first.load is not second.load
    assert third.load is fourth.load is second.load
    assert third.load_and_store is fourth.load_and_store is second.load_and_store


def test_a_request_that_is_due_cannot_be_left_out():
    planner = StepPlanner(num_blocks=100, block_tokens=8)
    parts = [part("a", 0, 15, [1, 2], restarts=True), part("b", 0, 9, [3, 4], restarts=True)]
    planner.plan(parts, [], num_far=3)
    assert planner.due == {"a"}
    with pytest.raises(IntegrityError, match=r"\['a'\] are left out, whose blocks change"):
        planner.plan_on([part("b", 9, 1, [5])], num_far=3)


def test_a_request_without_the_block_that_it_computes_in(planner):
    planner.plan([part("a", 0, 8, [7, 3], restarts=True)], ())
    with pytest.raises(IntegrityError, match="block 2 of a request that has 2"):
        planner.plan([part("a", 8, 1)], ())
