# SPDX-License-Identifier: Apache-2.0
"""FFN kernels for a batch of tokens over the neurons of a cache buffer, on tensor cores.

    batch_activations    a_Bn         one program: N neurons, M tokens; all of gate and up
    batch_down           parts_PBH    one program: C codes of down, M tokens; one P-th of the slots
    reduce (codecs.py)   out_BH

8- and 4-bit codes are integers that bfloat16 and float16 represent exactly. They are multiplied
without their scales, which are applied to the sums of a group. In the down projection the scales
are part of the activations, and one bfloat16 number would lose more precision than the dense layer
of a 16-bit model does. So an activation is split into two bfloat16 numbers, with 16 significand
bits together, at the cost of a second matmul.

Expected performance (estimated, not measured): an H200 can do about 200 bfloat16 operations for
each byte of memory that it reads. M tokens take 2 M operations a weight for gate and up, 4 M for
down. For gated 8-bit neurons, 64 tokens take 171 operations a byte, near the balance. 4-bit neurons
are bound by tensor cores from about 40 tokens.
"""

import triton
import triton.language as tl

from vllm_tiered.kernels.matmul import matmul_add
from vllm_tiered.kernels.neuron_ffn.codecs import above, decode
from vllm_tiered.kernels.variants import Variant


@triton.jit
def _operand(codes, is_high: tl.constexpr, CODEC: tl.constexpr, DOT: tl.constexpr):
    """Convert codes to a matmul's operand."""
    if CODEC == "bfloat16":
        found = codes.to(tl.bfloat16, bitcast=True).to(DOT)
    elif CODEC == "float16":
        found = codes.to(tl.float16, bitcast=True).to(DOT)
    elif CODEC == "int4":
        found = ((codes >> 4 if is_high else codes & 15).to(tl.float32) - 8).to(DOT)
    else:
        found = decode(codes, 0, is_high, CODEC).to(DOT)
    return found


@triton.jit
def _add_scaled_matmul(
    sums,
    codes,
    x_MK,
    scales,
    feature,
    is_neuron,
    is_high: tl.constexpr,
    CODEC: tl.constexpr,
    DOT: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HIDDEN: tl.constexpr,
):
    """Add a scaled matmul; weights are the left operand, because they are decoded in registers."""
    w_NK = _operand(codes, is_high, CODEC, DOT)
    if NUM_GROUPS > 1:
        group = feature // (HIDDEN // NUM_GROUPS)
        scale_N = tl.load(scales + group, mask=is_neuron, other=0.0).to(tl.float32)
        zeros = tl.zeros_like(sums)
        sums += scale_N[:, None] * matmul_add(w_NK, x_MK.T, zeros, "ieee")
    else:
        sums = matmul_add(w_NK, x_MK.T, sums, "ieee")
    return sums


