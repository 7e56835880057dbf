# SPDX-License-Identifier: Apache-2.0
"""Detection of steps that repeat the last one with one more token for each request."""

from types import SimpleNamespace

import pytest

from vllm_tiered.adapter.kv import adaptive
from vllm_tiered.adapter.kv.adaptive import AdaptiveExpansion
from vllm_tiered.adapter.kv.steps import (
    DecodeStreak,
    FirstPrefills,
    Step,
    StepReport,
    StepWatch,
)
from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.controller import Decision
from vllm_tiered.kv.layout import KvLevels, Level


def output(**changes):
    """Return vLLM's scheduler output for three decoding requests."""
    ids = changes.pop("ids", ["a", "b", "c"])
    computed = changes.pop("computed", [10, 20, 30])
    total = changes.pop("total", len(ids))
    new = changes.pop("new", [])
    cached = {
        "req_ids": ids,
        "num_computed_tokens": computed,
        "new_block_ids": [None] * len(ids),
        "resumed_req_ids": set(),
    }
    return SimpleNamespace(
        scheduled_new_reqs=new,
        total_num_scheduled_tokens=total,
        scheduled_spec_decode_tokens={},
        scheduled_cached_reqs=SimpleNamespace(**(cached | changes)),
    )


NEXT = [11, 21, 31]


def test_it_goes_on():
    streak = DecodeStreak()
    assert not streak.continues(output())
    assert streak.continues(output(computed=NEXT))
    assert streak.continues(output(computed=[12, 22, 32], new_block_ids=[None, ([7],), None]))


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": ["a", "b"], "computed": [11, 21]},
        {"ids": ["a", "c", "b"]},
        {"total": 4},
        {"computed": [11, 21, 32]},
        {"computed": [10, 20, 30]},
        {"resumed_req_ids": {"b"}},
        {"new": ["d"], "total": 9},
    ],
    ids=str,
)
def test_it_ends(changes):
    streak = DecodeStreak()
    streak.continues(output())
    assert not streak.continues(output(**({"computed": NEXT} | changes)))


def test_it_begins_again_after_the_step_that_ended_it():
    streak = DecodeStreak()
    streak.continues(output())
    assert not streak.continues(output(computed=NEXT, new=["d"], total=9))
    assert not streak.continues(output(computed=[12, 22, 32]))  # not before "d" is known
    assert streak.continues(output(computed=[13, 23, 33]))


@pytest.mark.parametrize("began", [{"resumed_req_ids": {"a"}}, {"new": ["a"]}], ids=str)
def test_an_empty_step_depends_on_nothing(began):
    """The next step may compute nothing after a request came back with all but one token.

    The request may not run again before it is known whether that token was its last.
    """
    streak = DecodeStreak()
    assert not streak.continues(output(ids=[], computed=[]))
    assert not streak.continues(output(ids=["a"], computed=[32], **began))
    assert not streak.continues(output(ids=[], computed=[]))
    assert not streak.continues(output(ids=[], computed=[]))


def plans(*steps, drafts=(), continues=False):
    """Return `is_recent` after each step; a step is its tokens by request, and who is preempted."""
    prefills = FirstPrefills()
    found = []
    for tokens, *preempted in steps:
        prefills.add(
            SimpleNamespace(
                num_scheduled_tokens=tokens,
                scheduled_spec_decode_tokens=dict(drafts),
                preempted_req_ids=set(preempted),
                finished_req_ids=set(),
            ),
            continues=continues,
        )
        found.append(prefills.is_recent)
    return found


def test_a_first_prefill_counts_for_two_steps():
    decode = ({"a": 1, "b": 1},)
    assert plans(decode, ({"a": 1, "b": 40},), decode, decode) == [False, True, True, False]


def test_what_is_computed_again_is_no_first_prefill():
    again = ({"a": 1, "b": 40},)
    assert plans(({"a": 1}, "b"), again, again) == [False, False, False]
    assert plans(({"a": 1}, "c"), again) == [False, True]


def test_drafts_are_no_prefill():
    step = ({"a": 4, "b": 1},)
    assert plans(step, drafts=[("a", (7, 7, 7))]) == [False]
    assert plans(step, drafts=[("a", (7, 7))]) == [True]


