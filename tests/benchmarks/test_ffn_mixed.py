# SPDX-License-Identifier: Apache-2.0
"""ffn_mixed: limits and settings of each contender, skipped peers, and the figures."""

import json
import subprocess
from dataclasses import replace

import pytest

from benchmarks import peers
from benchmarks.harness import memory_capped, memory_capped_peers
from benchmarks.harness.memory_capped_peers import PeerRuns
from benchmarks.harness.runner import MeasurementError
from benchmarks.inputs.synthetic_sparsity.model import SYNTHETIC_SHAPES
from benchmarks.peers import PEERS
from benchmarks.suites.ffn import mixed as ffn_mixed
from benchmarks.suites.ffn.mixed import PROFILES
from benchmarks.suites.ffn.mixed_summary import DENSE, FULL, LAYERS, OURS, POLICIES, UNCACHED
from vllm_tiered.config import TieredConfig

RESIDENT = 900_000_000
SECONDS = {OURS: 0.1, FULL: 0.2, LAYERS: 2.0, DENSE: 0.05, "llama_cpp": 0.8}
SECONDS |= {POLICIES["window"]: 0.15}
SECONDS[UNCACHED] = 0.3


class Runs:
    """Replaces the processes; records each contender's limit."""

    def __init__(self):
        self.seen = []
        self.largest_share = 1.0

    def __call__(self, name, command, limit_bytes, threads):
        self.seen.append((name, limit_bytes, list(command)))
        if name == "flexgen":
            share = float(command[command.index("--resident-share") + 1])
            if share > self.largest_share:
                raise MeasurementError("flexgen was killed for want of memory")
        return {
            "load_seconds": 10.0,
            "seconds_per_token": [SECONDS.get(name, 0.1)] * 3 + [9.0],
            "resident_bytes": RESIDENT,
            "peak_bytes": 2_000_000_000,
            "use": {
                "ffn_hits": 32.0,
                "ffn_misses": 8.0,
                "ffn_storage_bytes": 4e6,
                "ffn_far_bytes": 8e6,
                "ffn_wait_seconds": 0.4,
            },
            "manifest": {"ffn": {}},
        }


@pytest.fixture
def runs(monkeypatch):
    lacked = dict.fromkeys(PEERS) | {"airllm_disk": "package airllm: pip install airllm"}
    runs = Runs()
    monkeypatch.setattr(peers, "available", lambda python: lacked)
    monkeypatch.setattr(memory_capped, "measure", runs)
    monkeypatch.setattr(PeerRuns, "prepare", lambda self, name: None)
    monkeypatch.setattr(ffn_mixed, "can_limit", lambda: True)
    return runs


@pytest.fixture
def settings(tmp_path):
    return replace(
        PROFILES["quick"],
        shape="opt-tiny",
        rounds=2,
        peers=("llama_cpp", "flexgen", "airllm_disk"),
        folder=str(tmp_path),
    )


def test_figures_follow_from_the_runs(runs, settings):
    steps: list[str] = []
    result = ffn_mixed.run(settings, steps.append)
    assert len(steps) == ffn_mixed.num_steps(settings)
    assert set(ffn_mixed.RESULT_KEYS) <= result.keys()
    assert result["speedup_vs_layer_streaming"] == pytest.approx(20.0)
    assert result["speedup_vs_llama_cpp"] == pytest.approx(8.0)
    assert result["ratio_to_dense"] == pytest.approx(0.5)
    assert result["mixed_precision_gain"] == pytest.approx(2.0)
    assert result["cache_gain"] == pytest.approx(3.0)
    # The same memory is used for twenty times as long.
    assert result["carbon_ratio"] == pytest.approx(20.0)
    assert set(result["policies"]) == set(POLICIES)
    assert result["policies"]["window"]["tokens_per_s"] == pytest.approx(1 / 0.15)
    atu = result["policies"]["atu"]
    assert atu["hit_ratio"] == pytest.approx(0.8)
    assert (atu["storage_bytes"], atu["far_bytes"]) == (1e6, 2e6)
    assert atu["wait_seconds"] == pytest.approx(0.1)
    json.dumps(result)
    text = ffn_mixed.table(result)
    assert "airllm" in text and "| window | 80.0 |" in text


def test_all_have_the_same_limit_but_for_two(runs, settings):
    result = ffn_mixed.run(settings, lambda text: None)
    limit = SYNTHETIC_SHAPES["opt-tiny"].sizes.num_bytes // 2 + RESIDENT
    assert result["limit_bytes"] == limit
    unlimited = {name for name, given, _ in runs.seen if given is None}
    assert unlimited == {"vLLM alone", DENSE}
    assert {given for _, given, _ in runs.seen} == {None, limit}


