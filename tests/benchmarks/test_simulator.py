# SPDX-License-Identifier: Apache-2.0
"""The simulator: its scheduler's block accounting, its step times, the controller on its loads."""

import dataclasses
import json
import math
from functools import cache
from importlib.util import find_spec

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from benchmarks.simulator.calibration import calibration, calibration_case
from benchmarks.simulator.case import Case
from benchmarks.simulator.compare import (
    compare,
    fixed_levels,
    headline,
    run_fixed,
    steps_to_converge,
)
from benchmarks.simulator.models import MODELS, page_bytes
from benchmarks.simulator.plot import plot_timeline
from benchmarks.simulator.policies.base import StepBlocks
from benchmarks.simulator.policies.interleave import Interleave
from benchmarks.simulator.scenarios import SCENARIOS
from benchmarks.simulator.scheduler import SimulatedScheduler, StepWork
from benchmarks.simulator.simulation import Change, Run, simulate
from benchmarks.simulator.timing import StepTimer
from benchmarks.simulator.trace import (
    LENGTHS,
    Arrival,
    Contention,
    Trace,
    all_at_once,
    poisson,
)
from benchmarks.suites.kv import simulate as kv_simulate
from vllm_tiered.kv.layout import KvLevels, Level
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.model_shape import ModelShape

LEVELS = KvLevels(
    num_layers=12,
    page_bytes=1024,
    block_tokens=8,
    near_pages=500,
    max_num_far=9,
    max_blocks=120,
    offloads_partial_blocks=True,
)


# Scheduler ------------------------------------------------------------------------------


def scheduler_of(arrivals, *, level=0, max_num_seqs=16, max_batched_tokens=64):
    scheduler = SimulatedScheduler(
        LEVELS,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        level=LEVELS.ladder[level],
    )
    for prompt, output in arrivals:
        scheduler.add(Arrival(arrival_s=0.0, prompt_tokens=prompt, output_tokens=output))
    return scheduler


def run_to_the_end(scheduler, each_step=lambda work: None, max_steps=20_000):
    tokens = steps = 0
    while scheduler.running or scheduler.waiting:
        work = scheduler.schedule()
        each_step(work)
        scheduler.end_step(float(steps))
        scheduler.change_level()
        tokens += work.output_tokens
        steps += 1
        assert steps < max_steps
    return tokens, steps


@pytest.mark.parametrize(
    ("prompt", "output", "steps"), [(1, 1, 1), (64, 1, 1), (65, 1, 2), (20, 30, 30), (200, 5, 8)]
)
def test_a_single_request_runs_its_chunks_and_then_one_step_per_token(prompt, output, steps):
    assert run_to_the_end(scheduler_of([(prompt, output)])) == (output, steps)


@pytest.mark.parametrize(
    ("prompt", "hits", "fetched", "scheduled"),
    [(40, 0, 0, [40, 1, 1]), (40, 30, 3, [16, 1, 1]), (40, 40, 4, [8, 1, 1]), (7, 7, 0, [7, 1, 1])],
)
def test_hits_are_read_in_whole_blocks_and_not_computed(prompt, hits, fetched, scheduled):
    """At least one token of a prompt is computed."""
    arrival = Arrival(arrival_s=0.0, prompt_tokens=prompt, output_tokens=3, hit_tokens=hits)
    work: list[list[StepWork]] = []
    for reads_hits in (True, False):
        scheduler = SimulatedScheduler(
            LEVELS,
            max_num_seqs=4,
            max_batched_tokens=64,
            level=LEVELS.ladder[0],
            reads_hits=reads_hits,
        )
        scheduler.add(arrival)
        work.append([])
        run_to_the_end(scheduler, work[-1].append)
    with_hits, without = work
    assert [step.scheduled_tokens for step in with_hits] == scheduled
    assert [step.fetched_blocks for step in with_hits] == [fetched, 0, 0]
    assert [step.used_blocks for step in with_hits] == [step.used_blocks for step in without]
    assert [step.context_tokens for step in with_hits] == [step.context_tokens for step in without]
    assert [step.scheduled_tokens for step in without] == [prompt, 1, 1]


def test_requests_beyond_max_num_seqs_wait_without_being_blocked():
    scheduler = scheduler_of([(4, 10)] * 6, max_num_seqs=2)
    work = scheduler.schedule()
    assert (work.num_requests, work.is_blocked, len(scheduler.waiting)) == (2, False, 4)


