# SPDX-License-Identifier: Apache-2.0
"""Weights in 4 bit on a CPU, 32 to a group: FlexGen's form (5; HeLM IV-B), rounded closer.

    w_NK  ≈  (q_NK - 8) * scale_GN + zero_GN,    q from 0 to 15,    G groups of 32 along K

N is the number of out features, K of in features, B of tokens. A compressed matrix is a flat array
of bytes:

    codes              [N / block, K, block / 2]   two per byte, in the order of torch's kernels
    scales and zeros   [G, N, 2]                   in the activations' dtype

For few tokens, torch's GEMM expands the compressed weights in registers. For many tokens, rows are
expanded before the GEMM, as many at a time as fit a cache. The whole matrix is never expanded.
"""

from functools import cache

import torch

from vllm_tiered.weights.int4.layout import BLOCK, GROUP, can_compress, compressed_bytes
from vllm_tiered.weights.int4.rounding import MIDDLE, round_groups

DIRECT_TOKENS = 60
"""Number of tokens up to which torch's GEMM for compressed weights is faster than expanding."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CHUNK_WEIGHTS = 1 << 17  # half a MiB in float32, and a 16-bit copy: fits a core's L2 cache


def can_compress_matrix(weight_NK: torch.Tensor) -> bool:
    """Return whether a matrix has whole groups and a dtype that the kernels support."""
    return weight_NK.ndim == 2 and weight_NK.dtype in _DTYPES and can_compress(*weight_NK.shape)


def compress(weight_NK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Round each weight to one of its group's 16 values.

    Args:
        weight_NK: a matrix for which :func:`can_compress_matrix` is true.
        out: output, uint8 of ``compressed_bytes``; None to allocate it.

    Returns:
        ``out``.
    """
    rows, columns = weight_NK.shape
    dtype = weight_NK.dtype
    if out is None:
        num_bytes = compressed_bytes(rows, columns, dtype.itemsize)
        out = torch.empty(num_bytes, dtype=torch.uint8, device=weight_NK.device)
    codes, scales_and_zeros_GN2 = parts(out, rows, dtype)
    # A few rows at a time, because rounding needs several times their size in float32.
    step = _chunk_rows(columns)
    for first in range(0, rows, step):
        chosen = slice(first, min(first + step, rows))
        codes_NGg, *scale_and_zero = round_groups(weight_NK[chosen], GROUP)
        codes_NK = codes_NGg.flatten(1).to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_NK, 1)
        codes[chosen] = packed.view(-1, columns // 2)
        scales_and_zeros_GN2[:, chosen] = torch.stack(scale_and_zero, dim=2).transpose(0, 1)
    return out


def parts(
    compressed: torch.Tensor, rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a compressed matrix: codes, uint8 [N, K / 2]; scales and zeros, [G, N, 2]."""
    per_group = GROUP // 2 + 2 * dtype.itemsize
    groups = compressed.numel() // (rows * per_group)
    num_code_bytes = rows * groups * GROUP // 2
    codes = compressed[:num_code_bytes].view(rows, -1)
    return codes, compressed[num_code_bytes:].view(dtype).view(groups, rows, 2)


def linear(
    x: torch.Tensor, compressed: torch.Tensor, rows: int, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x @ w.T + bias`` with the weight in 4 bit.

    Args:
        x: [..., K], in the dtype of the scales.
        compressed: matrix from :func:`compress`.
        rows: number N of out features.
        bias_N: bias; None for none.

    Returns:
        [..., N].
    """
    codes, scales_and_zeros_GN2 = parts(compressed, rows, x.dtype)
    flat_BK = x.reshape(-1, x.shape[-1]).contiguous()
    # torch's GEMM takes 30 times as long per row in float32 as in bfloat16.
    is_direct = x.dtype != torch.float32 and len(flat_BK) <= DIRECT_TOKENS
    if is_direct or _half_block() is None:
        out_BN = torch.ops.aten._weight_int4pack_mm_for_cpu(
            flat_BK, codes, GROUP, scales_and_zeros_GN2
        )
    else:
        out_BN = _expand_and_multiply(flat_BK, codes, scales_and_zeros_GN2)
    if bias_N is not None:
        out_BN += bias_N
    result: torch.Tensor = out_BN.view(*x.shape[:-1], rows)
    return result


def layout() -> str:
    """Return the name of the codes' order, which depends on the instruction set, and groups."""
    half = _half_block()
    order = torch.backends.cpu.get_cpu_capability() if half is None else f"halves of {half}"
    return f"{order}, {GROUP} a group"


def _expand_and_multiply(
    x_BK: torch.Tensor, codes: torch.Tensor, scales_and_zeros_GN2: torch.Tensor
) -> torch.Tensor:
    rows, columns = len(codes), x_BK.shape[1]
    step = min(rows, _chunk_rows(columns))
    half = _half_block()
    assert half is not None
    scale_GN, zero_GN = (part.contiguous() for part in scales_and_zeros_GN2.float().unbind(dim=2))
    zero_GN.sub_(scale_GN, alpha=MIDDLE)
    # Allocated once, because allocation for each chunk took a quarter of the time.
    nibbles = torch.empty(columns * step // 2, dtype=torch.uint8)
    expanded = torch.empty(columns * step)
    rounded = torch.empty(columns * step, dtype=x_BK.dtype)
    out_BN = x_BK.new_empty((len(x_BK), rows))
    for first in range(0, rows, step):
        chosen = slice(first, min(first + step, rows))
        codes_bKh = codes[chosen].view(-1, columns, half)
        w_KN = expanded[: 2 * codes_bKh.numel()].view(columns, -1)
        _unpack(codes_bKh, w_KN, nibbles[: codes_bKh.numel()].view_as(codes_bKh))
        w_GgN = w_KN.view(-1, GROUP, w_KN.shape[1])
        scale_G1N, zero_G1N = scale_GN[:, None, chosen], zero_GN[:, None, chosen]
        torch.addcmul(zero_G1N, w_GgN, scale_G1N, out=w_GgN)
        if x_BK.dtype != torch.float32:
            w_KN = rounded[: w_KN.numel()].view_as(w_KN).copy_(w_KN)
        torch.mm(x_BK, w_KN, out=out_BN[:, chosen])
    return out_BN


def _unpack(codes_bKh: torch.Tensor, out_KN: torch.Tensor, nibbles_bKh: torch.Tensor) -> None:
    """Unpack blocks of rows to float32.

    The byte at [k, i] has row i in its lower half and row i + h in its upper half.

    Args:
        codes_bKh: packed codes.
        out_KN: output.
        nibbles_bKh: scratch memory.
    """
    blocks, columns, half = codes_bKh.shape
    out_2bKh = out_KN.view(columns, blocks, 2, half).permute(2, 1, 0, 3)
    out_2bKh[0] = torch.bitwise_and(codes_bKh, 15, out=nibbles_bKh)
    out_2bKh[1] = torch.bitwise_right_shift(codes_bKh, 4, out=nibbles_bKh)


def _chunk_rows(columns: int) -> int:
    return max(1, _CHUNK_WEIGHTS // (columns * BLOCK)) * BLOCK


@cache
def _half_block() -> int | None:
    """Return half the rows of a kernel block on this CPU; None if the order is another one.

    A block has 64 rows with AVX512 and 32 with AVX2. torch does not document the order, so the
    function packs row numbers and compares the result.
    """
    rows = torch.arange(BLOCK, dtype=torch.int32, device="cpu")
    for half in (32, 16):
        blocks = rows.view(-1, 2, half)
        is_this = True
        for digit in (rows % 16, rows // 16):
            codes_NK = digit[:, None].expand(BLOCK, GROUP).contiguous()
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_NK, 1)
            numbers = digit[blocks]
            expected_bh = numbers[:, 0] | numbers[:, 1] << 4
            expected = expected_bh[:, None].expand(-1, GROUP, -1).to(torch.uint8)
            is_this &= torch.equal(packed.view(-1, GROUP, half), expected)
        if is_this:
            return half
    return None
