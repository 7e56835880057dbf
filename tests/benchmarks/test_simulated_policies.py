# SPDX-License-Identifier: Apache-2.0
"""Policies of reading far KV in the simulator: Pie's figure 4, and what holds for any pace."""

import dataclasses
import itertools
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from benchmarks.registry import load
from benchmarks.simulator import policy_search
from benchmarks.simulator.calibration import calibration_case
from benchmarks.simulator.policies.base import Pace, StepBlocks
from benchmarks.simulator.policies.blocks import KeptBlocks
from benchmarks.simulator.policies.interleave import (
    Interleave,
    InterleaveAcrossSteps,
    even_order,
    product_order,
)
from benchmarks.simulator.policies.on_demand import OnDemand
from benchmarks.simulator.policies.pie import Pie
from benchmarks.simulator.policies.rotation import Rotation
from benchmarks.simulator.policies.table import POLICIES
from benchmarks.simulator.policy_figures import LOADS, NUM_MACHINES, over_interleave, policy_cases
from benchmarks.simulator.policy_search import at_expansion, best_of, settings_of
from benchmarks.simulator.simulation import simulate
from benchmarks.suites.kv import policies as kv_policies
from vllm_tiered.kv.layout import KvLevels, Level

# Pie's protocol -------------------------------------------------------------------------


class Log:
    """A rotation of layers that compute for one second each, and the swaps that it begins.

    Layers and seconds count from 1, as in the paper.
    """

    def __init__(self, num_layers, num_near, *, swap_in_s, swap_out_s, **kwargs):
        self.rotation = Rotation(
            num_layers,
            num_near,
            swap_in_s=lambda layer: self._note("in", layer, swap_in_s),
            swap_out_s=lambda layer: self._note("out", layer, swap_out_s),
            **kwargs,
        )
        self.num_layers = num_layers
        self.swaps = []
        self.now = 0.0
        self.stall = 0.0
        self.starts = []

    def _note(self, kind, layer, seconds):
        self.swaps.append((kind, layer + 1, self.present))
        return seconds

    def run(self, tokens):
        for step in range(tokens * self.num_layers):
            layer = step % self.num_layers
            self.present = step + 1
            begins = self.rotation.compute(layer, self.now)
            assert self.rotation.near[layer]
            in_flight = [
                each for each in (self.rotation.swap_in, self.rotation.swap_out) if each is not None
            ]
            assert (
                sum(self.rotation.near) + sum(self.rotation.far) + len(in_flight) == self.num_layers
            )
            self.stall += begins - self.now
            self.starts.append(begins)
            self.now = begins + 1
        return self


def figure_4(tokens, **kwargs):
    """Nine layers, transfers of two computes, two layers in CPU memory."""
    return Log(9, 7, swap_in_s=2.0, swap_out_s=2.0, **kwargs).run(tokens)


def test_figure_4_begins_the_swaps_that_the_paper_describes():
    """No swap-out at layer 1; 1 leaves at 2; nothing at 3; at 4, 3 leaves and 8 comes."""
    swaps = figure_4(1).swaps
    assert swaps[:3] == [("out", 1, 2), ("in", 8, 4), ("out", 3, 4)]
    assert swaps[3:] == [("in", 9, 6), ("out", 5, 6), ("in", 1, 8), ("out", 7, 8)]


def test_figure_4_hides_the_expansion_of_1_28():
    assert figure_4(50).stall == 0
    assert pytest.approx(1.28, abs=0.01) == 9 / 7


def test_a_layer_of_figure_4_spends_eight_computes_away():
    """Two to leave, four behind the two layers before it, two to return."""
    left = {}
    away = []
    for kind, layer, at in figure_4(20).swaps:
        if kind == "out":
            left[layer] = at
        elif layer in left:
            away.append(at + 2 - left.pop(layer))
    assert len(away) > 70
    assert set(away) == {8}


def test_figure_4_swaps_half_of_the_layers_in_a_token():
    """The link is never idle: 4.5 layers in each direction, where four would do.

    `interleave` with two buffers has the same seven spaces with four far layers.
    """
    swaps = [kind for kind, _, _ in figure_4(101).swaps]
    before = [kind for kind, _, _ in figure_4(1).swaps]
    for kind in ("in", "out"):
        assert (swaps.count(kind) - before.count(kind)) / 100 == pytest.approx(4.5)


