# SPDX-License-Identifier: Apache-2.0
"""Weights in 4 bit on the real engine: tokens equal those of a checkpoint rounded beforehand."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.offloader import get_offloader

from benchmarks.inputs import shapes
from tests.e2e.harness import (
    PATHS,
    engine,
    generate,
    layers,
    model_path,
    random_prompts,
    run,
    vllm_tokens,
)
from tests.fakes.devices import DelayedDevice
from tests.fixtures.rounding import rounded
from vllm_tiered.adapter.telemetry import manifest
from vllm_tiered.adapter.weights import int4_layers, offloader
from vllm_tiered.adapter.weights.offloader import TieredOffloader
from vllm_tiered.config import WeightsConfig
from vllm_tiered.errors import BudgetError, UnsupportedError
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.weights.int4 import cpu as int4
from vllm_tiered.weights.int4.layout import can_compress
from vllm_tiered.weights.layout import BUFFER_ALIGNMENT
from vllm_tiered.weights.placement import place

PROMPTS = random_prompts(6, seed=8)
KV_OFF = {"enabled": False}
ALL_FAR = {"placement": "all_far", "compress": "int4"}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all_far": {"placement": "all_far"},
    "helm": {"placement": "helm"},
    "latency": {"placement": "latency", "near_gib": 0.0009},
    "flexgen": {"placement": "flexgen", "percents": [20, 80, 0]},
    "near": {"placement": "flexgen", "percents": [100, 0, 0]},
}
STORED: dict[str, dict[str, Any]] = {
    "all_far": {"placement": "all_far", "far_gib": 0},
    "flexgen": {"placement": "flexgen", "percents": [20, 40, 40]},
}
# Every model, and every placement with opt and one other model.
CASES = [
    *((model, "all_far") for model in ("opt", "llama3", "phi3", "falcon", "qwen2")),
    *(("opt", placement) for placement in ("helm", "latency", "flexgen", "near")),
    ("qwen2", "helm"),
    ("llama3", "latency"),
    ("phi3", "flexgen"),
    ("falcon", "near"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return a function that makes checkpoints for vLLM alone, with matrices rounded to 4 bit."""

    @functools.cache
    def make(model: str) -> str:
        folder = tmp_path_factory.mktemp(model)
        shutil.copytree(model_path(model), folder, dirs_exist_ok=True)
        (file,) = folder.glob("*.safetensors")
        tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
        for name, tensor in tensors.items():
            in_layer = "layers." in name or ".h." in name
            if in_layer and tensor.ndim == 2 and can_compress(*tensor.shape):
                tensors[name] = rounded(tensor)
        save_file(tensors, file, metadata={"format": "pt"})
        PATHS[f"{model}, rounded"] = str(folder)
        return f"{model}, rounded"

    yield make
    for name in [name for name in PATHS if name.endswith(", rounded")]:
        del PATHS[name]


@pytest.mark.parametrize(("model", "placement"), CASES)
def test_tokens_equal(model, placement, plain) -> None:
    weights = {**PLACEMENTS[placement], "compress": "int4"}
    result = run(model, PROMPTS, KV_OFF, weights=weights)
    assert result.tokens == vllm_tokens(plain(model), PROMPTS)
    assert result.tokens != vllm_tokens(model, PROMPTS), "rounding is to be seen"
    stated = result.manifest["weights"]
    assert stated["compress"] == "int4"
    assert bool(stated["far_bytes"]) == (placement != "near")


@pytest.mark.parametrize("placement", ["all_far", "near"])
@pytest.mark.parametrize("model", ["opt", "llama3", "phi3", "falcon", "qwen2"])
def test_each_matrix_is_compressed_when_it_is_loaded(model, placement, monkeypatch) -> None:
    """Nothing is left to be compressed when all weights are loaded, so that none is in 32 bit."""
    types: list[torch.dtype] = []
    start = TieredOffloader.start

    def look_and_start(tiered: TieredOffloader) -> None:
        types.extend(linear.weight.dtype for linear in tiered._compressed)
        start(tiered)

    monkeypatch.setattr(TieredOffloader, "start", look_and_start)
    run(model, PROMPTS[:1], KV_OFF, weights={**PLACEMENTS[placement], "compress": "int4"})
    assert len(types) >= 8
    assert set(types) == {torch.uint8}


