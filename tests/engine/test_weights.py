# SPDX-License-Identifier: Apache-2.0
"""Weights in far memory on the real engine: the same tokens, and a manifest that says so."""

import pytest

from tests.engine.harness import random_prompts, run, vllm_tokens

PROMPTS = random_prompts(6, seed=5)
PLACEMENTS = (
    {"placement": "all_far"},
    {"placement": "helm"},
    {"placement": "flexgen", "percents": [20, 80, 0]},
    {"placement": "flexgen", "percents": [60, 40, 0]},
)
OFF = {"enabled": False}


@pytest.mark.parametrize("weights", PLACEMENTS, ids=lambda weights: weights["placement"])
@pytest.mark.parametrize("model", ["opt", "qwen2", "llama1", "llama3"])
def test_tokens_equal(model, weights) -> None:
    result = run(model, PROMPTS, OFF, weights=weights)
    assert result.tokens == vllm_tokens(model, PROMPTS)
    stated = result.manifest["weights"]
    assert stated["placement"] == weights["placement"]
    assert stated["far_bytes"] > stated["near_bytes"] * (0.2 if "percents" in weights else 1)


def test_together_with_swapped_kv() -> None:
    result = run(
        "demo",
        PROMPTS,
        {"expansion": 2.0},
        weights={"placement": "helm"},
        kv_cache_memory_bytes=64 << 20,
    )
    assert result.tokens == vllm_tokens("demo", PROMPTS)
    assert result.manifest["kv"]["active"]
    assert result.manifest["weights"]["far_sublayers"] == 60
