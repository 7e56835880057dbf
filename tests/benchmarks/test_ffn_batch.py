# SPDX-License-Identifier: Apache-2.0
"""ffn_batch: where dense overtakes sparse, and how good the plugin's choice was."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import batch_decode, ffn_batch, limited
from benchmarks.batch_decode import PATHS
from benchmarks.ffn_batch import PROFILES, summarise
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
    assert result["by_batch"][8]["sparse"] == pytest.approx(16)
    assert result["switch_over_batch"] == 32
    assert result["choice_ratio"] == pytest.approx(0.5 / 0.52)
    assert result["choice_is_within_5_percent"]
    assert result["by_batch"][1]["sparse_share"]["chosen"] == pytest.approx(0.75)
    assert "| 32 |" in ffn_batch.table(result)


def test_a_wrong_choice_shows():
    wrong = SECONDS | {32: {"sparse": 1.5, "dense": 1.0, "chosen": 1.5}}
    result = summarise(runs_of(wrong))
    assert result["choice_ratio"] == pytest.approx(1 / 1.5)
    assert not result["choice_is_within_5_percent"]


def test_where_sparse_always_pays_there_is_no_switch_over():
    assert summarise(runs_of({1: SECONDS[1], 8: SECONDS[8]}))["switch_over_batch"] is None


def test_one_batch_that_dense_wins_by_chance_is_no_switch_over():
    odd = {1: SECONDS[1], 4: SECONDS[32], 8: SECONDS[8], 32: SECONDS[32]}
    assert summarise(runs_of(odd))["switch_over_batch"] == 32


def test_a_run_reports_its_steps(tmp_path, monkeypatch):
    commands = []

    def measure(name, command, limit_bytes, threads):
        commands.append(command)
        assert limit_bytes is None
        return {"runs": runs_of(SECONDS), "manifest": {}}

    monkeypatch.setattr(limited, "measure", measure)
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


def test_dense_is_forced_and_the_rest_left_alone(monkeypatch):
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
