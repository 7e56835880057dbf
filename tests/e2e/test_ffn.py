# SPDX-License-Identifier: Apache-2.0
"""FFNs from a neuron store on the real engine give the same tokens; the manifest reports them."""

import gc
import itertools
import math
import shutil
import threading
import weakref
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.e2e.harness import (
    engine,
    generate,
    metric,
    model_path,
    random_prompts,
    run,
    vllm_tokens,
)
from vllm_tiered.adapter import worker_hooks
from vllm_tiered.adapter.telemetry import manifest, preload
from vllm_tiered.errors import BudgetError, ConfigError, IntegrityError, UnsupportedError
from vllm_tiered.ffn.cost_model import DenseSparseCostModel
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.predictor.gate import Gate
from vllm_tiered.ffn.prepare.pipeline import prepare
from vllm_tiered.ffn.store.format import NEURONS
from vllm_tiered.ffn.store.reader import NeuronStore
from vllm_tiered.storage.scatter_plan import ScatterPlan

PROMPTS = random_prompts(6, seed=5)
KV_OFF = {"enabled": False}
GATED = ("qwen2", "qwen3", "llama1", "llama3", "mistral", "phi3")
MODELS = ("opt", *(f"{name}-relu" for name in GATED))


_FOLDER: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def folder_of_stores(tmp_path_factory):
    _FOLDER[:] = [tmp_path_factory.mktemp("stores")]


MIX = [0.25, 0.25, 0.5]


@cache
def store_of(model: str) -> str:
    """Return the float32 store, prepared by the first test that asks for it."""
    folder = _FOLDER[0] / model
    prepare(Path(model_path(model)), folder, dtype=torch.float32)
    return str(folder)


@pytest.fixture
def all_active(monkeypatch):
    """No neuron is predicted to be inactive, so an error of the cache changes the tokens."""
    monkeypatch.setattr(Gate, "threshold", -math.inf)


@pytest.mark.parametrize("model", MODELS)
def test_every_neuron_streamed_gives_vllms_tokens(model) -> None:
    ffn = {"store": store_of(model), "exact": True, "far_gib": 0}
    result = run(model, PROMPTS, KV_OFF, ffn=ffn)
    assert result.tokens == vllm_tokens(model, PROMPTS)
    stated = result.manifest["ffn"]
    assert stated["mix"] is None and stated["far_bytes"] == 0
    assert stated["cache_rows"] == {"full": [0] * stated["num_layers"]}


@pytest.mark.parametrize("near_gib", [0.005, 0.2])
def test_some_near_some_far_some_stored(near_gib) -> None:
    ffn = {"store": store_of("opt"), "exact": True, "near_gib": near_gib, "far_gib": 0.0021}
    result = run("opt", PROMPTS, KV_OFF, ffn=ffn)
    assert result.tokens == vllm_tokens("opt", PROMPTS)
    stated = result.manifest["ffn"]
    assert stated["far_layers"] == 2 and stated["near_bytes"] <= near_gib * 2**30
    assert all(0 < rows <= stated["neurons"] for rows in stated["cache_rows"]["full"])


@pytest.mark.parametrize("kv", [{"expansion": 1.33}, {}], ids=["fixed", "auto"])
def test_exact_with_prefix_caching_preemption_and_swapped_kv(kv) -> None:
    """It covers chunked prompts with decodes, requests that start over, and a swapped KV cache."""
    prompts = random_prompts(12, seed=2, longest=200)
    prompts += [[*prompt, 7, 8, 9] for prompt in prompts[:4]]
    ffn = {"store": store_of("opt"), "exact": True, "near_gib": 0.006, "far_gib": 0}
    options: dict[str, Any] = {
        "kv_cache_memory_bytes": 10 << 20,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 64,
    }
    result = run("opt", prompts, kv, ffn=ffn, **options)
    assert result.tokens == vllm_tokens("opt", prompts)
    assert result.manifest["kv"]["active"]
    assert result.metrics["num_preemptions"] > 0