def test_without_a_limit_nothing_pretends_to_have_one(runs, settings, monkeypatch):
    monkeypatch.setattr(ffn_mixed, "can_limit", lambda: False)
    result = ffn_mixed.run(settings, lambda text: None)
    assert result["is_limited"] is False
    assert {given for _, given, _ in runs.seen} == {None}


def test_ablations_change_one_thing_each(settings, tmp_path):
    settings = replace(settings, shape="opt-6.7b", near_share=0.6)
    commands = ffn_mixed.contenders(settings, tmp_path, tmp_path / "store", tmp_path)

    def tiered(name):
        return json.loads(commands[name][commands[name].index("--tiered") + 1])

    ours = tiered(OURS)["ffn"]
    assert tiered(FULL)["ffn"] == ours | {"mix": [1.0, 0.0, 0.0]}
    assert tiered(UNCACHED)["ffn"] == ours | {"cache": "none"}
    for policy, name in POLICIES.items():
        assert tiered(name)["ffn"] == ours | {"cache": policy}
    assert ours["near_gib"] / (ours["near_gib"] + ours["far_gib"]) == pytest.approx(0.6)
    assert "--tiered" not in commands[DENSE]
    for name in (FULL, UNCACHED, LAYERS, *POLICIES.values()):
        TieredConfig.from_dict(tiered(name)).check()


def test_an_unknown_peer_is_refused_before_anything_is_written(runs, settings, tmp_path):
    with pytest.raises(ValueError, match=r"no peer 'llama\.cpp'; there are: llama_cpp"):
        ffn_mixed.run(replace(settings, peers=("llama.cpp",)), lambda text: None)
    assert not list(tmp_path.iterdir()) and not runs.seen


def test_contenders_that_cannot_run_are_skipped_and_named(runs, settings):
    result = ffn_mixed.run(settings, lambda text: None)
    assert result["skipped"]["airllm_disk"] == "package airllm: pip install airllm"
    assert not {name for name, *_ in runs.seen} & result["skipped"].keys()


def test_a_peer_keeps_as_much_in_memory_as_the_limit_allows(runs, settings):
    runs.largest_share = 0.43
    ffn_mixed.run(settings, lambda text: None)
    shares = [
        float(command[command.index("--resident-share") + 1])
        for name, _, command in runs.seen
        if name == "flexgen"
    ]
    assert shares == pytest.approx([0.5, 0.46, 0.42, 0.42, 0.42])


def test_a_peer_that_cannot_run_at_all_is_an_error(runs, tmp_path):
    runs.largest_share = -1.0
    load = memory_capped.Load(prompt_tokens=12, new_tokens=4)
    peer_runs = PeerRuns(python="python", model=tmp_path, folder=tmp_path, load=load)
    with pytest.raises(MeasurementError, match="flexgen was killed"):
        peer_runs.fitting_command("flexgen", 10)
    assert memory_capped_peers.lacking(["airllm_disk", "llama_cpp"], "python").keys() == {
        "airllm_disk"
    }


def test_a_peer_that_takes_too_long_is_skipped_and_named(tmp_path, monkeypatch):
    def hangs(command, limit_bytes, *, timeout_s, **_):
        raise subprocess.TimeoutExpired(command, timeout_s)

    monkeypatch.setattr(memory_capped, "run_limited", hangs)
    monkeypatch.setattr(memory_capped_peers, "run_limited", hangs)
    monkeypatch.setattr(peers, "available", lambda python: dict.fromkeys(PEERS))
    load = memory_capped.Load(prompt_tokens=12, new_tokens=4)
    peer_runs = PeerRuns(python="python", model=tmp_path, folder=tmp_path, load=load)
    _, skipped = peer_runs.commands(["llama_cpp"], 10, lambda text: None)
    assert skipped == {"llama_cpp": "llama_cpp took more than 1800 s to prepare"}
    monkeypatch.setattr(PeerRuns, "prepare", lambda self, name: None)
    _, skipped = peer_runs.commands(["llama_cpp"], 10, lambda text: None)
    assert skipped == {"llama_cpp": "llama_cpp took more than 1800 s"}


def test_the_kv_cache_is_that_of_the_load():
    sizes = SYNTHETIC_SHAPES["opt-tiny"].sizes
    block = 32 * 2 * sizes.num_layers * sizes.hidden_size * 2
    one = memory_capped.Load(prompt_tokens=12, new_tokens=8)
    assert one.kv_bytes(sizes) == 2 * block
    many = memory_capped.Load(prompt_tokens=12, new_tokens=8, batch=3, prompt_step=20)
    assert many.kv_bytes(sizes) == (1 + 1 + 2 + 2) * block
