# SPDX-License-Identifier: Apache-2.0
"""The engines and links that are compared, and the targets that their rounds meet or miss."""

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.harness.runner import MeasurementError
from benchmarks.harness.summary import PREEMPTIONS
from benchmarks.harness.throttled_engine import COMPUTE_SECONDS, FAR_BYTES, LINK_SECONDS
from benchmarks.suites.papers.helm_figures import LINK_GB_PER_S
from benchmarks.suites.weights import placement as weights_placement
from benchmarks.suites.weights import placement_plan
from benchmarks.suites.weights.placement import NEAR
from benchmarks.suites.weights.placement_contenders import CONTENDERS, PLACED, SHARING
from benchmarks.suites.weights.placement_summary import DEFINITIONS, TARGETS
from tests.fakes.benchmark_engines import FakeEngine, FakeEngines
from tests.fixtures.rounds import make_round
from vllm_tiered.config import WeightsConfig
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.weights.layout import Kind

SETTINGS = weights_placement.Settings(
    layers=6, links=("nvdram", "dram", "cxl_fpga"), gaps=2, rounds=2, throughput_rounds=1
)
ATTENTION, FFN, NEAR_STEP = 0.010, 0.020, 0.200
STEPS = {
    "flexgen": 0.4,
    "helm": 0.3,
    "all_far": 0.44,
    "latency_helm": 0.25,
    "latency_card": 0.24,
    "latency_flexgen": 0.4,
    "throughput": 0.44,
    "throughput_helm": 0.33,
}
BLOCKS = {"throughput": 34, "throughput_helm": 100}
"""KV blocks that a plan leaves: for 33 requests, and for more than there are."""


class LinkedEngine(FakeEngine):
    """Records the links it is given, and answers by the current one."""

    def __init__(self, spec, answer, log_path):
        super().__init__(spec, answer, log_path)
        self.links = []
        self.is_second = False

    def set_link(self, bytes_per_s):
        self.links.append(bytes_per_s)

    def run(self, requests):
        self.rounds.append(list(requests))
        return self._answer(self, requests)


class LinkedEngines(FakeEngines):
    """Marks each engine that is started for the second link."""

    def __init__(self, *args):
        super().__init__(*args)
        self.speeds = []

    def __call__(self, specs, warmup, step):
        for spec in specs:
            step(f"engine up: {spec.label}")
            if spec.link_bytes_per_s and spec.link_bytes_per_s not in self.speeds:
                self.speeds.append(spec.link_bytes_per_s)
        group = [LinkedEngine(spec, self._answer, self._log_path) for spec in specs]
        for engine in group:
            engine.is_second = engine.spec.link_bytes_per_s in self.speeds[1:2]
        self.started += group
        return _Context(group)


class _Context:
    def __init__(self, group):
        self._group = group

    def __enter__(self):
        return self._group

    def __exit__(self, *_):
        return None


def answer(engine, requests, steps=STEPS, at_once=None):
    """Return a round; steps take `steps` on NVDRAM and a tenth less on DRAM, the second link."""
    name = engine.spec.label
    is_dram = len(engine.links) == 2 or engine.is_second
    gap = NEAR_STEP if name == NEAR else steps[name] * (0.9 if is_dram else 1.0)
    count = requests[0].num_output_tokens
    result = make_round(name, seconds=count * gap)
    counters = {
        PREEMPTIONS: 0.0,
        FAR_BYTES: 5e6 * count,
        LINK_SECONDS: 1.0,
        COMPUTE_SECONDS[Kind.ATTENTION]: ATTENTION,
        COMPUTE_SECONDS[Kind.FFN]: FFN,
    }
    return replace(
        result,
        num_output_tokens=count * len(requests),
        num_steps=count,
        token_gaps_s=[gap] * (count - 1),
        counters=counters,
        num_blocks=BLOCKS.get(name, 64),
        peak_in_flight=len(requests) if at_once is None else at_once,
    )


PLANS: dict[tuple[float, int], Any] = {}
planned_split = placement_plan.planned_split


def plan_once(shape, compute, speed, near_bytes, *rest):
    """Return a cached plan: each takes a second, and all tests need the same ones."""
    key = (round(speed), near_bytes)
    if key not in PLANS:
        PLANS[key] = planned_split(shape, compute, speed, near_bytes, *rest)
    return PLANS[key]


def measured(monkeypatch, settings=SETTINGS, **changes):
    monkeypatch.setattr(placement_plan, "planned_split", plan_once)
    fakes = LinkedEngines(lambda engine, requests: answer(engine, requests, **changes))
    monkeypatch.setattr(weights_placement, "engines", fakes)
    steps: list[str] = []
    return weights_placement.run(settings, steps.append), fakes, steps