@pytest.fixture
def signals_of(monkeypatch):
    """Return a function from a step to the controller's signals."""
    levels = KvLevels(
        num_layers=6,
        page_bytes=64,
        block_tokens=4,
        near_pages=60,
        max_num_far=3,
        max_blocks=20,
    )
    elastic = ElasticBlocks(geometry=levels.geometry(Level(0)), usable_blocks=20)
    expansion = AdaptiveExpansion(
        levels,
        elastic,
        max_model_blocks=8,
        max_num_seqs=4,
        resident_blocks=lambda _: 0,
        on_change=lambda *_: None,
    )
    seen = []

    def step(signals, state, levels, tuning):
        seen.append(signals)
        return Decision(level_idx=0, reason=""), state

    def signals_of(**changes):
        defaults = {
            "end": 1.0,
            "seconds": 0.03,
            "report": StepReport(),
            "is_blocked": True,
            "num_preempted": 0,
            "tokens": 1,
            "num_running": 1,
            "num_waiting": 0,
            "used_blocks": 5,
            "longest": 8,
        }
        expansion.decide(Step(**{**defaults, **changes}))
        return seen.pop()

    monkeypatch.setattr(adaptive.controller, "step", step)
    return signals_of


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "counted"), [(4, 30, 0), (3, 30, 1), (1, 2, 2)]
)
def test_requests_beyond_max_num_seqs_do_not_ask_for_blocks(
    signals_of, num_running, num_waiting, counted
):
    assert signals_of(num_running=num_running, num_waiting=num_waiting).num_waiting == counted


@pytest.mark.parametrize(
    ("longest", "beside", "session_blocks", "needed"),
    [
        (8, 8, 0, 2 + 1 + 4),
        (99, 99, 0, 8),  # the longest that the engine accepts
        (8, 8, 3, 3 + 2 + 1 + 4),
        (8, 0, 3, 3 + 4),  # sessions alone: each may go on
        (8, 0, 2, 2 + 1 + 4),
        (8, 5, 99, 5 + (2 + 1 + 4) + 1 + 1 + 4),  # 5 are in use: they share blocks
    ],
)
def test_blocks_of_sessions_add_to_those_of_the_longest_request(
    signals_of, longest, beside, session_blocks, needed
):
    signals = signals_of(
        longest=longest, longest_beside_sessions=beside, session_blocks=session_blocks
    )
    assert signals.needed_blocks == needed


def test_each_session_has_a_partial_block_that_takes_pages(signals_of):
    """With 3 of 6 layers far a partial block costs at most 3 / (3 + 1) of a block."""
    alone = signals_of(longest=8, session_blocks=6).needed_blocks
    assert signals_of(longest=8, session_blocks=6, num_sessions=3).needed_blocks == alone + 3


# Known facts about requests ------------------------------------------------------------


def take(watch, num_preempted=0):
    return watch.take_step(tokens=1, num_running=1, num_preempted=num_preempted, used_blocks=5)


@pytest.fixture
def watch():
    watch = StepWatch(block_tokens=4)
    watch.begin_request("a", 100)
    take(watch)
    return watch


def test_a_long_prompt_is_not_forgotten_while_parts_of_it_are_computed(watch):
    watch.update_tokens("a", 16)
    assert take(watch).longest == 100
    watch.update_tokens("a", 101)
    assert take(watch).longest == 101
    watch.update_tokens("b", 500)
    assert take(watch).longest == 101, "vLLM made it end: it is not there any more"


def test_a_refused_request_reports_its_present_length(watch):
    watch.record_blocked("a", 140)
    step = take(watch)
    assert step.is_blocked and step.longest == 140
    assert not take(watch).is_blocked


def test_sessions_hold_blocks_from_beginning_to_end(watch):
    watch.begin_request("s", 10, is_session=True)
    watch.begin_request("t", 12, is_session=True)
    step = take(watch)
    assert (step.num_sessions, step.session_blocks) == (2, 3 + 4)
    assert (step.longest, step.longest_beside_sessions) == (100, 100)
    watch.update_tokens("s", 200)
    step = take(watch)
    assert (step.longest, step.longest_beside_sessions) == (200, 100)
    watch.end_request("t")
    assert take(watch).session_blocks == 51


def test_a_preemption_is_for_blocks_only_if_somebody_record_blocked(watch):
    """A reset of the prefix cache preempts too, and so does a lost page."""
    step = take(watch, num_preempted=2)
    assert not step.is_blocked and step.num_preempted == 0
    watch.record_blocked("a", 1)
    step = take(watch, num_preempted=2)
    assert step.is_blocked and step.num_preempted == 2
