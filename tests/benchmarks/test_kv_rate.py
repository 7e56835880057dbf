# SPDX-License-Identifier: Apache-2.0
"""Rates are multiples of vLLM's own; requests are the same at each; figures compare with vLLM."""

import dataclasses
import json

import pytest

from benchmarks.inputs import kv_workloads
from benchmarks.suites.kv import rate as kv_rate
from benchmarks.suites.kv.summary import BASELINE, plugin_label
from tests.fakes.benchmark_engines import FakeEngines, answer_in
from tests.fixtures.rounds import make_round

SETTINGS = kv_rate.Settings(
    workload="sharegpt",
    budget=0.5,
    loads=(1.0, 2.0),
    expansions=(1.5, 2.0),
    num_requests=6,
    max_repeats=0,
    rounds=2,
)


@pytest.fixture
def fakes(monkeypatch, fake_model):
    fakes = FakeEngines(answer_in(lambda spec: 2.0 if spec.tiered else 3.0))
    for module in (kv_rate, kv_workloads):
        monkeypatch.setattr(module, "engines", fakes)
    monkeypatch.setattr(kv_rate, "demo_model_dir", lambda: fake_model)
    return fakes


def test_result_has_its_keys_and_every_step_is_reported(fakes):
    steps: list[str] = []
    result = kv_rate.run(SETTINGS, steps.append)
    assert set(kv_rate.RESULT_KEYS) <= result.keys()
    assert len(steps) == kv_rate.num_steps(SETTINGS)
    assert result["saturated_requests_per_s"] == 2.0
    assert {k: v["requests_per_s"] for k, v in result["by_load"].items()} == {"1": 2.0, "2": 4.0}
    assert list(result["by_load"]["1"]["systems"]) == ["vllm", "1.5", "2", "auto"]
    assert result["throughput_ratio_vs_vllm"] == pytest.approx(1.5)
    json.dumps(result)
    assert len(kv_rate.table(result).splitlines()) == 2 + 2 * 4


def test_several_policies_are_warmed_up_each(fakes):
    settings = dataclasses.replace(SETTINGS, autos=("auto by layers", "auto by blocks"))
    steps: list[str] = []
    result = kv_rate.run(settings, steps.append)
    assert len(steps) == kv_rate.num_steps(settings)
    systems = list(result["by_load"]["1"]["systems"])
    assert systems == ["vllm", "1.5", "2", "auto by layers", "auto by blocks"]
    assert [len(engine.rounds) for engine in fakes.started[-2:]] == [2 * 3, 2 * 3]


def test_all_systems_serve_the_same_requests_faster_at_twice_the_rate(fakes):
    kv_rate.run(SETTINGS, lambda _: None)
    _, vllm, *plugin = fakes.started
    saturated, *at_rates = vllm.rounds
    assert {request.arrival_s for request in saturated} == {0.0}
    slow, fast = at_rates[0], at_rates[2]
    for before, after in zip(slow, fast, strict=True):
        assert before.prompt_token_ids == after.prompt_token_ids
        assert before.arrival_s == pytest.approx(2 * after.arrival_s)
    for engine in plugin[:-1]:
        assert engine.rounds == at_rates
    # The adaptive engine comes last and first runs an unmeasured round at each rate.
    assert plugin[-1].rounds == [slow, *at_rates[:2], fast, *at_rates[2:]]


def test_unfavourable_loads_do_not_hide_and_the_best_is_named():
    def rounds(vllm_s, auto_s, tpot_s):
        return {
            BASELINE: [make_round(seconds=vllm_s, tpot_s=0.2)] * 2,
            plugin_label("auto"): [make_round(seconds=auto_s, tiered=True, tpot_s=tpot_s)] * 2,
        }

    measured = {"1": (2.0, rounds(2.0, 2.2, 0.3)), "2": (4.0, rounds(2.0, 1.6, 0.1))}
    result = kv_rate.summarise(measured, ["auto"])
    assert result["best_load"] == 2.0
    assert result["throughput_ratio_vs_vllm"] == pytest.approx(1.25)
    slow = result["by_load"]["1"]["systems"]["auto"]
    assert slow["throughput_ratio_vs_vllm"] == pytest.approx(2.0 / 2.2)
    # Per token from arrival: (0.25 + 2 tpot) / 3 s of one request and 1 s of the other.
    assert slow["mean_token_latency_ratio"] == pytest.approx((0.85 / 3 + 1) / (0.65 / 3 + 1))
    assert result["mean_token_latency_ratio"] == pytest.approx((0.45 / 3 + 1) / (0.65 / 3 + 1))


def test_profiles_reach_a_rate_that_vllm_cannot_serve():
    for settings in kv_rate.PROFILES.values():
        assert max(settings.loads) > 1.0
        assert settings.rounds >= 3
        assert settings.plugin_expansions[-1] == "auto"
