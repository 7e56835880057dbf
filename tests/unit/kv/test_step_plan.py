# SPDX-License-Identifier: Apache-2.0
"""How a step's blocks are classified. Blocks hold 4 tokens here."""

import dataclasses
import random

import numpy as np
import pytest

from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.step_plan import ScheduledRequest, StepPlanner


@pytest.fixture
def planner():
    return StepPlanner(num_blocks=100, block_tokens=4)


def part(name, computed, scheduled, new_blocks=(), *, restarts=False):
    return ScheduledRequest(
        request_id=name,
        new_block_ids=new_blocks,
        restarts=restarts,
        computed_tokens=computed,
        scheduled_tokens=scheduled,
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
    assert classes(plan) == {"ring": [7, 3], "tail_acquire": [9]}
    assert planner.num_tails == 1


def test_the_tail_fills_step_by_step(planner):
    planner.plan([part("a", 0, 5, [7, 3], restarts=True)], ())
    assert classes(planner.plan([part("a", 5, 2)], ())) == {"read": [7]}
    assert classes(planner.plan([part("a", 7, 1)], ())) == {"read": [7], "tail_flush": [3]}
    assert planner.num_tails == 0
    plan = planner.plan([part("a", 8, 1, [5])], ())
    assert classes(plan) == {"read": [3, 7], "tail_acquire": [5]}


def test_a_chunk_may_finish_a_tail_and_begin_another(planner):
    planner.plan([part("a", 0, 3, [7], restarts=True)], ())
    plan = planner.plan([part("a", 3, 7, [3, 9])], ())
    assert classes(plan) == {"tail_flush": [7], "ring": [3], "tail_acquire": [9]}


def test_a_request_that_is_left_out_keeps_its_tail_and_is_not_read(planner):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], ())
    assert classes(planner.plan([], ())) == {}
    assert planner.num_tails == 1
    assert classes(planner.plan([part("a", 6, 1)], ())) == {"read": [7]}


def test_shared_blocks_are_read_once(planner):
    planner.plan([part("a", 0, 8, [7, 3], restarts=True)], ())
    plan = planner.plan([part("a", 8, 1, [5]), part("b", 8, 1, [7, 3, 6], restarts=True)], ())
    assert classes(plan) == {"read": [3, 7], "tail_acquire": [5, 6]}


def test_a_prefix_that_another_request_computes_in_this_step_is_not_read(planner):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], ())
    plan = planner.plan(
        [
            part("a", 6, 6, [8]),  # fills its tail 3 and block 8
            part("b", 12, 2, [7, 3, 8, 6], restarts=True),
        ],
        (),
    )
    assert classes(plan) == {
        "read": [7],
        "ring": [8],
        "tail_flush": [3],
        "tail_acquire": [6],
    }


def test_tails_leave_when_they_may_not_stay_and_are_far_until_they_are_full():
    planner = StepPlanner(num_blocks=20, block_tokens=4)
    planner.plan([part("a", 0, 2, [1], restarts=True)], (), far_layers=2)
    planner.plan([part("b", 0, 2, [2], restarts=True)], (), far_layers=2, write_out_for=3)
    parts = [part("a", 2, 1), part("c", 0, 1, [3], restarts=True)]
    plan = planner.plan(parts, (), far_layers=3, tails_stay=False)
    assert classes(plan) == {"tail_leave": [1, 2], "extend": [1], "ring": [3]}
    plan = planner.plan([part("a", 3, 2, [4]), part("b", 2, 1)], (), far_layers=1)
    assert classes(plan) == {"extend": [1, 2], "tail_acquire": [4]}
    plan = planner.plan([part("b", 3, 1)], ["a", "c"], far_layers=1)
    assert classes(plan) == {"extend": [2], "tail_release": [4]}


def test_an_ended_request_releases_its_tail(planner):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], ())
    assert classes(planner.plan([], ("a", "unknown"))) == {"tail_release": [3]}
    assert classes(planner.plan([], ("a",))) == {}


def test_an_ended_request_without_a_tail_releases_nothing(planner):
    planner.plan([part("a", 0, 8, [7, 3], restarts=True)], ())
    assert classes(planner.plan([], ("a",))) == {}


