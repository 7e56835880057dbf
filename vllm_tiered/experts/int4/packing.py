# SPDX-License-Identifier: Apache-2.0
"""Layout of 4-bit experts for the C++ GEMM, and how it is made from those of checkpoints.

    w_NK  =  (code_NK - zero_NG) * scale_NG,    codes and zeros from 0 to 15,    G groups along K

N is the number of out features, K of in features, E of experts. A row's first half is in the low
nibbles and its second half in the high ones, so that a vector of bytes gives two vectors of codes
whose inputs are contiguous, too:

    codes              uint8 [E, N, K / 2]
    scales             [E, N, G], in the checkpoint's dtype
    zeros              uint8 [E, N, G];  [E, N, 0] where each zero is 8

A checkpoint packs 8 nibbles in an int32:

    GPTQ, compressed-tensors    [E, N, K / 8]   k ascending;  zeros [E, N / 8, G], n ascending
    AWQ                         [E, K, N / 8]   n as 0 2 4 6 1 3 5 7;  zeros [E, G, N / 8] likewise
"""

from typing import NamedTuple

import torch

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of an AWQ int32 that has the n-th of its 8 features."""

MIDDLE = 8
"""Zero of symmetric codes."""


class Int4Matrix(NamedTuple):
    """A matrix of each expert.

    Attributes:
        codes, scales, zeros: as above.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


def from_rows(
    packed_ENk: torch.Tensor,
    scales_ENG: torch.Tensor,
    zeros_EnG: torch.Tensor | None,
    *,
    zeros_add: int,
) -> Int4Matrix:
    """Return the matrix of a GPTQ or compressed-tensors checkpoint, one expert at a time.

    Args:
        packed_ENk: int32 [E, N, K / 8].
        scales_ENG: scales.
        zeros_EnG: int32 [E, N / 8, G]; None if each zero is 8.
        zeros_add: what to add to the stored zeros: 1 for GPTQ, which stores them less 1.
    """
    experts, rows, words = packed_ENk.shape
    codes = torch.empty((experts, rows, 4 * words), dtype=torch.uint8)
    for expert in range(experts):
        codes[expert] = _in_halves(_nibbles(packed_ENk[expert]))
    zeros = _no_zeros(scales_ENG)
    if zeros_EnG is not None:
        zeros_EGn = zeros_EnG.transpose(1, 2)
        zeros = (_nibbles(zeros_EGn) + zeros_add).clamp_(max=16).transpose(1, 2).contiguous()
    return Int4Matrix(codes, scales_ENG.contiguous(), zeros)


def from_awq(
    packed_EKn: torch.Tensor, scales_EGN: torch.Tensor, zeros_EGn: torch.Tensor | None
) -> Int4Matrix:
    """Return the matrix of an AWQ checkpoint, one expert at a time.

    Args:
        packed_EKn: int32 [E, K, N / 8].
        scales_EGN: scales.
        zeros_EGn: int32 [E, G, N / 8]; None if each zero is 8.
    """
    experts, length, words = packed_EKn.shape
    codes = torch.empty((experts, 8 * words, length // 2), dtype=torch.uint8)
    for expert in range(experts):
        codes[expert] = _in_halves(_nibbles(packed_EKn[expert], _AWQ_ORDER).transpose(0, 1))
    scales_ENG = scales_EGN.transpose(1, 2).contiguous()
    zeros = _no_zeros(scales_ENG)
    if zeros_EGn is not None:
        zeros = _nibbles(zeros_EGn, _AWQ_ORDER).transpose(1, 2).contiguous()
    return Int4Matrix(codes, scales_ENG, zeros)


def quantise(weight_ENK: torch.Tensor, group: int) -> Int4Matrix:
    """Return weights in 4 bit, one expert at a time: codes around 8, and bfloat16 scales.

    The weight of a group that is largest in size is code 0, as in llama.cpp's Q4_0.
    """
    experts, rows, length = weight_ENK.shape
    codes = torch.empty((experts, rows, length // 2), dtype=torch.uint8)
    scales = torch.empty((experts, rows, length // group), dtype=torch.bfloat16)
    for expert in range(experts):
        groups = weight_ENK[expert].float().view(rows, -1, group)
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scales[expert] = (largest / -MIDDLE).squeeze(2)
        by = scales[expert].float()[..., None]
        found = (groups / torch.where(by == 0, 1, by) + MIDDLE).round_().clamp_(0, 15)
        codes[expert] = _in_halves(found.to(torch.uint8).flatten(1))
    return Int4Matrix(codes, scales, _no_zeros(scales))


def expand(matrix: Int4Matrix) -> torch.Tensor:
    """Return the weights, float32 [E, N, K]."""
    codes, scales, zeros = matrix
    codes_ENK = torch.cat([codes & 15, codes >> 4], dim=2).float()
    groups = scales.shape[2]
    zeros_ENG = zeros.float() if zeros.shape[2] else torch.full(scales.shape, float(MIDDLE))
    codes_ENGg = codes_ENK.view(*codes_ENK.shape[:2], groups, -1) - zeros_ENG[..., None]
    return (codes_ENGg * scales.float()[..., None]).flatten(2)


def _no_zeros(scales_ENG: torch.Tensor) -> torch.Tensor:
    return torch.empty((*scales_ENG.shape[:2], 0), dtype=torch.uint8)


def _nibbles(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Return the nibbles of int32 words, uint8 [..., 8 * words]."""
    found = torch.empty((*words.shape, 8), dtype=torch.uint8)
    for feature, nibble in enumerate(order):
        found[..., feature] = (words >> 4 * nibble) & 15
    return found.flatten(-2)


def _in_halves(codes_NK: torch.Tensor) -> torch.Tensor:
    half = codes_NK.shape[1] // 2
    return codes_NK[:, :half] | codes_NK[:, half:] << 4
