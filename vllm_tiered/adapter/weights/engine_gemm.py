# SPDX-License-Identifier: Apache-2.0
"""GEMMs of vLLM's engine, for measurements: what its linear layers do with near and far weights."""

import importlib.util
from collections.abc import Sequence

import torch
from torch import nn

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
    count = min(max(2, -(-64 * MIB // first.nbytes)), 16)
    weights = [first, *(first.clone() for _ in range(count - 1))]
    found = []
    for num_tokens in rows:
        x = torch.randn((num_tokens, in_features), device=near_device).to(dtype)

        def product(turn: int, x: torch.Tensor = x) -> None:
            packing.linear(x, weights[turn % count], out_features)

        found.append(median_seconds(product, seconds, synchronizer(near_device)))
    return found


def computes_on(near_device: torch.device) -> bool:
    """Return whether the installed vLLM, if any, computes on a device."""
    if importlib.util.find_spec("vllm") is None:
        return False
    from vllm_tiered.adapter.compat import device_type

    return device_type() == near_device.type
