# SPDX-License-Identifier: Apache-2.0
"""Reference of the packing and of the linear layer in plain torch, float32 first.

    w_NK  is about  (q_NK - 8) * scale_NG + zero_NG,    q from 0 to 15,    G groups of 32 along K

N out features, K in features, B tokens. A compressed matrix is one sequence of bytes. It is as long
as the one of the CPU kernels (``weights/int4``), but in another order:

    codes    [N, G, 16]   byte j of a group has weight j in its lower half, j + 16 in its upper half
    scales   [N, G]       in the activations' dtype
    zeros    [N, G]       in the activations' dtype

A thread's 16 bytes are the 32 weights of a group. One operation extracts the lower or the upper
halves in order. The bytes of a row are contiguous.
"""

import torch

GROUP = 32
"""Number of consecutive weights of a row that share a scale and a zero."""

_LEVELS = 15
_MIDDLE = 8


def pack(weight_NK: torch.Tensor) -> torch.Tensor:
    """Round each weight to the nearest of 16 values between its group's minimum and maximum.

    Args:
        weight_NK: float32, bfloat16 or float16; K is a multiple of ``GROUP``.

    Returns:
        The compressed matrix, uint8; scales and zeros are in the dtype of the weights.
    """
    dtype, num_rows = weight_NK.dtype, len(weight_NK)
    groups_NGg = weight_NK.float().reshape(num_rows, -1, GROUP)
    low_NG = groups_NGg.amin(dim=2)
    # Round scales and zeros to their stored dtype before the codes are computed from them.
    scale_NG = ((groups_NGg.amax(dim=2) - low_NG) / _LEVELS).to(dtype)
    zero_NG = (low_NG + _MIDDLE * scale_NG.float()).to(dtype)
    scale_NG1, zero_NG1 = scale_NG.float()[..., None], zero_NG.float()[..., None]
    codes_NGg = torch.where(scale_NG1 > 0, (groups_NGg - zero_NG1) / scale_NG1, 0) + _MIDDLE
    return arrange(codes_NGg.round().clamp(0, _LEVELS).to(torch.uint8), scale_NG, zero_NG)


def arrange(codes_NGg: torch.Tensor, scale_NG: torch.Tensor, zero_NG: torch.Tensor) -> torch.Tensor:
    """Return the compressed matrix, uint8, from codes uint8, and scales and zeros of one dtype."""
    low, high = codes_NGg.chunk(2, dim=2)
    codes = low | high << 4
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in (codes, scale_NG, zero_NG)])


def parts(
    packed: torch.Tensor, num_rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views: codes uint8 [N, K / 2], scales and zeros [N, G] in the activations' dtype."""
    per_group = GROUP // 2 + 2 * dtype.itemsize
    num_groups = packed.numel() // (num_rows * per_group)
    num_code_bytes = num_rows * num_groups * GROUP // 2
    scales_and_zeros = packed[num_code_bytes:].view(dtype).view(2, num_rows, num_groups)
    return packed[:num_code_bytes].view(num_rows, -1), scales_and_zeros[0], scales_and_zeros[1]


def unpack(packed: torch.Tensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights, float32 [N, K]; ``dtype`` is the dtype of the activations."""
    codes, scale_NG, zero_NG = parts(packed, num_rows, dtype)
    bytes_NGb = codes.view(*scale_NG.shape, GROUP // 2)
    q_NGg = torch.cat([bytes_NGb & 15, bytes_NGb >> 4], dim=2).float() - _MIDDLE
    return (q_NGg * scale_NG.float()[..., None] + zero_NG.float()[..., None]).view(num_rows, -1)


def linear(
    x_BK: torch.Tensor, packed: torch.Tensor, num_rows: int, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x @ w.T + bias`` computed in float32, [B, N], rounded once to x's dtype."""
    out_BN = x_BK.float() @ unpack(packed, num_rows, x_BK.dtype).T
    if bias_N is not None:
        out_BN += bias_N.float()
    return out_BN.to(x_BK.dtype)
