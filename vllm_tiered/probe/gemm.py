# SPDX-License-Identifier: Apache-2.0
"""GEMMs as the engine computes them: near weights are packed, far weights are not.

On a CPU vLLM packs the weights of linear layers for oneDNN. Torch's own packing is as fast (5
shapes, 1 to 256 rows, 1 and 2 threads, within the noise; Xeon with AMX, 2026-11-22). A weight in a
weight buffer cannot be packed. On other devices both GEMMs are the same.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch

Gemm: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Function from activations [rows, in] to [rows, out]."""

ROWS_ON_THE_LEFT = 4
"""Least number of rows at which torch is faster with the unpacked weight as the left factor. The
engine then computes it so (the adapter's ``cpu_linear``)."""


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
