# SPDX-License-Identifier: Apache-2.0
"""Times of loaded linear layers, measured by calling their quantization method.

A matrix in 16 bit is timed by its shape before it exists (`measurements`). What a quantized layer
takes depends on its kernel, so it is timed when it is loaded and processed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase

from vllm_tiered.adapter.weights.layer_weights import readers
from vllm_tiered.adapter.weights.quantized import named_tensors
from vllm_tiered.probe.links import SECONDS, median_seconds, synchronizer


def module_seconds(
    layers: Sequence[nn.Module], near_device: torch.device, num_tokens: int
) -> list[dict[str, float]]:
    """Return the seconds of each linear layer's product, by the name of its first tensor.

    Layers whose method and tensors have the same form are timed once.

    Args:
        layers: the decoder layers, loaded and processed, their tensors in any memory.
        near_device: torch device that computes.
        num_tokens: number of activation rows.
    """
    known: dict[Any, float] = {}
    found: list[dict[str, float]] = []
    for layer in layers:
        by_name: dict[str, float] = {}
        for path, module in readers(layer):
            tensors = dict(named_tensors(module))
            if not isinstance(module, LinearBase) or not tensors:
                continue
            form = (
                type(module.quant_method),
                *((name, one.dtype, *one.shape) for name, one in tensors.items()),
            )
            if form not in known:
                known[form] = _seconds(module, near_device, num_tokens)
            by_name[f"{path}.{next(iter(tensors))}"] = known[form]
        found.append(by_name)
    return found


def _seconds(module: LinearBase, near_device: torch.device, num_tokens: int) -> float:
    homes = {name: tensor.data for name, tensor in named_tensors(module)}
    width = getattr(module, "input_size_per_partition", module.input_size)
    x = torch.randn((num_tokens, width), device=near_device).to(module.params_dtype)

    def product(turn: int) -> None:
        module.quant_method.apply(module, x, None)

    try:
        for _, tensor in named_tensors(module):
            tensor.data = tensor.data.to(near_device)
        with torch.inference_mode():
            return median_seconds(product, SECONDS, synchronizer(near_device))
    finally:
        for name, tensor in named_tensors(module):
            tensor.data = homes[name]