def test_result_has_its_keys_and_every_step_is_reported(monkeypatch):
    result, _, steps = measured(monkeypatch)
    assert set(weights_placement.RESULT_KEYS) <= result.keys()
    assert len(steps) == weights_placement.num_steps(SETTINGS)
    json.loads(json.dumps(result, allow_nan=False))
    rows = weights_placement.table(result).splitlines()
    assert len(rows) == 2 + 3 * len(CONTENDERS) + 1 + 2 + len(TARGETS)
    assert set(DEFINITIONS) <= {*result, *result["targets"], *result["by_link"]["dram"]}


def test_figures(monkeypatch):
    result, _, _ = measured(monkeypatch)
    assert result["helm_tbt_gain"] == pytest.approx(0.25)
    flexgen, all_far = result["batches"]["flexgen"], result["batches"]["all_far"]
    assert result["all_far_throughput_ratio"] == pytest.approx(all_far / flexgen * 0.4 / 0.44)
    assert result["helm_of_dram"] == pytest.approx(0.9)
    assert result["all_far_of_dram"] == pytest.approx(0.9)
    assert result["latency_over_helm"]["nvdram"] == pytest.approx(0.3 / 0.25)
    assert result["latency_card_over_helm"]["nvdram"] == pytest.approx(0.3 / 0.24)
    assert result["latency_over_flexgen"]["nvdram"] == pytest.approx(1.0)
    assert result["compute"]["rest"] == pytest.approx(NEAR_STEP - 6 * (ATTENTION + FFN))
    assert result["by_link"]["nvdram"]["far_bytes_per_step"]["helm"] == pytest.approx(5e6)


def test_throughput_over_the_others_by_memory(monkeypatch):
    """All run 33 requests: `throughput` has 0.44 s steps in All-CPU's memory, 0.33 in HeLM's."""
    result, _, _ = measured(monkeypatch)
    assert result["batches"]["all_far"] == 33
    assert result["by_link"]["dram"]["batches"] == {
        "flexgen": 7,
        "helm": 7,
        "all_far": 33,
        "throughput": 33,
        "throughput_helm": 33,
    }
    for link in SETTINGS.links:
        assert result["throughput_over_all_far"][link] == pytest.approx(1.0)
        over_flexgen = 33 / 7 * 0.4 / 0.44
        assert result["throughput_over_flexgen"][link] == pytest.approx(over_flexgen)
        assert result["throughput_helm_over_all_far"][link] == pytest.approx(0.44 / 0.33)
        over_helm = 33 / 7 * 0.3 / 0.33
        assert result["throughput_helm_over_helm"][link] == pytest.approx(over_helm)
    assert result["targets"]["throughput_least"]["met"]
    assert result["targets"]["throughput_better_share"]["value"] == 1.0


def test_throughput_that_is_slower_anywhere_is_missed(monkeypatch):
    result, _, _ = measured(monkeypatch, steps={**STEPS, "throughput": 0.46})
    assert "throughput_least" in result["missed"]
    assert "throughput_better_share" not in result["missed"]
    result, _, _ = measured(monkeypatch, steps={**STEPS, "throughput_helm": 0.44})
    assert "throughput_least" not in result["missed"]
    assert "throughput_better_share" in result["missed"]


def test_missed_targets_are_reported(monkeypatch):
    slow = {
        **STEPS,
        "helm": 0.38,
        "latency_helm": 0.4,
        "latency_card": 0.38,
        "all_far": 0.4,
        "throughput": 0.4,
    }
    result, _, _ = measured(monkeypatch, steps=slow)
    assert result["targets"]["helm_tbt_gain"]["value"] == pytest.approx(0.05)
    assert set(result["missed"]) == {
        "helm_tbt_gain",
        "helm_of_dram",
        "all_far_of_dram",
        "latency_over_helm_least",
        "latency_better_share",
        "latency_card_better_share",
    }
    table = weights_placement.table(result)
    assert "| helm_tbt_gain | 0.2 | 0.050 | missed |" in table
    assert "| all_far_throughput_ratio | 4.5 | " in table and table.count("| met |") == 4
    assert set(result["targets"]) - set(result["missed"]) == {
        "all_far_throughput_ratio",
        "latency_card_over_helm_least",
        "throughput_better_share",
        "throughput_least",
    }


