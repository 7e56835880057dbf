# SPDX-License-Identifier: Apache-2.0
"""Long contexts on models with several kinds of attention: what is run, and the figures."""

import json
from dataclasses import replace

import pytest

from benchmarks.harness.runner import MeasurementError
from benchmarks.inputs.workload import Request
from benchmarks.suites.kv import groups
from benchmarks.suites.kv.summary import BASELINE, CEILING, plugin_label
from tests.fakes.benchmark_engines import FakeEngines, answer_in

CASE = replace(groups.PROFILES["quick"].cases[1], shortest=20, longest=40, num_requests=4)
SETTINGS = groups.Settings(cases=(CASE,), max_repeats=0, rounds=2)
PLUGIN = plugin_label("auto")


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    def prompts(n, seed, model_dir):
        return [
            Request(
                request_id=f"r{at}",
                prompt_token_ids=tuple(range(at, at + 7)),
                num_output_tokens=5,
                arrival_s=0.0,
            )
            for at in range(n)
        ]

    monkeypatch.setattr(groups, "sharegpt_requests", prompts)
    monkeypatch.setattr(groups, "random_model_dir", lambda model: tmp_path / model)


def run_with(monkeypatch, answer, settings=SETTINGS):
    fakes = FakeEngines(answer)
    monkeypatch.setattr(groups, "engines", fakes)
    steps: list[str] = []
    return groups.run(settings, steps.append), fakes, steps


def test_vllm_and_the_plugin_differ_in_the_plugin_alone(monkeypatch, drawn):
    seconds = {BASELINE: 4.0, PLUGIN: 2.0, CEILING: 1.0}
    answer = answer_in(lambda spec: seconds.get(spec.label, 1.0))
    result, fakes, steps = run_with(monkeypatch, answer)
    assert len(steps) == groups.num_steps(SETTINGS)
    assert set(groups.RESULT_KEYS) <= result.keys()
    json.loads(json.dumps(result, allow_nan=False))
    assert result["throughput_ratio_vs_vllm"] == pytest.approx(2.0)
    assert result["by_model"]["latent"]["fraction_of_ceiling"] == pytest.approx(0.5)
    alone, plugin, ceiling = fakes.specs[2:]
    assert plugin == replace(alone, label=PLUGIN, tiered={"kv": {}})
    more = ceiling.kv_cache_memory_bytes
    assert ceiling == replace(alone, label=CEILING, kv_cache_memory_bytes=more)
    assert more > alone.kv_cache_memory_bytes
    assert len(groups.table(result).splitlines()) == 2 + 1


def test_several_policies_run_side_by_side(monkeypatch, drawn):
    settings = replace(SETTINGS, autos=("auto by layers", "auto by blocks"))
    seconds = {BASELINE: 4.0, "plugin auto by layers": 2.0, "plugin auto by blocks": 1.0}
    answer = answer_in(lambda spec: seconds.get(spec.label, 1.0))
    result, fakes, steps = run_with(monkeypatch, answer, settings)
    assert len(steps) == groups.num_steps(settings)
    ratios = result["by_model"]["latent"]["throughput_ratios"]
    assert ratios == {"auto by layers": 2.0, "auto by blocks": 4.0}
    assert result["throughput_ratio_vs_vllm"] == 2.0
    policies = [spec.tiered["kv"]["policy"] for spec in fakes.specs if spec.tiered]
    assert policies == ["interleave", "blocks"] * 2
    assert result["tokens_equal_fp32"]["total"] == 2 * 2
    assert len(groups.table(result).splitlines()) == 2 + 2


def test_nothing_is_reported_if_a_float32_token_differs(monkeypatch, drawn):
    answer = answer_in(lambda spec: 1.0, lambda spec: ((1, 2), (3 + bool(spec.tiered),)))
    with pytest.raises(MeasurementError, match="only 1 of 2 outputs"):
        run_with(monkeypatch, answer)


def test_prompts_are_as_long_as_asked(drawn):
    requests = groups.long_requests(CASE, 3)
    lengths = [len(request.prompt_token_ids) for request in requests]
    assert len(requests) == 4 and min(lengths) >= 20 and max(lengths) <= 40
    assert requests == groups.long_requests(CASE, 3) != groups.long_requests(CASE, 4)
