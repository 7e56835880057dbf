# SPDX-License-Identifier: Apache-2.0
"""Kernels that convert KV pages to narrow far pages and back as they copy them.

Pages are rows of E floats. A far page has a code of 8 bits for each, and then a scale of 16 bits
for each group of ``GROUP`` codes (``devices/page_format.py``). As in ``copy_pages_kernel``, a few
programs take chunks in turn; a chunk is ``BLOCK_GROUPS`` groups of a page.

The reference and the C++ of the CPU's device give the same bits. So division is exact, no product
is fused with a sum (a clamp lies between them), and bfloat16 is rounded with integers. Codes of fp8
are made of integers too: sm_80 has no instructions for them.

P pages, E elements, B bytes of a far page, H its halves of 16 bits.
"""

import triton
import triton.language as tl

from vllm_tiered.kernels.variants import Variant

_INFINITY = tl.constexpr(0x7F800000)
_SMALLEST = tl.constexpr(0x0D800000)  # 2^-100
_NAN = tl.constexpr(0x7FC00000)
_HALF_NAN = tl.constexpr(0x7E00)


@triton.jit
def _float_bits(words, ELEMENT: tl.constexpr):
    """Return the bits of elements as those of floats."""
    if ELEMENT == "float32":
        bits = words
    elif ELEMENT == "bfloat16":
        bits = words.to(tl.int32) << 16
    else:
        tl.static_assert(ELEMENT == "float16")
        bits = words.to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return bits


@triton.jit
def _element_bits(x, is_nan, ELEMENT: tl.constexpr):
    """Round floats to elements, and return their bits."""
    bits = tl.where(is_nan, _NAN, x.to(tl.int32, bitcast=True))
    if ELEMENT == "float32":
        found = bits
    elif ELEMENT == "bfloat16":
        found = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        tl.static_assert(ELEMENT == "float16")
        halves = x.to(tl.float16).to(tl.int16, bitcast=True)
        found = tl.where(is_nan, _HALF_NAN, halves.to(tl.int32)).to(tl.int16)
    return found


@triton.jit
def _clamped(x, limit):
    x = tl.where(x < limit, x, limit)
    return tl.where(x > -limit, x, -limit)