@triton.jit
def batch_activations_kernel(
    x_BH,
    slots,
    scales_nMG,
    up_bias_n,
    a_Bn,
    num_neurons,
    num_tokens,
    x_stride,
    slot_stride,
    a_stride,
    threshold,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GATED: tl.constexpr,
    CODEC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BOTH: tl.constexpr,
    DOT: tl.constexpr,
    TOKENS: tl.constexpr,
    NEURONS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Compute the activations of NEURONS slots for TOKENS tokens.

    CODES divides WIDTH, and a block of CODES is in one scale group. ``slot_stride`` is in codes.
    """
    NUM_MATRICES: tl.constexpr = 3 if GATED else 2
    UP: tl.constexpr = NUM_MATRICES - 2
    slot = (tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)).to(tl.int64)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    is_neuron = slot < num_neurons
    is_token = token < num_tokens
    in_slots = slots + (slot * slot_stride)[:, None] + tl.arange(0, CODES)[None, :]
    in_x = x_BH + (token * x_stride)[:, None] + tl.arange(0, CODES)[None, :]
    scales = None
    gate_scales = None
    if NUM_GROUPS:
        gate_scales = scales_nMG + slot * (NUM_MATRICES * NUM_GROUPS)
        scales = gate_scales + UP * NUM_GROUPS
    up = tl.zeros((NEURONS, TOKENS), tl.float32)
    gate = tl.zeros((NEURONS, TOKENS), tl.float32)
    for first in range(0, WIDTH, CODES):
        up_codes = tl.load(in_slots + UP * WIDTH + first, mask=is_neuron[:, None], other=0)
        if GATED:
            gate_codes = tl.load(in_slots + first, mask=is_neuron[:, None], other=0)
        for half in tl.static_range(HIDDEN // WIDTH):
            x_MK = tl.load(in_x + half * WIDTH + first, mask=is_token[:, None], other=0.0).to(DOT)
            feature = half * WIDTH + first
            up = _add_scaled_matmul(
                up, up_codes, x_MK, scales, feature, is_neuron,
                half, CODEC, DOT, NUM_GROUPS, HIDDEN,
            )  # fmt: skip
            if GATED:
                gate = _add_scaled_matmul(
                    gate, gate_codes, x_MK, gate_scales, feature, is_neuron,
                    half, CODEC, DOT, NUM_GROUPS, HIDDEN,
                )  # fmt: skip
    if NUM_GROUPS == 1:
        up *= tl.load(scales, mask=is_neuron, other=0.0).to(tl.float32)[:, None]
        if GATED:
            gate *= tl.load(gate_scales, mask=is_neuron, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BOTH:
            up = above(up, 0.0)
        a = above(gate, threshold) * up
    else:
        if HAS_BIAS:
            up += tl.load(up_bias_n + slot, mask=is_neuron, other=0.0)[:, None]
        a = above(up, threshold)
    tl.store(
        a_Bn + (token * a_stride)[None, :] + slot[:, None],
        a,
        mask=is_neuron[:, None] & is_token[None],
    )


@triton.jit
def _add_weighted(sums, a_MN, w_NC, DOT: tl.constexpr, PRECISION: tl.constexpr):
    if tl.float32 == DOT:
        sums = matmul_add(a_MN, w_NC, sums, PRECISION)
    else:
        upper_MN = a_MN.to(DOT)
        lower_MN = (a_MN - upper_MN.to(tl.float32)).to(DOT)
        sums = matmul_add(upper_MN, w_NC, sums, PRECISION)
        sums = matmul_add(lower_MN, w_NC, sums, PRECISION)
    return sums


@triton.jit
def batch_down_kernel(
    a_Bn,
    slots,
    scales_nMG,
    parts_PBH,
    num_neurons,
    num_tokens,
    slot_stride,
    a_stride,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GATED: tl.constexpr,
    CODEC: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    NEURONS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Compute partial sums of the down projection for TOKENS tokens and CODES codes.

    CODES divides WIDTH, and a block of CODES is in one scale group. ``slot_stride`` is in codes.
    """
    NUM_MATRICES: tl.constexpr = 3 if GATED else 2
    DOWN: tl.constexpr = NUM_MATRICES - 1
    first = tl.program_id(0) * CODES
    code = first + tl.arange(0, CODES)
    token = (tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    is_token = token < num_tokens
    low = tl.zeros((TOKENS, CODES), tl.float32)
    high = tl.zeros((TOKENS, CODES), tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(num_neurons, NEURONS), tl.num_programs(1)):
        slot = (block * NEURONS + tl.arange(0, NEURONS)).to(tl.int64)
        is_neuron = slot < num_neurons
        a = tl.load(
            a_Bn + (token * a_stride)[:, None] + slot[None, :],
            mask=is_token[:, None] & is_neuron[None, :],
            other=0.0,
        )
        codes = tl.load(
            slots + (slot * slot_stride)[:, None] + DOWN * WIDTH + code[None, :],
            mask=is_neuron[:, None],
            other=0,
        )
        # Slots whose activations are all 0 may hold any bits, including NaN.
        adds = tl.max((a != 0).to(tl.int32), axis=0) > 0
        scales = scales_nMG
        if NUM_GROUPS:
            scales = scales_nMG + (slot * NUM_MATRICES + DOWN) * NUM_GROUPS
        for half in tl.static_range(HIDDEN // WIDTH):
            scaled = a
            if NUM_GROUPS:
                group = (half * WIDTH + first) // (HIDDEN // NUM_GROUPS)
                scale_N = tl.load(scales + group, mask=is_neuron, other=0.0).to(tl.float32)
                scaled = a * tl.where(adds, scale_N, 0.0)[None, :]
            w_NC = tl.where(adds[:, None], _operand(codes, half, CODEC, DOT), 0.0).to(DOT)
            if half:
                high = _add_weighted(high, scaled, w_NC, DOT, PRECISION)
            else:
                low = _add_weighted(low, scaled, w_NC, DOT, PRECISION)
    part = tl.program_id(1).to(tl.int64) * num_tokens + token
    parts = parts_PBH + (part * HIDDEN)[:, None] + code[None, :]
    tl.store(parts, low, mask=is_token[:, None])
    if HIDDEN > WIDTH:
        tl.store(parts + WIDTH, high, mask=is_token[:, None])


def _variants(codec: str, *, gated: bool, tokens: int) -> tuple[Variant, Variant]:
    """Return the launches of ``batch.py`` for 4096 features, with codes in groups of 64."""
    groups = {"int8": 64, "int4": 64}.get(codec, 0)
    shape = {
        "HIDDEN": 4096,
        "WIDTH": 2048 if codec == "int4" else 4096,
        "NUM_GROUPS": groups,
        "GATED": gated,
        "CODEC": codec,
        "DOT": tl.bfloat16,
        "TOKENS": tokens,
        "NEURONS": 64,
        "CODES": 64,
    }
    codes = {"bfloat16": "*i16", "int8": "*i8", "int4": "*u8"}[codec]
    slots = {"slots": codes, "scales_nMG": "*fp16"} if groups else {"slots": codes}
    numbers = dict.fromkeys(("num_neurons", "num_tokens", "slot_stride", "a_stride"), "i32")
    name = f"{codec}{'' if gated else '.plain'}.{tokens}tokens"
    bias = {} if gated else {"up_bias_n": "*fp32"}
    activations = {"x_BH": "*bf16", **slots, **bias, "a_Bn": "*fp32", **numbers, "x_stride": "i32"}
    down = {"a_Bn": "*fp32", **slots, "parts_PBH": "*fp32", **numbers}
    missing = {} if groups else {"scales_nMG": None}
    return (
        Variant(
            name=f"neuron_ffn.batch_activations.{name}",
            kernel=batch_activations_kernel,
            signature=activations | {"threshold": "fp32"},
            constants=shape
            | missing
            | ({"up_bias_n": None} if gated else {})
            | {"HAS_BIAS": not gated, "BOTH": False},
            aligned=(*(activations.keys() - numbers.keys()), "slot_stride"),
            num_warps=8,
        ),
        Variant(
            name=f"neuron_ffn.batch_down.{name}",
            kernel=batch_down_kernel,
            signature=down,
            constants=shape | missing | {"PRECISION": "ieee"},
            aligned=(*(down.keys() - numbers.keys()), "slot_stride"),
            num_warps=8,
        ),
    )


VARIANTS = (
    *_variants("bfloat16", gated=True, tokens=64),
    *_variants("bfloat16", gated=False, tokens=64),
    *_variants("int8", gated=True, tokens=64),
    *_variants("int8", gated=False, tokens=64),
    *_variants("int4", gated=True, tokens=32),
    *_variants("int4", gated=False, tokens=32),
)