def test_requests_beyond_the_blocks_are_blocked():
    scheduler = scheduler_of([(64, 10)] * 9, max_batched_tokens=4096)
    work = scheduler.schedule()
    assert work.is_blocked and work.used_blocks == 5 * 8 == LEVELS.block_limit(Level(0), 10)


def test_the_last_admitted_is_preempted_and_computed_again():
    scheduler = scheduler_of([(150, 100), (150, 100)], max_batched_tokens=512)
    preempted = []
    tokens, _ = run_to_the_end(scheduler, lambda work: preempted.append(work.num_preempted))
    assert sum(preempted) >= 1
    assert tokens == 200
    first, second = scheduler.finished
    assert (first.name, second.name) == ("r0", "r1")


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(1, 120), st.integers(1, 60)), min_size=1, max_size=25),
    level=st.integers(0, 18),
    targets=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 18)), max_size=6),
    max_batched_tokens=st.sampled_from([32, 64, 1024]),
)
def test_blocks_and_tokens_add_up_while_levels_change(arrivals, level, targets, max_batched_tokens):
    scheduler = scheduler_of(arrivals, level=level, max_batched_tokens=max_batched_tokens)
    changes = dict(targets)
    steps = 0

    def check(work):
        nonlocal steps
        steps += 1
        scheduler.elastic.check_integrity()
        assert 0 <= scheduler.used_blocks <= scheduler.elastic.released_blocks
        assert scheduler.used_blocks == sum(r.blocks for r in scheduler.running.values())
        assert work.scheduled_tokens <= max(max_batched_tokens, work.num_requests)
        for request in scheduler.running.values():
            decoded = 0 if request.since is None else steps - request.since
            assert request.blocks == math.ceil((request.computed + decoded) / LEVELS.block_tokens)
        if steps in changes:
            scheduler.expansion.aim(LEVELS.ladder[changes[steps]])

    tokens, _ = run_to_the_end(scheduler, check)
    assert tokens == sum(output for _, output in arrivals)
    assert scheduler.used_blocks == scheduler.elastic.num_partial == 0
    assert len(scheduler.finished) == len(arrivals)
    for _ in range(3):  # a change may have begun in the last step
        scheduler.change_level()
    assert scheduler.expansion.is_settled


# Time of a step -------------------------------------------------------------------------

FAST = Machine(
    read_gb_per_s=1.0,
    write_gb_per_s=1.0,
    near_gb_per_s=10.0,
    tflops=1.0,
    near_bytes_per_copied_byte=0.0,
    step_overhead_ms=1.0,
    request_overhead_us=0.0,
    far_layer_overhead_us=0.0,
)
MODEL = ModelShape(
    family="none",
    num_layers=12,
    sublayers=(),
    other_bytes=120_000_000,
    head_bytes=0,
    kv_bytes_per_token=12 * 2 * 64 * 2,
    dtype_bytes=2,
)
LAYER_S = 1e-3  # 120 MB of weights at 10 GB/s are 12 ms


