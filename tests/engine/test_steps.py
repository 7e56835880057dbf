# SPDX-License-Identifier: Apache-2.0
"""Which steps are the one before with a token more for each request."""

from types import SimpleNamespace

import pytest

from vllm_tiered.adapter import adaptive
from vllm_tiered.adapter.adaptive import AdaptiveExpansion
from vllm_tiered.adapter.steps import DecodeStreak, Step, StepReport
from vllm_tiered.cost.kv import KvLevels
from vllm_tiered.kv.controller import Decision
from vllm_tiered.kv.elastic import ElasticBlocks


def output(**changes):
    """vLLM's scheduler output for three requests that decode."""
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
        scheduled_cached_reqs=SimpleNamespace(**(cached | changes)),
    )


NEXT = [11, 21, 31]


def test_it_goes_on():
    streak = DecodeStreak()
    assert not streak.goes_on(output())
    assert streak.goes_on(output(computed=NEXT))
    assert streak.goes_on(output(computed=[12, 22, 32]))


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": ["a", "b"], "computed": [11, 21]},
        {"ids": ["a", "c", "b"]},
        {"total": 4},
        {"computed": [11, 21, 32]},
        {"computed": [10, 20, 30]},
        {"new_block_ids": [None, ([7],), None]},
        {"resumed_req_ids": {"b"}},
        {"new": ["d"], "total": 9},
    ],
    ids=str,
)
def test_it_ends(changes):
    streak = DecodeStreak()
    streak.goes_on(output())
    assert not streak.goes_on(output(**({"computed": NEXT} | changes)))


def test_it_begins_again_behind_what_ended_it():
    streak = DecodeStreak()
    streak.goes_on(output())
    assert not streak.goes_on(output(computed=NEXT, new=["d"], total=9))
    assert not streak.goes_on(output(computed=[12, 22, 32]))  # not without a look at "d"
    assert streak.goes_on(output(computed=[13, 23, 33]))


@pytest.mark.parametrize(
    ("num_running", "num_waiting", "counted"), [(4, 30, 0), (3, 30, 1), (1, 2, 2)]
)
def test_who_waits_for_a_seat_does_not_ask_for_blocks(
    monkeypatch, num_running, num_waiting, counted
):
    levels = KvLevels(
        num_layers=6,
        page_bytes=64,
        block_tokens=4,
        near_pages=60,
        max_far_layers=3,
        max_blocks=20,
    )
    elastic = ElasticBlocks(geometry=levels.geometry(0), usable_blocks=20)
    expansion = AdaptiveExpansion(
        levels, elastic, max_model_blocks=8, max_num_seqs=4, on_change=lambda *_: None
    )
    seen = []

    def step(signals, state, levels):
        seen.append(signals.num_waiting)
        return Decision(far_layers=0, reason=""), state

    monkeypatch.setattr(adaptive.controller, "step", step)
    expansion.decide(
        Step(
            end=1.0,
            seconds=0.03,
            report=StepReport(),
            is_blocked=True,
            num_preempted=0,
            tokens=num_running,
            num_running=num_running,
            num_waiting=num_waiting,
            used_blocks=5,
            longest=8,
        )
    )
    assert seen == [counted]
