# SPDX-License-Identifier: Apache-2.0
"""Layers without a KV cache of their own under vLLM's model runner V2, the default on GPUs."""

from typing import Any

import pytest

from tests.e2e.harness import vllm_tokens
from tests.e2e.test_second_runner_hybrids import prompts, run_engines

MODEL = "gemma4_e"
MAX_TOKENS = 12
PROMPTS = prompts(150, 60, 149, 90, 152)
TIGHT: dict[str, Any] = {
    "model": MODEL,
    "prompts": PROMPTS,
    "max_tokens": MAX_TOKENS,
    "kv_cache_memory_bytes": 3 << 20,
    "max_num_batched_tokens": 96,
    "max_model_len": 320,
    "max_num_seqs": 8,
}
ENGINES: dict[str, dict[str, Any]] = {
    "all far": TIGHT | {"tiered": {"expansion": 3.0}},
    "all levels": TIGHT | {"tiered": {}, "walk": 3},
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_engines(ENGINES)


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_are_those_of_v1_without_the_plugin(found, engine):
    assert found[engine]["tokens"] == vllm_tokens(MODEL, PROMPTS, MAX_TOKENS)


def test_the_layer_that_others_read_was_far(found):
    assert found["all far"]["manifest"]["kv"]["offloaded_layers"] == [2, 5, 8]
    assert found["all far"]["metrics"]["tiered_kv_read_bytes"] > 0
    assert found["all levels"]["metrics"]["tiered_kv_read_bytes"] > 0
    assert found["all levels"]["level_changes"] > 3