def timed(machine_=FAST, *, num_far, read_bytes, num_staging_buffers=2, **kwargs):
    levels = dataclasses.replace(LEVELS, max_num_far=11, staging_buffers=num_staging_buffers)
    timer = StepTimer(machine_, MODEL, page_bytes=1000, policy=Interleave(levels))
    return timer.step(
        level=Level(num_far),
        blocks=StepBlocks(used=read_bytes // 1000, released=10**9),
        scheduled_tokens=1,
        context_tokens=0,
        num_requests=1,
        **kwargs,
    )


def test_a_step_without_far_layers_is_overhead_and_compute():
    time = timed(num_far=0, read_bytes=10**9)
    assert time.seconds == pytest.approx(1e-3 + 12 * LAYER_S)
    assert time.stall_seconds == time.link_seconds == 0


def test_transfers_that_are_shorter_than_a_layer_are_hidden():
    time = timed(num_far=9, read_bytes=900_000)
    assert time.stall_seconds == 0
    assert time.link_seconds == pytest.approx(9 * 0.9e-3)


def test_a_slow_link_bounds_the_step():
    time = timed(num_far=9, read_bytes=50_000_000)
    assert time.seconds >= time.link_seconds == pytest.approx(0.45)
    assert time.stall_seconds == pytest.approx(0.45, rel=0.05)


def test_a_single_buffer_is_read_into_only_after_it_was_computed():
    """Eleven far layers in a row take turns of 0.9 ms of reading and 1 ms of computing each.

    Only the first read is hidden, by the overhead.
    """
    in_turns = timed(num_far=11, read_bytes=900_000, num_staging_buffers=1)
    assert in_turns.stall_seconds == pytest.approx(10 * 0.9e-3)
    assert timed(num_far=11, read_bytes=900_000).stall_seconds == 0


def test_layers_that_come_back_are_waited_for():
    assert timed(num_far=0, read_bytes=0, link_busy_s=0.005).stall_seconds == pytest.approx(0.004)


def test_pages_of_hits_are_read_before_a_step_and_counted():
    none = timed(num_far=0, read_bytes=0)
    some = timed(num_far=0, read_bytes=0, fetched_pages=5000)
    assert some.read_bytes == 5_000_000
    assert some.stall_seconds == pytest.approx(0.004)
    assert some.seconds == pytest.approx(none.seconds + 0.004)


def test_copies_that_share_the_bus_slow_compute_down():
    shared = dataclasses.replace(FAST, near_bytes_per_copied_byte=2.0)
    time = timed(shared, num_far=6, read_bytes=500_000)
    assert time.seconds == pytest.approx(1e-3 + 12 * LAYER_S + 2 * 6 * 500_000 / 10e9)


@given(
    num_far=st.integers(1, 11),
    read_bytes=st.integers(0, 5_000_000),
    link_share=st.floats(0.1, 0.9),
)
def test_less_link_and_fewer_buffers_never_stall_less(num_far, read_bytes, link_share):
    kwargs = {"num_far": num_far, "read_bytes": read_bytes}
    free = timed(**kwargs).stall_seconds
    assert timed(**kwargs, link_share=link_share).stall_seconds >= free
    assert timed(**kwargs, num_staging_buffers=1).stall_seconds >= free
    assert timed(**kwargs, num_staging_buffers=4).stall_seconds <= free + 1e-12


# Models and loads -----------------------------------------------------------------------


def test_kv_of_a_token_is_pies_figure_for_opt_13b():
    model = MODELS["opt-13b"]
    assert page_bytes(model, 1) * model.num_layers == 819_200  # 800 KB, section 2.2


def test_lengths_have_the_published_means():
    requests = all_at_once(LENGTHS["alpaca"], 20_000, seed=1)
    assert sum(r.prompt_tokens for r in requests) / 20_000 == pytest.approx(19, rel=0.05)
    assert sum(r.output_tokens for r in requests) / 20_000 == pytest.approx(58, rel=0.05)


def test_arrivals_follow_their_phases_and_their_seed():
    phases = [(100.0, 2.0), (50.0, 0.0), (100.0, 10.0)]
    arrivals = poisson(LENGTHS["alpaca"], phases, seed=3)
    assert arrivals == poisson(LENGTHS["alpaca"], phases, seed=3)
    times = [arrival.arrival_s for arrival in arrivals]
    assert times == sorted(times)
    assert not [time for time in times if 100 <= time < 150]
    assert sum(time < 100 for time in times) == pytest.approx(200, rel=0.3)
    assert sum(time >= 150 for time in times) == pytest.approx(1000, rel=0.15)
    with pytest.raises(ValueError, match="a phase of 0 s"):
        poisson(LENGTHS["alpaca"], [(0, 1.0)], seed=0)


def test_contention_leaves_its_share():
    trace = Trace(
        arrivals=(), horizon_s=10, contention=[Contention(start_s=2, end_s=4, share=0.75)]
    )
    assert [trace.link_share(now) for now in (1.9, 2.0, 3.9, 4.0)] == [1, 0.25, 0.25, 1]


# Simulation -----------------------------------------------------------------------------


def test_the_model_of_this_machine_is_within_6_percent_of_the_measured_table():
    assert calibration()["worst_error"] < 0.06


@pytest.mark.parametrize(
    ("near_blocks", "preemptions"), [(25, (47, 18)), (49, (40, 13)), (97, (23, 0))]
)
def test_preemptions_match_the_measured_ones(near_blocks, preemptions):
    """Preemptions of vLLM alone and at the best expansion match the README's."""
    case = calibration_case(near_blocks)
    best_level = 22 if near_blocks == 25 else 20
    alone, best = simulate(case, 0), simulate(case, best_level)
    assert alone.num_preempted == pytest.approx(preemptions[0], abs=3)
    assert best.num_preempted == pytest.approx(preemptions[1], abs=3)


def test_equal_cases_give_equal_runs():
    case = SCENARIOS["gh200-step"].case(seconds=20, noise=0.05, seed=5)
    assert simulate(case) == simulate(case)
    assert simulate(case) != simulate(dataclasses.replace(case, seed=6))


def test_a_finite_load_ends_when_all_is_done():
    case = calibration_case(97)
    run = simulate(case)
    assert run.num_finished == 36
    assert run.output_tokens == sum(a.output_tokens for a in case.trace.arrivals)
    assert run.seconds < 60
    assert run.steps == sum(run.steps_at.values())


def test_the_timeline_has_every_token_and_second():
    case = SCENARIOS["gh200-opt13b-7gb"].case(seconds=30, noise=0.0, seed=0)
    run = simulate(case)
    covered = run.timeline[-1].end_s
    assert covered == pytest.approx(len(run.timeline) * case.interval_s)
    tokens = sum(interval.tokens_per_s * case.interval_s for interval in run.timeline)
    assert tokens == pytest.approx(run.output_tokens, rel=0.05)


def test_a_request_that_fits_nowhere_is_refused_with_the_numbers():
    case = SCENARIOS["gh200-opt13b-3gb"].case(seconds=20, noise=0.0, seed=0)
    with pytest.raises(ValueError, match=r"tokens, but 0\.10 GB of near KV hold"):
        simulate(dataclasses.replace(case, near_bytes=1e8))


STEADY = [name for name in SCENARIOS if SCENARIOS[name].is_steady]

SLOWER_WITH_PARTIAL_BLOCKS_OFFLOADED = {
    "cpu-sharegpt": pytest.mark.xfail(
        strict=True,
        reason="missed: offloaded partial blocks give more blocks and 4 to 5 % fewer tokens, "
        "which the controller does not tell from noise; on the real engine 4 %, with 150 requests "
        "at a time",
    )
}


@cache
def steady_figures(name):
    """Return the figures of a minute or two of load, ramp included."""
    scenario = SCENARIOS[name]
    case = scenario.case(seconds=150, noise=0.05, seed=1)
    auto = simulate(case)
    fixed = {m: run for m in fixed_levels(case, 4) if (run := run_fixed(case, m)) is not None}
    return compare(auto, fixed, case, is_steady=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=SLOWER_WITH_PARTIAL_BLOCKS_OFFLOADED.get(name, ()))
        for name in STEADY
        if not SCENARIOS[name].uses_storage
    ],
)
def test_auto_is_as_good_as_the_best_transparent_level(name):
    """Throughput is within 3 % of it, and the level then hardly changes."""
    figures = steady_figures(name)
    assert figures["fraction_of_best_transparent"] > 0.97
    assert figures["stall_fraction"] < 0.02
    assert figures["late_level_changes"] <= 12


