# SPDX-License-Identifier: Apache-2.0
"""The KV cache swapped on a GPU gives vLLM's tokens, eager and with piecewise CUDA graphs."""

from typing import Any

import pytest
import torch

from tests.e2e.harness import engine, generate, metric, random_prompts, run

PROMPTS = random_prompts(8, seed=40)
NEAR = 48 << 20
TRITON: dict[str, Any] = {"attention_backend": "TRITON_ATTN"}  # supports float32

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_a_gpu
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("policy", ["interleave", "on_demand"])
def test_tokens_equal(policy: str, eager: bool) -> None:
    arguments = {**TRITON, "enforce_eager": eager}
    expected = run("demo", PROMPTS, **arguments).tokens
    kv = {"expansion": 2.5, "policy": policy}
    with engine("demo", kv, kv_cache_memory_bytes=NEAR, **arguments) as llm:
        assert generate(llm, PROMPTS) == expected
        assert metric("tiered_kv_read_bytes") > 0


@on_a_gpu
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_the_level_follows_the_load(eager: bool) -> None:
    """Full graphs serve the first request, and piecewise graphs the others."""
    prompts = random_prompts(24, seed=41)
    arguments = {**TRITON, "enforce_eager": eager}
    with engine("demo", **arguments) as llm:
        expected = [generate(llm, few, 120) for few in (prompts[:1], prompts)]
    arguments["kv_cache_memory_bytes"] = NEAR // 2
    with engine("demo", {"expansion": "auto"}, **arguments) as llm:
        mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        assert mode.name == ("NONE" if eager else "FULL_AND_PIECEWISE")
        assert generate(llm, prompts[:1], 120) == expected[0]
        assert metric("tiered_kv_expansion") == 1
        assert generate(llm, prompts, 120) == expected[1]
        assert metric("tiered_kv_expansion") > 1


@on_a_gpu
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_with_far_weights(eager: bool) -> None:
    expected = run("demo", PROMPTS, **TRITON).tokens
    arguments = {**TRITON, "kv_cache_memory_bytes": NEAR, "enforce_eager": eager}
    with engine("demo", {"expansion": 2.5}, weights={"placement": "helm"}, **arguments) as llm:
        assert generate(llm, PROMPTS) == expected
        assert metric("tiered_kv_read_bytes") > 0 and metric("tiered_weights_read_bytes") > 0
