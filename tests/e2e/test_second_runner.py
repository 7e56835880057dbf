# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runner V2, used on GPUs: each part gives the tokens of V1 without the plugin."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import model_path, prepared, random_prompts, vllm_tokens

MODEL, RELU = "qwen2", "qwen2-relu"
PROMPTS = random_prompts(4, seed=3, longest=60)
MAX_TOKENS = 6
WHOLE: dict[str, Any] = {
    "model": "deep",
    "tiered": {"expansion": "auto"},
    "kv_cache_memory_bytes": 40 << 20,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_tokens": 16,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("second_runner")
    prepared(Path(model_path(RELU)), folder / "store").close()
    short = {"max_num_seqs": 4, "max_model_len": 128}
    swapping = short | {"kv_cache_memory_bytes": 3 << 18, "max_num_batched_tokens": 48}
    near = {"store": str(folder / "store"), "exact": True, "near_gib": 0.01}
    sparse = short | {"model": RELU, "tiered": {"expansion": 1.0}}
    engines = {
        "swapping": swapping | {"tiered": {"expansion": 1.3}, "enable_prefix_caching": True},
        "by itself": swapping | {"tiered": {"expansion": "auto"}},
        "weights": short | {"tiered": {"expansion": 1.0}, "weights": {"placement": "all_far"}},
        "whole steps": WHOLE,
        "ffn": sparse | {"ffn": near},
        "ffn on a fake": sparse | {"ffn": near | {"far_gib": 0.003}},
    }
    asked = {"model": MODEL, "prompts": PROMPTS, "max_tokens": MAX_TOKENS, "engines": engines}
    command = [sys.executable, "-m", "tests.e2e.second_runner_script"]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr[-4000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {answer["name"]: answer for answer in answers}


@pytest.mark.parametrize("engine", ["swapping", "by itself", "weights", "ffn", "ffn on a fake"])
def test_tokens_are_those_of_v1_without_the_plugin(found, engine):
    model = RELU if engine.startswith("ffn") else MODEL
    assert found[engine]["tokens"] == vllm_tokens(model, PROMPTS, MAX_TOKENS)


def test_whole_steps_are_replayed_until_the_first_layer_is_far(found):
    """V2 chooses a graph before the connector learns of the step."""
    whole = found["whole steps"]
    assert whole["tokens"] == vllm_tokens("deep", PROMPTS, WHOLE["max_tokens"])
    steps = [tuple(step) for step in whole["steps"]]
    assert steps.count(("FULL", True)) > 2 and steps.count(("PIECEWISE", False)) > 2
    assert ("FULL", False) not in steps
    assert whole["metrics"]["tiered_kv_read_bytes"] > 0


def test_each_part_was_on(found):
    assert found["swapping"]["metrics"]["tiered_kv_read_bytes"] > 0
    assert found["swapping"]["metrics"]["tiered_kv_write_bytes"] > 0
    assert found["by itself"]["manifest"]["kv"]["active"]
    assert found["weights"]["manifest"]["weights"]["far_bytes"] > 0
    assert found["ffn"]["manifest"]["ffn"]["dense_bytes"] > 0
    assert found["ffn on a fake"]["manifest"]["ffn"]["far_layers"] > 0
