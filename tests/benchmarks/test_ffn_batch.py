# SPDX-License-Identifier: Apache-2.0
"""ffn_batch: the batch at which dense overtakes sparse, and the quality of the plugin's choice."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.harness import batch_decode, memory_capped
from benchmarks.harness.batch_decode import PATHS
from benchmarks.inputs.synthetic_sparsity.model import SYNTHETIC_SHAPES, synthetic_model_dir
from benchmarks.inputs.synthetic_sparsity.store import synthetic_store
from benchmarks.suites.ffn import batch as ffn_batch
from benchmarks.suites.ffn.batch import PROFILES, summarise
from vllm_tiered.config import TieredConfig
from vllm_tiered.ffn.layer import FfnLayer

SECONDS = {
    1: {"sparse": 0.1, "dense": 1.0, "chosen": 0.1},
    8: {"sparse": 0.5, "dense": 1.0, "chosen": 0.52},
    32: {"sparse": 1.5, "dense": 1.0, "chosen": 1.02},
}


def runs_of(seconds, rounds=2):
    return [
        {
            "batch": batch,
            "path": path,
            "round": number,
            "seconds_per_step": [of_path[path]] * 3 + [9.0],
            "use": {"ffn_sparse_steps": 3.0, "ffn_dense_steps": 1.0},
        }
        for batch, of_path in seconds.items()
        for number in range(rounds)
        for path in PATHS
    ]


def test_figures_follow_from_the_runs():
    result = summarise(runs_of(SECONDS))
    assert result["by_batch"]["8"]["sparse"] == pytest.approx(16)
    assert result["switch_over_batch"] == 32
    assert result["choice_ratio"] == pytest.approx(0.5 / 0.52)
    assert result["choice_is_within_5_percent"]
    assert result["by_batch"]["1"]["sparse_share"]["chosen"] == pytest.approx(0.75)
    assert "| 32 |" in ffn_batch.table(result)


def test_a_wrong_choice_shows():
    wrong = SECONDS | {32: {"sparse": 1.5, "dense": 1.0, "chosen": 1.5}}
    result = summarise(runs_of(wrong))
    assert result["choice_ratio"] == pytest.approx(1 / 1.5)
    assert not result["choice_is_within_5_percent"]


def test_no_crossover_if_sparse_is_always_faster():
    assert summarise(runs_of({1: SECONDS[1], 8: SECONDS[8]}))["switch_over_batch"] is None


def test_one_dense_win_by_chance_is_no_crossover():
    odd = {1: SECONDS[1], 4: SECONDS[32], 8: SECONDS[8], 32: SECONDS[32]}
    assert summarise(runs_of(odd))["switch_over_batch"] == 32


def test_a_run_reports_its_steps(tmp_path, monkeypatch):
    commands = []

    def measure(name, command, limit_bytes, threads):
        commands.append(command)
        assert limit_bytes is None
        return {"runs": runs_of(SECONDS), "manifest": {}}

    monkeypatch.setattr(memory_capped, "measure", measure)
    settings = replace(
        PROFILES["quick"], shape="opt-tiny", batches=(1, 8, 32), folder=str(tmp_path)
    )
    steps: list[str] = []
    result = ffn_batch.run(settings, steps.append)
    assert len(steps) == ffn_batch.num_steps(settings)
    assert set(ffn_batch.RESULT_KEYS) <= result.keys()
    json.dumps(result)
    (command,) = commands
    TieredConfig.from_dict(json.loads(command[command.index("--tiered") + 1])).check()


def test_dense_is_forced_and_nothing_else_changes(monkeypatch):
    seen = []
    monkeypatch.setattr(
        FfnLayer, "compute", lambda layer, x_BH, only_decodes: seen.append(only_decodes)
    )
    force = batch_decode.forced_path()
    layer = FfnLayer.__new__(FfnLayer)
    for path in PATHS:
        force(path)
        layer.compute(torch.zeros(1, 1), True)
        layer.compute(torch.zeros(1, 1), False)
    assert seen == [True, False, False, False, True, False]


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """Return the folder of a tiny model with synthetic sparsity, and its store."""
    folder = tmp_path_factory.mktemp("synthetic")
    model = synthetic_model_dir("opt-tiny", folder)
    return model, synthetic_store(model, folder)


def tiered(store):
    return {
        "ffn": {
            "store": str(store),
            "mix": [1.0, 0.0, 0.0],
            "cache": "window",
            "window": 5,
            "near_gib": 6e6 / 2**30,
            "far_gib": 0,
        }
    }


@pytest.mark.slow
def test_a_batch_is_decoded_in_each_way(synthetic):
    model, store = synthetic
    settings = replace(
        PROFILES["quick"], shape="opt-tiny", batches=(1, 3), rounds=1, near_share=1.4, new_tokens=6
    )
    command = ffn_batch.batch_command(settings, model, store)
    runs = memory_capped.measure("batches", command, None, 1)["runs"]
    assert [(run["batch"], run["path"]) for run in runs] == [(b, p) for b in (1, 3) for p in PATHS]
    for run in runs:
        # The prompt's step gives the first token.
        assert len(run["seconds_per_step"]) == settings.new_tokens - 1
        steps = (settings.new_tokens - 1) * SYNTHETIC_SHAPES["opt-tiny"].sizes.num_layers
        kind = {"sparse": "ffn_sparse_steps", "dense": "ffn_dense_steps"}
        assert run["path"] == "chosen" or run["use"][kind[run["path"]]] == steps


@pytest.mark.slow
def test_a_contender_decodes_with_chosen_neurons(synthetic):
    model, store = synthetic
    load = memory_capped.Load(prompt_tokens=12, new_tokens=12, batch=2, prompt_step=7)
    kv_bytes = load.kv_bytes(SYNTHETIC_SHAPES["opt-tiny"].sizes)
    command = memory_capped.decode_command(load, model, kv_bytes, tiered(store))
    measured = memory_capped.measure("sparse", command, None, 1)
    assert len(measured["seconds_per_token"]) == load.new_tokens - 1
    assert [len(ids) for ids in measured["tokens"]] == [load.new_tokens] * 2
    use = measured["use"]
    # Such a small model may turn out to be faster densely after a while.
    steps = 11 * SYNTHETIC_SHAPES["opt-tiny"].sizes.num_layers
    assert 0 < use["ffn_sparse_steps"] <= steps
    # Four of five neurons were needed for the token before.
    assert use["ffn_hits"] > 2 * use["ffn_misses"] > 0
    assert use["ffn_storage_bytes"] >= 1024 * use["ffn_misses"]
    assert measured["prefill_seconds"] > 0
    assert measured["manifest"]["ffn"]["predictor"] == "low_rank"