@pytest.mark.parametrize(("model", "placement"), [("opt", "all_far"), ("llama3", "flexgen")])
def test_stored_with_the_first_start_and_the_second(model, placement, plain, tmp_path) -> None:
    weights = {**STORED[placement], "compress": "int4", "storage_path": str(tmp_path)}
    first = run(model, PROMPTS, KV_OFF, weights=weights)
    (file,) = tmp_path.iterdir()
    written = file.stat()
    second = run(model, PROMPTS, KV_OFF, weights=weights)
    assert first.tokens == second.tokens == vllm_tokens(plain(model), PROMPTS)
    stated = first.manifest["weights"]
    assert second.manifest["weights"] == stated
    assert 0 < stated["storage_bytes"] < written.st_size
    assert file.stat().st_mtime_ns == written.st_mtime_ns, "it was read only"


def test_a_file_of_16_bit_weights_is_filled_again(plain, tmp_path) -> None:
    weights = {**STORED["all_far"], "storage_path": str(tmp_path)}
    run("opt", PROMPTS[:1], KV_OFF, weights=weights)
    (file,) = tmp_path.iterdir()
    before = file.stat().st_size
    result = run("opt", PROMPTS, KV_OFF, weights={**weights, "compress": "int4"})
    assert result.tokens == vllm_tokens(plain("opt"), PROMPTS)
    assert file.stat().st_size < before / 2


@pytest.fixture
def uneven(monkeypatch):
    """Add a model whose FFN has no whole blocks, so that only attention is compressed."""
    shape = {**shapes.SHAPES["opt"], "ffn_dim": 560}
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "uneven": shape})
    return "uneven"


@pytest.mark.parametrize("placement", ["all_far", "near"])
def test_matrices_without_whole_groups_stay_unchanged(placement, uneven, plain) -> None:
    weights = {**PLACEMENTS[placement], "compress": "int4"}
    with engine(uneven, KV_OFF, weights=weights) as llm:
        tokens = generate(llm, PROMPTS)
        sizes = {
            parameter.name: parameter.num_bytes
            for sublayer in get_offloader().placement.sublayers
            for parameter in sublayer.parameters
        }
    assert tokens == vllm_tokens(plain(uneven), PROMPTS)
    assert sizes["fc1.weight"] == 560 * 256 * 4
    assert sizes["self_attn.out_proj.weight"] == 256 * 256 * 0.75


@pytest.mark.parametrize("model", ["demo", "opt", "falcon"])
def test_a_plan_from_the_config_equals_the_engines(model) -> None:
    config = json.loads((Path(model_path(model)) / "config.json").read_text())
    planned = place("helm", model_shape(config, dtype="float32", compress="int4").sublayers)
    with engine(model, KV_OFF, weights={"placement": "helm", "compress": "int4"}):
        assert get_offloader().placement == planned


@pytest.mark.parametrize("placement", ["helm", "near"])
def test_near_memory_matches_the_manifest(placement) -> None:
    """The memory that weights were loaded to is freed, so near memory has only the stated bytes."""
    weights = {**PLACEMENTS[placement], "compress": "int4"}
    with engine("opt", KV_OFF, weights=weights) as llm:
        (model,) = llm.apply_model(lambda model: model)
        far = {id(parameter) for *_, parameter in get_offloader()._far}
        near = [p for p in model.model.decoder.layers.parameters() if id(p) not in far]
        current = manifest.current()
        assert current is not None
        stated = current["weights"]
        assert sum(p.untyped_storage().nbytes() for p in near) == stated["near_bytes"]


@pytest.mark.parametrize(
    ("model", "near_gib", "block_bytes"),
    [("opt", 0.006, 4 * 2 * 4 * 64 * 32 * 4), ("llama3", 0.0025, 3 * 2 * 1 * 64 * 32 * 4)],
)
@pytest.mark.parametrize("placement", ["throughput", "auto"])
def test_near_memory_shared_with_the_kv_cache(
    model, near_gib, block_bytes, placement, plain
) -> None:
    """The plan uses the bytes in 4 bit; in 32 bit these layers would leave no KV cache."""
    weights = {"placement": placement, "near_gib": near_gib, "compress": "int4"}
    with engine(model, KV_OFF, weights=weights, kv_cache_memory_bytes=None) as llm:
        tokens = generate(llm, PROMPTS)
        placed = get_offloader().placement
        num_blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert tokens == vllm_tokens(plain(model), PROMPTS)
    config = json.loads((Path(model_path(model)) / "config.json").read_text())
    assert placed.sublayers == model_shape(config, dtype="float32", compress="int4").sublayers
    assert num_blocks == (int(near_gib * 2**30) - placed.near_bytes) // block_bytes
    uncompressed = place("all_far", model_shape(config, dtype="float32").sublayers)
    needed = uncompressed.near_bytes + 17 * block_bytes
    assert needed > near_gib * 2**30, "not enough for weight buffers and a request in 32 bit"


