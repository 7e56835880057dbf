# SPDX-License-Identifier: Apache-2.0
"""The FFN's products in plain torch, float32: what the kernels are held against, and the way out
where they were not built. Expands a chunk of rows at a time, never all of them.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm_tiered.ffn.cache.buffer import Region
from vllm_tiered.ffn.layout import Precision, bundle_bytes

_CHUNK_BYTES = 1 << 20
"""Of float32 weights: they stay in a core's cache."""


def activations(x_BH: torch.Tensor, region: Region, a_Bn: torch.Tensor, activation: str) -> None:
    """Write ``a_Bn``, of the region's first n rows; all float32."""
    act = activation_function(activation)
    for begin, end in _chunks(region, a_Bn.shape[1]):
        up_Bn = x_BH @ _matrix(region, -2, begin, end).T
        if region.shape.gated:
            up_Bn *= act(x_BH @ _matrix(region, 0, begin, end).T)
        else:
            if region.up_bias is not None:
                up_Bn += region.up_bias[begin:end]
            up_Bn = act(up_Bn)
        a_Bn[:, begin:end] = up_Bn


def add_down(out_BH: torch.Tensor, a_Bn: torch.Tensor, region: Region) -> None:
    """Add the down product of the region's first n rows to ``out_BH``; all float32."""
    for begin, end in _chunks(region, a_Bn.shape[1]):
        down_nH, some_Bn = _matrix(region, -1, begin, end), a_Bn[:, begin:end]
        down_nH[(some_Bn == 0).all(dim=0)] = 0  # also where it is no number
        out_BH.addmm_(some_Bn, down_nH)


def activation_function(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """One of ``ACTIVATIONS``. Raises KeyError for others."""
    return _FUNCTIONS[name]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
}


def _chunks(region: Region, num_rows: int) -> list[tuple[int, int]]:
    step = max(1, _CHUNK_BYTES // (4 * region.shape.hidden))
    return [(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]


def _matrix(region: Region, matrix: int, begin: int, end: int) -> torch.Tensor:
    """One matrix of some rows, float32 [rows, H]."""
    matrix %= region.shape.num_matrices
    hidden = region.shape.hidden
    num_bytes = bundle_bytes(region.shape, region.precision) // region.shape.num_matrices
    codes = region.rows[begin:end, matrix * num_bytes : (matrix + 1) * num_bytes]
    if region.precision is Precision.FULL:
        return codes.view(region.dtype).to(torch.float32, copy=True)
    if region.precision is Precision.INT8:
        weights = codes.view(torch.int8).float()
    else:
        weights = torch.cat((codes & 15, codes >> 4), dim=1).float() - 8
    assert region.scales is not None
    scales = region.scales[begin:end, matrix].float()
    num_groups = scales.shape[1]
    return (weights.view(-1, num_groups, hidden // num_groups) * scales[:, :, None]).view(
        -1, hidden
    )
