# SPDX-License-Identifier: Apache-2.0
"""FFN kernel for a few tokens over a cache buffer's neurons; it reads each byte of a slot once.

T tokens, R neurons of a tile. A matrix of a neuron is G segments of S codes. Program p of P
computes tiles p, p + P, ...; x and the sums of the down projection stay in registers from tile to
tile:

    tile     R slots   [gate │] up   ─► a_TR ─► down ─► sums_TH        each byte in 16-byte loads
    after    sums_TH ─► parts_PTH, which a second launch adds up

There are no atomics. P and the number of neurons fix the order of the sums, so two runs give the
same bits. The partial sums are P x T x H floats, 2 MB for P = 128, H = 4096 and T = 1. They stay in
the L2 cache, together with about 37 MB for 3,000 gated neurons in 8 bit.

While one tile is multiplied, the bundles of the next tiles are copied to shared memory (cp.async,
on sm_80 and later), 16 bytes at a time, as words of 4 bytes. x is permuted so that the codes in the
same position of all words are multiplied with contiguous values of x. All operands then have one
layout in registers.

Missing neurons (FILLS) come first in the list. The program whose tile has a missing neuron reads
its bundle from pinned far memory, stores it to its slot and multiplies it, while other programs
compute present slots. A missing neuron without a slot is only multiplied. The number of missing
neurons is read on the device. Padding after a bundle is not copied.

Expected performance (estimated, not measured): a gated neuron of 4096 features has 24,576 bytes in
16 bit, 12,294 in 8 bit, and 6,528 in 4 bit with groups of 64. Each SM of an H200 prefetches 48 KB,
where 25 KB cover a latency of 700 ns at 4.8 TB/s. For one token, a weight takes 5.2 instructions in
16 bit, 5.7 in 8 bit and 6.7 in 4 bit (the loop's, counted in sm_90's code), while 12.3, 6.2 and 3.1
can be issued in the time that its bytes take. So 16 bit should reach 80 % of the bandwidth or more,
8 bit is at the balance, and 4 bit reaches at most 46 % and takes as long as 8 bit. Fewer
instructions for 4 bit would help most.
"""

import triton
import triton.language as tl

from vllm_tiered.kernels.neuron_ffn.codecs import above, decode, decoded_unit, reduce_kernel
from vllm_tiered.kernels.variants import Variant


@triton.jit
def _dot(words, scales, x, place, is_high, CODEC: tl.constexpr):
    """Return the dot products of neurons with tokens, [T, R, 1, 1, 1, 1]."""
    found = tl.sum(decode(words, place, is_high, CODEC) * x, axis=3, keep_dims=True)
    found = scales * tl.sum(found, axis=5, keep_dims=True)
    return tl.sum(tl.sum(found, axis=2, keep_dims=True), axis=4, keep_dims=True)


