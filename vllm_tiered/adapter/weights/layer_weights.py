# SPDX-License-Identifier: Apache-2.0
"""Parameters of a vLLM layer: which can be offloaded, and where they are during loading."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_tiered.adapter.weights.quantized import is_quantized, movable_tensors, named_tensors
from vllm_tiered.probe.gemm import ROWS_ON_THE_LEFT
from vllm_tiered.weights.int4.layout import compressed_bytes

IsElsewhere = Callable[[nn.Module], bool]
"""Whether another part of the plugin keeps a module's parameters."""


def placed_tensors(
    layer: nn.Module, is_elsewhere: IsElsewhere
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the layer's tensors with their names, without those that another part keeps.

    They are its parameters, and the buffers of quantized linear layers.
    """
    others = {
        id(parameter)
        for module in layer.modules()
        if is_elsewhere(module)
        for parameter in module.parameters(recurse=False)
    }
    for name, parameter in layer.named_parameters():
        if id(parameter) not in others:
            yield name, parameter
    for path, module in layer.named_modules():
        if is_quantized(module):
            for name, buffer in module.named_buffers(prefix=path, recurse=False):
                yield name, buffer


def parameter_bytes(
    parameters: Iterable[tuple[str, torch.Tensor]], compressed: Collection[str]
) -> dict[str, int]:
    """Return the bytes of each parameter in its tier; those in ``compressed`` are in 4 bit.

    Call it before the parameters are compressed.
    """
    return {
        name: compressed_bytes(p.shape[0], p.shape[1], p.itemsize)
        if name in compressed
        else p.nbytes
        for name, p in parameters
    }


def movable_parameters(layer: nn.Module) -> set[str]:
    """Return the names of the parameters that only a linear layer reads, within its own call.

    Other modules may read the rest at any time. Examples are convolutions of state-space models,
    and biases that a layer returns to be added later. Call it when quantized layers are processed.
    """
    names: set[str] = set()
    for path, module in readers(layer):
        prefix = f"{path}." if path else ""
        if is_quantized(module):
            skipped = {"bias"} if getattr(module, "skip_bias_add", False) else set()
            names.update(f"{prefix}{name}" for name in movable_tensors(module) - skipped)
            continue
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.ndim != 2 or not weight.is_contiguous():
            continue
        names.add(f"{prefix}weight")
        if not getattr(module, "skip_bias_add", False):
            names.add(f"{prefix}bias")
    return names


def readers(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers, with their paths, whose weights no other module reads."""
    read_elsewhere = {id(module) for module in _read_elsewhere(layer)}
    for path, module in layer.named_modules():
        if isinstance(module, LinearBase | nn.Linear) and id(module) not in read_elsewhere:
            yield path, module


def tensors_of_readers(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the linear layers whose weights no other module reads, by their names.

    All that is movable is among them.
    """
    for path, module in readers(layer):
        for name, tensor in named_tensors(module):
            yield f"{path}.{name}", tensor


def _read_elsewhere(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear layers whose weights other modules may read.

    A module that processes weights itself may make tensors of its own from the weights of the
    linear layers in it: attention over latents absorbs one. A mixture of experts joins the weights
    of its gates, and its router may be called before its layer is.
    """
    for module in layer.modules():
        if isinstance(module, LinearBase):
            continue
        if callable(getattr(module, "process_weights_after_loading", None)):
            yield from module.modules()
        config = getattr(module, "moe_config", None)
        if config is not None:
            yield from module.children()
            shape = (config.num_logical_experts, config.hidden_dim)
            yield from (child for child in layer.modules() if _has_shape(child, shape))


def _has_shape(module: nn.Module, shape: tuple[int, int]) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and tuple(weight.shape) == shape


def shared_parameters(layers: Sequence[nn.Module]) -> set[int]:
    """Return the ids of the parameters that more than one layer or module has."""
    counts = Counter(
        id(parameter)
        for layer in layers
        for module in layer.modules()
        for parameter in module.parameters(recurse=False)
    )
    return {parameter for parameter, count in counts.items() if count > 1}


def move_to_host(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Move a new layer's parameters to the host, as the layers may exceed near memory."""
    for _, parameter in parameters:
        parameter.data = parameter.data.to("cpu")


def move_to_near(
    parameters: Iterable[tuple[str, torch.Tensor]],
    near_device: torch.device,
    *,
    from_files: bool = False,
) -> None:
    """Move parameters to near memory; from files they are copied even if the host's is near."""
    for _, parameter in parameters:
        parameter.data = parameter.data.to(near_device, copy=from_files)


def disable_weight_processing(module: nn.Module) -> None:
    """Make vLLM leave an unquantized weight as it was loaded, and where it was loaded.

    vLLM's CPU backend would keep a packed copy in near memory. On a GPU, vLLM would move the weight
    to the GPU and back to new pinned memory, although it does not process unquantized weights. That
    would double the host memory that far weights take.
    """
    method = getattr(module, "quant_method", None)
    if isinstance(method, UnquantizedLinearMethod):
        module._cpu_skip_gemm_dispatch = True  # type: ignore[assignment]
        method.requires_device_loading = False


def skip_loading(parameter: torch.Tensor) -> None:
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
