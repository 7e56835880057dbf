# SPDX-License-Identifier: Apache-2.0
"""Products as the engine computes them: a near weight packed, a far one as the checkpoint has it.

On a CPU vLLM packs the weights of linear layers for oneDNN; torch's own packing is as fast (5
shapes, 1 to 256 rows, 1 and 2 threads, within the noise; Xeon with AMX, 2026-11-22). A weight that
passes through a staging slot cannot be packed. Elsewhere the two are the same product.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch

Gemm: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Activations [rows, in] to [rows, out]."""

ROWS_ON_THE_LEFT = 4
"""From so many rows on torch is faster with an unpacked weight on the left of the product, and the
engine computes it so (the adapter's ``cpu_linear``)."""


def near_gemm(weight: torch.Tensor) -> Gemm:
    """With a weight [out, in] that stays near."""
    if not _packs(weight):
        return lambda x: torch.nn.functional.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def far_gemm(weight: torch.Tensor) -> Gemm:
    """With a weight [out, in] in a staging slot."""
    if weight.device.type != "cpu":
        return lambda x: torch.nn.functional.linear(x, weight)

    def product(x: torch.Tensor) -> torch.Tensor:
        if len(x) < ROWS_ON_THE_LEFT:
            return torch.nn.functional.linear(x, weight)
        return torch.matmul(weight, x.t()).t().contiguous()

    return product


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return False
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())