@pytest.mark.parametrize("ended", [(), ("a",)], ids=["resumed", "ended-and-begun-again"])
def test_a_request_that_restarts_has_only_its_new_blocks(planner, ended):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], ())
    plan = planner.plan([part("a", 4, 3, [7, 5], restarts=True)], ended)
    assert classes(plan) == {"read": [7], "tail_acquire": [5], "tail_release": [3]}


def test_a_released_block_may_be_written_in_the_same_step(planner):
    planner.plan([part("a", 0, 6, [7, 3], restarts=True)], ())
    plan = planner.plan([part("b", 0, 2, [3], restarts=True)], ("a",))
    assert classes(plan) == {"tail_release": [3], "tail_acquire": [3]}


def test_granted_and_withheld_are_passed_on(planner):
    plan = planner.plan([], (), granted=[4, 5], withheld=[6])
    assert classes(plan) == {"granted": [4, 5], "withheld": [6]}


def test_many_blocks(planner):
    """The array behind a request grows."""
    planner.plan([part("a", 0, 4 * 17, range(1, 18), restarts=True)], ())
    plan = planner.plan([part("a", 4 * 17, 4 * 60, range(18, 78))], ())
    assert classes(plan) == {"read": [*range(1, 18)], "ring": [*range(18, 78)]}


def test_block_tokens_of_one_never_have_tails():
    planner = StepPlanner(num_blocks=10, block_tokens=1)
    plan = planner.plan([part("a", 0, 3, [1, 2, 3], restarts=True)], ())
    assert classes(plan) == {"ring": [1, 2, 3]}
    plan = planner.plan([part("a", 3, 1, [4])], ())
    assert classes(plan) == {"read": [1, 2, 3], "ring": [4]}
    assert planner.num_tails == 0


@pytest.mark.parametrize("scheduled", [2, 1], ids=["fills", "fills-further"])
def test_going_on_behind_a_block_that_is_no_tail(planner, scheduled):
    with pytest.raises(IntegrityError, match="continues at token 6 in block 3"):
        planner.plan([part("a", 6, scheduled, [7, 3], restarts=True)], ())


@pytest.mark.parametrize(
    "tails_stay", [(True,), (False,), (True, True, True, True, False)], ids=str
)
@pytest.mark.parametrize("seed", range(8))
def test_going_on_says_what_planning_would(seed, tails_stay):
    """Requests decode; one planner looks at those whose blocks change, the other one at all."""
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
            "far_layers": rng.choice((3, 3, 3, 3, 3, 0)),
            "write_out_for": rng.choice((5, None)),
            "tails_stay": rng.choice(tails_stay),
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
        assert again.read.tolist() == plan.read.tolist()
        found, expected = classes(again), classes(plan)
        assert {name: sorted(ids) for name, ids in found.items()} == {
            name: sorted(ids) for name, ids in expected.items()
        }
        assert (again.far_layers, again.write_out_for) == (plan.far_layers, plan.write_out_for)
    assert num_again > 20
    assert num_changes > 5


def test_while_nothing_changes_the_same_arrays_come_again():
    """So that a worker of the same process need not compare them."""
    planner = StepPlanner(num_blocks=100, block_tokens=8)
    first = planner.plan([part("a", 0, 17, [1, 2, 3], restarts=True)], [], far_layers=3)
    second = planner.plan([part("a", 17, 1, [])], [], far_layers=3)
    third, fourth = (planner.plan_on(far_layers=3) for _ in range(2))
    assert third is not None and fourth is not None
    assert second.read.tolist() == [1, 2] and first.read is not second.read
    assert third.read is fourth.read is second.read
    assert third.extend is fourth.extend is second.extend


def test_a_request_that_is_due_cannot_be_left_out():
    planner = StepPlanner(num_blocks=100, block_tokens=8)
    parts = [part("a", 0, 15, [1, 2], restarts=True), part("b", 0, 9, [3, 4], restarts=True)]
    planner.plan(parts, [], far_layers=3)
    assert planner.due == {"a"}
    with pytest.raises(IntegrityError, match=r"\['a'\] are left out, whose blocks change"):
        planner.plan_on([part("b", 9, 1, [5])], far_layers=3)


def test_a_request_without_the_block_that_it_computes_in(planner):
    planner.plan([part("a", 0, 8, [7, 3], restarts=True)], ())
    with pytest.raises(IntegrityError, match="block 2 of a request that has 2"):
        planner.plan([part("a", 8, 1)], ())
