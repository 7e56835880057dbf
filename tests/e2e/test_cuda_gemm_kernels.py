# SPDX-License-Identifier: Apache-2.0
"""Far weights with vLLM's kernel classes for CUDA, which pack a checkpoint's tensors their own way.

vLLM takes these classes for the CPU's, loads and processes the weights with them, and calls their
ops in each step. The ops themselves are compiled for CUDA alone. In their place are functions that
take the same arguments, move bytes where the op would, and multiply with all bytes of what they
get. So equal tokens say that a kernel reads what was loaded, wherever its tensors are.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm import _custom_ops as vllm_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.nvfp4 import cutlass as nvfp4_cutlass
from vllm.model_executor.layers.quantization.utils import marlin_utils
from vllm.model_executor.offloader import get_offloader
from vllm.platforms import current_platform

from benchmarks.inputs.quantized_checkpoint import quantized_model_dir
from benchmarks.inputs.shapes import random_model_dir
from tests.e2e import harness
from tests.e2e.harness import engine, generate, random_prompts, run
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.weights import offloader, quantized

PROMPTS = random_prompts(3, seed=5)
NEAR = {"placement": "flexgen", "percents": [100, 0, 0]}
FAR = {"placement": "all_far"}

REGISTRIES = {
    "MP": linear._POSSIBLE_KERNELS,
    "INT8": linear._POSSIBLE_INT8_KERNELS,
    "FP8": linear._POSSIBLE_FP8_KERNELS,
    "BLOCK": linear._POSSIBLE_FP8_BLOCK_KERNELS,
    "NVFP4": linear._POSSIBLE_NVFP4_KERNELS,
}
CASES = [
    ("compressed_int4", "MP", "MarlinLinearKernel"),
    ("compressed_int4_asym", "MP", "MarlinLinearKernel"),
    ("gptq", "MP", "MarlinLinearKernel"),
    ("awq", "MP", "MarlinLinearKernel"),
    ("compressed_int4", "MP", "MacheteLinearKernel"),
    ("compressed_int4_asym", "MP", "MacheteLinearKernel"),
    ("compressed_int8", "INT8", "CutlassInt8ScaledMMLinearKernel"),
    ("compressed_int8_asym", "INT8", "CutlassInt8ScaledMMLinearKernel"),
    ("fp8", "FP8", "CutlassFP8ScaledMMLinearKernel"),
    ("compressed_fp8", "FP8", "CutlassFP8ScaledMMLinearKernel"),
    ("compressed_fp8", "FP8", "MarlinFP8ScaledMMLinearKernel"),
    ("fp8_block", "BLOCK", "CutlassFp8BlockScaledMMKernel"),
    ("fp8_block", "BLOCK", "MarlinFP8ScaledMMLinearKernel"),
    ("compressed_nvfp4", "NVFP4", "CutlassNvFp4LinearKernel"),
    ("compressed_nvfp4", "NVFP4", "MarlinNvFp4LinearKernel"),
    ("modelopt_nvfp4", "NVFP4", "CutlassNvFp4LinearKernel"),
    ("modelopt_nvfp4", "NVFP4", "MarlinNvFp4LinearKernel"),
    ("modelopt_fp8", "FP8", "CutlassFP8ScaledMMLinearKernel"),
    ("modelopt_fp8", "FP8", "MarlinFP8ScaledMMLinearKernel"),
]


CALLS: Counter[str] = Counter()
BYTE_VALUES = torch.randn(256, generator=torch.Generator().manual_seed(0))


def product(x: torch.Tensor, num_columns: int, *tensors: torch.Tensor | None) -> torch.Tensor:
    """Return x times a matrix that each byte of the tensors has a part in, as float32."""
    raw = [t.contiguous().flatten().view(torch.uint8) for t in tensors if t is not None]
    values = BYTE_VALUES[torch.cat(raw).long()]
    num_weights = x.shape[1] * num_columns
    folded = torch.nn.functional.pad(values, (0, -len(values) % num_weights))
    matrix = folded.view(-1, x.shape[1], num_columns).sum(0)
    matrix = (matrix - matrix.mean(0)) / matrix.std()  # or one direction outweighs all others
    out: torch.Tensor = x.float() @ matrix / x.shape[1] ** 0.5
    return out


def marlin_gemm(**given: Any) -> torch.Tensor:
    tensors = (given["b_q_weight"], given["b_scales"], given["b_zeros"], given["global_scale"])
    out = product(given["a"], given["size_n"], *tensors)
    out = out if given["b_bias"] is None else out + given["b_bias"]
    return out.to(given["a"].dtype)


def machete_mm(**given: Any) -> torch.Tensor:
    scales = given["b_group_scales"]
    tensors = (given["b_q"], scales, given["b_group_zeros"])
    return product(given["a"], scales.shape[-1], *tensors).to(given["a"].dtype)


def cutlass_scaled_mm(**given: Any) -> torch.Tensor:
    scaled = given["a"].float() * (given["scale_a"].float().mean())
    tensors = (given["b"], given["scale_b"], given.get("azp_adj"))
    out = product(scaled, given["b"].shape[1], *tensors)
    return (out if given["bias"] is None else out + given["bias"]).to(given["out_dtype"])


def cutlass_scaled_fp4_mm(**given: Any) -> torch.Tensor:
    rows = given["a"].view(torch.uint8).float() - 102  # two codes of 6
    tensors = (given["b"], given["block_scale_b"], given["alpha"])
    return product(rows, given["b"].shape[0], *tensors).div(8).to(given["out_dtype"])


def gptq_marlin_repack(**given: Any) -> torch.Tensor:
    words: torch.Tensor = given["b_q_weight"].reshape(given["size_k"] // 16, -1)
    return words.flip(0).contiguous()


def machete_prepack_B(**given: Any) -> torch.Tensor:
    words: torch.Tensor = given["b_q_weight"]
    return words.flip(0).contiguous()


def scaled_int8_quant(**given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    codes, scales, zeros = vllm_ops.onednn_scaled_int8_quant(
        given["input"], given["scale"], given["azp"], given["symmetric"]
    )
    return codes, scales, zeros


def scaled_fp8_quant(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    most = torch.finfo(torch.float8_e4m3fn).max
    scaled = given["input"].float() / given["scale"]
    return scaled.clamp(-most, most).to(torch.float8_e4m3fn), given["scale"]


def scaled_fp4_quant(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    halves = given["input"].float().clamp(-6, 6).unflatten(1, (-1, 2))
    codes = (halves + 6).round().to(torch.uint8)
    return codes[..., 0] | codes[..., 1] << 4, torch.ones(1)


OPS: tuple[Callable[..., Any], ...] = (
    machete_mm,
    cutlass_scaled_mm,
    cutlass_scaled_fp4_mm,
    gptq_marlin_repack,
    machete_prepack_B,
    scaled_int8_quant,
    scaled_fp8_quant,
    scaled_fp4_quant,
)


@pytest.fixture
def cuda_kernel(request, monkeypatch) -> Any:
    """Let vLLM choose a kernel for CUDA, and count the calls of its ops."""
    registry, name = request.param
    CALLS.clear()
    of_cuda = [kernel for kernels in REGISTRIES[registry].values() for kernel in kernels]
    kernel = next(kernel for kernel in of_cuda if kernel.__name__ == name)
    monkeypatch.setitem(REGISTRIES[registry], current_platform._enum, [kernel])
    for check in ("is_supported", "can_implement"):
        passes = classmethod(lambda cls, *_, **__: (True, None))
        monkeypatch.setattr(kernel, check, passes, raising=False)
    # Marlin's op is called by its registered name.
    gemm = checked(marlin_gemm, vllm_ops.marlin_gemm)
    monkeypatch.setattr(torch.ops._C, "marlin_gemm", gemm, raising=False)
    for stand_in in OPS:
        bound = checked(stand_in, getattr(vllm_ops, stand_in.__name__))
        for module in (vllm_ops, nvfp4_cutlass):
            if hasattr(module, stand_in.__name__):
                monkeypatch.setattr(module, stand_in.__name__, bound)
    monkeypatch.setattr(nvfp4_cutlass, "swizzle_blockscale", lambda scale: scale.flip(0))
    azp = checked(cutlass_scaled_mm, vllm_ops.cutlass_scaled_mm_azp)
    monkeypatch.setattr(vllm_ops, "cutlass_scaled_mm_azp", azp)
    monkeypatch.setattr(marlin_utils, "num_compute_units", lambda index: 4)
    return kernel


def checked(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes vLLM's call if the op would, with the op's defaults."""
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        CALLS[stand_in.__name__] += 1
        return stand_in(**bound.arguments)

    return call