@pytest.mark.parametrize("name", SLOWER_WITH_PARTIAL_BLOCKS_OFFLOADED)
def test_auto_loses_no_more_if_partial_blocks_are_costly(name):
    figures = steady_figures(name)
    assert figures["fraction_of_best_transparent"] > 0.94
    assert figures["stall_fraction"] < 0.02
    assert figures["late_level_changes"] <= 12


@pytest.mark.parametrize("name", [name for name in STEADY if SCENARIOS[name].uses_storage])
def test_on_storage_auto_is_hardly_below_no_far_layer(name):
    """Every level costs more than it gives; one or two of the ten minutes go into learning that."""
    case = SCENARIOS[name].case(seconds=600, noise=0.05, seed=1)
    none = simulate(case, 0).tokens_per_s
    assert simulate(case, 15).tokens_per_s < 0.9 * none
    assert simulate(case).tokens_per_s > 0.87 * none


def test_auto_gives_way_to_contention_and_returns():
    case = SCENARIOS["gh200-contention"].case(seconds=120, noise=0.05, seed=2)
    timeline = simulate(case).timeline

    def mean_expansion(start, end):
        inside = [i.expansion for i in timeline if start <= i.end_s <= end]
        return sum(inside) / len(inside)

    before, during, after = (mean_expansion(*at) for at in ((30, 39), (50, 79), (90, 119)))
    assert during < 0.85 * before
    assert after > 0.95 * before
    stalls = [i.stall_share for i in timeline if 50 <= i.end_s <= 79]
    assert sum(stalls) / len(stalls) < 0.02


