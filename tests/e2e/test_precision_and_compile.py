# SPDX-License-Identifier: Apache-2.0
"""bfloat16 stays within vLLM's own spread, and torch.compile works."""

import math
from typing import Any

import torch
from vllm import SamplingParams

from tests.e2e.harness import engine, random_prompts, run, vllm_tokens

PROMPTS = random_prompts(12, seed=30)


def logprobs_of(tiered: dict[str, Any] | None, texts: list[list[int]], **args: Any) -> torch.Tensor:
    """Return the log-probabilities of given tokens (all but the first) as prompts: flat float32."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with engine("demo", tiered, dtype="bfloat16", **args) as llm:
        outputs = llm.generate([{"prompt_token_ids": t} for t in texts], sampling, use_tqdm=False)
    values = [
        entry[token].logprob
        for output, text in zip(outputs, texts, strict=True)
        for token, entry in zip(text[1:], output.prompt_logprobs[1:], strict=True)
    ]
    return torch.tensor(values)


def test_bfloat16_within_vllms_own_spread() -> None:
    """vLLM's results differ with the batch of the same tokens; ours differ no more than that.

    Chunks of 64 tokens make later chunks read what earlier ones put into the KV cache.
    """
    texts = random_prompts(3, seed=31, longest=200)  # of 7, 141 and 38 tokens
    reference = logprobs_of(None, texts, max_num_batched_tokens=64)
    spread = (logprobs_of(None, texts, max_num_batched_tokens=2048) - reference).abs()
    ours = logprobs_of(
        {"expansion": 2.0}, texts, max_num_batched_tokens=64, kv_cache_memory_bytes=48 << 20
    )
    difference = (ours - reference).abs()
    assert difference.mean() <= spread.mean()
    assert difference.max() <= 1.5 * spread.max()
    assert not math.isnan(float(ours.sum()))


def test_swapping_with_torch_compile(force_far_layers) -> None:
    force_far_layers(2)
    result = run(
        "llama3",
        PROMPTS,
        {},
        enforce_eager=False,
        kv_cache_memory_bytes=4 << 20,
    )
    assert result.metrics["tiered_kv_read_bytes"] > 0
    assert result.tokens == vllm_tokens("llama3", PROMPTS)
