# SPDX-License-Identifier: Apache-2.0
"""Forward hooks that acquire and release the weights of modules with offloaded parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.offloader.base import BaseOffloader

from vllm_tiered.adapter.weights.layer_weights import disable_weight_processing


def register_hooks(
    layer: nn.Module, names: Sequence[str], position: int, offloader: BaseOffloader
) -> None:
    """Register hooks on each module that owns offloaded parameters.

    Args:
        layer: a decoder layer.
        names: names of the offloaded parameters in the layer.
        position: position of their sublayer among the sublayers with offloaded parameters.
        offloader: the offloader that acquires and releases the weights.
    """
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = layer.get_submodule(path)
        disable_weight_processing(module)
        module.register_forward_pre_hook(_before(position, offloader), with_kwargs=True)
        module.register_forward_hook(_after(position, offloader))


def _before(position: int, offloader: BaseOffloader) -> Any:
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            torch.ops.vllm.wait_prefetch(_first_tensor((*args, *kwargs.values())), position)
        else:
            offloader._wait_for_layer(position)

    return before


def _after(position: int, offloader: BaseOffloader) -> Any:
    def after(module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            torch.ops.vllm.start_prefetch(_first_tensor(output), position)
        else:
            offloader._start_prefetch(position)

    return after


def _first_tensor(values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    return next(value for value in values if isinstance(value, torch.Tensor))
