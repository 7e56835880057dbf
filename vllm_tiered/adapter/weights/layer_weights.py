# SPDX-License-Identifier: Apache-2.0
"""Parameters of a vLLM layer: which can be placed, and where they are while it is built."""

from collections.abc import Collection

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_tiered.errors import UnsupportedError
from vllm_tiered.probe.gemm import ROWS_ON_THE_LEFT
from vllm_tiered.weights.int4.layout import compressed_bytes


def parameter_bytes(layer: nn.Module, compressed: Collection[str]) -> dict[str, int]:
    """Return the bytes of each parameter in its tier, with ``compressed`` ones in 4 bit.

    Call it before parameters are compressed.
    """
    return {
        name: compressed_bytes(p.shape[0], p.shape[1], p.itemsize)
        if name in compressed
        else p.nbytes
        for name, p in layer.named_parameters()
    }


def movable_parameters(layer: nn.Module) -> set[str]:
    """Return the parameters that only a linear layer reads, within its own call.

    Other modules may read the rest at any time: convolutions of state-space models, biases that are
    returned to be added later.
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
    """Move a new layer's parameters to the host: the model may be larger than near memory."""
    for name, parameter in layer.named_parameters():
        if not parameter.is_contiguous():
            raise UnsupportedError(
                f"parameter {name} of shape {tuple(parameter.shape)} is not contiguous: set "
                "weights.placement=off for this model"
            )
        parameter.data = parameter.data.to("cpu")


def move_to_near(layer: nn.Module, far_names: Collection[str], near_device: torch.device) -> None:
    """Move all parameters but those in ``far_names`` to near memory."""
    for name, parameter in layer.named_parameters():
        if name not in far_names:
            parameter.data = parameter.data.to(near_device)


def disable_weight_processing(module: nn.Module) -> None:
    """Let vLLM leave the layer's weight as and where it was loaded.

    vLLM's CPU backend would keep a packed copy near. On a GPU, where an unquantized weight is not
    processed, vLLM would move it to the GPU and back to new pinned memory: that would take as much
    memory again as all that is far.
    """
    module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]
    method = getattr(module, "quant_method", None)
    if isinstance(method, UnquantizedLinearMethod):
        method.requires_device_loading = False


def skip_loading(parameter: nn.Parameter) -> None:
    """Make vLLM's loaders skip a parameter that the file of stored weights already has.

    Its memory is a weight buffer, which sublayers share. Loaders read a tensor when they copy it,
    so the parameter's tensors are not read.
    """
    parameter.weight_loader = _load_nothing  # type: ignore[attr-defined]


def _load_nothing(*args: object, **kwargs: object) -> None:
    return None


def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply with a weight in the checkpoint's layout, where vLLM would have packed it.

    For several rows torch is faster with the weight on the left: 2048 x 8192 in bfloat16, 8, 38 and
    256 rows on one core: 2.4, 4.2 and 7.8 ms against 2.9, 6.0 and 9.9; packed 2.5, 4.2 and 10.1
    (Xeon with AMX, 2026-11-22).
    """
    # Compiled code serves any number of rows: it must not depend on it.
    if torch.compiler.is_compiling() or x.ndim != 2 or len(x) < ROWS_ON_THE_LEFT:
        return torch.nn.functional.linear(x, weight, bias)
    product = torch.matmul(weight, x.t()).t().contiguous()
    return product if bias is None else product.add_(bias)
