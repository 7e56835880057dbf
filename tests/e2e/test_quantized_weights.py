# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints in far memory: what vLLM's kernels read is what they would read near."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as vllm_ops
from vllm.model_executor.offloader import get_offloader

from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.quantized_checkpoint import FORMATS, quantized_model_dir
from benchmarks.inputs.shapes import random_model_dir
from tests.e2e import harness
from tests.e2e.harness import AVX512, Tokens, engine, generate, random_prompts, run, vllm_tokens
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.weights import choosing, offloader, quantized
from vllm_tiered.adapter.weights.graphs import PLACEMENT_KEY
from vllm_tiered.errors import BudgetError, UnsupportedError
from vllm_tiered.ffn.prepare.texts import calibration_texts

PROMPTS = random_prompts(4, seed=5)
KV_OFF = {"enabled": False}
FP8 = ("fp8", "compressed_fp8")
INT8 = ("compressed_int8", "compressed_int8_asym")
DTYPES = {form: "bfloat16" for form in ("fp8", "gptq", "awq")}
DTYPES |= dict.fromkeys(("compressed_fp8", "compressed_int4", "compressed_int4_asym"), "float32")
DTYPES |= dict.fromkeys(INT8, "float32")
"""vLLM takes some of the formats in 16 bit alone."""

INT4 = ("gptq", "awq", "compressed_int4", "compressed_int4_asym")
PLACEMENTS = ({"placement": "all_far"}, {"placement": "helm"})


@pytest.fixture(scope="module", autouse=True)
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> None:
    for form in FORMATS:
        folder = tmp_path_factory.mktemp(form)
        source = random_model_dir("qwen2")
        harness.PATHS[f"qwen2-{form}"] = str(quantized_model_dir(source, form, folder))


@pytest.fixture
def delayed(monkeypatch):
    """Delay copies, and fill weight buffers with 0xFF before each."""
    monkeypatch.setattr(offloader, "make_device", lambda: DelayedDevice(3, 0.002))


@pytest.fixture
def reference_ops(monkeypatch):
    """Stand in for vLLM's ops that its build for this processor may not have."""
    monkeypatch.setattr(vllm_ops, "cpu_gemm_wna16", gemm_wna16)
    monkeypatch.setattr(vllm_ops, "scaled_fp8_quant", scaled_fp8_quant)