def test_shared_and_stored(plain, tmp_path) -> None:
    weights = {
        "placement": "throughput",
        "near_gib": 0.0052,
        "far_gib": 0,
        "compress": "int4",
        "storage_path": str(tmp_path),
    }
    first, second = (
        run("opt", PROMPTS, KV_OFF, weights=weights, kv_cache_memory_bytes=None) for _ in range(2)
    )
    assert first.tokens == second.tokens == vllm_tokens(plain("opt"), PROMPTS)
    assert first.manifest["weights"] == second.manifest["weights"]
    assert first.manifest["weights"]["storage_bytes"] > 0


def test_delayed_and_poisoned_copies(plain, monkeypatch) -> None:
    monkeypatch.setattr(offloader, "make_device", lambda: DelayedDevice(3, 0.004))
    expected = vllm_tokens(plain("llama3"), PROMPTS)
    with engine("llama3", KV_OFF, weights=ALL_FAR) as llm:
        assert generate(llm, PROMPTS) == expected
        assert get_offloader().buffer_pool.stall_seconds > 0


def test_an_overwritten_scale_changes_the_tokens(plain) -> None:
    """Comparisons of tokens detect wrong scales and zeros of one far matrix."""
    with engine("llama3", KV_OFF, weights=ALL_FAR) as llm:
        assert generate(llm, PROMPTS) == vllm_tokens(plain("llama3"), PROMPTS)
        weights = get_offloader()._weights
        linear = get_offloader()._compressed[0]
        extent = weights._extents[0]
        first = weights._far.data.view(-1)[extent.far_page * BUFFER_ALIGNMENT :]
        compressed = first[: linear.weight.numel()]
        _, scales_and_zeros_GN2 = int4.parts(compressed, linear._rows, torch.float32)
        scales_and_zeros_GN2[..., 0] *= 2
        assert generate(llm, PROMPTS) != vllm_tokens(plain("llama3"), PROMPTS)


@pytest.mark.slow
def test_compiled(plain) -> None:
    """Compiled code calls the GEMM as an op of the graph."""
    expected = vllm_tokens(plain("falcon"), PROMPTS)
    with engine("falcon", KV_OFF, weights=ALL_FAR, enforce_eager=False) as llm:
        assert generate(llm, PROMPTS) == expected
        assert get_offloader().buffer_pool.num_misses < 10, "the order of the layers is kept"


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks(plain, two_ranks) -> None:
    """The groups of a shard are groups of the whole matrix, so tokens are equal."""
    weights = {"placement": "helm", "compress": "int4"}
    expected = vllm_tokens(plain("qwen2"), PROMPTS)
    assert run("qwen2", PROMPTS, KV_OFF, weights=weights, **two_ranks).tokens == expected


def test_the_op_is_fit_for_compilers() -> None:
    weight = int4.compress(torch.randn(128, 64))
    arguments = (torch.randn(5, 64), weight, 128, torch.randn(128))
    int4_layers._op()
    torch.library.opcheck(torch.ops.tiered.int4_linear.default, arguments)


# Refused --------------------------------------------------------------------------------


def test_a_model_without_a_matrix_that_can_be_compressed() -> None:
    tiered = TieredOffloader(WeightsConfig(placement="all_far", compress="int4"), model=dict)
    with pytest.raises(
        UnsupportedError, match=r"none of the model's 2 layers .* weights\.compress"
    ):
        tiered.wrap_modules(layers())


def test_budgets_are_those_of_compressed_weights() -> None:
    """Far weights take 2.9 MiB in 4 bit (activations in float32) and 18 MiB in 32 bit."""
    weights = {"placement": "all_far", "far_gib": 0.005}
    run("opt", PROMPTS[:1], KV_OFF, weights={**weights, "compress": "int4"})
    with (
        pytest.raises(BudgetError, match=r"weights\.far_gib allows"),
        engine("opt", KV_OFF, weights=weights),
    ):
        pass


def test_a_weight_that_was_replaced_while_loading() -> None:
    with engine("opt", KV_OFF, weights=ALL_FAR):
        linear = get_offloader()._compressed[0]
        linear.module.weight = torch.nn.Parameter(torch.zeros(64, 64))
        with pytest.raises(UnsupportedError, match="was replaced by another tensor"):
            linear.multiply_compressed()
