# SPDX-License-Identifier: Apache-2.0
"""experts_offload: the bound, the limit of each contender, and the figures."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

from benchmarks import peers
from benchmarks.harness import memory_capped
from benchmarks.harness.memory_capped_peers import PeerRuns
from benchmarks.harness.runner import MeasurementError
from benchmarks.inputs.shapes import random_model_dir
from benchmarks.peers.shapes import OLMOE_SHAPES
from benchmarks.suites.experts import offload, offload_peer, replay
from benchmarks.suites.experts.offload_settings import Settings
from benchmarks.suites.experts.offload_summary import IN_MEMORY, LLAMA, OURS, bound

SHAPE = OLMOE_SHAPES["olmoe-0.9b"]
SETTINGS = Settings(shape="olmoe-0.9b", new_tokens=4, rounds=2, control_rounds=3)
RESIDENT = 900_000_000
NEAR = 300_000_000
READ = 4_000_000


def test_the_bound_is_the_bandwidth_over_what_uniform_routing_misses():
    expert = SHAPE.expert_bytes
    # 8 of 64 experts in each of 8 layers, of which slots hold a quarter.
    assert bound(SHAPE, 16, 1, 1.0) == pytest.approx(1e9 / (8 * 0.75 * 8 * expert))
    # Two tokens want 8 + 8 experts, less those that both want.
    assert bound(SHAPE, 16, 2, 1.0) == pytest.approx(2e9 / (15 * 0.75 * 8 * expert))
    assert bound(SHAPE, 32, 1, 2.0) == pytest.approx(3 * bound(SHAPE, 16, 1, 1.0))


class Runs:
    """Replaces the processes; records each contender's limit."""

    def __init__(self, monkeypatch):
        self.seen: list[tuple[str, int | None, list[str], int]] = []
        self.tokens = [[1, 2, 3]]
        self.read_ahead: int | None = None
        monkeypatch.setattr(memory_capped, "measure", self)
        monkeypatch.setattr(offload_peer, "read_ahead", self.reading_ahead)
        monkeypatch.setattr(offload, "read_ahead_kib", lambda path: 8192)

    @contextmanager
    def reading_ahead(self, path, kib):
        self.read_ahead = kib
        yield
        self.read_ahead = None

    def __call__(self, name, command, limit_bytes, threads):
        self.seen.append((name, limit_bytes, list(command), threads))
        if name == LLAMA:
            threads = int(command[command.index("--threads") + 1])
        llama = 1.0 + abs(threads - 8) / 40 + (self.read_ahead != 128)
        seconds = {OURS: 0.5, LLAMA: llama, IN_MEMORY: 0.1}.get(name, 1.0)
        batch = int(command[command.index("--batch") + 1]) if "--batch" in command else 1
        return {
            "load_seconds": 3.0,
            "seconds_per_token": [seconds] * 4,
            "batch": batch,
            "read_bytes": 4 * READ,
            "tokens": self.tokens,
            "prefill_seconds": 8 * seconds,
            "prefill_use": {"experts_storage_bytes": 6e9},
            "use": {
                "experts_hits": 30.0,
                "experts_misses": 10.0,
                "experts_storage_bytes": 4.0 * READ,
                "experts_ahead": 8.0,
                "experts_ahead_used": 6.0,
                "experts_wait_seconds": 1.0,
            },
            "resident_bytes": RESIDENT,
            "manifest": {"experts": {"slots": 16, "near_bytes": NEAR}},
            "peak_bytes": 1_900_000_000,
        }


@pytest.fixture
def runs(monkeypatch, tmp_path):
    monkeypatch.setattr(offload, "model_dir", lambda shape, folder: tmp_path / "model")
    monkeypatch.setattr(offload, "random_model_dir", lambda shape: tmp_path / "small")
    monkeypatch.setattr(peers, "available", lambda python: dict.fromkeys(peers.PEERS))
    monkeypatch.setattr(PeerRuns, "prepare", lambda self, name: None)
    monkeypatch.setattr(offload, "can_limit", lambda: True)
    monkeypatch.setattr(offload, "sequential_read_gb_per_s", lambda paths: 2.0)
    monkeypatch.setattr(replay, "read", lambda path: ({"0": [[1, 2]] * 4}, 0))
    return Runs(monkeypatch)


def measured(tmp_path, **changes):
    settings = replace(SETTINGS, folder=str(tmp_path), **changes)
    steps: list[str] = []
    return settings, steps, offload.run(settings, steps.append)


