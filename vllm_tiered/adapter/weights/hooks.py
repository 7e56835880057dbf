# SPDX-License-Identifier: Apache-2.0
"""Forward hooks that acquire and release the weights of modules with offloaded parameters."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.offloader.base import BaseOffloader

from vllm_tiered.errors import UnsupportedError


class FarParameter(NamedTuple):
    """Offloaded parameter, with the module that owns it.

    Attributes:
        layer: the decoder layer.
        path: path of the owner in the layer, when the layer was built.
        owner: the module that owns the parameter and reads it.
        leaf: name of the parameter in the owner.
        position: position of its sublayer among the sublayers with offloaded parameters.
        parameter: the parameter.
    """

    layer: nn.Module
    path: str
    owner: nn.Module
    leaf: str
    position: int
    parameter: torch.Tensor


def register_hooks(parameters: Sequence[FarParameter], offloader: BaseOffloader) -> None:
    """Register hooks on each module that reads offloaded parameters.

    Args:
        parameters: the offloaded parameters.
        offloader: the offloader that acquires and releases the weights.

    Raises:
        UnsupportedError: another module has taken an owner's place without calling it.
    """
    owners = {(id(one.layer), one.path): one for one in parameters}
    for one in owners.values():
        module = reader_of(one)
        module.register_forward_pre_hook(_before(one.position, offloader), with_kwargs=True)
        module.register_forward_hook(_after(one.position, offloader))


def reader_of(parameter: FarParameter) -> nn.Module:
    """Return the module whose call reads the parameter: its owner, or what wraps the owner.

    A linear layer with adapters reads the weight of the layer that it wraps without calling it.

    Raises:
        UnsupportedError: the module in the owner's place does not contain it.
    """
    module = parameter.layer.get_submodule(parameter.path)
    if not any(part is parameter.owner for part in module.modules()):
        raise UnsupportedError(
            f"{parameter.path} was replaced by a {type(module).__name__} after it was built, so "
            "nothing waits for its weights: set weights.placement=off"
        )
    return module


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
