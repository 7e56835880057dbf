# SPDX-License-Identifier: Apache-2.0
"""weights_storage: the limit of each contender, skipped peers, and the figures."""

import json

import pytest

from benchmarks import peers
from benchmarks.harness import disk, memory_capped
from benchmarks.harness.disk import sequential_read_gb_per_s
from benchmarks.harness.memory_capped_peers import PeerRuns
from benchmarks.harness.runner import MeasurementError
from benchmarks.peers import PEERS
from benchmarks.suites.weights import storage as weights_storage
from benchmarks.suites.weights.storage import Settings
from benchmarks.suites.weights.storage_summary import OURS

SETTINGS = Settings(
    shape="opt-1.3b", new_tokens=4, rounds=2, peers=("llama_cpp", "flexgen", "airllm_disk")
)
RESIDENT = 900_000_000
WEIGHTS = 4_000_000
STORED = 1_000_000_000
SECONDS = {OURS: 0.5, "llama_cpp": 1.0, "flexgen": 2.0}


class Runs:
    """Replaces the processes; records each contender's limit."""

    def __init__(self, largest_share=1.0):
        self.seen: list[tuple[str, int | None, list[str]]] = []
        self.largest_share = largest_share

    def __call__(self, name, command, limit_bytes, threads):
        self.seen.append((name, limit_bytes, list(command)))
        if name == "flexgen":
            share = float(command[command.index("--resident-share") + 1])
            if share > self.largest_share:
                raise MeasurementError("flexgen was killed for want of memory")
        number = sum(seen[0] == OURS for seen in self.seen) if name == OURS else 0
        return {
            "load_seconds": {1: 40.0, 3: 30.0}.get(number, 10.0),
            "weights_load_seconds": {1: 36.0, 2: 3.0, 3: 20.0}.get(number, 2.0),
            "prefill_seconds": 1.0,
            "seconds_per_token": [SECONDS.get(name, 1.0)] * 3 + [9.0],
            "stall_seconds_per_token": [0.3] * 4,
            "resident_bytes": RESIDENT,
            "manifest": {"storage_bytes": STORED},
            "peak_bytes": 1_900_000_000,
        }


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Provide a model folder, peers of which one is not installed, and fake runs."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "a.safetensors").write_bytes(bytes(WEIGHTS))
    lacking = dict.fromkeys(PEERS) | {"airllm_disk": "package airllm: pip install airllm"}
    runs = Runs()
    monkeypatch.setattr(weights_storage, "model_dir", lambda shape, folder: model)
    monkeypatch.setattr(peers, "available", lambda python: lacking)
    monkeypatch.setattr(memory_capped, "measure", runs)
    monkeypatch.setattr(PeerRuns, "prepare", lambda self, name: None)
    monkeypatch.setattr(weights_storage, "can_limit", lambda: True)
    monkeypatch.setattr(weights_storage, "sequential_read_gb_per_s", lambda paths: 2.5)
    return runs


def measured(tmp_path, steps=None):
    from dataclasses import replace

    settings = replace(SETTINGS, folder=str(tmp_path))
    notes = [] if steps is None else steps
    return settings, weights_storage.run(settings, notes.append)


def test_figures_follow_from_the_runs(world, tmp_path):
    steps: list[str] = []
    settings, result = measured(tmp_path, steps)
    assert len(steps) == weights_storage.num_steps(settings)
    assert set(weights_storage.RESULT_KEYS) <= result.keys()
    assert result["best_peer"] == "llama_cpp"
    assert result["tokens_per_s_ratio"] == pytest.approx(2.0)
    assert result["disk_share"] == pytest.approx(STORED / 0.5 / 2.5e9)
    assert result["second_start_ratio"] == pytest.approx(12.0)
    assert result["starts"]["all_stored"] == {"weights": [36.0, 3.0], "engine": [40.0, 10.0]}
    assert result["starts"]["measured"] == {"weights": [20.0, 2.0], "engine": [30.0, 10.0]}
    assert result["by_contender"][OURS]["tokens_per_s"] == pytest.approx(2.0)
    json.dumps(result)
    assert "airllm" in weights_storage.table(result)


def test_all_runs_have_the_same_limit_except_the_measuring_one(world, tmp_path):
    _, result = measured(tmp_path)
    limit = WEIGHTS // 2 + RESIDENT
    assert result["limit_bytes"] == limit
    limits = {(name, given) for name, given, _ in world.seen}
    assert limits == {
        ("vLLM alone", None),
        (OURS, limit),
        ("llama_cpp", limit),
        ("flexgen", limit),
    }


def test_missing_packages_are_skipped_and_named(world, tmp_path):
    steps: list[str] = []
    _, result = measured(tmp_path, steps)
    assert result["skipped_peers"] == {"airllm_disk": "package airllm: pip install airllm"}
    assert any("airllm_disk is skipped: package airllm" in step for step in steps)


def test_a_peer_keeps_as_much_in_memory_as_the_limit_allows(world, tmp_path):
    world.largest_share = 0.43
    measured(tmp_path)
    shares = [
        float(command[command.index("--resident-share") + 1])
        for name, _, command in world.seen
        if name == "flexgen"
    ]
    assert shares == pytest.approx([0.5, 0.46, 0.42, 0.42, 0.42])


def test_a_peer_that_no_share_lets_run_is_skipped_and_its_end_is_reported(world, tmp_path):
    world.largest_share = -1.0
    steps: list[str] = []
    _, result = measured(tmp_path, steps)
    assert "was killed for want of memory" in result["skipped_peers"]["flexgen"]
    assert result["best_peer"] == "llama_cpp" and "flexgen" not in result["by_contender"]
    assert any("flexgen is skipped: flexgen was killed" in step for step in steps)


def test_the_order_changes_from_round_to_round(world, tmp_path):
    measured(tmp_path)
    rounds = [name for name, *_ in world.seen][-6:]
    assert sorted(rounds[:3]) == sorted(rounds[3:]) and rounds[:3] != rounds[3:]


def test_without_peers_there_is_no_ratio_but_a_result(world, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "available", lambda python: dict.fromkeys(PEERS, "not there"))
    _, result = measured(tmp_path)
    assert result["tokens_per_s_ratio"] is None and result["best_peer"] is None
    assert result["disk_share"] > 0


def test_the_disk_is_read_past_the_cache(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(24 << 20))
    assert sequential_read_gb_per_s([path]) > 0


def test_read_ahead_is_set_and_set_back(tmp_path, monkeypatch):
    setting = tmp_path / "read_ahead_kb"
    setting.write_text("8192\n")
    monkeypatch.setattr(disk, "_read_ahead_setting", lambda path: setting)
    with pytest.raises(RuntimeError), disk.read_ahead(tmp_path, 128):
        assert disk.read_ahead_kib(tmp_path) == 128
        raise RuntimeError
    assert disk.read_ahead_kib(tmp_path) == 8192
    with disk.read_ahead(tmp_path, None):
        assert disk.read_ahead_kib(tmp_path) == 8192


def test_a_disk_without_the_setting_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_read_ahead_setting", lambda path: None)
    assert disk.read_ahead_kib(tmp_path) is None
    with disk.read_ahead(tmp_path, 128):
        pass
