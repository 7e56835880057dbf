# SPDX-License-Identifier: Apache-2.0
"""GEMMs to be timed: the engine's own, or torch's in their place.

On a CPU vLLM packs the weights of linear layers, in a way that depends on dtype, shape and
instruction set. The adapter hands its GEMMs to the probe as :class:`Products`, as only the adapter
imports vLLM. Torch's own packing is as fast in bfloat16 (5 shapes, 1 to 256 rows, 1 and 2 threads,
within the noise; Xeon with AMX, 2026-11-22), but not in float32. A weight in a weight buffer cannot
be packed. On other devices both GEMMs are the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

Gemm: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Function from activations [rows, in] to [rows, out]."""

GemmOf: TypeAlias = Callable[[torch.Tensor], Gemm]
"""Function that returns the GEMM of a weight [out, in]."""

GemmSeconds: TypeAlias = Callable[
    [tuple[int, int], Sequence[int], torch.dtype, torch.device, float], Sequence[float]
]
"""Function that times GEMMs of a kind. It gets the shape (out, in) of the weight, the numbers of
rows, the dtype of the activations, the torch device and the seconds for one point. It returns the
seconds for each number of rows, or nothing if the device or the dtype has no such GEMM."""

ROWS_ON_THE_LEFT = 4
"""Least number of rows at which torch is faster with the unpacked weight as the left factor. The
engine then computes it so (the adapter's ``cpu_linear``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """GEMMs of an engine, by what it does with the weight.

    Attributes:
        source: whose GEMMs they are, for people.
        near: GEMMs with weights that stay near.
        far: GEMMs with weights in a weight buffer.
        int4_seconds: times GEMMs with a weight in our 4 bit; None if there are no such GEMMs.
        w4a16_seconds: likewise, with a weight as 4-bit checkpoints (AWQ, GPTQ, compressed-tensors)
            have it.
    """

    source: str
    near: GemmOf
    far: GemmOf
    int4_seconds: GemmSeconds | None = None
    w4a16_seconds: GemmSeconds | None = None


def near_gemm(weight: torch.Tensor) -> Gemm:
    """Return the GEMM of a weight [out, in] that stays near."""
    if not _packs(weight):
        return lambda x: torch.nn.functional.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def far_gemm(weight: torch.Tensor) -> Gemm:
    """Return the GEMM of a weight [out, in] in a weight buffer."""
    if weight.device.type != "cpu":
        return lambda x: torch.nn.functional.linear(x, weight)

    def gemm(x: torch.Tensor) -> torch.Tensor:
        if len(x) < ROWS_ON_THE_LEFT:
            return torch.nn.functional.linear(x, weight)
        return torch.matmul(weight, x.t()).t().contiguous()

    return gemm


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return False
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


TORCH = Products(source="torch", near=near_gemm, far=far_gemm)
"""Torch's own GEMMs, where the engine's are not known."""
