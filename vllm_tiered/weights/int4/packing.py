# SPDX-License-Identifier: Apache-2.0
"""Packing of weights in 4 bit for each device: the same values and bytes in different orders.

torch's CPU kernels need one order (``cpu.py``), our GPU kernel another one
(``kernels/dequant_linear``). The host packs a weight in the right order when it is loaded.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

import torch

from vllm_tiered.weights.int4 import cpu as int4
from vllm_tiered.weights.int4.layout import GROUP, compressed_bytes
from vllm_tiered.weights.int4.rounding import round_groups

_CHUNK_WEIGHTS = 1 << 22  # rounding needs several times their size in float32


class Gemm(Protocol):
    """GEMM of x [..., K] with a compressed weight: ``x @ w.T + bias``, [..., rows]."""

    def __call__(
        self,
        x: torch.Tensor,
        compressed: torch.Tensor,
        rows: int,
        bias_N: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class Packing(NamedTuple):
    """Order of a compressed weight's bytes, with the functions that make and use it.

    Attributes:
        compress: compresses a weight [N, K] into ``out``, uint8 of ``compressed_bytes``. If ``out``
            is None, it allocates memory on the weight's device.
        linear: the GEMM.
        layout: returns the name of the order.
    """

    compress: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    linear: Gemm
    layout: Callable[[], str]


def packing_for(device: torch.device) -> Packing:
    """Return the packing that a device's GEMM needs."""
    return ON_CPU if device.type == "cpu" else ON_GPU


def compress_for_kernels(weight_NK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compress a weight for the kernel ``dequant_linear``, a few rows at a time."""
    from vllm_tiered.kernels.dequant_linear import reference

    rows, columns = weight_NK.shape
    dtype = weight_NK.dtype
    if out is None:
        num_bytes = compressed_bytes(rows, columns, dtype.itemsize)
        out = torch.empty(num_bytes, dtype=torch.uint8, device=weight_NK.device)
    of_all = reference.parts(out, rows, dtype)
    step = max(1, _CHUNK_WEIGHTS // columns)
    for first in range(0, rows, step):
        chunk = weight_NK[first : first + step]
        packed = reference.arrange(*round_groups(chunk, GROUP))
        of_chunk = reference.parts(packed, len(chunk), dtype)
        for whole, part in zip(of_all, of_chunk, strict=True):
            whole[first : first + step] = part
    return out


def linear_on_gpu(
    x: torch.Tensor, compressed: torch.Tensor, rows: int, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply with our kernel, which reads the weight in place and expands it in registers."""
    from vllm_tiered.kernels.dequant_linear import api

    x_BK = x.reshape(-1, x.shape[-1]).contiguous()
    out_BN: torch.Tensor = api.linear(x_BK, compressed, rows, bias_N, device_name=_name(x.device))
    return out_BN.view(*x.shape[:-1], rows)


@cache
def _name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


ON_CPU = Packing(int4.compress, int4.linear, int4.layout)
ON_GPU = Packing(compress_for_kernels, linear_on_gpu, lambda: f"dequant_linear, {GROUP} a group")
