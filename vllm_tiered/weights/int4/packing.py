# SPDX-License-Identifier: Apache-2.0
"""How weights in 4 bit lie, by the device that multiplies with them: the same values and bytes.

A CPU's kernels want an order of their own (``int4.py``); a GPU's are ours, and want another one
(``kernels/dequant_linear``). Both are made when a weight is loaded, on the host.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

import torch

from vllm_tiered.weights.int4 import cpu as int4
from vllm_tiered.weights.int4.layout import compressed_bytes

_CHUNK_WEIGHTS = 1 << 22  # rounding takes several times their size in float32


class Product(Protocol):
    """``x @ w.T + bias``, [..., rows], of x [..., K] and a compressed weight of so many rows."""

    def __call__(
        self,
        x: torch.Tensor,
        compressed: torch.Tensor,
        rows: int,
        bias_N: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class Packing(NamedTuple):
    """An order of bytes.

    Attributes:
        compress: a weight [N, K] to ``out``, uint8 of ``compressed_bytes``; new memory beside the
            weight if that is None.
        linear: the product with it.
        layout: names the order.
    """

    compress: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    linear: Product
    layout: Callable[[], str]


def packing_for(device: torch.device) -> Packing:
    """That of the products of a device."""
    return ON_CPU if device.type == "cpu" else ON_GPU


def compress_for_kernels(weight_NK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As ``dequant_linear.reference.pack``, some rows at a time."""
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
        of_chunk = reference.parts(reference.pack(chunk), len(chunk), dtype)
        for whole, part in zip(of_all, of_chunk, strict=True):
            whole[first : first + step] = part
    return out


def linear_on_gpu(
    x: torch.Tensor, compressed: torch.Tensor, rows: int, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """By our kernel, which reads the weight where it lies and expands it in registers."""
    from vllm_tiered.kernels.dequant_linear import api

    x_BK = x.reshape(-1, x.shape[-1]).contiguous()
    out_BN: torch.Tensor = api.linear(x_BK, compressed, rows, bias_N, device_name=_name(x.device))
    return out_BN.view(*x.shape[:-1], rows)


@cache
def _name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


ON_CPU = Packing(int4.compress, int4.linear, int4.layout)
ON_GPU = Packing(compress_for_kernels, linear_on_gpu, lambda: "dequant_linear")
