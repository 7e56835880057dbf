# SPDX-License-Identifier: Apache-2.0
"""Policies side by side: the engines' differences, and the bases of the ratios."""

import json
from dataclasses import replace

import pytest

from benchmarks.inputs import kv_workloads
from benchmarks.suites.kv import policy as kv_policy
from tests.fakes.benchmark_engines import FakeEngines, answer_in

SETTINGS = kv_policy.Settings(
    budget=0.5, expansions=(1.5, 2.0), num_requests=6, max_repeats=0, rounds=2
)


def seconds_of(spec):
    if not spec.tiered:
        return 4.0
    kv = spec.tiered["kv"]
    if kv["policy"] == "on_demand":
        return 3.0 if kv["expansion"] == 1.5 else 5.0
    return 2.0 if kv["policy"] == "interleave" else 1.6


@pytest.fixture
def ran(monkeypatch, fake_model):
    """Return the result, the reported steps and the specifications of a run without vLLM."""
    fakes = FakeEngines(answer_in(seconds_of))
    for module in (kv_policy, kv_workloads):
        monkeypatch.setattr(module, "engines", fakes)
    monkeypatch.setattr(kv_policy, "demo_model_dir", lambda: fake_model)
    steps: list[str] = []
    return kv_policy.run(SETTINGS, steps.append), steps, fakes.specs


def test_ratios_are_over_the_same_expansion(ran):
    result, steps, _ = ran
    assert set(kv_policy.RESULT_KEYS) <= result.keys()
    assert len(steps) == kv_policy.num_steps(SETTINGS)
    assert result["throughput_ratio_vs_on_demand"] == pytest.approx(2.5)
    assert result["best_expansion"] == 2.0
    assert result["blocks_over_interleave"] == pytest.approx(1.25)
    assert result["tokens_equal_fp32"] is None
    lower, higher = (result["by_expansion"][key] for key in ("1.5", "2"))
    assert lower["interleave"]["throughput_ratio_vs_on_demand"] == pytest.approx(1.5)
    assert higher["on_demand"]["throughput_ratio_vs_vllm"] == pytest.approx(0.8)
    json.loads(json.dumps(result, allow_nan=False))
    assert len(kv_policy.table(result).splitlines()) == 2 + 1 + 2 * len(kv_policy.POLICIES)


def test_engines_of_an_expansion_differ_only_in_the_policy(ran):
    _, _, specs = ran
    ours = [spec for spec in specs if spec.tiered and spec.tiered["kv"]["expansion"] == 2.0]
    assert [spec.tiered["kv"]["policy"] for spec in ours] == list(kv_policy.POLICIES)
    assert len({str(replace(spec, label="", tiered=None)) for spec in ours}) == 1
    rest = [{**spec.tiered["kv"], "policy": ""} for spec in ours]
    assert rest[0] == rest[1] == rest[2]
