# SPDX-License-Identifier: Apache-2.0
"""GEMMs of vLLM's engine, for measurements: what its linear layers do with near and far weights."""

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vllm_tiered.adapter.one_rank import one_rank
from vllm_tiered.probe.gemm import TORCH, Gemm, Products, near_gemm
from vllm_tiered.probe.links import SECONDS, median_seconds, synchronizer
from vllm_tiered.units import MIB
from vllm_tiered.weights.int4.cpu import can_compress_matrix
from vllm_tiered.weights.int4.packing import packing_for


def engine_products(near_device: torch.device) -> Products:
    """Return the engine's GEMMs on a device, or torch's where no engine computes on it."""
    if not computes_on(near_device):
        return Products(
            source="torch, as vLLM does not compute here",
            near=TORCH.near,
            far=TORCH.far,
            int4_seconds=int4_seconds,
        )
    from vllm_tiered.adapter.compat import vllm_version

    return Products(
        source=f"vLLM {vllm_version()}",
        near=engine_near_gemm,
        far=engine_far_gemm,
        int4_seconds=int4_seconds,
        w4a16_seconds=w4a16_seconds,
    )


def engine_near_gemm(weight: torch.Tensor) -> Gemm:
    """Return the GEMM of vLLM's linear layers with a weight [out, in] that stays near.

    On a CPU vLLM packs the weight for the kernel that it dispatches to, by dtype, shape and
    instruction set. ``weight`` itself stays as it is.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    if weight.device.type != "cpu":
        return near_gemm(weight)
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    method = UnquantizedLinearMethod()
    method.process_weights_after_loading(layer)
    return lambda x: method.apply(layer, x, None)


def engine_far_gemm(weight: torch.Tensor) -> Gemm:
    """Return the GEMM of our offloader with a weight [out, in] in a weight buffer."""
    from vllm_tiered.adapter.weights.layer_weights import cpu_linear

    if weight.device.type != "cpu":
        return TORCH.far(weight)
    return lambda x: cpu_linear(x, weight, None)


def int4_seconds(
    shape: tuple[int, int],
    rows: Sequence[int],
    dtype: torch.dtype,
    near_device: torch.device,
    seconds: float = SECONDS,
) -> list[float]:
    """Time GEMMs with a 4-bit weight that is not in a cache; near or far makes no difference.

    Args:
        shape: (out, in) of the weight, of whole groups and blocks.
        rows: numbers of activation rows.
        dtype: data type of the activations.
        near_device: torch device that computes.
        seconds: approximate duration for each number of rows.
    """
    out_features, in_features = shape
    packing = packing_for(near_device)
    weight = torch.randn(shape, device=near_device).to(dtype)
    assert can_compress_matrix(weight), shape
    first = packing.compress(weight, None)
    count = _copies(first.nbytes)
    weights = [first, *(first.clone() for _ in range(count - 1))]

    def gemm_of(packed: torch.Tensor) -> Gemm:
        return lambda x: packing.linear(x, packed, out_features)

    inputs = _inputs(rows, in_features, dtype, near_device)
    return _in_turns([gemm_of(packed) for packed in weights], inputs, seconds)


GROUP = 128
"""Weights of a row that share a scale in the GEMMs of 4-bit checkpoints: what most have."""


def w4a16_seconds(
    shape: tuple[int, int],
    rows: Sequence[int],
    dtype: torch.dtype,
    near_device: torch.device,
    seconds: float = SECONDS,
) -> list[float]:
    """Time vLLM's GEMMs with the weight of a 4-bit checkpoint that is not in a cache.

    vLLM chooses the kernel, which is the same for AWQ, GPTQ and compressed-tensors on most devices.
    Weights are symmetric, in groups of ``GROUP``.

    Args:
        shape: (out, in) of the weight.
        rows: numbers of activation rows.
        dtype: data type of the activations.
        near_device: torch device that computes.
        seconds: approximate duration for each number of rows.

    Returns:
        The seconds for each number of rows; nothing if vLLM has no kernel for the shape, the
        dtype or the processor.
    """
    out_features, in_features = shape
    if dtype.itemsize != 2 or in_features % GROUP:
        return []
    count = _copies(out_features * in_features // 2)
    try:
        with one_rank():
            gemms = [_w4a16_linear(shape, dtype, near_device) for _ in range(count)]
        gemms[0](torch.zeros((1, in_features), dtype=dtype, device=near_device))
    except (AttributeError, ImportError, NotImplementedError, RuntimeError, ValueError):
        return []  # how vLLM and PyTorch say that a kernel is missing
    return _in_turns(gemms, _inputs(rows, in_features, dtype, near_device), seconds)


def _w4a16_linear(shape: tuple[int, int], dtype: torch.dtype, near_device: torch.device) -> Gemm:
    """Return the GEMM of a linear layer with random codes, as compressed-tensors make it."""
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        CompressedTensorsWNA16,
    )

    out_features, in_features = shape
    scheme = CompressedTensorsWNA16("group", 4, GROUP)
    layer: Any = nn.Module()
    with torch.device(near_device):
        scheme.create_weights(
            layer,
            output_size=out_features,
            input_size=in_features,
            output_partition_sizes=[out_features],
            input_size_per_partition=in_features,
            params_dtype=dtype,
            weight_loader=lambda *_: None,
        )
    layer.weight_packed.data.random_(-(2**31), 2**31 - 1)
    layer.weight_scale.data.fill_(1e-2)
    scheme.process_weights_after_loading(layer)

    def gemm(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = scheme.apply_weights(layer, x, None)
        return product

    return gemm


def _copies(num_bytes: int) -> int:
    """Return how many weights of these bytes take turns, so that none stays in a cache."""
    return min(max(2, -(-64 * MIB // num_bytes)), 16)


def _in_turns(gemms: Sequence[Gemm], inputs: Iterable[torch.Tensor], seconds: float) -> list[float]:
    """Return the seconds of a GEMM for each input, each call with the next weight."""

    def time_of(x: torch.Tensor) -> float:
        def call(turn: int) -> None:
            gemms[turn % len(gemms)](x)

        return median_seconds(call, seconds, synchronizer(x.device))

    return [time_of(x) for x in inputs]


def _inputs(
    rows: Sequence[int], in_features: int, dtype: torch.dtype, near_device: torch.device
) -> Iterator[torch.Tensor]:
    for num_tokens in rows:
        yield torch.randn((num_tokens, in_features), device=near_device).to(dtype)


def computes_on(near_device: torch.device) -> bool:
    """Return whether the installed vLLM, if any, computes on a device."""
    if importlib.util.find_spec("vllm") is None:
        return False
    from vllm_tiered.adapter.compat import device_type

    return device_type() == near_device.type
