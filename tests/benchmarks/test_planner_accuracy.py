# SPDX-License-Identifier: Apache-2.0
"""Predicted against measured times: the configurations, the errors, and a real engine."""

import copy
import dataclasses
import json
import statistics

import pytest

from benchmarks.harness.runner import MeasurementError
from benchmarks.inputs import shapes
from benchmarks.suites.weights import planner_accuracy
from tests.fakes.benchmark_engines import FakeEngines
from tests.fixtures.probes import TINY, sample_probe
from tests.fixtures.rounds import make_round
from vllm_tiered.planner.from_probe import machine_from_probe

SETTINGS = planner_accuracy.Settings(
    placements=("off", "all_far", "latency"),
    batches=(1, 2),
    contexts=(32, 64),
    rounds=2,
    max_repeats=0,
)
STEPS = planner_accuracy._OUTPUT_TOKENS - 1


def answer(seconds_of):
    def make(spec, requests):
        result = make_round(spec.label, tiered=spec.tiered is not None)
        gap = seconds_of(spec, requests)
        return dataclasses.replace(result, token_gaps_s=[gap] * STEPS * len(requests))

    return make


@pytest.fixture
def fakes(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_TIERED_CACHE", str(tmp_path))
    fakes = FakeEngines(answer(lambda spec, requests: 0.2 * len(requests)))
    monkeypatch.setattr(planner_accuracy, "engines", fakes)
    monkeypatch.setattr(planner_accuracy, "_probe", lambda settings, folder: sample_probe())
    return fakes


def test_result_has_its_keys_and_every_step_is_reported(fakes):
    steps: list[str] = []
    result = planner_accuracy.run(SETTINGS, steps.append)
    assert set(planner_accuracy.RESULT_KEYS) <= result.keys()
    assert len(steps) == planner_accuracy.num_steps(SETTINGS)
    assert result["num_configurations"] == 2 * 3 * (2 + 1)
    json.loads(json.dumps(result, allow_nan=False))
    assert len(planner_accuracy.table(result).splitlines()) == 2 + 18


def test_engines_have_made_up_weights_and_the_placement(fakes):
    planner_accuracy.run(SETTINGS, lambda _: None)
    alone, all_far, latency = fakes.specs[:3]
    assert alone.tiered is None and alone.random_weights and alone.threads == 1
    assert all_far.tiered["weights"] == {"placement": "all_far"}
    assert all_far.tiered["kv"] == {"enabled": False}
    layers = planner_accuracy.planned_shape("opt").layer_bytes
    assert latency.tiered["weights"]["near_gib"] * 2**30 == pytest.approx(0.6 * layers, rel=0.01)


def test_errors_are_of_the_prediction_over_the_measurement(fakes):
    machine, _ = machine_from_probe(sample_probe())
    predicted = planner_accuracy.predict("opt", "off", "decode", 1, 32, machine, SETTINGS)
    result = planner_accuracy.run(SETTINGS, lambda _: None)
    row = result["by_configuration"][0]
    assert row["predicted_ms"] == pytest.approx(1e3 * predicted)
    assert row["measured_ms"] == pytest.approx(200)
    assert row["error"] == pytest.approx(predicted / 0.2 - 1)
    errors = sorted(abs(row["error"]) for row in result["by_configuration"])
    assert result["worst_error"] == errors[-1]
    assert result["median_error"] == pytest.approx((errors[8] + errors[9]) / 2)


def test_engines_times_have_no_influence_on_predictions(fakes, monkeypatch):
    before = planner_accuracy.run(SETTINGS, lambda _: None)
    slower = FakeEngines(answer(lambda spec, requests: 7.0))
    monkeypatch.setattr(planner_accuracy, "engines", slower)
    after = planner_accuracy.run(SETTINGS, lambda _: None)
    assert [row["predicted_ms"] for row in before["by_configuration"]] == [
        row["predicted_ms"] for row in after["by_configuration"]
    ]


def test_far_weights_are_predicted_to_cost():
    machine, _ = machine_from_probe(sample_probe())
    off, helm, all_far = (
        planner_accuracy.predict("llama", name, "decode", 1, 32, machine, SETTINGS)
        for name in ("off", "helm", "all_far")
    )
    assert off < helm < all_far


def test_a_disturbed_probe_is_taken_again_and_the_quietest_counts(monkeypatch, tmp_path):
    shares = iter([0.4, 0.2, 0.3, 0.01])
    monkeypatch.setattr(
        planner_accuracy,
        "_probe",
        lambda settings, folder: {**sample_probe(), "foreign_cpu_share": next(shares)},
    )
    assert planner_accuracy._quiet_probe(SETTINGS, tmp_path, 2)["foreign_cpu_share"] == 0.2
    assert planner_accuracy._quiet_probe(SETTINGS, tmp_path, 2)["foreign_cpu_share"] == 0.01


def test_steps_that_are_missing_are_no_result():
    with pytest.raises(MeasurementError, match="2 gaps of 1 requests"):
        planner_accuracy._decode_steps(make_round(), 1)


def test_profiles_compare_a_dozen_configurations():
    for settings in planner_accuracy.PROFILES.values():
        count = len(settings.models) * len(settings.placements) * len(settings.batches)
        assert count >= 12
        assert len(settings.batches) == len(settings.contexts)


@pytest.mark.slow
def test_a_real_engine_and_a_real_probe(monkeypatch, tmp_path):
    """Run in float32, as the smallest shapes are; the prediction's accuracy is not tested."""
    monkeypatch.setenv("VLLM_TIERED_CACHE", str(tmp_path))
    tiny = {**shapes.PLANNED_SHAPES["opt"], "num_hidden_layers": 8, "ffn_dim": 512}
    tiny |= {"hidden_size": 256, "word_embed_proj_dim": 256, "num_attention_heads": 4}
    monkeypatch.setattr(planner_accuracy, "PLANNED_SHAPES", {"opt": tiny})
    monkeypatch.setattr(shapes, "PLANNED_SHAPES", {"opt": tiny})

    def probe(settings, folder):
        import torch

        from vllm_tiered.devices.cpu import CpuDevice
        from vllm_tiered.probe.run import run_probe

        device = CpuDevice()
        try:
            return run_probe(device, torch.device("cpu"), TINY, folder=folder)
        finally:
            device.close()

    monkeypatch.setattr(planner_accuracy, "_probe", probe)
    settings = planner_accuracy.Settings(
        models=("opt",),
        placements=("off", "all_far", "stored", "kv x2"),
        batches=(1, 2),
        contexts=(8, 16),
        prompts=(64,),
        rounds=1,
        max_repeats=0,
        dtype="float32",
    )
    result = planner_accuracy.run(settings, lambda _: None)
    assert result["num_configurations"] == 4 * 3
    for row in result["by_configuration"]:
        assert 0.1 < row["measured_ms"] < 1000
        assert 0.1 < row["predicted_ms"] < 1000


def test_several_probes_are_as_good_as_their_median():
    slow = copy.deepcopy(sample_probe())
    for entry in slow["gemms"]["near"]:
        entry["seconds"] *= 10
    assert machine_from_probe(
        planner_accuracy.median_probe([sample_probe(), slow, sample_probe()])
    ) == machine_from_probe(sample_probe())


def test_an_engine_that_did_not_start_in_a_probe_leaves_its_costs_estimated():
    costs = dict.fromkeys(
        (
            "step_seconds",
            "request_seconds",
            "layer_seconds",
            "row_seconds_per_feature",
            "attention_request_seconds",
            "decode_kv_bytes_per_s",
            "decode_operations_per_s",
            "prompt_operations_per_s",
        ),
        0.5,
    )
    with_engine = {**sample_probe(), "step_costs": costs}
    assert planner_accuracy.median_probe([with_engine, with_engine])["step_costs"] == costs
    for probes in ([with_engine, sample_probe()], [sample_probe(), with_engine]):
        assert planner_accuracy.median_probe(probes)["step_costs"] is None


def test_prompts_are_measured_by_their_first_token(fakes):
    result = planner_accuracy.run(SETTINGS, lambda _: None)
    machine, _ = machine_from_probe(sample_probe())
    row = next(row for row in result["by_configuration"] if row["phase"] == "prompt")
    times = make_round().requests
    assert row["measured_ms"] == pytest.approx(
        1e3 * statistics.median(one.first_token_s - one.arrival_s for one in times)
    )
    predicted = planner_accuracy.predict("opt", "off", "prompt", 1, 512, machine, SETTINGS)
    assert row["predicted_ms"] == pytest.approx(1e3 * predicted)


def test_a_swapped_cache_has_fewer_near_blocks_and_a_longer_step(fakes, monkeypatch):
    slower = {"compute_slowdown": 1.2, "link_slowdown": 1.1}
    disk = {"weight_reads": [{"num_bytes": 10**6, "seconds": 1e-3}], "contention": slower}
    probe = {**sample_probe(), "storage": disk}
    monkeypatch.setattr(planner_accuracy, "_probe", lambda settings, folder: probe)
    settings = dataclasses.replace(SETTINGS, placements=("off", "kv x2", "stored"))
    planner_accuracy.run(settings, lambda _: None)
    alone, swapped, stored = fakes.specs[:3]
    assert swapped.tiered == {"kv": {"expansion": 2.0}}
    assert 0.5 < swapped.kv_cache_memory_bytes / alone.kv_cache_memory_bytes < 0.9
    assert stored.tiered["weights"]["far_gib"] == 0
    machine, _ = machine_from_probe(probe)
    off, expanded, on_disk = (
        planner_accuracy.predict("opt", name, "decode", 16, 256, machine, settings)
        for name in ("off", "kv x2", "stored")
    )
    assert off < expanded < on_disk
