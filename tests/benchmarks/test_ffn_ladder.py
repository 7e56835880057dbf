# SPDX-License-Identifier: Apache-2.0
"""ffn_ladder: limits and settings of each contender, those that do not fit, and the figures."""

import json
from dataclasses import replace

import pytest

from benchmarks.harness import memory_capped
from benchmarks.harness.runner import MeasurementError
from benchmarks.inputs.widened_model import widened_model_dir
from benchmarks.peers import llama_formats, powerinfer
from benchmarks.suites.ffn import ladder
from benchmarks.suites.ffn.ladder import (
    GGUF,
    POWERINFER,
    PROFILES,
    SPARSE,
    STREAMED,
    STREAMED_INT4,
    VLLM,
    VLLM_W4A16,
)
from tests.fixtures.tiny_models import tiny_model
from vllm_tiered.config import TieredConfig

RESIDENT = 900_000_000
FIRST = next(iter(SPARSE))


class Runs:
    """Replaces the processes; records each contender's limit and command."""

    def __init__(self):
        self.seen = []
        self.prepared = []

    def __call__(self, name, command, limit_bytes, threads):
        self.seen.append((name, limit_bytes, list(command)))
        if name == VLLM and limit_bytes is not None:
            raise MeasurementError("vLLM was killed for want of memory:\nthe log")
        return {
            "seconds_per_token": [{FIRST: 0.1, STREAMED: 0.4}.get(name, 0.2)] * 4,
            "resident_bytes": RESIDENT,
            "peak_bytes": 2_000_000_000,
            "use": {
                "ffn_hits": 32.0,
                "ffn_misses": 8.0,
                "ffn_storage_bytes": 4e6,
                "ffn_sparse_steps": 90.0,
                "ffn_dense_steps": 30.0,
            },
        }


@pytest.fixture
def measured(tmp_path, monkeypatch):
    runs = Runs()
    tiny_model("llama", tmp_path / "small").bfloat16().save_pretrained(tmp_path / "small")
    model = widened_model_dir(tmp_path / "small", 2, tmp_path)
    text = type("Text", (), {"token_ids": tuple(range(40))})
    monkeypatch.setattr(memory_capped, "measure", runs)
    monkeypatch.setattr(memory_capped, "MARGIN_BYTES", 0)
    monkeypatch.setattr(ladder, "_model_dir", lambda *_: model)
    monkeypatch.setattr(ladder, "calibration_texts", lambda *_, **__: [text])
    monkeypatch.setattr(ladder, "demo_model_dir", lambda: model)
    monkeypatch.setattr(ladder, "prepare", lambda *given, **_: runs.prepared.append(given))
    monkeypatch.setattr(ladder, "can_limit", lambda: True)
    monkeypatch.setattr(ladder, "quantized_model_dir", lambda *_: None)
    for peer in (llama_formats, powerinfer):
        monkeypatch.setattr(peer, "missing", lambda python: None)
    monkeypatch.setattr(powerinfer, "converted", lambda model, work, copies: work / "p.gguf")
    monkeypatch.setattr(
        llama_formats, "quantised", lambda python, model, work, name, threads: work / f"{name}.gguf"
    )

    def measure(**changes):
        settings = replace(
            PROFILES["full"], folder=str(tmp_path), prompt_tokens=8, new_tokens=5, **changes
        )
        steps: list[str] = []
        result = ladder.run(settings, steps.append)
        assert len(steps) == ladder.num_steps(settings)
        assert set(ladder.RESULT_KEYS) <= result.keys()
        json.dumps(result)
        return runs, result

    return measure


def tiered_of(command):
    return json.loads(command[command.index("--tiered") + 1])


def test_every_contender_has_the_limit(measured):
    runs, result = measured()
    limits = [int(share * result["weights_bytes"]) + RESIDENT for share in (0.75, 0.6)]
    for name in (VLLM_W4A16, STREAMED, STREAMED_INT4, *SPARSE, *GGUF, POWERINFER):
        assert {limit for seen, limit, _ in runs.seen if seen == name} == {None, *limits}, name
    assert [one["limit_bytes"] for one in result["by_limit"].values()] == [None, *limits]
    assert len(runs.prepared) == 1


