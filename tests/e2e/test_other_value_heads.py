# SPDX-License-Identifier: Apache-2.0
"""Values of another head size than keys, and windows with more KV heads, as in MiMo-V2.

vLLM computes them with TRITON_ATTN_DIFFKV or FLASH_ATTN_DIFFKV. The first runs on the CPU too, in
Triton's interpreter and under model runner V2.
"""

from typing import Any

import pytest

from tests.e2e.test_second_runner_hybrids import prompts, run_engines

ARGUMENTS: dict[str, Any] = {
    "model": "mimo_v2",
    "prompts": prompts(100, 40, 70),
    "max_tokens": 4,
    "kv_cache_memory_bytes": 2 << 20,
    "max_num_batched_tokens": 64,
    "max_model_len": 160,
    "max_num_seqs": 4,
}


@pytest.mark.slow
def test_tokens_are_those_of_vllm_alone() -> None:
    """Blocks of full attention hold twice the tokens of a window's."""
    tiered = ARGUMENTS | {"tiered": {"expansion": 2.0}}
    found = run_engines({"vLLM": ARGUMENTS | {"tiered": None}, "tiered": tiered})
    assert found["tiered"]["tokens"] == found["vLLM"]["tokens"]
    kv = found["tiered"]["manifest"]["kv"]
    assert (kv["offloaded_layers"], kv["block_tokens"]) == ([1, 3], 64)
    # 64 tokens of one head with 64 + 32 numbers of 4 bytes.
    assert kv["page_bytes"] == 64 * (64 + 32) * 4
    assert found["tiered"]["metrics"]["tiered_kv_read_bytes"] > 0
