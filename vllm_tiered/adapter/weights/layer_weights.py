# SPDX-License-Identifier: Apache-2.0
"""Parameters of a vLLM layer: which can be offloaded, and where they are during loading."""

from collections.abc import Collection

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_tiered.errors import UnsupportedError
from vllm_tiered.probe.gemm import ROWS_ON_THE_LEFT
from vllm_tiered.weights.int4.layout import compressed_bytes


def parameter_bytes(layer: nn.Module, compressed: Collection[str]) -> dict[str, int]:
    """Return the bytes of each parameter in its tier; those in ``compressed`` are in 4 bit.

    Call it before the parameters are compressed.
    """
    return {
        name: compressed_bytes(p.shape[0], p.shape[1], p.itemsize)
        if name in compressed
        else p.nbytes
        for name, p in layer.named_parameters()
    }


def movable_parameters(layer: nn.Module) -> set[str]:
    """Return the names of the parameters that only a linear layer reads, within its own call.

    Other modules may read the rest at any time. Examples are convolutions of state-space models,
    and biases that a layer returns to be added later.
    """
    names: set[str] = set()
    for path, module in layer.named_modules():
        if not isinstance(module, LinearBase | nn.Linear) or module.weight.ndim != 2:
            continue
        prefix = f"{path}." if path else ""
        names.add(f"{prefix}weight")
        if not getattr(module, "skip_bias_add", False):
            names.add(f"{prefix}bias")
    return names


def move_to_host(layer: nn.Module) -> None:
    """Move a new layer's parameters to the host, as the model may exceed near memory."""
    for name, parameter in layer.named_parameters():
        if not parameter.is_contiguous():
            raise UnsupportedError(
                f"parameter {name} of shape {tuple(parameter.shape)} is not contiguous: set "
                "weights.placement=off for this model"
            )
        parameter.data = parameter.data.to("cpu")


def move_to_near(layer: nn.Module, far_names: Collection[str], near_device: torch.device) -> None:
    """Move all parameters except those in ``far_names`` to near memory."""
    for name, parameter in layer.named_parameters():
        if name not in far_names:
            parameter.data = parameter.data.to(near_device)


def disable_weight_processing(module: nn.Module) -> None:
    """Make vLLM leave the layer's weight as it was loaded, and where it was loaded.

    vLLM's CPU backend would keep a packed copy in near memory. On a GPU, vLLM would move the weight
    to the GPU and back to new pinned memory, although it does not process unquantized weights. That
    would double the host memory that far weights take.
    """
    module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]
    method = getattr(module, "quant_method", None)
    if isinstance(method, UnquantizedLinearMethod):
        method.requires_device_loading = False


def skip_loading(parameter: nn.Parameter) -> None:
    """Make vLLM's loaders skip a parameter that the file of stored weights already has.

    The parameter is a view of a weight buffer, which several sublayers share. Loaders read a
    checkpoint tensor only when they copy it, so the parameter's tensors are not read at all.
    """
    parameter.weight_loader = _load_nothing  # type: ignore[attr-defined]


def _load_nothing(*args: object, **kwargs: object) -> None:
    return None


def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply with a weight in the checkpoint's layout, which vLLM would have packed.

    For several rows, torch is faster with the weight on the left. Milliseconds on one core with a
    2048 x 8192 weight in bfloat16 (Xeon with AMX, 2026-11-22):

        rows of x               8     38    256
        weight on the left     2.4    4.2    7.8
        weight on the right    2.9    6.0    9.9
        packed                 2.5    4.2   10.1
    """
    # Compiled code serves any number of rows, so it must not branch on the number.
    if torch.compiler.is_compiling() or x.ndim != 2 or len(x) < ROWS_ON_THE_LEFT:
        return torch.nn.functional.linear(x, weight, bias)
    product = torch.matmul(weight, x.t()).t().contiguous()
    return product if bias is None else product.add_(bias)
