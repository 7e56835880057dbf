# SPDX-License-Identifier: Apache-2.0
"""Convergence of an adaptive expansion, computed by hand from recorded levels."""

import pytest

from benchmarks.harness.convergence import (
    last_expansion,
    steps_to_reach,
    summarise_convergence,
    warm_up,
    working_expansion,
    working_partial_blocks_far,
)
from benchmarks.inputs.workload import Request
from tests.fakes.benchmark_engines import FakeEngines
from tests.fixtures.rounds import make_round


def rounds(*levels_by_round, num_steps=100):
    return [
        make_round(tiered=True, levels=levels, num_steps=num_steps) for levels in levels_by_round
    ]


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([(1, 2.0)], 2.0),
        ([(1, 2.0), (41, 3.0)], 3.0),
        ([(1, 2.0), (61, 3.0)], 2.0),
        ([(1, 3.0), (31, 1.0), (61, 3.0)], 3.0),
        ([(71, 3.0)], 1.0),
        ([], 1.0),
    ],
    ids=["one", "60 steps of 3", "60 steps of 2", "3 twice", "first noted late", "never noted"],
)
def test_working_expansion_is_the_median_over_steps(levels, expected):
    assert working_expansion(rounds(levels)) == expected


def test_working_expansion_counts_all_rounds():
    assert working_expansion(rounds([(1, 1.0)], [(1, 2.0)], [(1, 2.0), (91, 1.0)])) == 2.0


def test_no_steps_have_no_expansion():
    with pytest.raises(ValueError, match="no steps"):
        working_expansion([])


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([[(1, 1.0), (11, 1.5), (21, 2.0)]], 20),
        ([[(1, 1.0)], [(1, 1.0), (6, 1.9)]], 105),
        ([[(1, 2.2), (50, 1.0)]], 0),
        ([[(1, 1.0), (5, 4.0)]], None),
    ],
    ids=["third level", "second round", "at once", "never"],
)
def test_steps_until_the_level_is_first_close(levels, expected):
    assert steps_to_reach(rounds(*levels), 2.0) == expected


def test_where_partial_blocks_are_is_part_of_the_level():
    warmup = rounds([(1, 1.0), (11, 3.0), (41, 3.0, "far")], [(1, 3.0)])
    assert steps_to_reach(warmup, 3.0) == 10
    assert steps_to_reach(warmup, 3.0, partial_blocks_far=True) == 40
    measured = rounds([(1, 3.0), (31, 3.0, "far")])
    figures = summarise_convergence(warmup, measured)
    assert figures["working_partial_blocks_far"] and figures["steps_to_converge"] == 40
    assert not working_partial_blocks_far(rounds([(1, 3.0, "far"), (41, 3.0)]))


def test_summary_of_a_warm_up():
    warmup = rounds([(1, 1.0), (31, 2.0)], [(1, 2.0)])
    measured = [
        make_round(tiered=True, levels=[(1, 2.0)], num_steps=80, level_changes=changes)
        for changes in (0.0, 2.0, 1.0)
    ]
    figures = summarise_convergence(warmup, measured)
    assert figures["steps_to_converge"] == 30
    assert figures["working_expansion"] == 2.0
    assert figures["level_changes_per_round"] == 1.0
    assert figures["warmup_tokens_per_s"] == [200.0, 200.0]
    assert figures["warmup_steps"] == 200


def test_last_expansion_of_a_plugin_that_never_swapped_is_one():
    assert last_expansion(make_round()) == 1.0
    assert last_expansion(*rounds([(1, 2.0), (5, 3.0)])) == 3.0


def test_warm_up_runs_the_load_and_says_where_it_got():
    fakes = FakeEngines(lambda spec, requests: make_round("auto", levels=[(1, 2.5)]))
    lines: list[str] = []
    with fakes([make_round()], [], lines.append) as (engine,):
        lines.clear()
        load = [Request(request_id="a", prompt_token_ids=(1, 2), num_output_tokens=3)]
        done = warm_up(engine, load, 2, lines.append)
    assert engine.rounds == [load] * 2
    assert len(done) == 2
    assert lines == [f"warm-up {i}/2 auto: 200 tokens/s, expansion 2.50" for i in (1, 2)]