def scaled_fp8_quant(input: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide by a scale and round to FP8, as vLLM does to join matrices of several scales."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return (input.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn), scale


def gemm_wna16(
    input: torch.Tensor,
    q_weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """Multiply as vLLM's op does, with weights in blocks of 16 rows by columns.

    Args:
        q_weight: [N / 16, K * 16 / 8] of 8 codes each.
        scales: [G, N].
        zeros: [G, N / 8] of 8 codes each; None for 8.
    """
    del pack_factor, isa_hint
    groups, num_rows = scales.shape
    words_KW = q_weight.view(num_rows // 16, -1, 2).permute(1, 0, 2).reshape(-1, num_rows // 8)
    codes_KN = unpack(words_KW)
    group = len(codes_KN) // groups
    zeros_GN = torch.full_like(scales, 8.0) if zeros is None else unpack(zeros).to(scales.dtype)
    shifted = codes_KN.to(scales.dtype) - zeros_GN.repeat_interleave(group, 0)
    weight_KN = shifted * scales.repeat_interleave(group, 0)
    product = input @ weight_KN.to(input.dtype)
    return product if bias is None else product + bias.to(input.dtype)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Return the 8 codes of each int32 of the last dimension."""
    shifts = 4 * torch.arange(8, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).flatten(-2)


def expected_tokens(form: str, dtype: str | None = None) -> Tokens:
    """Return vLLM's tokens in float32; in 16 bit those with the plugin and all weights near.

    With the plugin the head is not packed on the CPU, which rounds otherwise in 16 bit.
    """
    dtype = dtype or DTYPES[form]
    if dtype == "float32":
        return vllm_tokens(f"qwen2-{form}", PROMPTS)
    near = {"placement": "flexgen", "percents": [100, 0, 0]}
    return run(f"qwen2-{form}", PROMPTS, KV_OFF, weights=near, dtype=dtype).tokens


def check_far(
    form: str, weights: dict[str, Any], expected: Tokens, dtype: str | None = None
) -> None:
    name = f"qwen2-{form}"
    with engine(name, KV_OFF, weights=weights, dtype=dtype or DTYPES[form]) as llm:
        assert generate(llm, PROMPTS) == expected
        keys = llm.llm_engine.vllm_config.additional_config
        assert PLACEMENT_KEY in keys, "compiled code is kept by the placement, chosen late"
        placed = get_offloader()
        assert placed.is_checked and placed.placement.policy == weights["placement"]
        assert len(placed.placement.extents) == 2 * 4
        moved = {one.leaf for one in placed._far}
        assert any("weight" in name for name in moved), "packed weights are far"
        assert placed.buffer_pool.num_misses == 0
        placed.buffer_pool.check_integrity()


@pytest.mark.parametrize("weights", PLACEMENTS, ids=lambda one: one["placement"])
@pytest.mark.parametrize("form", FP8)
def test_fp8(form, weights, delayed, reference_ops) -> None:
    """With PyTorch's kernels, which read a matrix by columns."""
    check_far(form, weights, expected_tokens(form))


@pytest.mark.parametrize("weights", PLACEMENTS, ids=lambda one: one["placement"])
@pytest.mark.parametrize("form", INT8)
def test_int8(form, weights, delayed) -> None:
    """Of which vLLM's kernel packs the weights where they cannot be moved."""
    check_far(form, weights, expected_tokens(form))


def test_a_plan_for_latency_times_the_loaded_layers() -> None:
    near_gib = 0.0015
    weights = {"placement": "latency", "near_gib": near_gib}
    result = run("qwen2-compressed_fp8", PROMPTS, KV_OFF, weights=weights)
    assert result.tokens == expected_tokens("compressed_fp8")
    stated = result.manifest["weights"]
    assert stated["near_bytes"] + stated["buffer_bytes"] <= near_gib * 2**30
    assert stated["far_bytes"] > 0
    assert stated["expected_step"]["seconds"] > 0


def test_a_file_has_what_the_kernel_reads(tmp_path: Path, monkeypatch) -> None:
    """It is of the kernel, too: another one may read other bytes of the same shape."""
    weights = {**PLACEMENTS[0], "storage_path": str(tmp_path), "far_gib": 0}
    expected = expected_tokens("compressed_fp8")
    changes = []
    for kernel in (None, None, "Other"):
        if kernel is not None:
            monkeypatch.setattr(choosing, "kernel_name", lambda module, name=kernel: name)
        result = run("qwen2-compressed_fp8", PROMPTS, KV_OFF, weights=weights)
        assert result.tokens == expected
        stated = result.manifest["weights"]
        assert stated["storage_bytes"] > 0 == stated["far_bytes"]
        changes.append(next(tmp_path.glob("*.weights")).stat().st_mtime_ns)
    assert changes[0] == changes[1] != changes[2]


def test_too_little_host_memory_is_an_error_before_anything_is_loaded(monkeypatch) -> None:
    memory = replace(offloader.read_host_memory(), available_bytes=1 << 20)
    monkeypatch.setattr(offloader, "read_host_memory", lambda: memory)
    with (
        pytest.raises(BudgetError, match=r"take 2.* MiB of host memory .* has 1\.00 MiB"),
        engine("qwen2-compressed_fp8", KV_OFF, weights=PLACEMENTS[0]),
    ):
        pytest.fail("the engine started")


def mapped_files() -> list[str]:
    """Return the mappings of this process that hold layers until they are placed."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/loading-" in line]


@pytest.mark.parametrize("form", ["compressed_fp8", "compressed_int4"])
@pytest.mark.parametrize(
    "weights",
    [
        {"placement": "all_far", "far_gib": 0},
        {"placement": "helm"},
        {"placement": "flexgen", "percents": [100, 0, 0]},
    ],
    ids=["stored", "helm", "near"],
)
def test_files_take_the_place_of_host_memory_that_is_too_small(
    weights, form, tmp_path: Path, monkeypatch, delayed, reference_ops
) -> None:
    """Each tensor of a layer's matrices is in a file when it is loaded, and none later."""
    expected = vllm_tokens(f"qwen2-{form}", PROMPTS)
    memory = replace(offloader.read_host_memory(), available_bytes=1 << 20)
    monkeypatch.setattr(offloader, "read_host_memory", lambda: memory)
    seen = []
    place = offloader.TieredOffloader._place

    def watched(self, layers, freed_bytes):
        seen.append(len(mapped_files()))
        large = [t for one in layers for _, t in offloader.tensors_of_readers(one)]
        large = [tensor for tensor in large if tensor.nbytes >= quantized.SMALLEST_BYTES]
        assert len(large) >= 4 * 4 and seen == [len(large)]
        place(self, layers, freed_bytes)

    monkeypatch.setattr(offloader.TieredOffloader, "_place", watched)
    options = weights | {"storage_path": str(tmp_path / "made")}
    with engine(f"qwen2-{form}", KV_OFF, weights=options, dtype="float32") as llm:
        assert seen and not mapped_files()
        assert generate(llm, PROMPTS) == expected
        assert list(tmp_path.glob("*/loading-*")) == []


def test_memory_of_loaded_layers_counts_as_theirs(tmp_path: Path, monkeypatch) -> None:
    """Without a budget, far memory is what is free, and what the layers take until then."""
    memory = replace(choosing.read_host_memory(), available_bytes=1 << 20)
    monkeypatch.setattr(choosing, "read_host_memory", lambda: memory)
    weights = {"placement": "all_far", "storage_path": str(tmp_path)}
    result = run("qwen2-compressed_fp8", PROMPTS, KV_OFF, weights=weights)
    assert result.tokens == expected_tokens("compressed_fp8")
    assert result.manifest["weights"]["far_bytes"] > 1 << 20


def test_a_disk_that_is_too_small_for_them_is_an_error_with_the_numbers(
    tmp_path: Path, monkeypatch
) -> None:
    memory = replace(offloader.read_host_memory(), available_bytes=1 << 20)
    monkeypatch.setattr(offloader, "read_host_memory", lambda: memory)

    def full(descriptor: int, begin: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    weights = {"placement": "all_far", "storage_path": str(tmp_path)}
    with (
        pytest.raises(BudgetError, match=r"no room for another .* KiB \(No space left"),
        engine("qwen2-compressed_fp8", KV_OFF, weights=weights),
    ):
        pytest.fail("the engine started")
    assert list(tmp_path.glob("loading-*")) == []


def test_too_little_near_memory_is_an_error_with_the_numbers() -> None:
    weights = {"placement": "helm", "near_gib": 0.0002}
    with (
        pytest.raises(BudgetError, match=r"of the layers near .* weights\.near_gib allows"),
        engine("qwen2-compressed_fp8", KV_OFF, weights=weights),
    ):
        pytest.fail("the engine started")


@torch.library.custom_op("tiered_tests::gemm_wna16", mutates_args=())
def opaque_gemm_wna16(
    input: torch.Tensor,
    q_weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> torch.Tensor:
    """Multiply as one operation, as vLLM's op is."""
    return gemm_wna16(input, q_weight, scales, zeros, bias, pack_factor, isa_hint)


@opaque_gemm_wna16.register_fake
def _(input, q_weight, scales, zeros, bias, pack_factor, isa_hint):
    return input.new_empty(*input.shape[:-1], scales.shape[1])


def test_what_unpacks_weights_first_is_not_compiled(reference_ops) -> None:
    """Operations on weights alone might run before the wait: tokens were wrong by chance."""
    with (
        pytest.raises(UnsupportedError, match=r"weight_packed.* unpacked .* --enforce-eager"),
        engine("qwen2-compressed_int4", KV_OFF, weights=PLACEMENTS[0], enforce_eager=False) as llm,
    ):
        generate(llm, PROMPTS)


@AVX512
@pytest.mark.slow
@pytest.mark.parametrize("form", ["compressed_int4", "compressed_int4_asym"])
def test_a_trained_model_in_vllms_own_kernels(form, tmp_path, delayed) -> None:
    """Its text, its weights from both placements and from a disk."""
    model = demo_model_dir()
    (tmp_path / "model").mkdir()
    harness.PATHS["demo-quantized"] = str(quantized_model_dir(model, form, tmp_path / "model"))
    texts = calibration_texts(model, 400, tokens_per_text=100)
    prompts = [list(text.token_ids[:60]) for text in texts]
    expected = run("demo-quantized", prompts, None, dtype="bfloat16").tokens
    assert expected != run("demo", prompts, None, dtype="bfloat16").tokens, "4 bit have a cost"
    stored = {"placement": "all_far", "storage_path": str(tmp_path), "far_gib": 0.01}
    for weights in (*PLACEMENTS, stored):
        found = run("demo-quantized", prompts, KV_OFF, weights=weights, dtype="bfloat16")
        assert found.tokens == expected
        assert found.manifest["weights"]["far_bytes"] > 0
    assert found.manifest["weights"]["storage_bytes"] > 0


@pytest.mark.slow
def test_compiled(reference_ops, monkeypatch) -> None:
    """In 4 bit: of FP8 compiled for this processor, vLLM alone gives one token for ever."""
    monkeypatch.setattr(vllm_ops, "cpu_gemm_wna16", opaque_gemm_wna16)
    expected = expected_tokens("compressed_int4")
    name = "qwen2-compressed_int4"
    with engine(name, KV_OFF, weights=PLACEMENTS[0], enforce_eager=False) as llm:
        assert generate(llm, PROMPTS) == expected
        assert get_offloader().buffer_pool.num_misses < 10, "the order of the layers is kept"


@pytest.mark.parametrize("form", INT4)
def test_int4_with_a_reference_gemm(form, delayed, reference_ops) -> None:
    """vLLM's loading and packing, with a GEMM of ours in both engines."""
    check_far(form, PLACEMENTS[0], expected_tokens(form))


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FP8, *INT8, *INT4])
def test_each_format_in_each_placement_and_from_a_file(form, tmp_path, reference_ops) -> None:
    """With a GEMM of ours in place of vLLM's 4-bit one, which is for 16 bit alone."""
    name, options = f"qwen2-{form}", dict[str, Any](dtype=DTYPES[form])
    expected = expected_tokens(form)
    stored = {"placement": "all_far", "storage_path": str(tmp_path), "far_gib": 0}
    latency = {"placement": "latency", "near_gib": 0.002}
    for weights in ({"placement": "helm"}, latency, stored):
        result = run(name, PROMPTS, KV_OFF, weights=weights, **options)
        assert result.tokens == expected, weights
        assert result.manifest["weights"]["placement"] == weights["placement"]
    assert result.manifest["weights"]["storage_bytes"] > 0


KINDS = {
    "deepseek_v2": (*(f"{at}.mlp" for at in range(1, 9)), "kv_b_proj"),
    "qwen3_moe": ("mlp",),
    "granite_hybrid": ("conv1d", "block_sparse_moe"),
    "qwen3_next": ("mlp", "conv1d", "linear_attn.in_proj"),
}
"""Kinds of models, and parts of the names of what stays in 16 bit, as in published checkpoints."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_layers_of_other_kinds(kind, tmp_path, delayed) -> None:
    """Latent attention, mixtures, recurrent states, in HeLM's placement and from a file."""
    (tmp_path / "model").mkdir()
    name, source = f"{kind}-fp8", random_model_dir(kind)
    folder = quantized_model_dir(source, "compressed_fp8", tmp_path / "model", keep=KINDS[kind])
    harness.PATHS[name] = str(folder)
    dtype = "bfloat16" if kind == "qwen3_next" else "float32"
    near = {"placement": "flexgen", "percents": [100, 0, 0]}
    if dtype == "float32":
        expected = vllm_tokens(name, PROMPTS)
    else:  # vLLM packs the head, which rounds otherwise in 16 bit
        expected = run(name, PROMPTS, KV_OFF, weights=near, dtype=dtype).tokens
    assert len({token for tokens in expected for token in tokens}) > 10
    stored = {"placement": "all_far", "storage_path": str(tmp_path), "far_gib": 0}
    for weights in (*PLACEMENTS, stored):
        found = run(name, PROMPTS, KV_OFF, weights=weights, dtype=dtype)
        assert found.tokens == expected
        assert found.manifest["weights"]["far_bytes"] > 0 or weights is stored
    assert found.manifest["weights"]["storage_bytes"] > 0


@pytest.mark.slow
@AVX512
@pytest.mark.parametrize("form", INT4)
def test_int4(form, delayed) -> None:
    """With vLLM's own GEMM, which is for 16 bit alone."""
    check_far(form, PLACEMENTS[0], expected_tokens(form, "bfloat16"), "bfloat16")


def test_damaged_far_bytes_change_the_tokens() -> None:
    """Comparisons of tokens detect wrong bytes of one far sublayer."""
    expected = vllm_tokens("qwen2-compressed_fp8", PROMPTS)
    with engine("qwen2-compressed_fp8", KV_OFF, weights=PLACEMENTS[0]) as llm:
        assert generate(llm, PROMPTS) == expected
        weights = get_offloader()._weights
        extent = weights._extents[1]
        far = weights._far.data[extent.far_page : extent.far_page + extent.num_far_pages]
        far.copy_(far.flip(0).flip(1))
        assert generate(llm, PROMPTS) != expected


# What cannot be placed ------------------------------------------------------------------


def test_a_kernel_that_keeps_weights_is_refused_by_its_name(monkeypatch) -> None:
    """With vLLM's int8 kernel, if we would leave it as it is."""
    monkeypatch.setattr(quantized, "keep_weight", lambda layer: lambda: None)
    with (
        pytest.raises(UnsupportedError, match=r"CPUInt8ScaledMMLinearKernel keeps the weights of "),
        engine("qwen2-compressed_int8", KV_OFF, weights={"placement": "all_far"}),
    ):
        pytest.fail("the engine started")


@pytest.mark.parametrize(
    "weights",
    [{"placement": "throughput", "near_gib": 1}, {"placement": "all_far", "compress": "int4"}],
    ids=["throughput", "int4"],
)
def test_plans_and_compression_are_refused_before_the_start(weights) -> None:
    with (
        pytest.raises(UnsupportedError, match="only when they are loaded"),
        engine("qwen2-compressed_fp8", KV_OFF, weights=weights, kv_cache_memory_bytes=None),
    ):
        pytest.fail("the engine started")


def test_quantizing_while_loading_is_refused_before_the_start() -> None:
    with (
        pytest.raises(UnsupportedError, match=r"quantizes a layer's tensors .* while it loads"),
        engine("qwen2", KV_OFF, weights=PLACEMENTS[0], quantization="fp8", dtype="bfloat16"),
    ):
        pytest.fail("the engine started")


# The tensors of a layer -----------------------------------------------------------------


class Method:
    """A quantization method that may keep a tensor, as some kernels do."""

    def __init__(self, kept: object) -> None:
        self.kernel = lambda: kept


Method.__module__ = "vllm.test"  # whose objects are looked into


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_tensor_that_a_kernel_keeps_does_not_move(is_kept) -> None:
    layer = torch.nn.Module()
    weight, scale = torch.zeros(64, 64), torch.zeros(64, 32)
    layer.weight = torch.nn.Parameter(weight)
    layer.register_buffer("scale", scale)
    layer.register_buffer("small", torch.zeros(4))
    layer.register_buffer("strided", torch.zeros(64, 128)[:, ::2])
    vars(layer)["quant_method"] = Method(scale.t() if is_kept else None)
    assert quantized.movable_tensors(layer) == ({"weight"} if is_kept else {"weight", "scale"})


@pytest.mark.parametrize(
    ("tensor", "is_dense"),
    [
        (torch.zeros(4, 6), True),
        (torch.zeros(4, 6).t(), True),
        (torch.zeros(2, 3, 4).permute(2, 0, 1), True),
        (torch.zeros(4, 1, 6).transpose(0, 1), True),
        (torch.zeros(4, 6)[:, :5], False),
        (torch.zeros(4, 1).expand(4, 6), False),
        (torch.zeros(0, 6), False),
    ],
)
def test_dense(tensor, is_dense) -> None:
    assert quantized.is_dense(tensor) == is_dense


def test_one_layer_at_a_time_is_near_while_a_model_is_processed(monkeypatch) -> None:
    """Copies take the place of tensors on a GPU."""
    near = torch.device("cuda")
    modules: list[Any] = [torch.nn.Linear(64, 64, bias=False) for _ in range(5)]
    held: list[torch.Tensor] = []  # so that no other tensor gets an address of theirs
    near_bytes: list[int] = []
    to = torch.Tensor.to

    def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copied = tensor.clone()
        held.extend([copied] if device == near else [])
        return copied if device == near else to(tensor, device)

    def process(layer: Any) -> None:
        tensors = [tensor for module in modules for _, tensor in quantized.named_tensors(module)]
        addresses = {one.data_ptr() for one in held}
        near_bytes.append(sum(one.nbytes for one in tensors if one.data_ptr() in addresses))
        layer.packed = torch.nn.Parameter(layer.weight.data.t().contiguous())
        held.append(layer.packed.data)
        del layer.weight

    for module in modules:
        vars(module)["quant_method"] = SimpleNamespace(process_weights_after_loading=process)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    quantized.process_on(near, modules, home=torch.clone)
    for module in modules:
        module.quant_method.process_weights_after_loading(module)
    assert near_bytes == [64 * 64 * 4] * 5
