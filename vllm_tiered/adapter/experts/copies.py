# SPDX-License-Identifier: Apache-2.0
"""Copies of a layer's 16-bit experts in 4 bit, for those that are not worth a load."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_tiered.adapter.experts import int4
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.experts.fallback import Fallback
from vllm_tiered.experts.int4.packing import quantise
from vllm_tiered.experts.layout import ExpertBundle, ExpertTensor

GROUP = 32
"""Weights that share a scale."""

_MATRICES = ("w13", "w2")
_CODES, _SCALES, _BIAS = "int4.codes", "int4.scales", "int4.bias"


def check(layer: Any) -> None:
    """Raise UnsupportedError if the layer's experts cannot be computed in 4 bit."""
    reason = None
    found = [getattr(layer, f"{name}_weight", None) for name in _MATRICES]
    weights = [w for w in found if isinstance(w, torch.Tensor) and _is_in_16_bit(w)]
    if len(weights) != len(_MATRICES):
        reason = "they are quantized already"
    elif any(weight.device.type != "cpu" for weight in weights):
        reason = "they are on a GPU"
    elif not int4.can_activate(layer.activation):
        reason = f"their activation is {layer.activation.value}"
    elif layer.apply_router_weight_on_input:
        reason = "routing weights are multiplied into their input"
    elif any(weight.shape[2] % GROUP for weight in weights):
        reason = f"their rows are not whole groups of {GROUP} weights"
    if reason is not None:
        raise UnsupportedError(
            f"{layer.layer_name}: its experts cannot be computed in 4 bit, as {reason}: leave "
            "experts.fallback out"
        )


def shapes_of(layer: Any) -> dict[str, torch.Tensor]:
    """Return what :func:`make` will return, without memory (on the device "meta")."""
    made: dict[str, torch.Tensor] = {}
    for name in _MATRICES:
        experts, rows, length = layer.get_parameter(f"{name}_weight").shape
        sizes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            _CODES: ((experts, rows, length // 2), torch.uint8),
            _SCALES: ((experts, rows, length // GROUP), torch.bfloat16),
        }
        if _bias(layer, name) is not None:
            sizes[_BIAS] = (experts, rows), torch.float32
        for part, (shape, dtype) in sizes.items():
            made[f"{name}.{part}"] = torch.empty(shape, dtype=dtype, device="meta")
    return made


def make(layer: Any) -> dict[str, torch.Tensor]:
    """Return copies of all experts, [experts, ...] by name, of the checkpoint's weights."""
    made: dict[str, torch.Tensor] = {}
    for name in _MATRICES:
        matrix = quantise(layer.get_parameter(f"{name}_weight").data, GROUP)
        made[f"{name}.{_CODES}"], made[f"{name}.{_SCALES}"] = matrix.codes, matrix.scales
        if (bias := _bias(layer, name)) is not None:
            made[f"{name}.{_BIAS}"] = bias.data.float().clone()
    return made


def from_rows(
    rows: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return copies from the bytes of all experts, uint8 [experts, row bytes] by name."""
    return {
        name: rows[name].reshape(-1).view(shape.dtype).view(shape.shape)
        for name, shape in shapes.items()
    }


def fallback(layer: Any, copies: Mapping[str, torch.Tensor], share: float) -> Fallback:
    """Return how the layer computes with its copies.

    Args:
        share: the most of a token's routing weight that is computed so.
    """
    no_zeros, no_limit = None, None
    parts = [
        part
        for name in _MATRICES
        for part in (
            copies[f"{name}.{_CODES}"],
            copies[f"{name}.{_SCALES}"],
            no_zeros,
            copies.get(f"{name}.{_BIAS}"),
        )
    ]
    activation = layer.activation.value

    def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return int4.compute(x.float(), weights, ids, parts, activation, no_limit)

    return Fallback(share, run)


def with_copies(bundle: ExpertBundle, copies: Mapping[str, torch.Tensor]) -> ExpertBundle:
    """Return the bundle with the copies as tensors that stay in host memory."""
    resident = tuple(
        ExpertTensor(name=name, row_bytes=copy[0].nbytes, is_resident=True)
        for name, copy in copies.items()
    )
    return ExpertBundle(tensors=bundle.tensors + resident)


def _is_in_16_bit(weight: torch.Tensor) -> bool:
    """Return whether a tensor is a matrix of each expert, in 16 or 32 bit."""
    return weight.ndim == 3 and weight.is_floating_point() and weight.itemsize >= 2


def _bias(layer: Any, name: str) -> torch.Tensor | None:
    bias: torch.Tensor | None = getattr(layer, f"{name}_bias", None)
    return bias