def test_figures_follow_from_the_runs(runs, tmp_path):
    settings, steps, result = measured(tmp_path)
    assert len(steps) == offload.num_steps(settings)
    assert set(offload.RESULT_KEYS) <= result.keys()
    one, eight = result["by_batch"]["1"], result["by_batch"]["8"]
    assert one["tokens_per_s"] == {OURS: 2.0, LLAMA: 1.0, IN_MEMORY: 10.0}
    assert one["read_gb_per_step"][LLAMA] == READ / 1e9
    ahead = result["lookahead"]
    assert (ahead["ratio"], ahead["precision"]) == (1.0, 0.75)
    assert eight["tokens_per_s"][OURS] == 16.0
    assert result["speedup_vs_llama_cpp"] == pytest.approx(2.0)
    assert one["disk_share"] == pytest.approx(READ / 0.5 / 2e9)
    assert one["fraction_of_bound"] == pytest.approx(2.0 / bound(SHAPE, 16, 1, 2.0))
    assert result["fraction_of_bound"] == min(one["fraction_of_bound"], eight["fraction_of_bound"])
    layers = 48 * 8 * SHAPE.expert_bytes
    assert one["speedup_vs_layer_streaming"] == pytest.approx(2.0 * layers / 2e9)
    assert one["replayed_hit_ratio"]["lru"]["16"] == 0.75  # the first of four steps misses
    assert one["hit_ratio"] == 0.75 and one["expected_hit_ratio"] == 0.25
    assert result["tokens_equal_fp32"] is True and result["ratio_all_in_slots"] == 1.0
    prompt = result["prompt"]
    assert prompt["seconds"] == {OURS: 4.0, LLAMA: 8.0}
    assert prompt["disk_share"] == pytest.approx(6.0 / 4.0 / 2.0)
    assert [len(of) for of in result["synthetic"].values()] == [3, 1]
    for of in result["synthetic"]["1"].values():
        assert of["tokens_per_s"] == {OURS: 2.0, LLAMA: 1.0}
        assert of["speedup_vs_llama_cpp"] == 2.0 and of["hit_ratio"] == 0.75
    json.dumps(result)
    assert "0.750 (0.250)" in offload.table(result)


def test_other_tokens_are_reported(runs, tmp_path, monkeypatch):
    import itertools

    numbers = itertools.count()
    original = Runs.__call__
    monkeypatch.setattr(
        Runs, "__call__", lambda self, *args: original(self, *args) | {"tokens": next(numbers)}
    )
    assert measured(tmp_path)[2]["tokens_equal_fp32"] is False


def test_contenders_have_the_limit_and_ours_fills_it_with_slots(runs, tmp_path):
    _, _, result = measured(tmp_path, batches=(1,))
    limit = SHAPE.num_bytes // 2 + RESIDENT
    assert result["limit_bytes"] == limit
    decoded = [seen for seen in runs.seen if {"--random-tokens", "--temperature"} & {*seen[2]}]
    assert {given for name, given, *_ in decoded if name == LLAMA} == {limit}
    assert {given for name, given, *_ in decoded if name == IN_MEMORY} == {None}
    near = limit - (RESIDENT - NEAR) - memory_capped.MARGIN_BYTES
    assert result["near_bytes"] == {"1": near}
    commands = {str(seen[2]) for seen in decoded if seen[:2] == (OURS, limit)}
    (long,) = {one for one in commands if "'512'" in one}
    assert str((near - 512 * offload.PROMPT_TOKEN_BYTES) / 2**30) in long
    others = commands - {long}
    assert all(str(near / 2**30) in one for one in others)
    # Experts are read ahead as by default, not, and always.
    assert len(others) == 3
    assert {mode for mode in ("off", "on") for one in others if f'"prefetch": "{mode}"' in one} == {
        "off",
        "on",
    }


def test_llama_cpp_has_what_suits_it(runs, tmp_path):
    _, _, result = measured(tmp_path, batches=(1,))
    commands = [command for name, _, command, _ in runs.seen if name == LLAMA]
    threads = [command[command.index("--threads") + 1] for command in commands]
    # Read-ahead with 4 threads, then the threads; rounds of prompt, decoding, and three routings.
    assert threads == [*"444", "2", "8", *"88", *"88", *"88" * 3]
    assert result["llama_cpp"] == {"1": {"threads": 8, "read_ahead_kib": 128}}


def test_without_the_right_to_set_it_llama_cpp_has_this_machines_read_ahead(
    runs, tmp_path, monkeypatch
):
    @contextmanager
    def refused(path, kib):
        if kib is not None:
            raise PermissionError("no")
        yield

    monkeypatch.setattr(offload_peer, "read_ahead", refused)
    _, _, result = measured(tmp_path, batches=(1,))
    assert result["llama_cpp"] == {"1": {"threads": 8, "read_ahead_kib": 8192}}
    assert not result["skipped_peers"]


def test_a_peer_that_fails_is_skipped_and_said(runs, tmp_path, monkeypatch):
    original = Runs.__call__

    def without(self, name, *args):
        if name == LLAMA:
            raise MeasurementError("llama_cpp was killed for want of memory")
        return original(self, name, *args)

    monkeypatch.setattr(Runs, "__call__", without)
    settings, steps, result = measured(tmp_path)
    assert "want of memory" in result["skipped_peers"][LLAMA]
    assert result["speedup_vs_llama_cpp"] is None
    assert len(steps) == offload.num_steps(settings)
    offload.table(result)


def test_a_replay_has_the_engines_hits(tmp_path):
    """A real engine's steps, replayed with its slots and its policy."""
    model, path = random_model_dir("olmoe"), tmp_path / "trace.json"
    load = memory_capped.Load(prompt_tokens=12, new_tokens=12, batch=3, prompt_step=5)
    experts = {"near_gib": 24.5 * 4 * 3 * 256 * 128 * 4 / 2**30, "policy": "lfu"}
    command = memory_capped.decode_command(
        load, model, 1 << 26, {"experts": experts}, "--dtype", "float32", "--trace", str(path)
    )
    use = memory_capped.measure(OURS, command, None, 2)["use"]
    trace, first = replay.read(path)
    found = replay.hit_ratio(trace, first, 64, 24, "lfu")
    assert found == use["experts_hits"] / (use["experts_hits"] + use["experts_misses"])
    assert found != replay.hit_ratio(trace, first, 64, 32, "lfu")