@pytest.mark.slow
def test_a_real_model_with_a_kv_cache_that_follows_the_load() -> None:
    prompts = random_prompts(12, seed=3, longest=120)
    ffn = {"store": store_of("demo-relu"), "exact": True, "near_gib": 0.15}
    result = run("demo-relu", prompts, {}, ffn=ffn, max_tokens=16, kv_cache_memory_bytes=24 << 20)
    assert result.tokens == vllm_tokens("demo-relu", prompts, 16)
    assert result.manifest["kv"]["active"]


def test_with_attention_weights_placed() -> None:
    """A layer's other matrices pass through weight buffers, its FFN through neuron cache slots."""
    ffn = {"store": store_of("llama3-relu"), "exact": True, "far_gib": 0}
    result = run("llama3-relu", PROMPTS, KV_OFF, ffn=ffn, weights={"placement": "all_far"})
    assert result.tokens == vllm_tokens("llama3-relu", PROMPTS)
    assert result.manifest["weights"]["far_bytes"] > 0


@pytest.mark.usefixtures("all_active")
@pytest.mark.parametrize("model", ["opt", "llama3-relu"])
@pytest.mark.parametrize("policy", ["atu", "window", "none"])
def test_every_neuron_through_the_cache(policy, model) -> None:
    ffn = {"store": store_of(model), "mix": [1, 0, 0], "cache": policy, "far_gib": 0}
    expected = vllm_tokens(model, PROMPTS)  # in its own engine, as two never coexist
    with engine(model, {"expansion": 1.0}, ffn=ffn) as llm:
        assert generate(llm, PROMPTS) == expected
        assert metric("tiered_ffn_sparse_steps") > 0 and metric("tiered_ffn_misses") > 0
        assert (metric("tiered_ffn_hits") > 0) == (policy != "none")
        assert metric("tiered_ffn_dense_steps") > 0  # prompts
        assert metric("tiered_ffn_storage_bytes") > 0
        (state,) = llm.collective_rpc("tiered_state")
    assert state["ffn"]["preload"]["reason"] == "ffn.far_gib leaves no room for it"
    assert preload.current("ffn") is None, "the engine is closed"
    # All neurons in each precision, whatever the mix is.
    assert state["ffn"]["storage_bytes"] > state["ffn"]["dense_bytes"]


@pytest.mark.slow
def test_decode_steps_follow_the_mix(monkeypatch) -> None:
    """The ranking's quality is measured on the FFN's output, in unit/ffn/predictor."""
    # Such a small model is computed faster densely.
    monkeypatch.setattr(DenseSparseCostModel, "prefers_dense", lambda *args: False)
    ffn = {"store": store_of("demo-relu"), "mix": MIX, "far_gib": 0}
    tokenizer = AutoTokenizer.from_pretrained(model_path("demo"))
    prompts = [tokenizer.encode("def fibonacci(n):\n")]
    with engine("demo-relu", {}, ffn=ffn) as llm:
        generate(llm, prompts, 24)
        assert metric("tiered_ffn_sparse_steps") == 30 * 23
        stated = (manifest.current() or {})["ffn"]
        assert stated["predictor"] == "gate" and stated["mix"] == [0.25, 0.25, 0.5]


@pytest.mark.parametrize("deterministic", [True, False])
def test_measured_times_decide_nothing_if_outputs_must_repeat(deterministic, monkeypatch) -> None:
    """By default a layer is dense after some steps here, and the tokens are others."""
    answers = itertools.cycle([True, True, False])
    monkeypatch.setattr(DenseSparseCostModel, "prefers_dense", lambda *args: next(answers))
    ffn = {"store": store_of("llama3-relu"), "mix": [0.25, 0.25, 0], "far_gib": 0}
    dense = []
    for _ in range(2):
        options = ffn | {"deterministic": deterministic}
        with engine("llama3-relu", {"expansion": 1.0}, ffn=options) as llm:
            tokens = generate(llm, PROMPTS[:1])
            dense.append((tokens, metric("tiered_ffn_dense_steps")))
        next(answers)
    assert (dense[0] == dense[1]) == deterministic
    assert (dense[0][1] == 3) == deterministic, "the prompt alone, in each of 3 layers"


