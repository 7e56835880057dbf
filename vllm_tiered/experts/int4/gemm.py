# SPDX-License-Identifier: Apache-2.0
"""GEMM of each token with the 4-bit weights of its expert.

The C++ library multiplies the codes in registers, or expands a few rows of them for an expert with
many tokens: with the same sums in the same order, so that a result does not depend on which other
tokens the step has. Plain torch, which expands an expert at a time, stands in where the library was
not built.
"""

import ctypes
from typing import NamedTuple

import torch

from vllm_tiered import native
from vllm_tiered.experts.int4.packing import Int4Matrix, expand


class Pairs(NamedTuple):
    """Pairs of a token and an expert, in ascending order of the experts.

    Attributes:
        rows: int64 [P], the row of the input of each pair.
        experts: int64 [used], the experts that have pairs.
        ends: int64 [used], one past each expert's last pair.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    ends: torch.Tensor


def pairs_of(ids_MK: torch.Tensor) -> tuple[Pairs, torch.Tensor]:
    """Return the pairs of a step, and the position of each in ``ids_MK`` (int64 [P], flat)."""
    flat = ids_MK.reshape(-1).long()
    order = flat.argsort(stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    return Pairs(order // ids_MK.shape[1], experts, counts.cumsum(0)), order


def grouped_gemm(
    x_MK: torch.Tensor, pairs: Pairs, matrix: Int4Matrix, bias_EN: torch.Tensor | None
) -> torch.Tensor:
    """Multiply each pair's input with its expert's weights.

    Args:
        x_MK: inputs, float32.
        pairs: which input goes with which expert.
        matrix: the weights, [E, N, K].
        bias_EN: float32; None for none.

    Returns:
        float32 [P, N].
    """
    codes, scales, zeros = matrix
    num_rows, length = codes.shape[1], 2 * codes.shape[2]
    assert x_MK.shape[1] == length and x_MK.dtype == torch.float32
    assert length % scales.shape[2] == 0 and zeros.shape[2] in (0, scales.shape[2])
    assert bias_EN is None or (bias_EN.is_contiguous() and bias_EN.dtype == torch.float32)
    assert codes.is_contiguous() and scales.is_contiguous() and zeros.is_contiguous()
    out_PN = torch.empty((len(pairs.rows), num_rows), dtype=torch.float32)
    kernels = native.best()
    if kernels is None:
        return _reference(x_MK, pairs, matrix, bias_EN, out_PN)
    x_MK = x_MK.contiguous()
    call = native.GroupedCall(
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        zeros=zeros.data_ptr() if zeros.shape[2] else None,
        bias=None if bias_EN is None else bias_EN.data_ptr(),
        x=x_MK.data_ptr(),
        rows=pairs.rows.data_ptr(),
        experts=pairs.experts.data_ptr(),
        ends=pairs.ends.data_ptr(),
        out=out_PN.data_ptr(),
        num_rows=num_rows,
        length=length,
        num_groups=scales.shape[2],
        num_pairs=len(pairs.rows),
        num_experts=len(pairs.experts),
        scale_type=native.SCALE_TYPES.index(scales.dtype),
        num_threads=torch.get_num_threads(),
    )
    if code := kernels.grouped_gemm(ctypes.byref(call)):
        raise MemoryError(f"the experts' C++ kernel failed with code {code}")
    return out_PN


def _reference(
    x_MK: torch.Tensor,
    pairs: Pairs,
    matrix: Int4Matrix,
    bias_EN: torch.Tensor | None,
    out_PN: torch.Tensor,
) -> torch.Tensor:
    begin = 0
    for expert, end in zip(pairs.experts.tolist(), pairs.ends.tolist(), strict=True):
        one = Int4Matrix(*(part[expert : expert + 1] for part in matrix))
        out_PN[begin:end] = x_MK[pairs.rows[begin:end]] @ expand(one)[0].T
        if bias_EN is not None:
            out_PN[begin:end] += bias_EN[expert]
        begin = end
    return out_PN
