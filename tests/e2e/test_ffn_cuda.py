# SPDX-License-Identifier: Apache-2.0
"""The real engine's FFN on the GPU's device: on a fake CUDA runtime, and on a GPU if present.

With the fake, vLLM uses the CPU backend and each layer's FFN runs deferred: its copies and GEMMs
are queued in the fake's streams, and run in random orders over poisoned memory, until vLLM has the
layer's output.
"""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.deferred_ffn import defer_compute
from tests.e2e.harness import (
    engine,
    generate,
    metric,
    model_path,
    random_prompts,
    vllm_tokens,
)
from tests.fakes.deferred_gpu import DeferredGpu
from tests.fakes.deferred_torch import DeferredTorch
from vllm_tiered.adapter import worker_hooks
from vllm_tiered.ffn.cost_model import DenseSparseCostModel
from vllm_tiered.ffn.predictor.gate import Gate
from vllm_tiered.ffn.prepare.pipeline import prepare

PROMPTS = random_prompts(3, seed=5, longest=40)
MAX_TOKENS = 8

KV_ON = {"expansion": 1.0}
"""KV section that leaves the cache to vLLM, so that metrics of both KV and FFN are there."""

KV_OFF = {"enabled": False}

_FOLDER: list[Path] = []


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    _FOLDER[:] = [tmp_path_factory.mktemp("stores")]
    store_of.cache_clear()


@cache
def store_of(model: str) -> str:
    """Return the float32 store, prepared by the first test that asks for it."""
    folder = _FOLDER[0] / model
    prepare(Path(model_path(model)), folder, dtype=torch.float32)
    return str(folder)


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM takes the GPU")


@pytest.fixture(params=[0.0, 0.7])
def deferred(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DeferredTorch:
    """Compute FFNs on the fake runtime."""
    return defer_compute(monkeypatch, request.param)


@pytest.fixture
def all_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """No neuron is predicted to be inactive, so an error of the cache changes the tokens."""
    monkeypatch.setattr(Gate, "threshold", -math.inf)


@without_a_gpu
@pytest.mark.parametrize("near_gib", [0.01, "auto"])
def test_every_neuron(deferred: DeferredTorch, near_gib: Any) -> None:
    ffn = {"store": store_of("opt"), "exact": True, "near_gib": near_gib, "far_gib": 0.003}
    expected = vllm_tokens("opt", PROMPTS, MAX_TOKENS)  # first, as two engines never coexist
    with engine("opt", KV_ON, ffn=ffn) as llm:
        assert generate(llm, PROMPTS, MAX_TOKENS) == expected
        assert metric("tiered_ffn_storage_bytes") > 0 and metric("tiered_ffn_far_bytes") > 0
    assert deferred.num_deferred > 50


@without_a_gpu
@pytest.mark.usefixtures("all_active")
def test_every_neuron_through_the_cache(deferred: DeferredTorch) -> None:
    ffn = {"store": store_of("llama3-relu"), "mix": [1, 0, 0], "far_gib": 0}
    expected = vllm_tokens("llama3-relu", PROMPTS, MAX_TOKENS)
    with engine("llama3-relu", KV_ON, ffn=ffn) as llm:
        assert generate(llm, PROMPTS, MAX_TOKENS) == expected
        assert metric("tiered_ffn_sparse_steps") > 0 and metric("tiered_ffn_misses") > 0
        assert metric("tiered_ffn_hits") > 0
    assert deferred.num_deferred > 50


@without_a_gpu
@pytest.mark.usefixtures("all_active")
@pytest.mark.parametrize("model", ["opt", "llama3-relu"])
def test_every_neuron_with_the_cache_index_on_the_gpu(
    deferred: DeferredTorch, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """All layers are far: decode steps wait for nothing, and prompts between them are dense."""
    gpu = DeferredGpu(monkeypatch, deferred)
    ffn = {"store": store_of(model), "mix": [1, 0, 0], "far_gib": 1}
    expected = vllm_tokens(model, PROMPTS, MAX_TOKENS)
    with engine(model, KV_ON, ffn=ffn) as llm:
        assert generate(llm, PROMPTS, MAX_TOKENS) == expected
        assert metric("tiered_ffn_sparse_steps") == len(gpu.counts) > 0
        assert metric("tiered_ffn_misses") > 0 and metric("tiered_ffn_hits") > 0


@on_a_gpu
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("model", ["opt", "llama3-relu"])
def test_every_neuron_on_a_gpu(model: str, eager: bool) -> None:
    ffn = {"store": store_of(model), "exact": True, "near_gib": 0.01, "far_gib": 0.003}
    expected = vllm_tokens(model, PROMPTS)
    with engine(model, KV_OFF, ffn=ffn, enforce_eager=eager) as llm:
        assert generate(llm, PROMPTS) == expected
        runtime = worker_hooks._ffns[-1].runtime
        assert runtime is not None and runtime.backend.stats.storage_bytes > 0


@on_a_gpu
@pytest.mark.usefixtures("all_active")
@pytest.mark.parametrize("model", ["opt", "llama3-relu"])
def test_every_neuron_by_the_gpus_cache_index(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Neurons are read from far memory during the matmul; float32 tokens are vLLM's."""
    monkeypatch.setattr(DenseSparseCostModel, "prefers_dense", lambda *args: False)
    ffn = {"store": store_of(model), "mix": [1, 0, 0], "far_gib": 1}
    expected = vllm_tokens(model, PROMPTS)
    with engine(model, KV_OFF, ffn=ffn) as llm:
        assert generate(llm, PROMPTS) == expected
        runtime = worker_hooks._ffns[-1].runtime
        assert runtime is not None and runtime.stats.sparse_steps > 0 and runtime.stats.hits > 0
        assert all(layer.on_device is not None for layer in runtime.layers)


@on_a_gpu
@pytest.mark.parametrize("far_gib", [0, 2], ids=["stored", "far"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_a_mix_on_a_gpu(monkeypatch: pytest.MonkeyPatch, eager: bool, far_gib: float) -> None:
    """Decode steps follow the mix, and the cache indices of far layers are on the GPU."""
    from transformers import AutoTokenizer

    monkeypatch.setattr(DenseSparseCostModel, "prefers_dense", lambda *args: False)
    ffn = {"store": store_of("demo-relu"), "mix": [0.25, 0.25, 0.5], "far_gib": far_gib}
    tokenizer = AutoTokenizer.from_pretrained(model_path("demo"))
    prompts = [tokenizer.encode("def fibonacci(n):\n")]
    with engine("demo-relu", KV_OFF, ffn=ffn, enforce_eager=eager) as llm:
        generate(llm, prompts, 24)
        runtime = worker_hooks._ffns[-1].runtime
        assert runtime is not None and runtime.stats.sparse_steps >= 30 * 23
        assert runtime.predictor == "gate"
        owns_index = [
            layer.on_device is not None and layer.on_device.owns_index for layer in runtime.layers
        ]
        assert owns_index == [far_gib > 0] * len(owns_index)


@on_a_gpu
def test_memory_of_cache_buffers_is_not_given_to_the_kv_cache() -> None:
    """vLLM's profile run counts them, and the memory of a prompt's matmul."""
    ffn = {"store": store_of("opt"), "exact": True, "near_gib": 0.01}
    sized: dict[str, Any] = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.3}
    expected = vllm_tokens("opt", PROMPTS, MAX_TOKENS)
    with engine("opt", KV_OFF, ffn=ffn, **sized) as llm:
        assert generate(llm, PROMPTS, MAX_TOKENS) == expected
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        assert total_bytes - free_bytes < 0.35 * total_bytes