@pytest.fixture
def checkpoint(form, tmp_path) -> str:
    name = f"cuda-{form}"
    harness.PATHS[name] = str(quantized_model_dir(random_model_dir("qwen2"), form, tmp_path))
    return name


each_kernel = pytest.mark.parametrize(
    ("form", "cuda_kernel"),
    [(form, (registry, name)) for form, registry, name in CASES],
    indirect=["cuda_kernel"],
    ids=[f"{form}-{name}" for form, _, name in CASES],
)


@each_kernel
def test_tokens_are_those_of_near_weights(checkpoint, cuda_kernel, monkeypatch) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16"}
    with engine(checkpoint, {"enabled": False}, weights=NEAR, **options) as llm:
        expected = generate(llm, PROMPTS)
    assert sum(CALLS.values()) > 4 * 4 * len(PROMPTS), "vLLM called the stand-ins"
    assert len({token for tokens in expected for token in tokens}) > 20, "the weights matter"
    monkeypatch.setattr(offloader, "make_device", lambda: DelayedDevice(3, 0.002))
    kernels: set[str] = set()

    def watched(layer: torch.nn.Module) -> set[str]:
        kernels.add(quantized.kernel_name(layer))
        return movable_tensors(layer)

    movable_tensors = quantized.movable_tensors
    monkeypatch.setattr(quantized, "movable_tensors", watched)
    with engine(checkpoint, {"enabled": False}, weights=FAR, **options) as llm:
        assert kernels == {cuda_kernel.__name__}
        placed = get_offloader()
        in_layers = sum(part.num_bytes for part in placed.placement.sublayers)
        assert placed.placement.far_bytes > 0.95 * in_layers
        assert generate(llm, PROMPTS) == expected
        weights = placed._weights
        extent = weights._extents[1]
        far = weights._far.data[extent.far_page : extent.far_page + extent.num_far_pages]
        far.copy_(far.flip(0).flip(1))
        assert generate(llm, PROMPTS) != expected


@pytest.mark.slow
@each_kernel
def test_other_placements_and_files(checkpoint, cuda_kernel, tmp_path, monkeypatch) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16"}
    expected = run(checkpoint, PROMPTS, {"enabled": False}, weights=NEAR, **options).tokens
    monkeypatch.setattr(offloader, "make_device", lambda: DelayedDevice(3, 0.002))
    stored = {**FAR, "storage_path": str(tmp_path / "stored"), "far_gib": 0}
    near_gib = 0.0013 if "8" in checkpoint else 0.0008
    for weights in ({"placement": "helm"}, {"placement": "latency", "near_gib": near_gib}, stored):
        found = run(checkpoint, PROMPTS, {"enabled": False}, weights=weights, **options)
        assert found.tokens == expected
        assert found.manifest["weights"]["placement"] == weights["placement"]
        assert found.manifest["weights"]["far_bytes"] > 0 or weights is stored
    assert found.manifest["weights"]["storage_bytes"] > 0