def test_one_more_far_layer_than_figure_4_stalls():
    assert Log(9, 6, swap_in_s=2.0, swap_out_s=2.0).run(50).stall > 0


@pytest.mark.parametrize("fills_space", [False, True])
@pytest.mark.parametrize("num_near", [9, 12, 30])
def test_fast_swaps_still_move_every_layer_in_a_token(num_near, fills_space):
    log = Log(40, num_near, swap_in_s=0.1, swap_out_s=0.1, fills_space=fills_space)
    log.run(1)
    before = len(log.swaps)
    log.run(10)
    assert (len(log.swaps) - before) / 10 == pytest.approx(2 * 40, rel=0.01)
    assert log.stall == 0


def test_checks_at_each_layer_round_a_swap_up_to_whole_layers():
    """A swap of 1.1 computes takes two, unless compute waits: not 36 layers of 40 in a token."""

    def moved(**kwargs):
        log = Log(40, 20, swap_in_s=1.1, swap_out_s=1.1, **kwargs).run(20)
        return sum(kind == "in" for kind, _, _ in log.swaps) / (log.now / 40)

    assert 20 < moved() < 23
    assert moved(is_eager=True) == pytest.approx(40 / 1.1, rel=0.01)


def test_short_swap_outs_empty_near_memory_unless_told_not_to():
    def stall(**kwargs):
        return Log(40, 30, swap_in_s=2.0, swap_out_s=0.1, **kwargs).run(30).stall

    assert stall(fills_space=True) == 0 < stall()