@triton.jit
def _matrix(
    begin,
    into,
    scales,
    first_scale,
    into_scales,
    matrix,
    word,
    feature,
    mask,
    is_kept,
    HIDDEN: tl.constexpr,
    WORDS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    FILLS: tl.constexpr,
):
    """Load one matrix of some neurons, and store it to the slots of those to keep.

    Args:
        feature: the first feature of each segment.

    Returns:
        The matrix's words, and its scales (1 without scales).
    """
    words = tl.load(begin + matrix * WORDS + word, mask=mask, other=0)
    if FILLS:
        tl.store(into + matrix * WORDS + word, words, mask=mask & is_kept)
    found = 1.0
    if NUM_GROUPS:
        GROUP: tl.constexpr = HIDDEN // NUM_GROUPS
        number = matrix * NUM_GROUPS + feature // GROUP
        # Load two scales at a time so that cp.async can prefetch them; it cannot copy 2 bytes. A
        # word that begins in the table also ends in the table's memory page.
        pairs = scales.to(tl.pointer_type(tl.int32))
        pair = tl.load(pairs + (first_scale + number) // 2, mask=mask, other=0)
        halves = (pair >> (first_scale + number) % 2 * 16).to(tl.int16).to(tl.float16, bitcast=True)
        if FILLS:
            is_first = feature % GROUP == 0
            tl.store(into_scales + number, halves, mask=mask & is_kept & is_first)
        found = halves.to(tl.float32)
    return words, found


@triton.jit
def few_tokens_kernel(
    x_BHPW,
    slots,
    scales_nMG,
    up_bias_n,
    a_Bn,
    parts_PBHPW,
    slab,
    slab_ids,
    slot_ids,
    neuron_ids,
    present_slot_ids,
    counts,
    table_NMG,
    table_bias_N,
    num_neurons,
    num_tokens,
    are_slots_filled,
    slot_stride,
    slab_stride,
    a_stride,
    threshold,
    HIDDEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GATED: tl.constexpr,
    CODEC: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BOTH: tl.constexpr,
    ACTIVATES: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    FILLS: tl.constexpr,
    TOKENS: tl.constexpr,
    NEURONS: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
    HALVES: tl.constexpr,
    PLACES: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Compute activations, the down projection, or both, over the neurons of the program's tiles.

    With ACTIVATES, activations are computed from x; otherwise they are read from ``a_Bn``. With
    MULTIPLIES, the down projection is computed; otherwise activations are written to ``a_Bn``. The
    gate (or fc1) has to exceed ``threshold``; with BOTH, up has a ReLU too.

    NEURONS is the number of neurons in a tile. Strides of slots and of the slab are in words.
    ``are_slots_filled`` is 1 for later tokens of a batch, because the launch for the first tokens
    has stored the missing neurons to their slots. ``slot_ids`` is -1 for a neuron without a slot.
    ``counts`` has the numbers of missing and of present neurons. A matrix has segments of SEGMENT
    words, each in one scale group; SEGMENTS is the number of segments, rounded up to a power of
    two.
    """
    WORDS: tl.constexpr = HIDDEN // HALVES // PLACES
    NUM_MATRICES: tl.constexpr = 3 if GATED else 2
    # All tiles have these axes, so that all have the register layout of the bundles' words.
    token = tl.arange(0, TOKENS)[:, None, None, None, None, None]
    in_tile = tl.arange(0, NEURONS)[None, :, None, None, None, None]
    half = tl.arange(0, HALVES)[None, None, :, None, None, None]
    place = tl.arange(0, PLACES)[None, None, None, :, None, None]
    segment = tl.arange(0, SEGMENTS)[None, None, None, None, :, None]
    word = segment * SEGMENT + tl.arange(0, SEGMENT)[None, None, None, None, None, :]
    is_word = segment < WORDS // SEGMENT
    is_token = token < num_tokens
    feature = (half * WORDS + segment * SEGMENT) * PLACES
    in_x = ((token * HALVES + half) * PLACES + place) * WORDS + word
    if ACTIVATES:
        x = tl.load(x_BHPW + in_x, mask=is_token & is_word, other=0.0) * decoded_unit(
            place, half, CODEC
        )
    if MULTIPLIES:
        sums = tl.zeros((TOKENS, 1, HALVES, PLACES, SEGMENTS, SEGMENT), tl.float32)
    num_missing = 0
    if FILLS:
        num_missing = tl.load(counts)
        num_neurons = num_missing + tl.load(counts + 1)
    first, last, step = tl.program_id(0), tl.cdiv(num_neurons, NEURONS), tl.num_programs(0)
    for tile in tl.range(first, last, step, num_stages=STAGES):
        position = tile * NEURONS + in_tile
        is_neuron = position < num_neurons
        slot = position.to(tl.int64)
        is_kept = None
        if FILLS:
            is_listed = position < num_missing
            is_present = is_neuron & (position >= num_missing)
            new_slot = tl.load(slot_ids + position, mask=is_listed, other=0)
            present = tl.load(present_slot_ids + position - num_missing, mask=is_present, other=0)
            slot = tl.where(is_listed, new_slot, present)
            is_new = position < num_missing * (1 - are_slots_filled)
            is_missing = is_listed & (is_new | (new_slot < 0))
            is_kept = is_missing & (new_slot >= 0)
            # Load these for all listed neurons, so that the loads need not wait for the slots.
            slab_id = tl.load(slab_ids + position, mask=is_listed, other=0)
            neuron = tl.load(neuron_ids + position, mask=is_listed, other=0)
        # 64 bits: a buffer can have more than 2^32 codes.
        into = slots + slot * slot_stride
        begin = into
        scales = scales_nMG
        first_scale = slot * (NUM_MATRICES * NUM_GROUPS)
        into_scales = None
        if FILLS:
            begin = tl.where(is_missing, slab + slab_id * slab_stride, into)
            if ALIGNED:
                # Triton cannot derive the alignment through tl.where.
                begin = tl.multiple_of(begin, [16, 16, 16, 16, 16, 16])
            if NUM_GROUPS:
                into_scales = scales_nMG + first_scale
                scales = tl.where(is_missing, table_NMG, scales_nMG)
                first_scale = tl.where(is_missing, neuron, slot) * (NUM_MATRICES * NUM_GROUPS)
        is_read = is_neuron & is_word
        if not ACTIVATES:
            a = tl.load(
                a_Bn + token.to(tl.int64) * a_stride + position,
                mask=is_token & is_neuron,
                other=0.0,
            )
            is_read &= tl.max((a != 0).to(tl.int32), axis=0, keep_dims=True) > 0
        # Load the whole bundle, including down, before any of it is used. Nearly every down is
        # needed, and this way its load does not wait for the activations.
        if MULTIPLIES:
            down, down_scales = _matrix(
                begin, into, scales, first_scale, into_scales, NUM_MATRICES - 1, word, feature,
                is_read, is_kept, HIDDEN, WORDS, NUM_GROUPS, FILLS,
            )  # fmt: skip
        if ACTIVATES:
            up, up_scales = _matrix(
                begin, into, scales, first_scale, into_scales, NUM_MATRICES - 2, word, feature,
                is_read, is_kept, HIDDEN, WORDS, NUM_GROUPS, FILLS,
            )  # fmt: skip
            if GATED:
                gate, gate_scales = _matrix(
                    begin, into, scales, first_scale, into_scales, 0, word, feature, is_read,
                    is_kept, HIDDEN, WORDS, NUM_GROUPS, FILLS,
                )  # fmt: skip
                a = above(_dot(gate, gate_scales, x, place, half, CODEC), threshold)
                of_up = _dot(up, up_scales, x, place, half, CODEC)
                if BOTH:
                    of_up = above(of_up, 0.0)
                a *= of_up
            else:
                a = _dot(up, up_scales, x, place, half, CODEC)
                if HAS_BIAS:
                    bias = up_bias_n + slot
                    if FILLS:
                        bias = tl.where(is_missing, table_bias_N + neuron, bias)
                    biases = tl.load(bias, mask=is_neuron, other=0.0)
                    if FILLS:
                        tl.store(up_bias_n + slot, biases, mask=is_kept)
                    a += biases
                a = above(a, threshold)
        if MULTIPLIES:
            # Neurons that add nothing may hold any bits, including NaN.
            adds = tl.max((a != 0).to(tl.int32), axis=0, keep_dims=True) > 0
            weights = decode(down, place, half, CODEC)
            if not NUM_GROUPS:  # codes with a scale are integers, never NaN
                weights = tl.where(adds, weights, 0.0)
            scaled = tl.where(adds, a * down_scales, 0.0)
            sums += tl.sum(scaled * weights, axis=1, keep_dims=True)
        else:
            into_a = a_Bn + token.to(tl.int64) * a_stride + position
            tl.store(into_a, a, mask=is_token & is_neuron)
    if MULTIPLIES:
        parts = parts_PBHPW + tl.program_id(0).to(tl.int64) * num_tokens * HIDDEN
        tl.store(parts + in_x, sums * decoded_unit(place, half, CODEC), mask=is_token & is_word)


def _variant(
    name: str,
    codec: str,
    *,
    gated: bool = True,
    tokens: int = 1,
    tile_neurons: int = 1,
    stages: int,
    num_warps: int = 8,
    activates: bool = True,
    multiplies: bool = True,
    fills: bool = False,
    has_bias: bool | None = None,
    both: bool = False,
) -> Variant:
    """Return the launch of ``api.py`` for 4096 features, with codes in groups of 64."""
    groups = {"int8": 64, "int4": 64}.get(codec, 0)
    has_bias = not gated if has_bias is None else has_bias
    pointers: dict[str, str | None] = {
        "x_BHPW": "*fp32" if activates else None,
        "slots": "*i32",
        "scales_nMG": "*fp16" if groups else None,
        "up_bias_n": "*fp32" if has_bias else None,
        "a_Bn": None if activates and multiplies else "*fp32",
        "parts_PBHPW": "*fp32" if multiplies else None,
        "slab": "*i32" if fills else None,
        **dict.fromkeys(
            ("slab_ids", "slot_ids", "neuron_ids", "present_slot_ids"), "*i64" if fills else None
        ),
        "counts": "*i32" if fills else None,
        "table_NMG": "*fp16" if fills and groups else None,
        "table_bias_N": "*fp32" if fills and has_bias else None,
    }
    strides = ("slot_stride", "slab_stride", "a_stride")
    numbers = ("num_neurons", "num_tokens", "are_slots_filled", *strides)
    signature = {name: kind for name, kind in pointers.items() if kind is not None}
    places = {"bfloat16": 2, "int8": 4, "int4": 4}[codec]
    halves = 2 if codec == "int4" else 1
    return Variant(
        name=f"neuron_ffn.{name}",
        kernel=few_tokens_kernel,
        signature=signature | dict.fromkeys(numbers, "i32") | {"threshold": "fp32"},
        constants=dict.fromkeys(pointers.keys() - signature.keys())
        | {
            "HIDDEN": 4096,
            "NUM_GROUPS": groups,
            "GATED": gated,
            "CODEC": codec,
            "HAS_BIAS": has_bias,
            "BOTH": both,
            "ACTIVATES": activates,
            "MULTIPLIES": multiplies,
            "FILLS": fills,
            "TOKENS": tokens,
            "NEURONS": tile_neurons,
            "STAGES": stages,
            "ALIGNED": True,
            "HALVES": halves,
            "PLACES": places,
            "SEGMENT": 64 // places,
            "SEGMENTS": 64 // halves,
        },
        aligned=(*signature, "slot_stride", "slab_stride"),
        num_warps=num_warps,
        num_stages=1,
    )


def _reduce(name: str, *, halves: int, places: int, adds: bool = False) -> Variant:
    """Return the reduction that ``few_tokens.py`` launches for 4096 features."""
    return Variant(
        name=f"neuron_ffn.reduce.{name}",
        kernel=reduce_kernel,
        signature={
            "parts_PBHPW": "*fp32",
            "out_BH": "*fp32",
            **dict.fromkeys(("num_parts", "num_tokens", "out_stride"), "i32"),
        },
        constants={
            "HALVES": halves,
            "PLACES": places,
            "WORDS": 4096 // halves // places,
            "ADDS": adds,
            "PARTS": 64,
            "BLOCK": 32,
        },
        aligned=("parts_PBHPW", "out_BH", "out_stride"),
    )


VARIANTS = (
    _variant("few_tokens.bf16", "bfloat16", stages=3),
    _variant("few_tokens.bf16.4tokens", "bfloat16", stages=3, tokens=4),
    _variant("few_tokens.bf16.plain", "bfloat16", stages=4, gated=False),
    _variant("few_tokens.bf16.plain.4tokens", "bfloat16", stages=4, gated=False, tokens=4),
    _variant("few_tokens.int8", "int8", tile_neurons=2, stages=3),
    _variant("few_tokens.int8.4tokens", "int8", stages=5, tokens=4),
    _variant("few_tokens.int8.plain", "int8", tile_neurons=2, stages=4, gated=False),
    _variant("few_tokens.int8.plain.4tokens", "int8", stages=7, gated=False, tokens=4),
    _variant("few_tokens.bf16.fills", "bfloat16", stages=3, fills=True),
    _variant("few_tokens.bf16.fills.4tokens", "bfloat16", stages=3, tokens=4, fills=True),
    _variant("few_tokens.bf16.plain.fills", "bfloat16", stages=4, gated=False, fills=True),
    _variant(
        "few_tokens.bf16.plain.fills.4tokens",
        "bfloat16",
        stages=4,
        gated=False,
        tokens=4,
        fills=True,
    ),
    _variant("few_tokens.int8.fills", "int8", tile_neurons=2, stages=3, fills=True),
    _variant("few_tokens.int8.fills.4tokens", "int8", stages=5, tokens=4, fills=True),
    _variant(
        "few_tokens.int8.plain.fills", "int8", tile_neurons=2, stages=4, gated=False, fills=True
    ),
    _variant(
        "few_tokens.int8.plain.fills.4tokens",
        "int8",
        stages=7,
        gated=False,
        tokens=4,
        fills=True,
    ),
    _variant("few_tokens.int4", "int4", stages=8, num_warps=4),
    _variant("few_tokens.int4.2tokens", "int4", stages=8, num_warps=4, tokens=2),
    _variant("few_tokens.int4.plain", "int4", stages=8, num_warps=4, gated=False),
    _variant("few_tokens.int4.plain.2tokens", "int4", stages=8, num_warps=4, gated=False, tokens=2),
    _variant("few_tokens.int4.fills", "int4", stages=7, num_warps=4, fills=True),
    _variant("few_tokens.int4.fills.2tokens", "int4", stages=7, num_warps=4, tokens=2, fills=True),
    _variant("few_tokens.int4.plain.fills", "int4", stages=7, num_warps=4, gated=False, fills=True),
    _variant(
        "few_tokens.int4.plain.fills.2tokens",
        "int4",
        stages=7,
        num_warps=4,
        gated=False,
        tokens=2,
        fills=True,
    ),
    # Predictors: a gate, OPT's fc1, and gate and up with dReLU.
    _variant(
        "few_tokens.int4.gate",
        "int4",
        stages=8,
        num_warps=4,
        gated=False,
        has_bias=False,
        multiplies=False,
    ),
    _variant("few_tokens.int4.fc1", "int4", stages=8, num_warps=4, gated=False, multiplies=False),
    _variant("few_tokens.int4.both", "int4", stages=8, num_warps=4, both=True, multiplies=False),
    _variant("few_tokens.int4.activations", "int4", stages=8, num_warps=4, multiplies=False),
    _variant("few_tokens.int4.down", "int4", stages=8, num_warps=4, activates=False),
    _reduce("bf16", halves=1, places=2),
    _reduce("int8", halves=1, places=4),
    _reduce("int4", halves=2, places=4),
    _reduce("int4.adds", halves=2, places=4, adds=True),
    _reduce("batch", halves=1, places=1),
)
