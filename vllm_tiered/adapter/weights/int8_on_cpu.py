# SPDX-License-Identifier: Apache-2.0
"""W8A8 linear layers on a CPU, whose weights vLLM packs into memory of oneDNN's own.

What oneDNN has packed has no address, so it cannot be moved. Layers that are offloaded keep the
int8 weight as a tensor, and multiply with PyTorch's operator: the same integers, with the scales
applied in the same order. With one row it takes as long, with 16 and more up to 4 times as long.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from vllm_tiered.adapter.compat import device_type


def keep_weight(layer: nn.Module) -> Callable[[], None]:
    """Return a function that undoes the packing of a layer that is about to be processed.

    Args:
        layer: linear layer with its checkpoint's tensors. Layers of which oneDNN packs nothing stay
            as vLLM processes them.
    """
    kernel: Any = getattr(getattr(layer, "scheme", None), "kernel", None)
    if device_type() != "cpu" or not hasattr(kernel, "process_weights_for_onednn"):
        return lambda: None
    name = kernel.layer_param_names[0]
    weight_NK = getattr(layer, name).data

    def restore() -> None:
        if getattr(layer, name) is not None:
            return
        del kernel.dnnl_handler
        setattr(layer, name, nn.Parameter(weight_NK.t(), requires_grad=False))
        kernel.linear_method = partial(_apply, kernel)

    return restore


def _apply(
    kernel: Any, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply as oneDNN's kernel does: sums in int32, the weight's scales, then the rows'."""
    from vllm import _custom_ops as ops

    weight_KN, weight_scale, static_scale, static_zero, adjustment_N = kernel._get_layer_params(
        layer
    )
    rows_MK = x.reshape(-1, x.shape[-1])
    codes_MK, scale_M1, zero_M1 = ops.onednn_scaled_int8_quant(
        rows_MK, static_scale, static_zero, kernel.config.input_symmetric
    )
    sums_MN = torch._int_mm(codes_MK, weight_KN).float()
    product_MN = sums_MN * weight_scale.view(1, -1)
    if zero_M1 is None:
        product_MN *= scale_M1
    else:  # vLLM multiplies and subtracts with one rounding, as float64 does
        shift_MN = scale_M1 * zero_M1 * adjustment_N
        product_MN = (product_MN.double() * scale_M1 - shift_MN).float()
    if bias is not None:
        product_MN += bias
    return product_MN.to(x.dtype).reshape(*x.shape[:-1], -1)
