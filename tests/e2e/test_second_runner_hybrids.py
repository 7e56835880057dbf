# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent states under vLLM's model runner V2, the default on GPUs."""

import json
import random
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.harness import Tokens, vllm_tokens

MAX_TOKENS = 12


def prompts(*lengths: int, seed: int = 5) -> Tokens:
    rng = random.Random(seed)
    return [[rng.randrange(1000, 40000) for _ in range(length)] for length in lengths]


GROWING = prompts(150, 155, 149, 148, 152, 154)
"""A block holds 160 tokens, so each request gets a second one, and some give theirs up for it."""
SHARING = [[*GROWING[0], *GROWING[1][:60], *own] for own in prompts(30, 105, 20, seed=7)]
TIGHT = {"kv_cache_memory_bytes": 7 << 19, "max_model_len": 336, "max_num_seqs": 8}
AMPLE = {"tiered": {"expansion": 2.0}, "max_model_len": 336, "max_num_seqs": 8}
# Where the CPU has AVX-512, vLLM keeps these states in float32: a block then holds 272 tokens.
LONG = [[token for prompt in GROWING[:4] for token in prompt] + own for own in prompts(30, 105)]
GATED = AMPLE | {"model": "qwen3_next", "dtype": "bfloat16", "max_model_len": 768, "prompts": LONG}
GATED |= {"enable_prefix_caching": True, "rounds": 2, "max_tokens": 4}
CACHED = TIGHT | {"kv_cache_memory_bytes": 5 << 20, "enable_prefix_caching": True, "rounds": 2}

ENGINES: dict[str, dict[str, Any]] = {
    "short convolutions": AMPLE | {"model": "lfm2"},
    "vLLM, short convolutions": AMPLE | {"model": "lfm2", "tiered": None},
    "states beside FFNs": AMPLE | {"model": "nemotron_h"},
    "all levels": TIGHT | {"tiered": {}, "walk": 3, "warm_up": True},
    "cached": CACHED | {"tiered": {"expansion": 2.0}, "prompts": SHARING},
    "cached on all levels": CACHED | {"tiered": {}, "walk": 3, "prompts": SHARING},
    "vLLM, cached": CACHED | {"tiered": None, "prompts": SHARING},
}


def run_engines(engines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return each engine's answer, from a process of their own."""
    asked = {"model": "granite_hybrid", "prompts": GROWING, "max_tokens": MAX_TOKENS}
    command = [sys.executable, "-m", "tests.e2e.second_runner_script"]
    done = subprocess.run(
        command,
        input=json.dumps(asked | {"engines": engines, "greedy": True}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-4000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {answer["name"]: answer for answer in answers}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_engines(ENGINES)


@pytest.mark.parametrize("engine", [name for name in ENGINES if "convolutions" not in name])
def test_tokens_are_those_of_v1_without_the_plugin(found, engine):
    asked = ENGINES[engine]
    model, rounds = asked.get("model", "granite_hybrid"), asked.get("rounds", 1)
    expected = vllm_tokens(model, asked.get("prompts", GROWING), MAX_TOKENS)
    assert found[engine]["tokens"] == expected * rounds


def test_tokens_of_short_convolutions_are_those_of_v2_without_the_plugin(found):
    """The order of the requests in a batch changes this form's tokens, and V2 sorts them."""
    assert found["short convolutions"]["tokens"] == found["vLLM, short convolutions"]["tokens"]


def test_layers_of_full_attention_were_far(found):
    swapping = [name for name, asked in ENGINES.items() if asked["tiered"] is not None]
    for name in swapping:
        assert found[name]["metrics"]["tiered_kv_read_bytes"] > 0, name
        assert found[name]["manifest"]["kv"]["active"], name
    assert found["all levels"]["metrics"]["num_preemptions"] > 0
    assert found["all levels"]["level_changes"] > 3
    assert found["cached on all levels"]["level_changes"] > 3


def test_prefix_hits_are_vllms_own(found):
    assert found["cached"]["hits"] == found["vLLM, cached"]["hits"] > 0
    assert found["cached on all levels"]["hits"] > 0


def test_what_the_warm_up_leaves_is_cleared(found):
    """It writes states into blocks, and what attention reads must never hold one."""
    assert found["all levels"]["warm_up"] == [True, False]


@pytest.mark.slow
def test_gated_delta_nets_have_the_tokens_of_v2_without_the_plugin():
    """vLLM's CPU kernels for them take bfloat16 alone, so both engines run the same batches."""
    found = run_engines({"tiered": GATED, "vLLM": GATED | {"tiered": None}})
    assert found["tiered"]["tokens"] == found["vLLM"]["tokens"]
    assert found["tiered"]["hits"] == found["vLLM"]["hits"] > 0
    assert found["tiered"]["metrics"]["tiered_kv_read_bytes"] > 0