def test_figures_follow_from_the_runs(measured):
    _, result = measured()
    half = result["by_limit"]["0.6"]["contenders"]
    assert half[FIRST]["tokens_per_s_by_round"] == pytest.approx([10.0, 10.0])
    assert half[FIRST]["hit_ratio"] == pytest.approx(0.8)
    assert half[FIRST]["storage_bytes"] == pytest.approx(1e6)
    assert half[FIRST]["sparse_share"] == pytest.approx(0.75)
    assert result["sparse_ratios"]["0.6"][STREAMED] == pytest.approx(4.0)
    text = ladder.table(result)
    assert f"| {STREAMED} | 2.50 | 2.50 | 2.50 |" in text and "| 80.0 |" in text


def test_what_cannot_start_is_named_and_not_tried_again(measured):
    runs, result = measured()
    found = result["by_limit"]["0.6"]["contenders"][VLLM]
    assert found == {"why_not": "vLLM was killed for want of memory:\nthe log"}
    assert VLLM not in result["sparse_ratios"]["0.6"]
    assert result["sparse_ratios"]["all"][VLLM] == pytest.approx(2.0)
    tried = [limit for name, limit, _ in runs.seen if name == VLLM]
    assert len(tried) == 2 + 1 + 1, "two rounds without a limit, and once under each"


def test_ours_fills_the_limit_and_ablations_change_one_thing(measured):
    runs, result = measured(contenders=(STREAMED, *SPARSE), rounds=1)
    kv_bytes = 2 * 32 * 4 * 3 * 4 * 8  # 2 blocks; 3 layers of 4 heads of 8
    left = 0.75 * result["weights_bytes"] - kv_bytes
    limit = int(0.75 * result["weights_bytes"]) + RESIDENT
    commands = {name: command for name, given, command in runs.seen if given == limit}
    outside = 64 * 64 * 2 + 64 * 2
    weights = tiered_of(commands[STREAMED])["weights"]
    assert weights["near_gib"] * 2**30 == pytest.approx(left - outside)
    ffn = tiered_of(commands[FIRST])["ffn"]
    others = result["weights_bytes"] - result["ffn_bytes"]
    assert (ffn["near_gib"] + ffn["far_gib"]) * 2**30 == pytest.approx(left - others)
    base = {key: value for key, value in ffn.items() if key != "mix"}
    for name, changes in SPARSE.items():
        tiered = tiered_of(commands[name])
        assert tiered["ffn"] == base | json.loads(json.dumps(changes))
        TieredConfig.from_dict(tiered).check()
    unlimited = [tiered_of(c)["ffn"] for n, given, c in runs.seen if given is None and n == FIRST]
    assert [set(one) for one in unlimited] == [{"store", "mix", "far_gib"}]


def test_all_of_ours_take_the_same_prompt(measured, tmp_path):
    runs, _ = measured(contenders=(VLLM, FIRST), rounds=1, shares=(2.0,))
    ours = [command for name, _, command in runs.seen if name in (VLLM, FIRST)]
    assert {command[command.index("--prompt-file") + 1] for command in ours} == {
        str(tmp_path / "prompt.json")
    }
    assert json.loads((tmp_path / "prompt.json").read_text()) == list(range(8))


def test_a_contender_that_fails_later_costs_no_figures(measured, monkeypatch):
    original, tries = Runs.__call__, []

    def fails_in_its_second_round(self, name, *arguments):
        tries.append(name)
        if name == STREAMED and tries.count(name) == 3:  # the first writes its file
            raise MeasurementError("streamed 16 bit failed")
        return original(self, name, *arguments)

    monkeypatch.setattr(Runs, "__call__", fails_in_its_second_round)
    _, result = measured(shares=(0.75,))
    assert STREAMED not in result["sparse_ratios"]["0.75"]
    assert "why_not" in result["by_limit"]["0.75"]["contenders"][STREAMED]
    assert STREAMED_INT4 in result["sparse_ratios"]["0.75"]


def test_a_width_without_a_4_bit_format_is_refused(measured):
    with pytest.raises(ValueError, match="copies=7"):
        measured(copies=7)
