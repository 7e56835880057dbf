# SPDX-License-Identifier: Apache-2.0
"""From a placement's names to the model's tensors, their owners and their sublayers."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from vllm_tiered.adapter.weights.hooks import FarParameter
from vllm_tiered.weights.layout import Parameter
from vllm_tiered.weights.offloaded_weights import OffloadedParameter, OffloadedSublayer
from vllm_tiered.weights.placement import Placement


class Offloaded(NamedTuple):
    """Tensors that a placement offloads.

    Attributes:
        sublayers: sublayers with offloaded tensors, in the order of computation.
        parameters: the tensors with their owners, in the same order.
        names: for each layer, the names of the tensors.
    """

    sublayers: list[OffloadedSublayer]
    parameters: list[FarParameter]
    names: list[set[str]]


def find_offloaded(
    layers: Sequence[nn.Module], compressed: Sequence[Collection[str]], placement: Placement
) -> Offloaded:
    """Return the tensors that a placement offloads.

    Args:
        layers: the decoder layers.
        compressed: for each layer, the matrices that will be in 4 bit.
        placement: placement of the layers.
    """

    def tensors(index: int, chosen: Iterable[Parameter]) -> list[OffloadedParameter]:
        return [
            OffloadedParameter(
                _tensor(layers[index], p.name), p.num_bytes, p.name in compressed[index]
            )
            for p in chosen
        ]

    found = Offloaded([], [], [set() for _ in layers])
    for sublayer, (far, stored) in zip(placement.sublayers, placement.offloaded, strict=True):
        if not far and not stored:
            continue
        index, position = sublayer.layer, len(found.sublayers)
        group = OffloadedSublayer(tensors(index, far), tensors(index, stored))
        found.sublayers.append(group)
        found.names[index].update(p.name for p in (*far, *stored))
        found.parameters.extend(
            FarParameter(layers[index], *_owner(layers[index], p.name), position, one.parameter)
            for p, one in zip((*far, *stored), (*group.far, *group.stored), strict=True)
        )
    return found


def _owner(layer: nn.Module, name: str) -> tuple[str, nn.Module, str]:
    """Return the path of the module that owns a tensor, the module, and the name in it."""
    path, _, leaf = name.rpartition(".")
    return path, layer.get_submodule(path), leaf


def _tensor(layer: nn.Module, name: str) -> torch.Tensor:
    """Return a parameter or a buffer by its name in the layer."""
    _, owner, leaf = _owner(layer, name)
    tensor: torch.Tensor = getattr(owner, leaf)
    return tensor
