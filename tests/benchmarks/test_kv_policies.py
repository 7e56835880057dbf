# SPDX-License-Identifier: Apache-2.0
"""Policies of reading far KV on whole loads, and the benchmark `kv_policies`."""

import dataclasses
import json

import pytest

from benchmarks.registry import load
from benchmarks.simulator import policy_search
from benchmarks.simulator.calibration import calibration_case
from benchmarks.simulator.policies.table import POLICIES
from benchmarks.simulator.policy_figures import LOADS, NUM_MACHINES, over_interleave, policy_cases
from benchmarks.simulator.policy_search import at_expansion, best_of, settings_of
from benchmarks.simulator.simulation import simulate
from benchmarks.suites.kv import policies as kv_policies


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


@pytest.mark.slow
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
    best = best_of(case, none, 40)
    assert best.setting is None and best.run is none


def test_pie_has_the_blocks_of_interleave_at_one_expansion(quarter):
    peaks = {}
    for name in ("interleave", "pie", "pie_write_once"):
        found = at_expansion(dataclasses.replace(quarter, policy=name), 2.0)
        assert found is not None
        setting, run = found
        assert setting.expansion == 2.0
        peaks[name] = (run.peak_blocks, run.steps)
    assert len(set(peaks.values())) == 1


@pytest.mark.slow
def test_pie_moves_more_for_the_same_blocks(quarter):
    for expansion in (1.25, 1.5, 2.0):
        runs = {}
        for name in ("interleave", "pie", "pie_write_once"):
            found = at_expansion(dataclasses.replace(quarter, policy=name), expansion)
            assert found is not None
            runs[name] = found[1]
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
        loads=("narrow pages",),
        policies=("pie_write_once", "blocks"),
    )
    steps: list[str] = []
    monkeypatch.setattr(
        policy_search, "settings_of", lambda case: [row[-1:] for row in settings_of(case)]
    )
    result = kv_policies.run(settings_, steps.append)
    assert load("kv_policies").result_keys <= result.keys()
    assert len(steps) == kv_policies.num_steps(settings_) == 3 * 2
    figures = result["by_machine"]["a"]["by_share"]["1/4"]["by_policy"]
    assert list(figures) == ["interleave", "pie_write_once", "blocks"]
    assert "| b, at expansion 2 | blocks |" in kv_policies.table(result)
    json.dumps(result)


def test_unknown_names_are_refused():
    quick = kv_policies.PROFILES["quick"]
    unknown = {
        "no policy 'fifo'; there are interleave, ": dataclasses.replace(quick, policies=("fifo",)),
        "no load 'fifo'; there are long prompts, ": dataclasses.replace(quick, loads=("fifo",)),
    }
    for message, settings_ in unknown.items():
        with pytest.raises(ValueError, match=message):
            kv_policies.run(settings_, lambda text: None)
