# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantized checkpoints, whose tensors are final when vLLM has processed them.

A quantization method may pack a layer's weights in another order, replace its scales, drop its zero
points, and keep some of it elsewhere. So nothing is known of these layers until they are loaded and
processed. Then each tensor that such a layer owns is opaque bytes with a shape and strides, and has
a home as any other parameter has.

    a layer is built       its tensors move to host memory
    weights are loaded     the loader writes to host memory
    a layer is processed   on the device that computes, one linear layer at a time; what it has
                           then moves back to host memory
    all are processed      the placement is chosen, and tensors move to their tiers

Where host memory is too small for all layers, files take its place, if weights may be stored.

A tensor that the method's own objects refer to, too, does not move: they would go on to read it
where it was.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_tiered.adapter.weights.int8_on_cpu import keep_weight
from vllm_tiered.errors import BudgetError, UnsupportedError
from vllm_tiered.units import format_bytes

SMALLEST_BYTES = 4096
"""Smallest tensor that moves. Smaller ones are scales of whole matrices, whose copies cost more."""

_LEAST_SHARE = 0.8
"""Least share of a layer's bytes in the checkpoint that its tensors have once it is processed."""

_MAX_DEPTH = 4
"""Number of objects, one in the other, in which a quantization method may keep a tensor."""


def is_quantized(module: nn.Module) -> bool:
    """Return whether a linear layer's weights are in a quantization method's own tensors."""
    return isinstance(module, LinearBase) and not isinstance(
        module.quant_method, UnquantizedLinearMethod
    )


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers that a module itself owns, by their names in it."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def movable_tensors(module: nn.Module) -> set[str]:
    """Return the names of the tensors of a processed layer that may have another home."""
    kept = set(_kept_addresses(module))
    return {
        name
        for name, tensor in named_tensors(module)
        if tensor.nbytes >= SMALLEST_BYTES
        and type(tensor.data) is torch.Tensor
        and is_dense(tensor)
        and tensor.untyped_storage().data_ptr() not in kept
    }


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps, in whatever order."""
    sizes = sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    expected = 1
    for stride, size in sizes:
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0


def fits_host_memory(num_bytes: int, usable_bytes: int, *, may_store: bool) -> bool:
    """Return whether host memory can hold layers until their placement is chosen.

    Args:
        num_bytes: bytes of all layers in the checkpoint, on this rank.
        usable_bytes: host memory that this rank could use before the layers were built.
        may_store: whether files may hold them instead.

    Raises:
        BudgetError: it cannot, and files may not; the message has the numbers.
    """
    if num_bytes <= usable_bytes:
        return True
    if may_store:
        return False
    raise BudgetError(
        f"quantized layers are placed when they are loaded, and theirs take "
        f"{format_bytes(num_bytes)} of host memory until then, which has "
        f"{format_bytes(usable_bytes)}: set weights.storage_path, use more ranks, or set "
        "weights.placement=off"
    )


ToHost = Callable[[torch.Tensor], torch.Tensor]
"""Function that moves a tensor to host memory, or to what takes its place."""


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory."""
    return tensor.to("cpu")


def process_on(
    near_device: torch.device, modules: Iterable[nn.Module], home: ToHost = to_host
) -> None:
    """Let linear layers be processed on the device that computes, and be in host memory otherwise.

    vLLM would move their parameters to the device and back itself, but leave on the device whatever
    has a new name, and allocate twice the host memory.

    Args:
        near_device: torch device that computes.
        modules: quantized linear layers, not loaded yet.
        home: moves a processed tensor to where it is until it is placed.
    """
    ours = {id(module) for module in modules}
    for module in modules:
        method: Any = module.quant_method
        method.requires_device_loading = False
        if not isinstance(method.process_weights_after_loading, partial):
            original = method.process_weights_after_loading
            process = partial(_process, original, ours, near_device, home)
            method.process_weights_after_loading = process


def _process(
    original: Callable[..., None],
    ours: set[int],
    near_device: torch.device,
    home: ToHost,
    layer: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> None:
    if id(layer) not in ours:
        original(layer, *args, **kwargs)
        return
    before = sum(tensor.nbytes for _, tensor in named_tensors(layer))
    for _, tensor in named_tensors(layer):
        tensor.data = tensor.data.to(near_device)
    restore_weight = keep_weight(layer)
    original(layer, *args, **kwargs)
    restore_weight()
    after = sum(tensor.nbytes for _, tensor in named_tensors(layer))
    if after < _LEAST_SHARE * before:
        raise UnsupportedError(
            f"{kernel_name(layer)} keeps the weights of {getattr(layer, 'prefix', 'a layer')} in "
            f"memory of its own ({format_bytes(after)} of {format_bytes(before)} are left in "
            "tensors), so they cannot be offloaded: set weights.placement=off"
        )
    movable = movable_tensors(layer)
    for name, tensor in named_tensors(layer):
        if name in movable:
            tensor.data = home(tensor.data)


def kernel_name(layer: nn.Module) -> str:
    """Return the name of the kernel that computes a quantized layer, or of what calls it."""
    method = layer.quant_method
    for owner in (method, getattr(layer, "scheme", None)):
        for name in ("kernel", "fp8_linear", "linear_kernel"):
            if (kernel := getattr(owner, name, None)) is not None:
                return type(kernel).__name__
    return type(method).__name__


def _kept_addresses(module: nn.Module) -> Iterator[int]:
    """Yield addresses of the memory of tensors that a layer's method, scheme and kernel keep."""
    seen = {id(module)}
    others = [
        value
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
    ]
    for value in others:
        yield from _tensors_in(value, seen, _MAX_DEPTH)


def _tensors_in(value: Any, seen: set[int], depth: int) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta":
            yield value.untyped_storage().data_ptr()
        return
    if depth == 0 or id(value) in seen or isinstance(value, nn.Module | type):
        return
    seen.add(id(value))
    for part in _parts_of(value):
        yield from _tensors_in(part, seen, depth - 1)


def _parts_of(value: Any) -> Iterable[Any]:
    """Return what an object of vLLM's, a container or a function refers to."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if closure := getattr(value, "__closure__", None):
        return [cell.cell_contents for cell in closure if cell != CellType()]
    if (owner := getattr(value, "__self__", None)) is not None and not isinstance(owner, type):
        return [owner]
    if type(value).__module__.startswith("vllm"):
        return vars(value).values() if hasattr(value, "__dict__") else ()
    return ()
