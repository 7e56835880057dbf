# SPDX-License-Identifier: Apache-2.0
"""With the plugin every greedy float32 token equals vLLM's."""

import pytest

from tests.e2e.harness import random_prompts, run, vllm_tokens

PROMPTS = random_prompts(10)
LAYERS = {"opt": 4, "qwen2": 4, "llama1": 1, "llama3": 3}
POLICIES = ("interleave", "on_demand")


def pages(model_kv_heads: int, blocks: int, layers: int, block_tokens: int = 32) -> int:
    """Return the near bytes of ``blocks`` blocks in float32 with head size 64."""
    return blocks * layers * model_kv_heads * block_tokens * 2 * 64 * 4


KV_HEADS = {"opt": 4, "qwen2": 2, "llama1": 2, "llama3": 1, "deep": 3, "demo": 3}


@pytest.mark.parametrize(
    ("model", "far_layers", "policy"),
    [(m, f, p) for m, n in LAYERS.items() for f in range(n) for p in POLICIES[: 1 + (f > 0)]],
)
def test_every_number_of_far_layers(model, far_layers, policy, force_far_layers) -> None:
    force_far_layers(far_layers)
    near = pages(KV_HEADS[model], blocks=44, layers=LAYERS[model])
    result = run(model, PROMPTS, {"policy": policy}, kv_cache_memory_bytes=near)
    assert result.tokens == vllm_tokens(model, PROMPTS)
    assert result.manifest["kv"]["active"] == bool(far_layers)
    assert result.manifest["kv"]["far_layers"] == far_layers
    if far_layers:
        assert result.metrics["tiered_kv_read_bytes"] > 0
        assert result.metrics["tiered_kv_write_bytes"] > 0


@pytest.mark.parametrize(
    ("model", "far_layers", "policy"),
    [("deep", m, "interleave") for m in (1, 2, 9, 17, 24, 29)]
    + [("deep", m, "on_demand") for m in (1, 17, 29)]
    + [("demo", 17, "interleave"), ("demo", 29, "on_demand")],
)
def test_thirty_layers(model, far_layers, policy, force_far_layers) -> None:
    force_far_layers(far_layers)
    near = pages(KV_HEADS[model], blocks=40, layers=30)
    result = run(model, PROMPTS, {"policy": policy}, kv_cache_memory_bytes=near)
    assert result.tokens == vllm_tokens(model, PROMPTS)
    assert result.manifest["kv"]["far_layers"] == far_layers
    assert len(result.manifest["kv"]["offloaded_layers"]) == far_layers


@pytest.mark.parametrize("block_size", [32, 64, 96, 128])
def test_block_sizes(block_size) -> None:
    """These are all sizes up to 128 that vLLM's CPU attention takes: multiples of 32."""
    near = pages(KV_HEADS["deep"], blocks=80, layers=30)
    result = run(
        "deep",
        PROMPTS,
        {"expansion": 2.0},
        kv_cache_memory_bytes=near,
        block_size=block_size,
        max_model_len=256,
    )
    assert result.tokens == vllm_tokens("deep", PROMPTS)
    assert result.manifest["kv"]["block_tokens"] == block_size


@pytest.mark.parametrize("tokens_per_step", [16, 33])
def test_chunked_prefill(tokens_per_step) -> None:
    prompts = random_prompts(8, seed=1, longest=200)
    result = run(
        "deep",
        prompts,
        {"expansion": 2.0},
        kv_cache_memory_bytes=60 << 20,
        max_num_batched_tokens=tokens_per_step,
        max_num_seqs=8,
    )
    assert result.tokens == vllm_tokens("deep", prompts)


@pytest.mark.parametrize("policy", POLICIES)
def test_preemption(policy) -> None:
    """Memory is so small that requests are preempted and recomputed; the plugin has more blocks."""
    near = pages(KV_HEADS["deep"], blocks=20, layers=30)
    result = run(
        "deep",
        PROMPTS,
        {"expansion": 1.5, "policy": policy},
        kv_cache_memory_bytes=near,
        max_tokens=120,
        max_model_len=256,
    )
    assert result.metrics["num_preemptions"] > 0
    assert result.tokens == vllm_tokens("deep", PROMPTS, max_tokens=120)


def test_auto_expansion_is_the_default() -> None:
    result = run("deep", PROMPTS, {}, kv_cache_memory_bytes=64 << 20)
    assert result.tokens == vllm_tokens("deep", PROMPTS)
    assert result.manifest["kv"]["expansion"] == 1.0
    assert result.manifest["kv"]["max_far_layers"] == 24
