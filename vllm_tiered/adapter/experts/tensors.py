# SPDX-License-Identifier: Apache-2.0
"""The tensors of vLLM's `RoutedExperts` that belong to experts, and the memory they have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from vllm_tiered.errors import UnsupportedError
from vllm_tiered.experts.layout import SMALLEST_PAGE_BYTES, ExpertBundle, ExpertTensor
from vllm_tiered.experts.store import KNOB
from vllm_tiered.storage.direct_file import ALIGNMENT
from vllm_tiered.storage.immutable_file import Draft
from vllm_tiered.units import format_bytes

_MOST_SMALL = 0.05
"""Largest share of a stored expert's bytes in rows that stay in host memory."""


def check_layer(layer: Any) -> None:
    """Raise UnsupportedError if the layer's experts cannot pass through slots."""
    method = layer.quant_method
    parallel = layer.moe_config.moe_parallel_config
    devices = {tensor.device.type for tensor in expert_tensors(layer).values()}
    reason = None
    if not isinstance(method, FusedMoEMethodBase):
        reason = f"{type(method).__name__} computes them, which is not one of vLLM's methods"
    elif devices not in ({"cpu"}, {"cuda"}):
        on = " and ".join(sorted(devices)) or "no device"
        reason = f"its experts are on {on}, and only CPUs and NVIDIA's GPUs are served"
    elif parallel.use_ep or parallel.enable_eplb or parallel.dp_size > 1:
        reason = "its experts are spread over ranks (expert or data parallel)"
    elif method.is_monolithic:
        reason = f"its kernel routes by itself ({kernel_name(method)})"
    elif method.mk_can_overlap_shared_experts:
        reason = "its kernel runs the shared experts"
    if reason is not None:
        raise UnsupportedError(
            f"{layer.layer_name}: {reason}: leave tiered.experts.near_gib out for this model"
        )


def kernel_name(method: Any) -> str:
    """Return the name of the kernel that a quantization method chose."""
    return getattr(getattr(method, "experts_cls", method), "__name__", type(method).__name__)


def takes_float32(method: Any) -> bool:
    """Return whether the kernel returns float32 for inputs of float32, whatever the model's."""
    kernel = getattr(method.moe_kernel, "fused_experts", None)
    return bool(getattr(kernel, "TAKES_FLOAT32", False))


def expert_tensors(layer: nn.Module, *also: int) -> dict[str, torch.Tensor]:
    """Return the layer's tensors with a leading dimension of experts (or of ``also``), by name.

    The router's bias has one, too, but it is the gate's, which refers to it from here.
    """
    leading = {layer.local_num_experts, *also}
    return {
        name: parameter.data
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.ndim
        and parameter.shape[0] in leading
        and parameter is not layer.e_score_correction_bias
    }


def processed_tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Return the experts' tensors, of all experts or of the one that stands for them."""
    return expert_tensors(layer, 1)


def bundle_of(tensors: Mapping[str, torch.Tensor]) -> ExpertBundle:
    """Return the bundle that these tensors make, [experts, ...] each."""
    return ExpertBundle(
        tensors=tuple(
            ExpertTensor(name=name, row_bytes=tensor[0].nbytes) for name, tensor in tensors.items()
        )
    )


def check_mostly_paged(layer: Any, bundle: ExpertBundle) -> None:
    """Raise UnsupportedError if too much of a stored expert would stay in host memory."""
    small = sum(tensor.row_bytes for tensor in bundle.small)
    if small > _MOST_SMALL * bundle.num_bytes:
        raise UnsupportedError(
            f"{layer.layer_name}: {format_bytes(small)} of an expert's "
            f"{format_bytes(bundle.num_bytes)} are in rows that are not whole blocks of "
            f"{SMALLEST_PAGE_BYTES} bytes, and would stay in host memory: leave {KNOB} out"
        )


def keep_one_expert(layer: nn.Module, bundle: ExpertBundle) -> None:
    """Free the memory of the layer's tensors, but for the first expert's rows."""
    for tensor in bundle.tensors:
        parameter = layer.get_parameter(tensor.name)
        parameter.data = parameter.data[:1].clone()


def check_nothing_else(layer: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise UnsupportedError if the kernel reads experts from other tensors than the layer's.

    It finds scales, zero points and biases in its quantization config, by reference.
    """
    known = {tensor.data_ptr() for tensor in tensors.values()}
    method = layer.quant_method
    config, kernel = method.moe_quant_config, method.moe_kernel
    owners = [config, kernel and getattr(kernel, "fused_experts", None)]
    owners += list(vars(config).values()) if config is not None else []
    for owner in owners:
        for name, value in getattr(owner, "__dict__", {}).items():
            if (
                isinstance(value, torch.Tensor)
                and value.numel()
                and value.ndim
                and value.shape[0] == layer.local_num_experts
                and value.data_ptr() not in known
            ):
                raise UnsupportedError(
                    f"{layer.layer_name}: its kernel keeps experts in a tensor of its own ({name}):"
                    " leave tiered.experts.near_gib out for this model"
                )


def move_to_draft(parameter: nn.Parameter, folder: Path) -> Draft:
    """Let a parameter's memory be that of a file which is deleted when it is closed."""
    num_bytes = parameter.nbytes
    draft = Draft(folder, -(-num_bytes // ALIGNMENT), ALIGNMENT, knob=KNOB)
    flat = draft.memory.view(-1)[:num_bytes]
    parameter.data = flat.view(parameter.dtype).view(parameter.shape)
    return draft


def load_nothing(*args: object, **kwargs: object) -> bool:
    """Stand in for a parameter's loader: the file of stored experts has it already."""
    return True


load_nothing.supports_moe_loading = True  # type: ignore[attr-defined]  # Llama 4 asks
