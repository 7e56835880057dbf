# SPDX-License-Identifier: Apache-2.0
"""ffn_swiglu: the inputs of each contender, and the figures."""

import json
from dataclasses import replace

import pytest

from benchmarks.harness import memory_capped
from benchmarks.suites.ffn import swiglu as ffn_swiglu
from benchmarks.suites.ffn.swiglu import CONTENDERS, DENSE, FROM_DISK, LAYERS, MIXED, PROFILES
from vllm_tiered.config import TieredConfig

SECONDS = {MIXED: 0.05, FROM_DISK: 0.08, LAYERS: 0.1, DENSE: 0.02}
PERPLEXITY = {"full": 6.5, "mixed": 6.63}


def run_of(name):
    return {
        "seconds_per_token": [SECONDS[name]] * 3 + [9.0],
        "use": {"ffn_hits": 30.0, "ffn_misses": 10.0, "ffn_sparse_steps": 4.0, "ffn_far_bytes": 8e6}
        if name == MIXED
        else {},
        "manifest": {"ffn": {}},
    }


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """Return the recorded measurements of a preparation, runs and texts that take no time."""
    seen: list[tuple[str, list[str]]] = []

    def measure(name, command, limit_bytes, threads):
        seen.append((name, list(command)))
        return run_of(name)

    monkeypatch.setattr(memory_capped, "measure", measure)
    monkeypatch.setattr(ffn_swiglu, "prepare", lambda model, store: True)
    monkeypatch.setattr(ffn_swiglu, "_perplexity", lambda model, tokens: PERPLEXITY)
    return seen


def settings_in(folder):
    return replace(PROFILES["quick"], folder=str(folder))


def test_figures_follow_from_the_runs(seen, tmp_path):
    steps: list[str] = []
    settings = settings_in(tmp_path)
    result = ffn_swiglu.run(settings, steps.append)
    assert len(steps) == ffn_swiglu.num_steps(settings)
    assert set(ffn_swiglu.RESULT_KEYS) <= result.keys()
    assert result["speedup_vs_layer_streaming"] == pytest.approx(2.0)
    assert result["ratio_to_dense"] == pytest.approx(0.4)
    assert result["perplexity_ratio"] == pytest.approx(1.02)
    figures = result["by_contender"][MIXED]
    assert (figures["hit_ratio"], figures["sparse_share"]) == (0.75, 1.0)
    assert figures["far_bytes"] == 2e6
    json.dumps(result)
    text = ffn_swiglu.table(result)
    assert "| 75 | 100 |" in text and "6.63" in text


def test_each_round_has_a_prompt_of_its_own_for_all(seen, tmp_path):
    settings = settings_in(tmp_path)
    ffn_swiglu.run(settings, lambda text: None)
    measured = seen[1:]  # except the start that makes the file of layers
    assert len(measured) == settings.rounds * len(CONTENDERS)
    prompts = [command[command.index("--prompt") + 1] for _, command in measured]
    by_round = [set(prompts[:4]), set(prompts[4:])]
    assert all(len(of) == 1 for of in by_round) and by_round[0] != by_round[1]
    assert all(len(json.loads(prompt)) > 8 for of in by_round for prompt in of)
    assert [name for name, _ in measured[:4]] == [name for name, _ in measured[4:]][::-1]


def test_memory_is_that_of_the_dense_ffn(tmp_path):
    from benchmarks.inputs.model import demo_model_dir

    settings = settings_in(tmp_path)
    commands = ffn_swiglu.contenders(settings, demo_model_dir(), tmp_path, tmp_path, [1, 2, 3])
    tiered = {
        name: json.loads(commands[name][commands[name].index("--tiered") + 1])
        for name in (MIXED, FROM_DISK, LAYERS)
    }
    for one in tiered.values():
        TieredConfig.from_dict(one).check()
    ffn = tiered[MIXED]["ffn"]
    assert (ffn["near_gib"] + ffn["far_gib"]) * 2**30 == pytest.approx(30 * 3 * 576 * 1536 * 2)
    assert tiered[FROM_DISK]["ffn"] == ffn | {"far_gib": 0.0}
    assert "--tiered" not in commands[DENSE]
