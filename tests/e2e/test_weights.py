# SPDX-License-Identifier: Apache-2.0
"""Weights in far memory on the real engine: tokens are equal, and the manifest is correct."""

import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm.model_executor.offloader import get_offloader

from tests.e2e.harness import engine, generate, layers, model_path, random_prompts, run, vllm_tokens
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.telemetry import manifest
from vllm_tiered.adapter.weights import choosing, kv_sharing, offloader
from vllm_tiered.adapter.weights.offloader import TieredOffloader
from vllm_tiered.config import WeightsConfig
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.errors import BudgetError, UnsupportedError
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.weights.buffers import WeightBufferPool
from vllm_tiered.weights.placement import place

PROMPTS = random_prompts(6, seed=5)
PLACEMENTS = (
    {"placement": "all_far"},
    {"placement": "helm"},
    {"placement": "latency", "near_gib": 0.004},
    {"placement": "flexgen", "percents": [20, 80, 0]},
    {"placement": "flexgen", "percents": [60, 40, 0]},
)
KV_OFF = {"enabled": False}
# Every model with all that may be far and with a part of it; every placement with opt and llama3.
CASES = [
    *(
        (model, weights)
        for model in ("opt", "qwen2", "llama1", "llama3", "phi3", "falcon")
        for weights in PLACEMENTS[:2]
    ),
    *((model, weights) for model in ("opt", "llama3") for weights in PLACEMENTS[2:]),
]


@pytest.mark.parametrize(
    ("model", "weights"), CASES, ids=lambda one: one if isinstance(one, str) else one["placement"]
)
def test_tokens_equal(model, weights) -> None:
    result = run(model, PROMPTS, KV_OFF, weights=weights)
    assert result.tokens == vllm_tokens(model, PROMPTS)
    stated = result.manifest["weights"]
    assert stated["placement"] == weights["placement"]
    if "near_gib" in weights:
        assert stated["near_bytes"] + stated["buffer_bytes"] <= weights["near_gib"] * 2**30
    else:
        assert stated["far_bytes"] > stated["near_bytes"] * (0.2 if "percents" in weights else 1)


@pytest.mark.parametrize("model", ["demo", "opt", "qwen2", "phi3", "falcon"])
def test_a_plan_from_the_config_equals_the_engines(model) -> None:
    config = json.loads((Path(model_path(model)) / "config.json").read_text())
    planned = place("helm", model_shape(config, dtype="float32").sublayers)
    with engine(model, KV_OFF, weights={"placement": "helm"}):
        assert get_offloader().placement == planned


@pytest.mark.slow
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


# Near memory shared with the KV cache ---------------------------------------------------

BLOCK_BYTES = {"opt": 4 * 2 * 4 * 64 * 32 * 4, "llama3": 3 * 2 * 1 * 64 * 32 * 4}
"""Factors: layers, keys and values, KV heads, head size, tokens of a block, bytes."""


@pytest.mark.parametrize("placement", ["throughput", "auto"])
@pytest.mark.parametrize(("model", "near_gib"), [("opt", 0.03), ("llama3", 0.008)])
def test_near_memory_is_shared_with_the_kv_cache(model, near_gib, placement) -> None:
    weights = {"placement": placement, "near_gib": near_gib}
    result = run(model, PROMPTS, KV_OFF, weights=weights, kv_cache_memory_bytes=None)
    assert result.tokens == vllm_tokens(model, PROMPTS)
    stated = result.manifest["weights"]
    assert stated["placement"] == "throughput"  # 16 requests may run at a time
    rest = int(near_gib * 2**30) - stated["near_bytes"] - stated["buffer_bytes"]
    assert result.num_blocks == rest // BLOCK_BYTES[model]
    assert result.num_blocks > 512 // 32, "a request of the longest length fits"


def test_the_plan_is_for_the_blocks_that_the_engine_uses(monkeypatch) -> None:
    """On CUDA, and since vLLM 0.33 on the CPU, the block size is final after the plan."""
    planned = []
    workload_of = kv_sharing.workload_of

    def record(vllm_config, config):
        planned.append(workload_of(vllm_config, config).block_tokens)
        return workload_of(vllm_config, config)

    monkeypatch.setattr(kv_sharing, "workload_of", record)
    weights = {"placement": "auto", "near_gib": 0.02}
    arguments = {"kv_cache_memory_bytes": None, "block_size": None}
    with engine("llama3", KV_OFF, weights=weights, **arguments) as llm:
        assert {*planned} == {llm.llm_engine.vllm_config.cache_config.block_size}


def test_one_request_at_a_time_is_planned_for_latency() -> None:
    """The layers get all near memory that one request's KV leaves."""
    weights = {"placement": "auto", "near_gib": 0.012}
    result = run(
        "opt", PROMPTS, KV_OFF, weights=weights, kv_cache_memory_bytes=None, max_num_seqs=1
    )
    assert result.tokens == vllm_tokens("opt", PROMPTS)
    stated = result.manifest["weights"]
    assert stated["placement"] == "latency" and stated["far_bytes"] > 0
    assert 17 <= result.num_blocks < 17 + 8  # of 256 KiB: the rest holds no matrix of fc1


