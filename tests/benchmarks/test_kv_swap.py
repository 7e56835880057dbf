# SPDX-License-Identifier: Apache-2.0
"""The KV benchmark: sizes, headline figures, keys, and its refusal, with fake engines."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from benchmarks.harness.runner import MeasurementError
from benchmarks.inputs.workload import Request
from benchmarks.suites.kv import swap as kv_swap
from benchmarks.suites.kv.plan import KvPlan, kv_bytes_per_token
from benchmarks.suites.kv.summary import (
    BASELINE,
    CEILING,
    bytes_for_rate,
    memory_ratios,
    plugin_label,
    summarise,
    summarise_budget,
)
from tests.fakes.benchmark_engines import TOKENS, FakeEngines, answer_in
from tests.fixtures.rounds import make_round

LLAMA = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
OPT = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 256}
SETTINGS = kv_swap.Settings(
    num_requests=3,
    max_prompt_tokens=64,
    max_output_tokens=32,
    budgets=(0.25, 1.0),
    expansions=(1.0, 2.0),
    control_requests=3,
    max_repeats=2,
)


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (LLAMA, "bfloat16", 2 * 30 * 3 * 64 * 2),
        (LLAMA, "float32", 2 * 30 * 3 * 64 * 4),
        ({**LLAMA, "head_dim": 128}, "bfloat16", 2 * 30 * 3 * 128 * 2),
        (OPT, "bfloat16", 2 * 4 * 4 * 64 * 2),
    ],
    ids=["gqa", "float32", "explicit head size", "mha"],
)
def test_kv_bytes_per_token(config, dtype, expected):
    assert kv_bytes_per_token(config, dtype) == expected


def make_request(name, num_prompt, num_output):
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(num_prompt)),
        num_output_tokens=num_output,
    )


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    return KvPlan(
        model_dir=tmp_path,
        requests=[make_request("a", 60, 30), make_request("b", 64, 32), make_request("c", 1, 1)],
        block_size=32,
        prefix_caching=False,
    )


def test_enough_blocks_hold_every_request_and_the_null_block(plan):
    assert plan.enough_blocks() == 3 + 3 + 1 + 1


def test_longest_request_in_whole_blocks(plan):
    assert plan.max_model_len() == 96


def test_budget_is_a_share_of_the_demand_rounded_up(plan):
    assert plan.budget_blocks(0.25, 41) == 11


def test_budget_below_the_longest_request_is_refused_with_the_numbers(plan):
    with pytest.raises(ValueError, match=r"is 3 blocks, but the longest request takes 3"):
        plan.budget_blocks(0.1, 30)


def test_systems_differ_in_label_and_plugin_only(plan):
    alone = plan.spec(BASELINE, 10).to_json()
    tiered = plan.spec(plugin_label(2.0), 10, expansion=2.0).to_json()
    assert {key for key in alone if alone[key] != tiered[key]} == {"label", "tiered"}
    assert alone["tiered"] is None
    assert tiered["tiered"] == {"kv": {"expansion": 2.0}}
    assert alone["kv_cache_memory_bytes"] == 10 * 32 * 23040


def test_what_follows_the_load_may_ask_for_a_policy(plan):
    sections = {
        auto: plan.spec("x", 10, expansion=auto, kv={"max_expansion": 3.0}).tiered["kv"]
        for auto in ("auto", "auto by layers", "auto by blocks")
    }
    assert {section["expansion"] for section in sections.values()} == {"auto"}
    policies = {auto: section.get("policy") for auto, section in sections.items()}
    assert policies == {"auto": None, "auto by layers": "interleave", "auto by blocks": "blocks"}


def test_a_link_holds_the_plugins_copies(plan):
    free = plan.spec("x", 10, expansion=2.0).to_json()
    held = plan.spec("x", 10, expansion=2.0, link_bytes_per_s=5e8).to_json()
    assert {key for key in free if free[key] != held[key]} == {"kv_link_bytes_per_s"}
    assert held["kv_link_bytes_per_s"] == 5e8


def measured(plugin_seconds, *, vllm=4.0, ceiling=1.0):
    """Return three rounds of 400 tokens for each system: tokens/s are 400 over the seconds."""
    systems = {
        BASELINE: [make_round(seconds=vllm, preemptions=8.0, tpot_s=0.2)] * 3,
        CEILING: [make_round(seconds=ceiling)] * 3,
    }
    for expansion, seconds in plugin_seconds.items():
        systems[plugin_label(expansion)] = [
            make_round(
                seconds=seconds,
                tiered=True,
                expansion=1.9 if expansion == "auto" else expansion,
                preemptions=1.0,
            )
        ] * 3
    return systems


def test_budget_takes_the_fastest_expansion():
    entry = summarise_budget(measured({1.0: 4.0, 2.0: 2.0, 3.0: 2.5}), [1.0, 2.0, 3.0])
    assert entry["best_expansion"] == 2.0
    assert entry["throughput_ratio"] == 2.0
    assert entry["fraction_of_ceiling"] == 0.5
    assert entry["vllm_fraction_of_ceiling"] == 0.25
    assert entry["preemptions"] == {"vllm": 8.0, "plugin": 1.0}
    assert {x: e["tokens_per_s"] for x, e in entry["plugin"].items()} == {
        "1": 100.0,
        "2": 200.0,
        "3": 160.0,
    }


def test_headline_is_the_best_budget_and_the_share_of_the_ceiling_the_worst_from_half_on():
    summaries = {
        "0.25": summarise_budget(measured({1.0: 4.0, 2.0: 2.0}), [1.0, 2.0]),
        "0.5": summarise_budget(measured({1.0: 1.6, 2.0: 1.25}, vllm=2.0), [1.0, 2.0]),
        "1.0": summarise_budget(measured({1.0: 1.0, 2.0: 1.1}, vllm=1.0), [1.0, 2.0]),
    }
    by_budget = {k: {"near_bytes": 100 * float(k), **entry} for k, entry in summaries.items()}
    headline = summarise(by_budget)
    assert headline["throughput_ratio_vs_vllm"] == 2.0
    assert headline["best"] == {"budget": 0.25, "expansion": 2.0}
    assert headline["fraction_of_ceiling"] == {
        "at_best": 0.5,
        "from_half_demand": pytest.approx(0.8),
    }
    assert headline["mean_tpot_ratio"] == pytest.approx(0.5)
    # Arrivals at 0.25 and 0.5 s: (0.25 + 2 tpot) / 3 and 1 s per token, with tpot 0.1 and 0.2.
    assert headline["mean_token_latency_ratio"] == pytest.approx((0.15 + 1) / (0.65 / 3 + 1))
    assert headline["stall_fraction"] == pytest.approx(0.005)
    assert headline["worst_foreign_cpu_share"] == 0.0
    assert headline["bytes_per_step"] == {"far_to_near": 5e8, "near_to_far": 1e8}


def test_auto_is_set_against_the_best_fixed_expansion():
    entry = summarise_budget(
        measured({1.0: 4.0, 2.0: 2.0, 3.0: 2.5, "auto": 2.0 / 0.96}), [1.0, 2.0, 3.0, "auto"]
    )
    assert entry["best_expansion"] == 2.0
    assert entry["auto"]["best_fixed"] == 2.0
    assert entry["auto"]["fraction_of_best_fixed"] == pytest.approx(0.96)
    assert entry["auto"]["throughput_ratio"] == pytest.approx(1.92)
    assert entry["plugin"]["auto"]["expansion"] == 1.9
    assert summarise({"0.25": entry})["auto"] == {"0.25": entry["auto"]}


def test_auto_may_be_the_best_of_all():
    entry = summarise_budget(measured({2.0: 2.0, "auto": 1.6}), [2.0, "auto"])
    assert entry["best_expansion"] == "auto"
    assert summarise({"0.25": entry})["throughput_ratio_vs_vllm"] == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(100, 10), (150, 15), (200, 20), (350, 35), (400, 40), (50, 10), (500, 40)],
    ids=["first", "between", "point", "second leg", "last", "below", "above"],
)
def test_bytes_for_a_rate_are_interpolated_and_never_outside_what_was_measured(rate, expected):
    assert bytes_for_rate([(40, 400), (10, 100), (20, 200)], rate) == expected


def test_bytes_for_a_rate_on_a_curve_with_a_dip_are_the_first_that_reach_it():
    assert bytes_for_rate([(10, 100), (20, 90), (30, 190)], 140) == 25


def test_memory_ratio_is_vllms_need_over_the_plugins_memory():
    # vLLM: 100 tokens/s at 10 bytes, 200 at 20. The plugin reaches 150 at 10, 210 at 20.
    by_budget = {
        "0.5": {"near_bytes": 10, **summarise_budget(measured({2.0: 400 / 150}), [2.0])},
        "1.0": {
            "near_bytes": 20,
            **summarise_budget(measured({2.0: 400 / 210}, vllm=2.0), [2.0]),
        },
    }
    assert memory_ratios(by_budget) == {"0.5": pytest.approx(1.5), "1.0": 1.0}
    assert summarise(by_budget)["memory_ratio_for_equal_throughput"] == pytest.approx(1.5)


def test_one_budget_gives_no_memory_ratio():
    entry = {"near_bytes": 10, **summarise_budget(measured({2.0: 2.0}), [2.0])}
    assert summarise({"0.25": entry})["memory_ratio_for_equal_throughput"] is None


def test_without_a_budget_of_half_the_demand_that_figure_is_absent_not_invented():
    entry = {"near_bytes": 10, **summarise_budget(measured({2.0: 2.0}), [2.0])}
    by_budget = {"0.25": entry}
    assert summarise(by_budget)["fraction_of_ceiling"]["from_half_demand"] is None


def run_with_fakes(monkeypatch, plan, tokens_of, settings=SETTINGS):
    steps: list[str] = []
    fakes = FakeEngines(answer_in(lambda spec: 2.0 if spec.tiered else 4.0, tokens_of))
    monkeypatch.setattr(kv_swap, "engines", fakes)
    monkeypatch.setattr(kv_swap, "demo_model_dir", lambda: plan.model_dir)
    source = SimpleNamespace(source="made up", draw=lambda *_: plan.requests)
    monkeypatch.setattr(kv_swap, "workload", lambda name: source)
    return kv_swap.run(settings, steps.append), steps, fakes.specs


def test_result_has_its_keys_and_every_step_is_reported(monkeypatch, plan):
    result, steps, specs = run_with_fakes(monkeypatch, plan, lambda spec: TOKENS)
    assert set(kv_swap.RESULT_KEYS) <= result.keys()
    assert len(steps) == kv_swap.num_steps(SETTINGS)
    assert list(result["by_budget"]) == ["0.25", "1.0"]
    assert list(result["by_budget"]["0.25"]["plugin"]) == ["1", "2", "auto"]
    assert result["by_budget"]["0.25"]["convergence"]["steps_to_converge"] == 0
    assert result["throughput_ratio_vs_vllm"] == 2.0
    assert result["demand_blocks"] == 61
    assert result["by_budget"]["0.25"]["near_bytes"] == 16 * 32 * 23040
    assert result["tokens_equal_fp32"]["equal"] == result["tokens_equal_fp32"]["total"] == 4
    assert {"kv": {"expansion": "auto"}} in [spec.tiered for spec in specs]
    # Rounds of all unlimited engines take equally long here, so a copy costs nothing.
    assert result["seconds_per_gb"] == 0.0
    assert result["fraction_of_bound"] == {"0.25": 2.0, "1.0": 2.0}
    assert result["by_budget"]["0.25"]["bound"]["gb_crossing"] == 45 * 32 * 23040 / 1e9
    json.dumps(result)
    table = kv_swap.table(result).splitlines()
    assert table[0] == (
        "| near KV | vLLM | x1 | x2 | auto | ceiling | memory ratio | of the bound |"
    )
    assert table[2] == ("| 0.25 | 100 | 200 (2.00) | 200 (2.00) | 200 (2.00) | 100 | 3.81 | 2.00 |")


def test_without_auto_there_are_no_figures_of_it(monkeypatch, plan):
    settings = dataclasses.replace(SETTINGS, autos=())
    result, steps, specs = run_with_fakes(monkeypatch, plan, lambda spec: TOKENS, settings)
    assert len(steps) == kv_swap.num_steps(settings)
    assert result["auto"] == {}
    assert result["by_budget"]["0.25"]["convergence"] is None
    assert not any(spec.tiered and spec.tiered["kv"]["expansion"] == "auto" for spec in specs)


def test_auto_by_blocks_runs_beside_auto_by_layers(monkeypatch, plan):
    settings = dataclasses.replace(SETTINGS, autos=("auto", "auto by blocks"))
    result, steps, specs = run_with_fakes(monkeypatch, plan, lambda spec: TOKENS, settings)
    assert len(steps) == kv_swap.num_steps(settings)
    assert list(result["by_budget"]["1.0"]["plugin"]) == ["1", "2", "auto", "auto by blocks"]
    assert result["by_budget"]["1.0"]["auto"]["best_fixed"] == 1.0
    assert result["tokens_equal_fp32"]["total"] == 6
    assert {"kv": {"expansion": "auto", "policy": "blocks"}} in [spec.tiered for spec in specs]


def test_all_systems_speculate_or_none(monkeypatch, plan):
    settings = dataclasses.replace(SETTINGS, drafts=3)
    result, _, specs = run_with_fakes(monkeypatch, plan, lambda spec: TOKENS, settings)
    asked = [spec.engine_args["speculative_config"] for spec in specs]
    assert {config["num_speculative_tokens"] for config in asked} == {3}
    assert {config["method"] for config in asked} == {"ngram"}
    assert result["workload"]["drafts"] == 3
    _, _, specs = run_with_fakes(monkeypatch, plan, lambda spec: TOKENS)
    assert not any(spec.engine_args for spec in specs)


@pytest.mark.parametrize("wrong", [2.0, "auto"])
def test_nothing_is_reported_if_one_float32_output_differs(monkeypatch, plan, wrong):
    def tokens_of(spec):
        is_wrong = spec.dtype == "float32" and spec.tiered == {"kv": {"expansion": wrong}}
        return ((1, 2, 9), (4,)) if is_wrong else TOKENS

    with pytest.raises(MeasurementError, match="only 1 of 2 outputs"):
        run_with_fakes(monkeypatch, plan, tokens_of)


def test_profiles_measure_what_the_report_states():
    for settings in kv_swap.PROFILES.values():
        assert settings.rounds >= 3
        assert 1.0 in settings.expansions
    assert kv_swap.PROFILES["full"].budgets == (0.125, 0.25, 0.5, 1.0)
    assert kv_swap.PROFILES["full"].expansions == (1.0, 1.25, 1.5, 2.0, 2.5, 3.0)