@triton.jit(do_not_specialize=["num_pages"])
def encode_pages_kernel(
    near_PE,
    near_ids,
    far_PB,
    far_PH,
    far_ids,
    num_pages,
    num_elements,
    far_bytes,
    inverse_limit,
    largest_scale,
    ELEMENT: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    num_groups = tl.cdiv(num_elements, GROUP)
    padding = far_bytes - num_elements - 2 * num_groups
    per_page = tl.cdiv(num_groups, BLOCK_GROUPS)
    for chunk in range(tl.program_id(0), num_pages * per_page, tl.num_programs(0)):
        position = chunk // per_page
        # Pools and far tiers can have more than 2^32 elements.
        near = tl.load(near_ids + position).to(tl.int64)
        far = tl.load(far_ids + position).to(tl.int64)
        groups = chunk % per_page * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
        elements = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        is_within = elements < num_elements
        words = tl.load(near_PE + near * num_elements + elements, mask=is_within, other=0)
        bits = _float_bits(words, ELEMENT)
        rest = bits & 0x7FFFFFFF
        is_finite = rest < _INFINITY
        top = tl.max(tl.where(is_finite, rest, 0), axis=1)
        scaled = (top.to(tl.float32, bitcast=True) * inverse_limit).to(tl.int32, bitcast=True)
        scale = (scaled + 0x4000) >> 15
        scale = tl.where(scale < largest_scale, scale, largest_scale)
        is_zero = top < _SMALLEST
        divisor = tl.where(is_zero, 0x3F800000, scale << 15).to(tl.float32, bitcast=True)
        ones = tl.full((BLOCK_GROUPS,), 1.0, tl.float32)
        inverse = tl.where(is_zero, 0.0, tl.div_rn(ones, divisor))
        y = bits.to(tl.float32, bitcast=True) * inverse[:, None]
        if CODE == "int8":
            sums = _clamped(y, 127.0) + 12582912.0  # their lowest bits are the nearest integers
            codes = tl.where(is_finite, sums.to(tl.int32, bitcast=True) - 0x4B400000, -128)
        else:
            tl.static_assert(CODE == "fp8")
            own = _clamped(y, 448.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            sums = own.to(tl.float32, bitcast=True) + 16384.0
            small = sums.to(tl.int32, bitcast=True) - 0x46800000
            large = ((own + 0x7FFFF + ((own >> 20) & 1)) >> 20) - 960
            codes = tl.where(own < 0x3C800000, small, large)
            codes = tl.where(is_finite, codes, 0x7F) | ((bits >> 24) & 0x80)
        tl.store(far_PB + far * far_bytes + elements, codes.to(tl.int8), mask=is_within)
        halves = far * (far_bytes // 2) + num_elements // 2 + groups
        stored = tl.where(is_zero, 0, scale).to(tl.int16)
        tl.store(far_PH + halves, stored, mask=groups < num_groups)
        if chunk % per_page == per_page - 1:
            behind = tl.arange(0, 16)
            zeros = far * far_bytes + num_elements + 2 * num_groups + behind
            tl.store(far_PB + zeros, (behind * 0).to(tl.int8), mask=behind < padding)


@triton.jit(do_not_specialize=["num_pages"])
def decode_pages_kernel(
    far_PB,
    far_PH,
    far_ids,
    near_PE,
    near_ids,
    num_pages,
    num_elements,
    far_bytes,
    ELEMENT: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    num_groups = tl.cdiv(num_elements, GROUP)
    per_page = tl.cdiv(num_groups, BLOCK_GROUPS)
    for chunk in range(tl.program_id(0), num_pages * per_page, tl.num_programs(0)):
        position = chunk // per_page
        near = tl.load(near_ids + position).to(tl.int64)
        far = tl.load(far_ids + position).to(tl.int64)
        groups = chunk % per_page * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
        elements = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        is_within = elements < num_elements
        loaded = tl.load(far_PB + far * far_bytes + elements, mask=is_within, other=0)
        codes = loaded.to(tl.int32)
        halves = far * (far_bytes // 2) + num_elements // 2 + groups
        stored = tl.load(far_PH + halves, mask=groups < num_groups, other=0).to(tl.int32)
        scale = ((stored & 0xFFFF) << 15).to(tl.float32, bitcast=True)
        if CODE == "int8":
            values = codes.to(tl.float32)
            is_nan = codes == -128
        else:
            tl.static_assert(CODE == "fp8")
            rest = codes & 0x7F
            small = (rest.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
            large = (rest << 20) + (120 << 23)
            sign = (codes >> 31) << 31
            values = (tl.where(rest < 8, small, large) | sign).to(tl.float32, bitcast=True)
            is_nan = rest == 0x7F
        x = values * scale[:, None]
        found = _element_bits(x, is_nan, ELEMENT)
        tl.store(near_PE + near * num_elements + elements, found, mask=is_within)


_SIZES = {"num_pages": "i32", "num_elements": "i32", "far_bytes": "i32"}
_ENCODE = {
    "near_PE": "*i16",
    "near_ids": "*i64",
    "far_PB": "*i8",
    "far_PH": "*i16",
    "far_ids": "*i64",
    **_SIZES,
    "inverse_limit": "fp32",
    "largest_scale": "i32",
}
_DECODE = {
    "far_PB": "*i8",
    "far_PH": "*i16",
    "far_ids": "*i64",
    "near_PE": "*i16",
    "near_ids": "*i64",
    **_SIZES,
}
_CONSTANTS = {"ELEMENT": "bfloat16", "GROUP": 64, "BLOCK_GROUPS": 16}
_ALIGNED = ("near_PE", "near_ids", "far_PB", "far_PH", "far_ids", "num_elements", "far_bytes")

VARIANTS = tuple(
    Variant(
        name=f"kv_pages.{name}_{code}",
        kernel=kernel,
        signature=signature,
        constants={**_CONSTANTS, "CODE": code},
        aligned=_ALIGNED,
    )
    for name, kernel, signature in (
        ("encode", encode_pages_kernel, _ENCODE),
        ("decode", decode_pages_kernel, _DECODE),
    )
    for code in ("int8", "fp8")
)