def test_shared_near_memory_with_swapped_kv() -> None:
    """With an expansion of 2, the near memory that the layers leave serves twice the blocks."""
    weights = {"placement": "throughput", "near_gib": 0.2}
    result = run("demo", PROMPTS, {"expansion": 2.0}, weights=weights, kv_cache_memory_bytes=None)
    assert result.tokens == vllm_tokens("demo", PROMPTS)
    stated = result.manifest["weights"]
    rest = int(0.2 * 2**30) - stated["near_bytes"] - stated["buffer_bytes"]
    block_bytes = 30 * 2 * 3 * 64 * 32 * 4
    assert result.manifest["kv"]["near_bytes"] == rest // block_bytes * block_bytes
    assert result.num_blocks > 1.5 * (rest // block_bytes)


def test_too_little_for_layers_and_one_request() -> None:
    weights = {"placement": "throughput", "near_gib": 0.004}
    with (
        pytest.raises(BudgetError, match=r"KV cache for one request of 512 tokens they exceed"),
        engine("opt", KV_OFF, weights=weights, kv_cache_memory_bytes=None),
    ):
        pass


# Delayed copies -------------------------------------------------------------------------


@pytest.fixture
def delayed(monkeypatch):
    monkeypatch.setattr(offloader, "make_device", lambda: DelayedDevice(3, 0.004))


@pytest.mark.parametrize(
    ("model", "prefetch_depth"), [("opt", 1), ("llama3", 1), ("opt", 2), ("llama3", 2), ("opt", 3)]
)
def test_delayed_and_poisoned_copies(model, prefetch_depth, delayed, monkeypatch) -> None:
    expected = vllm_tokens(model, PROMPTS)
    monkeypatch.setattr(
        choosing, "place", lambda *args: replace(place(*args), prefetch_depth=prefetch_depth)
    )
    with engine(model, KV_OFF, weights={"placement": "all_far"}) as llm:
        assert (manifest.current() or {})["weights"]["prefetch_depth"] == prefetch_depth
        assert generate(llm, PROMPTS) == expected
        buffer_pool = get_offloader().buffer_pool
        assert buffer_pool.stall_seconds > 0 and buffer_pool.num_misses == 0
        assert prefetch_depth < len(buffer_pool._buffers) < len(buffer_pool._buffer_of)
        buffer_pool.check_integrity()


def test_it_fails_without_the_wait(delayed, monkeypatch) -> None:
    """Tokens differ if compute reads a weight buffer before its copy is done."""
    monkeypatch.setattr(CpuDevice, "wait", lambda self, event: 0.0)
    result = run("opt", PROMPTS, KV_OFF, weights={"placement": "all_far"})
    assert result.tokens != vllm_tokens("opt", PROMPTS)


def test_an_overwritten_far_sublayer_changes_the_tokens() -> None:
    """Comparisons of tokens detect wrong bytes of one sublayer in far memory."""
    with engine("opt", KV_OFF, weights={"placement": "all_far"}) as llm:
        assert generate(llm, PROMPTS) == vllm_tokens("opt", PROMPTS)
        weights = get_offloader()._weights
        extent = weights._extents[1]
        far = weights._far.data[extent.far_page : extent.far_page + extent.num_far_pages]
        far.copy_(far.flip(0).flip(1))
        assert generate(llm, PROMPTS) != vllm_tokens("opt", PROMPTS)


# Other ways to run ----------------------------------------------------------------------


@pytest.mark.slow
def test_compiled(tmp_path) -> None:
    """Waits are custom ops of the compiled graph, and weights keep their addresses."""
    expected = vllm_tokens("falcon", PROMPTS)
    with engine("falcon", KV_OFF, weights={"placement": "all_far"}, enforce_eager=False) as llm:
        assert generate(llm, PROMPTS) == expected
        buffer_pool = get_offloader().buffer_pool
        assert buffer_pool.num_misses < 10, "the order of the layers is kept"


@pytest.mark.slow
def test_compiled_next_to_an_engine_that_places_nothing() -> None:
    """Two compiled engines of one model share neither compiled code nor offloader."""
    expected = vllm_tokens("falcon", PROMPTS)
    far = {"placement": "all_far"}
    with (
        engine("falcon", enforce_eager=False) as plain,
        engine("falcon", KV_OFF, weights=far, enforce_eager=False) as placed,
    ):
        for llm in (placed, plain, placed, plain):
            assert generate(llm, PROMPTS) == expected
        buffer_pool = get_offloader().buffer_pool
        assert buffer_pool.num_misses < 10, "the order of the layers is kept"
        buffer_pool.check_integrity()


def test_the_next_engine_has_its_weights_near() -> None:
    run("opt", PROMPTS[:1], KV_OFF, weights={"placement": "all_far"})
    expected = vllm_tokens("opt", PROMPTS)
    with engine("opt", KV_OFF) as llm:
        assert not isinstance(get_offloader(), TieredOffloader)
        assert set(manifest.current() or {}) == {"l2"}
        assert generate(llm, PROMPTS) == expected


def test_far_memory_is_released_with_the_engine() -> None:
    run("opt", PROMPTS[:1], KV_OFF, weights={"placement": "all_far"})
    gc.collect()
    assert not [held for held in gc.get_objects() if type(held) is WeightBufferPool]


# Refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"near_gib": 0.0005}, r"keeps .* of the layers near .* weights\.near_gib allows"),
        ({"far_gib": 0.0005}, r"in far memory, but weights\.far_gib allows"),
    ],
)
def test_budgets_too_small(budget, message) -> None:
    with (
        pytest.raises(BudgetError, match=message),
        engine("opt", KV_OFF, weights={"placement": "helm", **budget}),
    ):
        pass