def test_links_are_scaled_to_the_compute_of_the_engine_without_the_plugin(monkeypatch):
    result, fakes, _ = measured(monkeypatch)
    compute = placement_plan.Compute(attention=ATTENTION, ffn=FFN, rest=0.0)
    links = placement_plan.scaled_links(model_shape(placement_plan.opt_config(6)), compute)
    expected = [links[name] for name in SETTINGS.links]
    for engine in fakes.started:
        if engine.spec.label in ("flexgen", "helm", "all_far"):
            assert engine.links == pytest.approx(expected)
    for name, entry in result["by_link"].items():
        assert entry["scale"] * LINK_GB_PER_S[name] == pytest.approx(entry["gb_per_s"])
    for label in (
        "latency_helm",
        "latency_card",
        "latency_flexgen",
        "throughput",
        "throughput_helm",
    ):
        placed = [spec for spec in fakes.specs if spec.label == label]
        assert [spec.link_bytes_per_s for spec in placed] == pytest.approx(expected)


def test_every_engine_has_the_same_model_core_and_rate(monkeypatch):
    _, fakes, _ = measured(monkeypatch)
    assert fakes.specs[0].tiered is None
    assert len({(s.model_dir, s.cpus, s.weights_per_s, s.is_timed) for s in fakes.specs}) == 1
    for spec in fakes.specs[1:]:
        assert spec.tiered["kv"] == {"enabled": False}
        WeightsConfig.from_dict(spec.tiered["weights"]).check()


def test_a_placed_contender_has_the_memory_of_the_other_or_the_cards(monkeypatch):
    result, fakes, _ = measured(monkeypatch)
    for contender in PLACED:
        spec = next(spec for spec in fakes.specs if spec.label == contender.name)
        near_bytes = spec.tiered["weights"]["near_gib"] * 2**30
        others = result["near_bytes"][contender.near_of]
        taken = result["card_near_bytes"] if contender.fills_card else others
        assert 0 < near_bytes - taken <= 1024
    assert result["card_near_bytes"] > result["near_bytes"]["helm"]


def test_a_shared_budget_equals_the_layers_and_kv_of_the_other(monkeypatch):
    """It also gets a block that no request uses; its KV cache has no given size."""
    result, fakes, _ = measured(monkeypatch)
    for contender in SHARING:
        spec = next(spec for spec in fakes.specs if spec.label == contender.name)
        near_bytes = spec.tiered["weights"]["near_gib"] * 2**30
        taken = result["near_bytes"][contender.near_of] + 8 * result["kv_bytes_per_request"]
        assert 0 < near_bytes - taken <= 1024
        assert spec.kv_cache_memory_bytes is None
        assert spec.max_num_seqs == result["batches"]["all_far"]


def test_a_plan_without_a_request_is_not_reported(monkeypatch):
    monkeypatch.setitem(BLOCKS, "throughput", 1)
    with pytest.raises(MeasurementError, match="its plan leaves 0 blocks"):
        measured(monkeypatch)


def test_batches_fill_the_same_near_memory(monkeypatch):
    result, fakes, _ = measured(monkeypatch)
    for name in ("flexgen", "all_far"):
        taken = result["near_bytes"][name]
        taken += result["batches"][name] * result["kv_bytes_per_request"]
        assert 0 <= result["near_budget_bytes"] - taken < result["kv_bytes_per_request"]
        engine = next(engine for engine in fakes.started if engine.spec.label == name)
        batch = result["batches"][name]
        assert engine.spec.kv_cache_memory_bytes == (batch + 1) * result["kv_bytes_per_request"]
        assert {len(requests) for requests in engine.rounds} == {1, batch}
        lengths = {request.num_tokens for requests in engine.rounds for request in requests}
        assert max(lengths) == weights_placement.BLOCK_TOKENS


def test_a_batch_that_did_not_run_at_once_is_not_reported(monkeypatch):
    with pytest.raises(MeasurementError, match=r"flexgen: 3 of 7 requests at once"):
        measured(monkeypatch, at_once=3)


@pytest.mark.parametrize("links", [("nvdram",), ("nvdram", "dram", "pcie")])
def test_links_that_are_not_there(monkeypatch, links):
    with pytest.raises(ValueError, match="name nvdram and dram, and others of"):
        measured(monkeypatch, replace(SETTINGS, links=links))


def test_profiles_have_what_the_targets_need():
    for settings in weights_placement.PROFILES.values():
        assert {"nvdram", "dram"} <= set(settings.links)
        assert settings.rounds >= 3
    assert {*weights_placement.PROFILES["full"].links, "memory_mode"} == set(LINK_GB_PER_S)
    assert weights_placement.PROFILES["full"].layers == 24