@given(
    num_layers=st.integers(2, 12),
    share=st.floats(0, 1),
    swap_in_s=st.floats(0.01, 5),
    swap_out_s=st.floats(0.01, 5),
    fills_space=st.booleans(),
    is_eager=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_layer_is_near_when_it_computes(
    num_layers, share, swap_in_s, swap_out_s, fills_space, is_eager
):
    num_near = 1 + round(share * (num_layers - 1))
    log = Log(
        num_layers,
        num_near,
        swap_in_s=swap_in_s,
        swap_out_s=swap_out_s,
        fills_space=fills_space,
        is_eager=is_eager,
    )
    rotation = log.run(6).rotation
    taken = sum(rotation.near) + (rotation.swap_in is not None) + (rotation.swap_out is not None)
    assert taken <= num_near
    if num_near == num_layers:
        assert not log.swaps and not log.stall
    # A layer that is not always near is read at least that often (Belady's bound on a cycle).
    reads = sum(kind == "in" for kind, _, _ in log.swaps)
    if num_layers > 2:
        bound = num_layers * (num_layers - num_near) / (num_layers - 1)
        assert reads >= 5 * bound - num_layers


def test_no_space_at_all_is_refused():
    with pytest.raises(ValueError, match="0 of 9 layers near"):
        Rotation(9, 0, swap_in_s=lambda layer: 1.0, swap_out_s=lambda layer: 1.0)


# Steps of a policy ----------------------------------------------------------------------

LEVELS = KvLevels(
    num_layers=12,
    page_bytes=1000,
    block_tokens=16,
    near_pages=6000,
    max_num_far=11,
    max_blocks=2000,
    offloads_partial_blocks=True,
)
BLOCKS = StepBlocks(used=900, released=1000, partial=20)


def pace(*, bytes_per_s, overhead_s=1e-3, layer_s=1e-3, **kwargs):
    return Pace(
        overhead_s=overhead_s,
        layer_s=layer_s,
        page_bytes=1000,
        read_bytes_per_s=bytes_per_s,
        write_bytes_per_s=bytes_per_s,
        **kwargs,
    )


def policy_of(name):
    entry = POLICIES[name]
    return entry.make(
        dataclasses.replace(
            LEVELS, staging_buffers=entry.staging_buffers, max_num_far=entry.max_num_far(12)
        )
    )


LAZY = [name for name in POLICIES if name != "pie_write_once_eager"]  # its swaps must take time


@pytest.mark.parametrize("name", LAZY)
def test_an_infinitely_fast_link_never_stalls(name):
    policy = policy_of(name)
    num_far = POLICIES[name].max_num_far(12)
    for step in range(20):
        blocks = BLOCKS._replace(is_same=step % 3 > 0)
        outcome = policy.step(Level(num_far, False), blocks, pace(bytes_per_s=float("inf")))
        assert outcome.stall_s == 0
    assert outcome.read_pages > 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_slow_link_bounds_the_steps(name):
    """Steps take as long as their reads, but for a swap in flight."""
    policy, slow = policy_of(name), pace(bytes_per_s=1e8)
    level = Level(6, not POLICIES[name].offloaded_partial)
    seconds = read = 0.0
    for _ in range(30):
        outcome = policy.step(level, BLOCKS, slow)
        seconds += slow.overhead_s + 12 * slow.layer_s + outcome.stall_s
        read += outcome.read_pages
    assert outcome.stall_s > 0
    assert seconds >= slow.read_s(read) - slow.read_s(2 * BLOCKS.used)


@pytest.mark.parametrize("bytes_per_s", [1e8, 3e8, 1e9, 1e10])
def test_pie_moves_whole_layers(bytes_per_s):
    """Bytes are swaps times blocks, in both directions, and as many layers leave as come."""
    policy = policy_of("pie")
    read = written = 0.0
    for _ in range(50):
        outcome = policy.step(Level(6, False), BLOCKS, pace(bytes_per_s=bytes_per_s))
        assert outcome.read_pages % BLOCKS.used == outcome.written_pages % BLOCKS.used == 0
        read += outcome.read_pages
        written += outcome.written_pages
    assert abs(read - written) <= 2 * BLOCKS.used


def test_pie_that_writes_once_writes_what_was_filled_and_the_partial_blocks():
    policy = policy_of("pie_write_once")
    written = filled = reads = 0.0
    for step in range(200):
        blocks = BLOCKS._replace(filled=step % 4)
        filled += blocks.filled
        outcome = policy.step(Level(6, False), blocks, pace(bytes_per_s=1e10))
        reads += outcome.read_pages / BLOCKS.used
        written += outcome.written_pages
    # Every layer leaves in every step: its partial blocks then, and each filled block once.
    assert written == pytest.approx(reads * BLOCKS.partial + 12 * filled, rel=0.02)


def test_a_policy_of_a_fixed_level_refuses_another():
    policy = policy_of("pie")
    policy.step(Level(6, False), BLOCKS, pace(bytes_per_s=1e9))
    with pytest.raises(ValueError, match="this policy has a fixed level"):
        policy.step(Level(5, False), BLOCKS, pace(bytes_per_s=1e9))


def test_what_swaps_cost_is_charged_once_in_the_step_after():
    policy = policy_of("pie")
    copied = charged = 0.0
    for _ in range(10):
        charged += policy.burden(Level(6, False), BLOCKS).pages
        outcome = policy.step(Level(6, False), BLOCKS, pace(bytes_per_s=1e9))
        copied += outcome.read_pages + outcome.written_pages
    last = policy.burden(Level(6, False), BLOCKS).pages
    assert charged + last == copied > last > 0


def test_even_layers_leave_a_resident_one_between():
    for num_layers in (2, 9, 30, 40):
        for num_far in range(1, num_layers // 2 + 1):
            far = even_order(num_layers, num_far)
            assert len(set(far)) == num_far and far[-1] == num_layers - 1
            assert far[0] > 0 and all(b - a > 1 for a, b in itertools.pairwise(far))


def test_one_buffer_hides_what_fits_between_two_far_layers():
    """With every third layer far, two layers compute while the buffer is read into."""
    policy = policy_of("interleave_1_buffer")
    hidden = pace(bytes_per_s=BLOCKS.used * 1000 / 1.99e-3)
    late = pace(bytes_per_s=BLOCKS.used * 1000 / 2.01e-3)
    assert policy.step(Level(4, False), BLOCKS, hidden).stall_s == 0
    assert policy.step(Level(4, False), BLOCKS, late).stall_s > 0


@pytest.mark.parametrize("bytes_per_s", [1e8, 5e8])
def test_reads_in_the_step_before_are_as_those_of_interleave_if_blocks_change(bytes_per_s):
    plain, across = Interleave(LEVELS), InterleaveAcrossSteps(LEVELS)
    always = InterleaveAcrossSteps(LEVELS, always=True)
    speed = pace(bytes_per_s=bytes_per_s, overhead_s=0.0)
    level, stalls = Level(6), {True: [], False: []}
    for is_same in [False] * 4 + [True] * 4:
        blocks = BLOCKS._replace(is_same=is_same)
        expected = plain.step(level, blocks, speed).stall_s
        stall = across.step(level, blocks, speed).stall_s
        stalls[is_same].append((stall, expected))
        assert always.step(level, blocks, speed).stall_s <= stall + 1e-12
    assert all(stall == expected for stall, expected in stalls[False])
    assert all(stall < expected for stall, expected in stalls[True])


def test_reads_in_the_step_before_gain_nothing_if_the_overhead_fills_the_buffers():
    speed = pace(bytes_per_s=1e9, overhead_s=2.1e-3)  # two reads of 0.9 ms
    always = InterleaveAcrossSteps(LEVELS, always=True)
    stalls = [always.step(Level(9), BLOCKS, speed).stall_s for _ in range(5)]
    expected = Interleave(LEVELS).step(Level(9), BLOCKS, speed).stall_s
    assert stalls == pytest.approx([expected] * 5)


def test_on_demand_waits_for_every_byte():
    speed = pace(bytes_per_s=1e9)
    outcome = OnDemand(LEVELS).step(Level(6), BLOCKS, speed)
    assert outcome.stall_s == pytest.approx(speed.read_s(6 * (900 - 20)))
    assert OnDemand(LEVELS).burden(Level(6), BLOCKS).pages == 0


def test_kept_blocks_and_buffers_fill_near_memory():
    policy, level = KeptBlocks(LEVELS), Level(11)
    kept = policy.kept(level, BLOCKS)
    staged = policy.staged(level, BLOCKS)
    assert kept + staged == 880
    pages = 1 * BLOCKS.released + 11 * (BLOCKS.partial + kept) + 2 * staged
    assert LEVELS.near_pages - 9 < pages <= LEVELS.near_pages
    assert KeptBlocks(LEVELS, on_demand=True).kept(level, BLOCKS) > kept


def test_blocks_that_fit_are_not_read():
    few = BLOCKS._replace(used=300)
    policy = KeptBlocks(LEVELS)
    assert policy.step(Level(11), few, pace(bytes_per_s=1e6)).stall_s == 0
    assert policy.burden(Level(11), few).layers == 0
    assert policy.burden(Level(11), BLOCKS).layers == 11


def test_new_blocks_are_written_not_read():
    prefill = BLOCKS._replace(prefilled=100, filled=103)
    for policy in (Interleave(LEVELS), OnDemand(LEVELS)):
        outcome = policy.step(Level(6), prefill, pace(bytes_per_s=1e9))
        assert (outcome.read_pages, outcome.written_pages) == (6 * 780, 6 * 103)


# Whole runs -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quarter():
    return dataclasses.replace(calibration_case(49), partial_blocks_resident=False)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_all_tokens_from_the_same_near_memory(quarter, name):
    case = dataclasses.replace(quarter, policy=name)
    none = simulate(quarter, 0)
    rows = settings_of(case)
    assert all(setting.expansion > 1 for row in rows for setting in row)
    run = simulate(rows[-1][-1].case, rows[-1][-1].level_idx)
    assert run.output_tokens == none.output_tokens
    assert run.peak_blocks > none.peak_blocks
    assert run.read_bytes > 0


def test_narrow_pages_halve_the_bytes(quarter):
    def run(share):
        case = dataclasses.replace(quarter, far_page_share=share)
        return simulate(case, 20)

    wide, narrow = run(1.0), run(0.5)
    assert narrow.read_bytes == pytest.approx(wide.read_bytes / 2)
    assert narrow.tokens_per_s > wide.tokens_per_s


def test_the_search_finds_what_trying_everything_finds(quarter):
    none = simulate(quarter, 0)
    found = best_of(dataclasses.replace(quarter, policy="blocks"), none, 8)
    every = best_of(dataclasses.replace(quarter, policy="blocks"), none, 1)
    assert every.run.tokens_per_s >= found.run.tokens_per_s > 0.98 * every.run.tokens_per_s
    assert found.setting is not None and found.setting.is_partial_resident


def test_a_policy_that_only_costs_is_best_without_far_layers(quarter):
    slow = dataclasses.replace(quarter.machine, read_gb_per_s=1e-4)
    case = dataclasses.replace(quarter, machine=slow, policy="on_demand")
    none = simulate(case, 0)
    best = best_of(case, none, 8)
    assert best.setting is None and best.run is none


def test_pie_has_the_blocks_of_interleave_at_one_expansion(quarter):
    peaks = {}
    for name in ("interleave", "pie", "pie_write_once"):
        setting, run = at_expansion(dataclasses.replace(quarter, policy=name), 2.0)
        assert setting.expansion == 2.0
        peaks[name] = (run.peak_blocks, run.steps)
    assert len(set(peaks.values())) == 1


@pytest.mark.slow
def test_pie_moves_more_for_the_same_blocks(quarter):
    for expansion in (1.25, 1.5, 2.0):
        runs = {
            name: at_expansion(dataclasses.replace(quarter, policy=name), expansion)[1]
            for name in ("interleave", "pie", "pie_write_once")
        }
        assert runs["pie"].read_bytes > 1.2 * runs["interleave"].read_bytes
        assert runs["pie"].written_bytes > 4 * runs["interleave"].written_bytes
        assert (
            runs["pie"].tokens_per_s
            < runs["pie_write_once"].tokens_per_s
            < runs["interleave"].tokens_per_s
        )


# The benchmark --------------------------------------------------------------------------


def test_there_are_as_many_machines_as_steps_are_reported_for():
    assert len(policy_cases()) == NUM_MACHINES
    for load_name in LOADS:
        assert list(policy_cases(load_name)) == list(policy_cases())


def test_ratios_over_interleave():
    def entry(**ratios):
        return {"by_policy": {name: {"throughput_ratio": each} for name, each in ratios.items()}}

    ratios = over_interleave([entry(interleave=2.0, pie=1.0), entry(interleave=1.0, pie=1.5)])
    assert ratios["pie"] == {"least": 0.5, "median": 1.0, "most": 1.5}
    assert ratios["interleave"] == {"least": 1.0, "median": 1.0, "most": 1.0}


def test_result_has_its_keys_and_every_step_is_reported(monkeypatch, quarter):
    monkeypatch.setattr(kv_policies, "NUM_MACHINES", 2)
    cases = {"a": quarter, "b": quarter}
    monkeypatch.setattr(kv_policies, "policy_cases", lambda load=None: cases)
    settings_ = dataclasses.replace(
        kv_policies.PROFILES["quick"],
        stride=3,
        loads=("narrow pages",),
        policies=("pie_write_once", "blocks"),
    )
    steps = []
    monkeypatch.setattr(policy_search, "_BLOCKS_STEP", 1.5)
    result = kv_policies.run(settings_, steps.append)
    assert load("kv_policies").result_keys <= result.keys()
    assert len(steps) == kv_policies.num_steps(settings_) == 3 * 2
    figures = result["by_machine"]["a"]["by_share"]["1/4"]["by_policy"]
    assert list(figures) == ["interleave", "pie_write_once", "blocks"]
    assert "| b, at expansion 2 | blocks |" in kv_policies.table(result)
    json.dumps(result)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("policies", "no policy 'fifo'; there are interleave, "),
        ("loads", "no load 'fifo'; there are long prompts, "),
    ],
)
def test_unknown_names_are_refused(key, message):
    settings_ = dataclasses.replace(kv_policies.PROFILES["quick"], **{key: ("fifo",)})
    with pytest.raises(ValueError, match=message):
        kv_policies.run(settings_, lambda text: None)


def test_the_products_layers_are_its_policys():
    assert list(product_order(12, 0)) == []
    assert len(product_order(12, 5)) == 5


def test_pie_begins_without_a_level():
    assert Pie(LEVELS).burden(Level(6, False), BLOCKS) == (0, 0)