def test_auto_backs_off_after_a_peak():
    case = SCENARIOS["gh200-step"].case(seconds=300, noise=0.05, seed=2)
    run = simulate(case)
    assert max(change.level_idx for change in run.changes) > 10
    assert run.timeline[-1].expansion == 1.0
    assert any("nothing blocked" in change.reason for change in run.changes)


# Figures --------------------------------------------------------------------------------


def a_run(*changes, steps=2000):
    return Run(
        steps=steps,
        changes=[Change(step=s, time_s=0.0, level_idx=m, reason="") for s, m in changes],
    )


def test_convergence_is_from_where_the_level_stays():
    # Of 30 layers, 20 and 21 far are expansions of 2.5 and 2.73: the same within 10 %.
    levels = dataclasses.replace(LEVELS, num_layers=30, max_num_far=28)
    assert steps_to_converge(a_run((8, 3), (30, 20), (400, 21), (900, 20)), levels) == 30
    assert steps_to_converge(a_run((30, 20), (100, 3), (200, 20)), levels) == 200
    assert steps_to_converge(a_run((600, 20)), levels) == 600
    assert steps_to_converge(a_run(), levels) == 0
    # Level 48 has as many far layers as level 20, but partial blocks are offloaded too.
    assert steps_to_converge(a_run((30, 20), (700, 48)), levels) == 700
    restless = [(s, 20 if s % 200 else 3) for s in range(0, 2000, 100)]
    assert steps_to_converge(a_run(*restless), levels) is None


def test_result_has_its_keys_and_every_step_is_reported():
    settings_ = dataclasses.replace(
        kv_simulate.PROFILES["quick"],
        seconds=5.0,
        level_stride=20,
        scenarios=("cpu-alpaca", "gh200-step"),
    )
    steps: list[str] = []
    result = kv_simulate.run(settings_, steps.append)
    assert set(kv_simulate.RESULT_KEYS) <= result.keys()
    assert len(steps) == kv_simulate.num_steps(settings_) == 5
    assert list(result["by_scenario"]) == ["cpu-alpaca", "gh200-step"]
    assert "| cpu-alpaca |" in kv_simulate.table(result)
    json.dumps(result)


def test_unknown_scenarios_are_refused():
    settings_ = dataclasses.replace(kv_simulate.PROFILES["quick"], scenarios=("a100",))
    with pytest.raises(ValueError, match="no scenario 'a100'; there are gh200-opt13b-3gb"):
        kv_simulate.run(settings_, lambda text: None)


def test_headline_is_the_worst_and_the_median():
    entry = {
        "fraction_of_best_fixed": 0.9,
        "fraction_of_best_transparent": 1.0,
        "steps_to_converge": None,
        "level_changes": 4,
        "late_level_changes": 0,
    }
    other = {**entry, "fraction_of_best_fixed": 1.1, "steps_to_converge": 50}
    figures = headline({"a": entry, "b": other})
    assert figures["fraction_of_best_fixed"] == {"worst": 0.9, "median": 1.0}
    assert figures["steps_to_converge"] == {"worst": 50, "median": 50}
    assert headline({"a": entry})["steps_to_converge"] is None


def test_an_empty_timeline_is_not_drawn(tmp_path):
    with pytest.raises(ValueError, match="shorter than one interval"):
        plot_timeline([], "x", tmp_path / "x.png")


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs the extra `report`")
def test_a_timeline_becomes_a_picture(tmp_path):
    case = dataclasses.replace(calibration_case(49), interval_s=0.2)
    path = tmp_path / "deep" / "x.png"
    plot_timeline(simulate(case).timeline, "x", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_case_knows_its_levels():
    case = Case(
        machine=FAST,
        model=MODELS["smollm2-135m"],
        trace=Trace(arrivals=(), horizon_s=1),
        near_bytes=100 * 30 * 24576,
        block_tokens=32,
        max_expansion=2.0,
    )
    levels = case.levels
    assert (levels.near_pages, levels.max_num_far) == (3000, 17)
    assert levels.max_blocks == levels.geometry(Level(17)).block_limit(0) == 200