def test_weights_are_not_written_after_they_are_staged() -> None:
    with engine("opt", KV_OFF, weights={"placement": "all_far"}) as llm:
        for method in ("reload_weights", "save_sharded_state"):
            with pytest.raises(UnsupportedError, match=f"{method} reads or writes"):
                llm.collective_rpc(method)


@pytest.mark.parametrize("placement", ["all_far", "off"])
def test_a_second_engine_in_the_process_is_refused(placement) -> None:
    """The first engine's compiled code would call the offloader of the second engine.

    So an engine that places nothing is refused too.
    """
    with (
        engine("opt", KV_OFF, weights={"placement": "all_far"}),
        pytest.raises(UnsupportedError, match="another engine in this process"),
        engine("qwen2", KV_OFF, weights={"placement": placement}),
    ):
        pass


def given(*modules):
    yield from modules


def test_a_second_stack_of_layers_is_refused() -> None:
    tiered = TieredOffloader(WeightsConfig(placement="all_far"), model=dict)
    tiered.wrap_modules(layers())
    with pytest.raises(UnsupportedError, match=r"more than one stack .* weights\.placement=off"):
        tiered.wrap_modules(layers())


def test_a_draft_models_layers_are_left_alone() -> None:
    tiered = TieredOffloader(WeightsConfig(placement="all_far"), model=dict)
    tiered.wrap_modules(layers())
    tiered.start()
    (first, second) = tiered.wrap_modules(layers())
    for weight in (first.get_parameter("fc1.weight"), second.get_parameter("fc1.weight")):
        assert weight.untyped_storage().nbytes() == weight.nbytes, "not in a buffer"
    assert tiered.placement is not None and len(tiered.placement.sublayers) == 2
    tiered.close()


def test_what_layers_share_stays_near() -> None:
    first, second = layers()
    second.fc1 = first.fc1
    tiered = TieredOffloader(WeightsConfig(placement="all_far"), model=dict)
    tiered.wrap_modules(given(first, second))
    assert tiered.placement is not None
    far = {parameter.name for names in tiered.placement.far for parameter in names}
    assert far == {"fc2.weight", "fc2.bias"}
    sizes = [sublayer.num_bytes for sublayer in tiered.placement.sublayers]
    assert sizes == [2 * 65 * 64 * 4, 65 * 64 * 4], "counted once"


def test_weights_that_other_modules_read_stay_near() -> None:
    """Returned biases stay near, and so do parameters that are no matrix of a linear layer."""
    (layer,) = layers(1)
    layer.fc1.skip_bias_add = True
    layer.conv1d = torch.nn.Linear(4, 64)
    layer.conv1d.weight.data = layer.conv1d.weight.data.unsqueeze(1)
    layer.decay = torch.nn.Parameter(torch.zeros(64))
    tiered = TieredOffloader(WeightsConfig(placement="all_far"), model=dict)
    tiered.wrap_modules(given(layer))
    assert tiered.placement is not None
    far = {parameter.name for names in tiered.placement.far for parameter in names}
    assert far == {"fc1.weight", "fc2.weight", "fc2.bias"}


def test_parameters_that_are_not_contiguous_stay_near() -> None:
    tiered = TieredOffloader(WeightsConfig(placement="all_far"), model=dict)
    tiered.wrap_modules(layers(transposed=True))
    assert tiered.placement is not None
    far = {parameter.name for names in tiered.placement.far for parameter in names}
    assert far == {"fc1.weight", "fc1.bias"}


def test_energy_is_metered_without_kv_swapping() -> None:
    with engine("opt", KV_OFF, weights={"placement": "all_far"}) as llm:
        generate(llm, PROMPTS[:1])
        (state,) = llm.collective_rpc("tiered_state")
    assert state["energy"]["counters"]["energy_joules"] > 0
