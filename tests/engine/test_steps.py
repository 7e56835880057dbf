# SPDX-License-Identifier: Apache-2.0
"""Which steps are the one before with a token more for each request."""

from types import SimpleNamespace

import pytest

from vllm_tiered.adapter.steps import DecodeStreak


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
