# SPDX-License-Identifier: Apache-2.0
"""Adaptive against fixed expansions: selection of the finalists, comparison, reported figures."""

import dataclasses
import json

import pytest

from benchmarks.inputs import kv_workloads
from benchmarks.suites.kv import adaptive as kv_adaptive
from benchmarks.suites.kv.summary import plugin_label
from tests.fakes.benchmark_engines import FakeEngines, answer_in
from tests.fixtures.rounds import make_round

SETTINGS = kv_adaptive.Settings(
    workloads=("alpaca_like", "sharegpt"),
    budgets=(0.25, 1.0),
    expansions=(1.0, 2.0, 3.0),
    num_requests=4,
    max_num_seqs=2,
    warmup_rounds=2,
    sweep_rounds=1,
    finalists=2,
    max_repeats=0,
)
SECONDS = {1.0: 4.0, 2.0: 2.0, 3.0: 2.5, "auto": 2.1}


def seconds_of(spec):
    return SECONDS[spec.tiered["kv"]["expansion"]] if spec.tiered else 1.0


@pytest.fixture
def fakes(monkeypatch, fake_model):
    fakes = FakeEngines(answer_in(seconds_of))
    for module in (kv_adaptive, kv_workloads):
        monkeypatch.setattr(module, "engines", fakes)
    monkeypatch.setattr(kv_adaptive, "demo_model_dir", lambda: fake_model)
    return fakes


def test_result_has_its_keys_and_every_step_is_reported(fakes):
    steps: list[str] = []
    result = kv_adaptive.run(SETTINGS, steps.append)
    assert set(kv_adaptive.RESULT_KEYS) <= result.keys()
    assert len(steps) == kv_adaptive.num_steps(SETTINGS)
    assert result["fraction_of_best_fixed"] == pytest.approx(2.0 / 2.1)
    assert result["steps_to_converge"] == 0
    assert set(result["by_workload"]) == {"alpaca_like", "sharegpt"}
    json.dumps(result)
    rows = kv_adaptive.table(result).splitlines()
    assert len(rows) == 2 + 4
    assert rows[2].startswith("| alpaca_like | 0.25 | auto | 190 | 200 (x2) | 0.952 |")


def test_only_the_fastest_of_the_sweep_run_in_the_finals(fakes):
    kv_adaptive.run(dataclasses.replace(SETTINGS, workloads=("sharegpt",)), lambda _: None)
    num_rounds = {
        engine.spec.tiered["kv"]["expansion"]: len(engine.rounds)
        for engine in fakes.started
        if engine.spec.tiered
    }
    assert num_rounds == {"auto": 2 + 3, 1.0: 1, 2.0: 1 + 3, 3.0: 1 + 3}


def test_finals_are_repeated_with_new_engines(fakes):
    """The second order is reversed; all rounds of the same two engines count."""
    settings = dataclasses.replace(
        SETTINGS, workloads=("sharegpt",), budgets=(0.25,), finalists=1, starts=3
    )
    steps: list[str] = []
    result = kv_adaptive.run(settings, steps.append)
    assert len(steps) == kv_adaptive.num_steps(settings)
    of_case = result["by_workload"]["sharegpt"]["by_budget"]["0.25"]
    assert len(of_case["auto"]["rounds_tokens_per_s"]) == 3 * 3
    assert list(of_case["finalists"]) == ["2"]
    assert len(of_case["finalists"]["2"]["rounds_tokens_per_s"]) == 3 * 3
    later = [
        engine.spec.tiered["kv"]["expansion"] for engine in fakes.started if engine.spec.tiered
    ]
    assert later == ["auto", 1.0, 2.0, 3.0, 2.0, "auto", "auto", 2.0]
    assert [len(engine.rounds) for engine in fakes.started[-4:]] == [3, 2 + 3, 2 + 3, 3]


