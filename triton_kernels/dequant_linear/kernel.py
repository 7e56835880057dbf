# SPDX-License-Identifier: Apache-2.0
"""Matmul kernels with packed 4-bit weights; ``reference.py`` has the packing.

    few tokens    one program: ROWS rows of w over all of K, GROUPS groups at a time; programs share
                  no sums
    batch         one program: ROWS rows of w and TOKENS tokens, a group at a time on tensor cores

    y_BN = sum over G of  scale_NG * (q - 8) x   +   zero_NG * sum x        x and q of the group

The few-tokens kernel reads codes as words of 4 bytes. x is permuted so that the codes in the same
position of all words are multiplied with contiguous values of x. Words of the next step are loaded
to shared memory at the same time.
The batch kernel multiplies codes as integers, which bfloat16 and float16 represent exactly. It
applies scales and zeros to a group's sums, in float32.

Expected performance (estimated, not measured): a weight is 0.625 bytes, so a 4096 x 4096 matrix is
10.5 MB. An H200 reads it in 2.2 us, which is as long as the launch. For one token, a weight takes
6.3 instructions (the loop's, counted in sm_90's code with groups of 64), but only 3.9 can be issued
while its bytes are read, so the kernel reaches at most 60 % of the bandwidth. Many tokens are bound
by the tensor cores and by the sums of groups: one operation for 32 on the tensor cores.
"""

import triton
import triton.language as tl

from vllm_tiered.kernels.matmul import matmul_add
from vllm_tiered.kernels.variants import Variant


@triton.jit
def _nibbles(words, shift):
    """Return nibbles minus 8 as float32; the nibble is placed in the mantissa of 2^23."""
    bits = (words >> shift) & 15 | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def few_tokens_kernel(
    x_BHPW,
    words_NW,
    scale_NG,
    zero_NG,
    bias_N,
    out_BN,
    num_rows,
    num_tokens,
    out_stride,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply a few tokens with ROWS rows of w.

    ``x_BHPW`` is float32 [B, half of a byte, byte of a word, words of a row].
    """
    NUM_GROUPS: tl.constexpr = COLUMNS // 32
    WORDS: tl.constexpr = COLUMNS // 8
    token = tl.arange(0, TOKENS)[:, None, None, None, None, None]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[None, :, None, None, None, None]
    half = tl.arange(0, 2)[None, None, :, None, None, None]
    place = tl.arange(0, 4)[None, None, None, :, None, None]
    in_groups = tl.arange(0, GROUPS)[None, None, None, None, :, None]
    word = tl.arange(0, 4)[None, None, None, None, None, :]
    is_row = row < num_rows
    is_token = token < num_tokens
    row = row.to(tl.int64)
    total = tl.zeros((TOKENS, ROWS, 1, 1, GROUPS, 1), tl.float32)
    for first in tl.range(0, NUM_GROUPS, GROUPS, num_stages=STAGES):
        group = first + in_groups
        is_read = is_row & (group < NUM_GROUPS)
        at = group * 4 + word
        words = tl.load(words_NW + row * WORDS + at, mask=is_read, other=0)
        x = tl.load(
            x_BHPW + ((token * 2 + half) * 4 + place) * WORDS + at,
            mask=is_token & (group < NUM_GROUPS),
            other=0.0,
        )
        scale = tl.load(scale_NG + row * NUM_GROUPS + group, mask=is_read, other=0.0)
        zero = tl.load(zero_NG + row * NUM_GROUPS + group, mask=is_read, other=0.0)
        found = tl.sum(_nibbles(words, 8 * place + 4 * half) * x, axis=3, keep_dims=True)
        found = tl.sum(tl.sum(found, axis=2, keep_dims=True), axis=5, keep_dims=True)
        x_sum = tl.sum(tl.sum(x, axis=3, keep_dims=True), axis=2, keep_dims=True)
        x_sum = tl.sum(x_sum, axis=5, keep_dims=True)
        total += scale.to(tl.float32) * found + zero.to(tl.float32) * x_sum
    out = tl.sum(total, axis=4, keep_dims=True)
    if bias_N is not None:
        out += tl.load(bias_N + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out_BN + token.to(tl.int64) * out_stride + row, out, mask=is_token & is_row)


@triton.jit
def batch_kernel(
    x_BK,
    codes_NK,
    scale_NG,
    zero_NG,
    bias_N,
    out_BN,
    num_rows,
    num_tokens,
    x_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    NUM_GROUPS: tl.constexpr = COLUMNS // 32
    DOT: tl.constexpr = x_BK.dtype.element_ty
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    is_row = row < num_rows
    is_token = token < num_tokens
    byte = tl.arange(0, 16)[None, :]
    codes = codes_NK + (row * (COLUMNS // 2))[:, None] + byte
    x = x_BK + (token * x_stride)[:, None] + byte
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for group in range(NUM_GROUPS):
        pairs = tl.load(codes + group * 16, mask=is_row[:, None], other=0)
        low_x = tl.load(x + group * 32, mask=is_token[:, None], other=0.0)
        high_x = tl.load(x + group * 32 + 16, mask=is_token[:, None], other=0.0)
        scale = tl.load(scale_NG + row * NUM_GROUPS + group, mask=is_row, other=0.0).to(tl.float32)
        zero = tl.load(zero_NG + row * NUM_GROUPS + group, mask=is_row, other=0.0).to(tl.float32)
        low = _nibbles(pairs.to(tl.int32), 0).to(DOT)
        high = _nibbles(pairs.to(tl.int32), 4).to(DOT)
        found = matmul_add(low, low_x.T, tl.zeros_like(total), "ieee")
        found = matmul_add(high, high_x.T, found, "ieee")
        x_sum = tl.sum(low_x.to(tl.float32) + high_x.to(tl.float32), axis=1)
        total += scale[:, None] * found + zero[:, None] * x_sum[None, :]
    if bias_N is not None:
        total += tl.load(bias_N + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    out = out_BN + (token * out_stride)[None, :] + row[:, None]
    tl.store(out, total.to(DOT), mask=is_row[:, None] & is_token[None, :])


def _variant(name: str, kernel: object, *, tokens: int, bias: bool = False) -> Variant:
    """Return the launch that ``api.py`` makes for a 4096 x 4096 matrix."""
    few = kernel is few_tokens_kernel
    pointers = {
        "x_BHPW" if few else "x_BK": "*fp32" if few else "*bf16",
        "words_NW" if few else "codes_NK": "*i32" if few else "*u8",
        "scale_NG": "*bf16",
        "zero_NG": "*bf16",
        **({"bias_N": "*bf16"} if bias else {}),
        "out_BN": "*bf16",
    }
    numbers = ("num_rows", "num_tokens", *(() if few else ("x_stride",)), "out_stride")
    own = {"ROWS": 4, "GROUPS": 32, "STAGES": 4} if few else {"ROWS": 64}
    return Variant(
        name=f"dequant_linear.{name}",
        kernel=kernel,
        signature=pointers | dict.fromkeys(numbers, "i32"),
        constants={"COLUMNS": 4096, "TOKENS": tokens, **own} | ({} if bias else {"bias_N": None}),
        aligned=(*pointers, "num_rows", *numbers[2:]),
        num_warps=1 if few else 4,
        num_stages=1 if few else 3,
    )


VARIANTS = (
    _variant("few_tokens", few_tokens_kernel, tokens=1),
    _variant("few_tokens.4tokens.bias", few_tokens_kernel, tokens=4, bias=True),
    _variant("batch.16tokens", batch_kernel, tokens=16),
    _variant("batch.64tokens.bias", batch_kernel, tokens=64, bias=True),
)
