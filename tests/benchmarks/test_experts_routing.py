# SPDX-License-Identifier: Apache-2.0
"""experts_routing: replays, synthetic locality, and the figures of the runs."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness import memory_capped
from benchmarks.inputs import byte_training, trained_mixture
from benchmarks.inputs.routing_trace import PUBLISHED, synthetic_routing
from benchmarks.inputs.trained_mixture import Mixture, trained_mixture_dir
from benchmarks.suites.experts import replay, routing
from vllm_tiered.experts.policy import Lru

NUM_EXPERTS = 64


def trace_of(layers):
    return {str(i): [sorted(set(step)) for step in steps] for i, steps in enumerate(layers)}


@pytest.mark.parametrize("curve", PUBLISHED.values(), ids=PUBLISHED)
def test_synthetic_routing_has_the_published_hits(curve):
    made = synthetic_routing(curve, num_layers=2, num_steps=4000, num_experts=512, top_k=8)
    assert all(len(set(step)) == 8 for steps in made for step in steps)
    for share, expected in curve.items():
        found = replay.hit_ratio(trace_of(made), 100, 512, round(share * 512), "lru")
        assert found == pytest.approx(expected, abs=0.02)


def test_uniform_routing_hits_its_share_of_slots_with_any_policy():
    rng = np.random.default_rng(0)
    layers = [[rng.permutation(NUM_EXPERTS)[:4] for _ in range(3000)] for _ in range(2)]
    trace = trace_of(layers)
    for policy in replay.REPLAYED:
        assert replay.hit_ratio(trace, 100, NUM_EXPERTS, 16, policy) == pytest.approx(
            0.25, abs=0.02
        )
    shared = replay.shared_hit_ratio(trace, 100, NUM_EXPERTS, 16, Lru(2 * NUM_EXPERTS))
    assert shared == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("slots", [8, 24])
def test_no_policy_is_better_than_the_one_that_knows_the_future(slots):
    made = synthetic_routing(
        {0.25: 0.7}, num_layers=2, num_steps=800, num_experts=NUM_EXPERTS, top_k=4
    )
    trace = trace_of(made)
    best = replay.best_hit_ratio(trace, 0, NUM_EXPERTS, slots)
    found = [replay.hit_ratio(trace, 0, NUM_EXPERTS, slots, name) for name in replay.REPLAYED]
    assert all(ratio < best for ratio in found)


def test_the_best_policy_by_hand():
    """Two slots: 0 stays for its next use, 1 has none."""
    trace = {"0": [[0, 1], [2], [0], [2]]}
    assert replay.best_hit_ratio(trace, 0, 3, 2) == pytest.approx(2 / 5)
    assert replay.hit_ratio(trace, 0, 3, 2, "lru") == pytest.approx(1 / 5)


def test_layers_that_share_slots_give_them_to_the_layer_that_needs_them():
    """One layer wants three experts in turn, the other always the same one."""
    trace = {"0": [[n % 3] for n in range(300)], "1": [[5]] * 300}
    alone = replay.hit_ratio(trace, 10, 8, 2, "lru")
    shared = replay.shared_hit_ratio(trace, 10, 8, 2, Lru(16))
    assert shared == 1.0 > alone


def test_a_window_counts_the_last_steps_alone():
    window = replay.Window(4)
    for expert in [0] * 40 + [1] * 20 + [2, 3]:
        window.use(np.array([expert]))
    assert window.order(np.arange(4)).tolist() == [2, 3, 0, 1]
    for _ in range(12):
        window.use(np.array([3]))
    assert window.order(np.arange(4)).tolist() == [0, 2, 3, 1]


def test_a_mixture_is_trained_once(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_training, "byte_text", lambda first, num_bytes: b"ab" * 400)
    mixture = Mixture(
        layers=1, hidden=64, inner=16, experts=4, top_k=2, steps=2, batch=2, tokens=16
    )
    folder = trained_mixture_dir(mixture, tmp_path)
    assert (folder / "model.safetensors").is_file()
    monkeypatch.setattr(trained_mixture, "_train", None)  # a second training would fail
    assert trained_mixture_dir(mixture, tmp_path) == folder


def test_the_figures(monkeypatch, tmp_path):
    """Runs are replaced; hits of the engine differ from the replay by one point."""
    settings = replace(routing.PROFILES["quick"], rounds=2)
    made = synthetic_routing({0.25: 0.6}, num_layers=3, num_steps=200, num_experts=64, top_k=4)
    expected = replay.hit_ratio(trace_of(made), 0, 64, 32, "lfu")
    monkeypatch.setattr(replay, "read", lambda path: (trace_of(made), 0))
    monkeypatch.setattr(routing, "trained_mixture_dir", lambda of: tmp_path)
    monkeypatch.setattr(routing, "byte_text", lambda first, count: bytes(count))
    monkeypatch.setattr(routing, "cache_root", lambda: tmp_path)

    def measure(name, command, limit, threads):
        import json

        run = json.loads(command[-1])
        experts = run["experts"]
        share = experts.get("fallback_share", 0)
        seconds = {"off": 0.1, "on": 0.08, "auto": 0.09}[experts["prefetch"]] * (1 - share / 2)
        hits = expected + 0.01
        return {
            "seconds_per_token": [seconds] * 3,
            "batch": 1,
            "nll": 1.0 + share if run["scores"] else None,
            "use": {
                "experts_hits": hits,
                "experts_misses": 1 - hits,
                "experts_ahead": 40.0,
                "experts_ahead_used": 10.0,
                "experts_layer_steps": 80.0,
                "experts_storage_bytes": 1.0,
                "experts_pairs": 100.0,
                "experts_fallback_pairs": 100.0 * share,
            },
        }

    monkeypatch.setattr(memory_capped, "measure", measure)
    steps: list[str] = []
    result = routing.run(settings, steps.append)
    assert len(steps) == routing.num_steps(settings)
    assert set(routing.RESULT_KEYS) <= result.keys()
    assert result["replay_error_points"] == pytest.approx(1.0)
    ahead = result["lookahead"]
    assert ahead["tokens_per_s"] == pytest.approx({"off": 10.0, "on": 12.5, "auto": 1 / 0.09})
    assert (ahead["precision"], ahead["ahead_per_layer_step"]) == (0.25, 0.5)
    assert ahead["ratio"]["on"] == pytest.approx(1.25)
    quarter = result["fallback"]["0.25"]
    assert quarter["perplexity"] == pytest.approx(np.exp(1.25)) and quarter["in_4_bit"] == 0.25
    assert quarter["tokens_per_s"] == pytest.approx(10 / (1 - 0.125))
    by_policy = result["hit_ratio"]["1"]
    assert set(by_policy) == {*replay.REPLAYED, "lru, shared", "lfu, shared", "best", "uniform"}
    assert by_policy["uniform"] == {"8": 0.125, "32": 0.5}
    assert "| 1 | lru |" in routing.table(result)