def test_several_policies_are_set_against_the_same_fixed_expansions(fakes):
    settings = dataclasses.replace(
        SETTINGS,
        workloads=("sharegpt",),
        budgets=(0.25,),
        expansions=(1.0,),
        partial_expansions=(2.0,),
        block_expansions=(2.0,),
        autos=("auto", "auto by layers"),
        finalists=3,
    )
    steps: list[str] = []
    result = kv_adaptive.run(settings, steps.append)
    assert len(steps) == kv_adaptive.num_steps(settings)
    of_case = result["by_workload"]["sharegpt"]["by_budget"]["0.25"]
    assert set(of_case["finalists"]) == {"1", "2p", "2b"}
    assert list(of_case["fractions"]) == ["auto", "auto by layers"]
    assert of_case["fraction_of_best_fixed"] == of_case["fractions"]["auto"]
    assert len(kv_adaptive.table(result).splitlines()) == 2 + 2
    policies = {spec.label: spec.tiered["kv"].get("policy") for spec in fakes.specs if spec.tiered}
    assert policies == {
        "plugin auto": None,
        "plugin auto by layers": "interleave",
        "plugin x1": "interleave",
        "plugin x2p": "interleave",
        "plugin x2b": "blocks",
    }
    assert [spec.pinned_expansion for spec in fakes.specs if spec.label == "plugin x2p"] == [2.0]


def test_systems_differ_only_in_their_expansion_and_run_few_requests_at_once(fakes):
    kv_adaptive.run(SETTINGS, lambda _: None)
    specs = [spec for spec in fakes.specs if spec.tiered]
    assert {spec.max_num_seqs for spec in specs} == {2}
    assert {spec.tiered["kv"]["max_expansion"] for spec in specs} == {4.0}
    cases = {
        (spec.kv_cache_memory_bytes, spec.max_model_len, spec.dtype, spec.block_size)
        for spec in specs
    }
    assert len(specs) == 4 * 4
    assert len(cases) == 4


def finals(auto_seconds, fixed_seconds):
    return {
        plugin_label("auto"): [make_round(seconds=s, tiered=True) for s in auto_seconds],
        plugin_label(2.0): [make_round(seconds=s, tiered=True) for s in fixed_seconds],
    }


def test_fraction_is_the_median_of_the_rounds_own_ratios():
    # A machine that is half as fast in the third round changes no ratio.
    measured = finals([2.0, 2.0, 4.0], [1.9, 1.8, 3.8])
    case = kv_adaptive.summarise_case(
        {plugin_label(2.0): measured[plugin_label(2.0)]}, measured, ["2"]
    )
    assert case["fraction_of_best_fixed"] == pytest.approx(0.95)
    assert case["round_spread"] == pytest.approx((400 / 1.8 - 400 / 3.8) / (400 / 1.9))


def case(fraction, steps):
    summary = {"foreign_cpu_share": 0.01}
    return {
        "fraction_of_best_fixed": fraction,
        "autos": {"auto": summary},
        "finalists": {"2": {"foreign_cpu_share": 0.02}},
        "convergence": {"steps_to_converge": steps},
    }


def test_the_worst_case_counts():
    by_workload = {
        "alpaca_like": {"by_budget": {"0.25": case(0.99, 10), "0.5": case(1.02, 250)}},
        "sharegpt": {"by_budget": {"0.25": case(0.93, 40)}},
    }
    headline = kv_adaptive.summarise(by_workload)
    assert headline["fraction_of_best_fixed"] == 0.93
    assert headline["worst_case"] == {"workload": "sharegpt", "budget": 0.25}
    assert headline["steps_to_converge"] == 250
    assert headline["worst_foreign_cpu_share"] == 0.02


def test_one_case_that_never_converged_is_not_hidden_by_the_others():
    by_workload = {"sharegpt": {"by_budget": {"0.25": case(0.9, None), "0.5": case(0.99, 5)}}}
    assert kv_adaptive.summarise(by_workload)["steps_to_converge"] is None


def test_unknown_workload_names_the_known_ones():
    with pytest.raises(ValueError, match="no workload 'alpaca'; there are: alpaca_like, sharegpt"):
        kv_workloads.workload("alpaca")
