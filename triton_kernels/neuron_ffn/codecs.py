# SPDX-License-Identifier: Apache-2.0
"""Device functions of the FFN kernels: decode codes, apply activations, reduce partial sums."""

import triton
import triton.language as tl


@triton.jit
def decode(words, place, is_high, CODEC: tl.constexpr):
    """Decode weights to float32, exactly; 4-bit codes are in units of :func:`decoded_unit`.

    Args:
        words: int32 words of several codes, or single codes in an integer type of their size.
        place: position of the code in its word.
        is_high: for 4-bit codes, 1 for the upper half of a byte and 0 for the lower half.
    """
    words = words.to(tl.int32)
    if CODEC == "int4":
        # Build the float 2^23 + (code << shift): the code is in the lowest bits of the mantissa.
        # This takes one operation and a subtraction, fewer than shifting and converting each code.
        shift = 8 * place + 4 * is_high
        codes = (words >> (shift // 16 * 16)) & (15 << (shift % 16))
        weights = (codes | 0x4B000000).to(tl.float32, bitcast=True)
        weights -= 8388608.0 + (8 << (shift % 16)).to(tl.float32)
    elif CODEC == "int8":
        weights = ((words << (24 - 8 * place)) >> 24).to(tl.float32)
    elif CODEC == "bfloat16":
        weights = ((words >> (16 * place)) << 16).to(tl.float32, bitcast=True)
    elif CODEC == "float16":
        halves = (words >> (16 * place)).to(tl.int16)
        weights = halves.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(CODEC == "float32")
        weights = words.to(tl.float32, bitcast=True)
    return weights


@triton.jit
def decoded_unit(place, is_high, CODEC: tl.constexpr):
    """Return the unit of decoded weights, a power of two, so that multiplying by it is exact."""
    found = 1.0
    if CODEC == "int4":
        found = 1.0 / (1 << ((8 * place + 4 * is_high) % 16)).to(tl.float32)
    return found


@triton.jit
def above(x, threshold):
    """Return x where it exceeds the threshold, else 0; NaN stays NaN."""
    return tl.where(x <= threshold, 0.0, x)


@triton.jit
def reduce_kernel(
    parts_PBHPW,
    out_BH,
    num_parts,
    num_tokens,
    out_stride,
    HALVES: tl.constexpr,
    PLACES: tl.constexpr,
    WORDS: tl.constexpr,
    ADDS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sum of the partial sums to ``out_BH``, or add it; the order is fixed.

    The partial sums are [P, B, HALVES, PLACES, WORDS], and the output is [B, HALVES, WORDS,
    PLACES].
    """
    HIDDEN: tl.constexpr = HALVES * PLACES * WORDS
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)[:, None]
    is_number = number < num_tokens * HIDDEN
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, num_parts, PARTS):
        offset = (first + part).to(tl.int64) * (num_tokens * HIDDEN) + number[None, :]
        is_within = (first + part < num_parts) & is_number[None, :]
        total += tl.load(parts_PBHPW + offset, mask=is_within, other=0.0)
    found = tl.sum(total, axis=0)
    feature = number % HIDDEN
    half_place = feature // WORDS
    feature = (half_place // PLACES * WORDS + feature % WORDS) * PLACES + half_place % PLACES
    out = out_BH + (number // HIDDEN).to(tl.int64) * out_stride + feature
    if ADDS:
        found += tl.load(out, mask=is_number, other=0.0)
    tl.store(out, found, mask=is_number)
