# SPDX-License-Identifier: Apache-2.0
"""FFNs from a neuron store on the real engine: the same tokens, and a manifest that says so."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import (
    engine,
    generate,
    metric,
    model_path,
    random_prompts,
    run,
    vllm_tokens,
)
from vllm_tiered.adapter import manifest
from vllm_tiered.errors import BudgetError, ConfigError, UnsupportedError
from vllm_tiered.ffn.prepare.pipeline import prepare

PROMPTS = random_prompts(6, seed=5)
KV_OFF = {"enabled": False}
MODELS = ("opt", "qwen2", "llama3", "phi3", "falcon")


_FOLDER: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def folder_of_stores(tmp_path_factory):
    _FOLDER[:] = [tmp_path_factory.mktemp("stores")]


@cache
def store_of(model: str) -> str:
    """Prepared by the first test that asks for it, in float32."""
    folder = _FOLDER[0] / model
    prepare(Path(model_path(model)), folder, dtype=torch.float32)
    return str(folder)


@pytest.mark.parametrize("model", MODELS)
def test_every_neuron_streamed_gives_vllms_tokens(model) -> None:
    ffn = {"store": store_of(model), "exact": True, "far_gib": 0}
    result = run(model, PROMPTS, KV_OFF, ffn=ffn)
    assert result.tokens == vllm_tokens(model, PROMPTS)
    stated = result.manifest["ffn"]
    assert stated["mix"] is None and stated["far_bytes"] == 0
    assert stated["cache_rows"] == {"full": 0}


@pytest.mark.parametrize("near_gib", [0.005, 0.2])
def test_some_near_some_far_some_stored(near_gib) -> None:
    ffn = {"store": store_of("opt"), "exact": True, "near_gib": near_gib, "far_gib": 0.0021}
    result = run("opt", PROMPTS, KV_OFF, ffn=ffn)
    assert result.tokens == vllm_tokens("opt", PROMPTS)
    stated = result.manifest["ffn"]
    assert stated["far_layers"] == 2 and stated["near_bytes"] <= near_gib * 2**30
    assert 0 < stated["cache_rows"]["full"] <= stated["neurons"]


def test_exact_with_prefix_caching_preemption_and_swapped_kv() -> None:
    """Prompts in chunks, requests that start over, and a KV cache that is swapped itself."""
    prompts = random_prompts(12, seed=2, longest=200)
    prompts += [[*prompt, 7, 8, 9] for prompt in prompts[:4]]
    ffn = {"store": store_of("opt"), "exact": True, "near_gib": 0.006, "far_gib": 0}
    options: dict[str, Any] = {
        "kv_cache_memory_bytes": 24 << 20,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 512,
    }
    result = run("opt", prompts, {"expansion": 1.33}, ffn=ffn, **options)
    assert result.tokens == vllm_tokens("opt", prompts)
    assert result.manifest["kv"]["active"]


def test_with_attention_weights_placed() -> None:
    """What is left of a layer passes through staging slots, its FFN through neurons."""
    ffn = {"store": store_of("llama3"), "exact": True, "far_gib": 0}
    result = run("llama3", PROMPTS, KV_OFF, ffn=ffn, weights={"placement": "all_far"})
    assert result.tokens == vllm_tokens("llama3", PROMPTS)
    assert result.manifest["weights"]["far_bytes"] > 0


@pytest.mark.parametrize("policy", ["atu", "window", "lru"])
def test_every_neuron_through_the_cache(policy) -> None:
    """A mix that leaves nothing out, at decode: what the cache does shows in the tokens.

    Not with ReLU, where neurons that are predicted inactive are left out of any mix.
    """
    ffn = {"store": store_of("llama3"), "mix": [1, 0, 0], "cache": policy, "far_gib": 0}
    with engine("llama3", {"expansion": 1.0}, ffn=ffn) as llm:
        assert generate(llm, PROMPTS) == vllm_tokens("llama3", PROMPTS)
        assert metric("tiered_ffn_sparse_steps") > 0 and metric("tiered_ffn_hits") > 0
        assert metric("tiered_ffn_dense_steps") > 0  # prompts
        assert metric("tiered_ffn_storage_bytes") > 0


def test_fewer_bits_change_little() -> None:
    ffn = {"store": store_of("demo"), "mix": [0.25, 0.25, 0.5], "far_gib": 0}
    prompts = random_prompts(1, seed=9)
    with engine("demo", {}, ffn=ffn) as llm:
        found = generate(llm, prompts, 24)[0]
        assert metric("tiered_ffn_sparse_steps") == 30 * 23
        stated = (manifest.current() or {})["ffn"]
        assert stated["predictor"] == "base4" and stated["mix"] == [0.25, 0.25, 0.5]
    expected = vllm_tokens("demo", prompts, 24)[0]
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= 6


def test_compiled() -> None:
    ffn = {"store": store_of("qwen2"), "exact": True, "far_gib": 0}
    result = run("qwen2", PROMPTS, KV_OFF, ffn=ffn, enforce_eager=False)
    assert result.tokens == vllm_tokens("qwen2", PROMPTS)


# Refused --------------------------------------------------------------------------------


def test_a_store_of_another_model_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"fingerprint"),
        engine("llama1", KV_OFF, ffn={"store": store_of("llama3")}),
    ):
        pass


def test_no_store_is_refused(tmp_path) -> None:
    with (
        pytest.raises(ConfigError, match=r"ffn.store .* prepare"),
        engine("opt", KV_OFF, ffn={"store": str(tmp_path / "none")}),
    ):
        pass


def test_near_memory_below_a_tokens_neurons_is_refused() -> None:
    ffn = {"store": store_of("opt"), "mix": [0.5, 0.25, 0.25], "near_gib": 0.001}
    with pytest.raises(BudgetError, match=r"ffn.near_gib"), engine("opt", KV_OFF, ffn=ffn):
        pass


def test_a_store_in_another_dtype_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"dtype torch.float32 instead of torch.bfloat16"),
        engine("opt", KV_OFF, ffn={"store": store_of("opt")}, dtype="bfloat16"),
    ):
        pass


def test_made_up_weights_are_refused() -> None:
    with (
        pytest.raises(UnsupportedError, match="load_format"),
        engine("opt", KV_OFF, ffn={"store": store_of("opt")}, load_format="dummy"),
    ):
        pass