@pytest.mark.slow
def test_compiled() -> None:
    ffn = {"store": store_of("qwen2-relu"), "exact": True, "far_gib": 0}
    result = run("qwen2-relu", PROMPTS, KV_OFF, ffn=ffn, enforce_eager=False)
    assert result.tokens == vllm_tokens("qwen2-relu", PROMPTS)


@pytest.mark.parametrize("kv", [KV_OFF, {}], ids=["weights", "kv"])
def test_a_store_that_needs_more_than_the_dense_ffn_steps_aside(kv, caplog_vllm) -> None:
    """By default; the other parts are not touched by it. This store has no calibration."""
    ffn = {"store": store_of("llama3-relu"), "far_gib": 0}
    result = run("llama3-relu", PROMPTS, kv, ffn=ffn)
    assert result.tokens == vllm_tokens("llama3-relu", PROMPTS)
    assert "ffn" not in result.manifest and ("kv" in result.manifest) == (kv != KV_OFF)
    assert caplog_vllm.text.count("tiered ffn: steps aside: the neurons need") == 1


# Failures -------------------------------------------------------------------------------


def damage(store: Path, layer: int, neuron: int) -> None:
    """Overwrite part of a neuron's bundle in full precision."""
    opened = NeuronStore.open(store)
    stride = bundle_stride(opened.shape, Precision.FULL)
    offset = opened._form.offset(layer, Precision.FULL) + neuron * stride
    opened.close()
    with (store / NEURONS).open("r+b") as file:
        file.seek(offset + stride // 2)
        file.write(b"\xff" * 8)


def test_a_damaged_bundle_stops_the_engine_with_its_neuron_named(tmp_path, caplog_vllm) -> None:
    """Every later step fails, because the KV cache lacks the failed step's results."""
    store = tmp_path / "store"
    shutil.copytree(store_of("opt"), store)
    damage(store, layer=2, neuron=300)
    ffn = {"store": str(store), "exact": True, "far_gib": 0}
    with engine("opt", KV_OFF, ffn=ffn) as llm:
        with pytest.raises(IntegrityError, match=rf"{NEURONS}: layer 2, neuron 300, full is dam"):
            generate(llm, PROMPTS)
        said = "layer 2, neuron 300, full is damaged (checksum); reading it"
        assert caplog_vllm.text.count(said) == 1
        with pytest.raises(IntegrityError, match=r"neuron 300.* start the engine again"):
            generate(llm, PROMPTS[1:])


def test_a_damaged_bundle_of_far_memory_stops_the_start(tmp_path) -> None:
    store = tmp_path / "store"
    shutil.copytree(store_of("opt"), store)
    damage(store, layer=0, neuron=7)
    with (
        pytest.raises(IntegrityError, match="layer 0, neuron 7, full is damaged"),
        engine("opt", KV_OFF, ffn={"store": str(store), "exact": True}),
    ):
        pytest.fail("the engine started")
    assert not threads()


def test_a_bundle_read_wrong_once_is_read_again(monkeypatch, caplog_vllm) -> None:
    damaged = ScatterPlan.damaged
    calls = iter(range(1 << 20))

    def flipping(plan, first, end, bounce, origin):
        # Retries are never damaged: they read one bundle at a time.
        if end - first > 1 and next(calls) % 7 == 3:
            if bounce is None:
                plan._view[plan._row_begins[first]] ^= 64
            else:
                bounce[plan._begins[first] - origin] ^= 64
        return damaged(plan, first, end, bounce, origin)

    monkeypatch.setattr(ScatterPlan, "damaged", flipping)
    ffn = {"store": store_of("opt"), "exact": True, "far_gib": 0}
    assert run("opt", PROMPTS, KV_OFF, ffn=ffn).tokens == vllm_tokens("opt", PROMPTS)
    assert "damaged (checksum); reading it again" in caplog_vllm.text


_OTHERS: list[set[threading.Thread]] = []


@pytest.fixture(autouse=True)
def threads_of_others():
    _OTHERS[:] = [set(threading.enumerate())]


def threads() -> list[str]:
    """Return the threads of devices and stores that the test made."""
    made = set(threading.enumerate()) - _OTHERS[0]
    return [thread.name for thread in made if thread.name.startswith("tiered-")]


# Several engines ------------------------------------------------------------------------


def test_an_engine_that_fails_later_leaves_nothing_behind() -> None:
    ffn = {"store": store_of("opt"), "exact": True, "far_gib": 0}
    with (
        pytest.raises(Exception, match="No available memory for the cache blocks"),
        engine("opt", KV_OFF, ffn=ffn, kv_cache_memory_bytes=1 << 16),
    ):
        pytest.fail("the engine started")
    assert not threads() and not worker_hooks._ffns
    assert run("opt", PROMPTS, KV_OFF, ffn=ffn).tokens == vllm_tokens("opt", PROMPTS)


def test_memory_is_freed_with_the_engine() -> None:
    """The KV cache is freed too, although vLLM's offloader still refers to the FFN's engine."""
    ffn = {"store": store_of("opt"), "exact": True}
    with engine("opt", KV_OFF, ffn=ffn) as llm:
        runtime = weakref.ref(worker_hooks._ffns[0].runtime)
        context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        attention = [weakref.ref(module) for name, module in context.items() if "attn" in name]
        assert len(attention) == 4 and threads()
        del llm, context
    gc.collect()
    assert runtime() is None and not threads() and not worker_hooks._ffns
    assert not [alive for alive in attention if alive() is not None]


def test_an_engine_without_neurons_in_the_same_process() -> None:
    """It is not taken for one with neurons, which would be opened again and closed at its end."""
    ffn = {"store": store_of("opt"), "exact": True, "far_gib": 0}
    expected = vllm_tokens("opt", PROMPTS)
    with engine("opt", KV_OFF, ffn=ffn) as llm:
        (ours,) = worker_hooks._ffns
        runtime = ours.runtime
        compilation = SimpleNamespace(static_forward_context={})
        runner = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))
        loaded: list[Any] = []
        worker_hooks._load_model(loaded.append, runner)
        assert loaded == [runner] and ours.runtime is runtime
        wrapper = SimpleNamespace(tiered_ffn=worker_hooks._ffn_of(runner.vllm_config))
        worker_hooks._shutdown(lambda wrapper: None, wrapper)
        assert worker_hooks._ffns == [ours]
        assert worker_hooks._ffn_of(llm.llm_engine.vllm_config) is ours
        assert generate(llm, PROMPTS) == expected


# Refused --------------------------------------------------------------------------------


def test_a_store_of_another_model_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"fingerprint"),
        engine("llama1-relu", KV_OFF, ffn={"store": store_of("llama3-relu"), "mix": MIX}),
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
    assert not threads()


def test_a_store_in_another_dtype_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"dtype torch.float32 instead of torch.bfloat16"),
        engine("opt", KV_OFF, ffn={"store": store_of("opt"), "mix": MIX}, dtype="bfloat16"),
    ):
        pass


def test_dummy_weights_are_refused() -> None:
    with (
        pytest.raises(UnsupportedError, match="load_format"),
        engine("opt", KV_OFF, ffn={"store": store_of("opt"), "mix": MIX}, load_format="dummy"),
    ):
        pass
