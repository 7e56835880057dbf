# SPDX-License-Identifier: Apache-2.0
"""Kernels that assign precisions to neurons by exact rank, and list the chosen neurons.

    rank_kernel       one program a token    scores ─► a bit for each precision reached
    demote_kernel     one program            neurons beyond a precision's limit fall to the next one
    collect_kernel    one program            all tokens' bits ─► three ascending lists

Scores are compared as unsigned integers in the same order, in which 0 and -0 are equal and NaN is
the highest. A cut is the greatest integer that at least ``count`` scores reach; it is found bit by
bit from the highest bit. Three cuts at a time take 32 passes over integers that stay in registers.
Among scores equal to the cut, a running count takes those of the lower neuron ids.

Expected performance (estimated, not measured): 16,384 neurons are 32 for each of 512 threads. A
pass takes about 300 instructions a thread and two barriers, so ranking takes 10 to 20 us, for as
many tokens as there are multiprocessors. Collecting takes 5 us. The scores are 64 KiB a token, so
neither kernel is near the memory's bandwidth. If faster ranking is needed, the next step is a
histogram of 8-bit digits in four passes.
"""

import triton
import triton.language as tl

from vllm_tiered.kernels.variants import Variant


@triton.jit
def _ordered(scores):
    """Map scores to uint32 in the same order; NaN is the highest."""
    bits = scores.to(tl.uint32, bitcast=True)
    bits = tl.where(bits == 0x80000000, 0, bits)
    flipped = tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)
    return tl.where(scores == scores, flipped, 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _rounded(x):
    """Round to the nearest integer, half to even, as Python does."""
    low = tl.floor(x)
    rest = x - low
    is_odd = low - 2 * tl.floor(low * 0.5) > 0
    return (low + tl.where((rest > 0.5) | ((rest == 0.5) & is_odd), 1.0, 0.0)).to(tl.int32)


@triton.jit
def _num_equal_to_keep(ordered, cut, count):
    """Return how many scores equal to ``cut`` fit in ``count``; NaN is not counted as above it."""
    return count - tl.sum(((ordered > cut) & (ordered < 0xFFFFFFFF)).to(tl.int32))


@triton.jit
def _top(ordered, is_number, is_active, cut, count, num_equal, used, num_ranked, num_neurons,
    HAS_THRESHOLD: tl.constexpr,
):  # fmt: skip
    """Return whether scores are in the highest ``count``, and how many equalled the cut so far."""
    is_equal = is_number & (ordered == cut)
    place = used + tl.cumsum(is_equal.to(tl.int32))
    top = (is_number & (ordered > cut)) | (is_equal & (place <= num_equal))
    top = tl.where(count >= num_neurons, is_number, top & (count > 0))
    if HAS_THRESHOLD:
        top = tl.where(count == num_ranked, is_active, top)
    return top.to(tl.uint8), used + tl.sum(is_equal.to(tl.int32))


@triton.jit
def rank_kernel(
    scores_BN,
    edges,
    reached_BN,
    num_neurons,
    scores_stride,
    threshold,
    HAS_THRESHOLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """Rank one token's neurons and store the bits of the precisions that each reaches.

    ``edges`` is float64 [3], and ``reached_BN`` is uint8 with a bit for each precision.
    """
    token = tl.program_id(0).to(tl.int64)
    neuron = tl.arange(0, BLOCK)
    is_neuron = neuron < num_neurons
    scores = tl.load(scores_BN + token * scores_stride + neuron, mask=is_neuron, other=0.0)
    # Padding is 0, below every cut that is tried, so it is never counted.
    ordered = tl.where(is_neuron, _ordered(scores), 0)
    num_ranked = num_neurons
    if HAS_THRESHOLD:
        num_ranked = tl.sum((is_neuron & (scores >= threshold)).to(tl.int32))
    count0 = _rounded(tl.load(edges) * num_ranked.to(tl.float64))
    count1 = _rounded(tl.load(edges + 1) * num_ranked.to(tl.float64))
    count2 = _rounded(tl.load(edges + 2) * num_ranked.to(tl.float64))
    zero = num_neurons.to(tl.uint32) * 0
    cut0, cut1, cut2 = zero, zero, zero
    for place in range(32):
        bit = (zero + 1) << (31 - place)
        # A count fits in 20 bits, and one sum of all three needs only one pair of barriers.
        counts = (ordered >= (cut0 | bit)).to(tl.int64)
        counts += (ordered >= (cut1 | bit)).to(tl.int64) << 20
        counts += (ordered >= (cut2 | bit)).to(tl.int64) << 40
        total = tl.sum(counts)
        cut0 = tl.where((total & 0xFFFFF) >= count0, cut0 | bit, cut0)
        cut1 = tl.where((total >> 20 & 0xFFFFF) >= count1, cut1 | bit, cut1)
        cut2 = tl.where((total >> 40) >= count2, cut2 | bit, cut2)
    num_equal0 = _num_equal_to_keep(ordered, cut0, count0)
    num_equal1 = _num_equal_to_keep(ordered, cut1, count1)
    num_equal2 = _num_equal_to_keep(ordered, cut2, count2)
    # PART at a time: all scores with three running counts would not fit in registers.
    used0 = num_ranked * 0
    used1 = used0
    used2 = used0
    for first in range(0, num_neurons, PART):
        one = first + tl.arange(0, PART)
        is_one = one < num_neurons
        own = tl.load(scores_BN + token * scores_stride + one, mask=is_one, other=0.0)
        is_number = is_one & (own == own)
        is_active = is_number
        if HAS_THRESHOLD:
            is_active = is_one & (own >= threshold)
        part = _ordered(own)
        top0, used0 = _top(
            part, is_number, is_active, cut0, count0, num_equal0, used0, num_ranked, num_neurons,
            HAS_THRESHOLD,
        )  # fmt: skip
        top1, used1 = _top(
            part, is_number, is_active, cut1, count1, num_equal1, used1, num_ranked, num_neurons,
            HAS_THRESHOLD,
        )  # fmt: skip
        top2, used2 = _top(
            part, is_number, is_active, cut2, count2, num_equal2, used2, num_ranked, num_neurons,
            HAS_THRESHOLD,
        )  # fmt: skip
        reached = top0 | (top1 << 1) | (top2 << 2)
        tl.store(reached_BN + token * num_neurons + one, reached, mask=is_one)


@triton.jit
def demote_kernel(
    best_N,
    reached_N,
    limit,
    num_neurons,
    HERE: tl.constexpr,
    BELOW: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """Change ``reached_N`` from ``HERE`` to ``BELOW`` for all but the ``limit`` best neurons.

    ``best_N`` is float32, the best score over the tokens. ``reached_N`` is uint8.
    """
    neuron = tl.arange(0, BLOCK) + tl.program_id(0)  # 0: there is one program
    is_neuron = neuron < num_neurons
    is_here = tl.load(reached_N + neuron, mask=is_neuron, other=0) == HERE
    best = tl.load(best_N + neuron, mask=is_neuron & is_here, other=float("-inf"))
    ordered = tl.where(is_neuron, _ordered(best), 0)
    if tl.sum((is_neuron & is_here).to(tl.int32)) > limit:
        zero = num_neurons.to(tl.uint32) * 0
        cut = zero
        for place in range(32):
            bit = (zero + 1) << (31 - place)
            total = tl.sum((ordered >= (cut | bit)).to(tl.int32))
            cut = tl.where(total >= limit, cut | bit, cut)
        num_equal = _num_equal_to_keep(ordered, cut, limit)
        used = limit * 0
        for first in range(0, num_neurons, PART):
            one = first + tl.arange(0, PART)
            is_one = one < num_neurons
            reached = tl.load(reached_N + one, mask=is_one, other=0)
            own = tl.load(best_N + one, mask=is_one & (reached == HERE), other=float("-inf"))
            is_number = is_one & (own == own)
            top, used = _top(
                _ordered(own), is_number, is_number, cut, limit, num_equal, used, num_neurons,
                num_neurons, False,
            )  # fmt: skip
            falls = (reached == HERE) & (top == 0)
            tl.store(reached_N + one, tl.where(falls, BELOW, reached), mask=is_one)


@triton.jit
def _append(ids, count, neuron, is_chosen):
    """Append the chosen neurons to ``ids``, and return the new count."""
    place = count + tl.cumsum(is_chosen.to(tl.int32)) - 1
    tl.store(ids + place, neuron.to(tl.int64), mask=is_chosen)
    return count + tl.sum(is_chosen.to(tl.int32))


@triton.jit
def collect_kernel(
    reached_BN,
    ids_3N,
    counts_3,
    num_neurons,
    num_tokens,
    BLOCK: tl.constexpr,
):
    num_full = tl.program_id(0)  # 0: there is one program
    num_int8 = num_full
    num_int4 = num_full
    for first in range(0, num_neurons, BLOCK):
        neuron = first + tl.arange(0, BLOCK)
        is_neuron = neuron < num_neurons
        reached = tl.zeros((BLOCK,), tl.uint8)
        for token in range(num_tokens):
            offset = tl.cast(token, tl.int64) * num_neurons
            reached |= tl.load(reached_BN + offset + neuron, mask=is_neuron, other=0)
        full = (reached & 1) != 0
        int8 = (reached & 2) != 0
        int4 = (reached & 4) != 0
        num_full = _append(ids_3N, num_full, neuron, full)
        num_int8 = _append(ids_3N + num_neurons, num_int8, neuron, int8 & ~full)
        num_int4 = _append(ids_3N + 2 * num_neurons, num_int4, neuron, int4 & ~int8)
    tl.store(counts_3, num_full)
    tl.store(counts_3 + 1, num_int8)
    tl.store(counts_3 + 2, num_int4)


VARIANTS = (
    *(
        Variant(
            name=f"select_neurons.rank{'.threshold' if has_threshold else ''}",
            kernel=rank_kernel,
            signature={
                "scores_BN": "*fp32",
                "edges": "*fp64",
                "reached_BN": "*u8",
                "num_neurons": "i32",
                "scores_stride": "i32",
                "threshold": "fp32",
            },
            constants={"BLOCK": 16384, "PART": 4096, "HAS_THRESHOLD": has_threshold},
            aligned=("scores_BN", "edges", "reached_BN", "num_neurons", "scores_stride"),
            num_warps=16,
        )
        for has_threshold in (False, True)
    ),
    *(
        Variant(
            name=f"select_neurons.demote.{precision}",
            kernel=demote_kernel,
            signature={
                "best_N": "*fp32",
                "reached_N": "*u8",
                "limit": "i32",
                "num_neurons": "i32",
            },
            constants={"BLOCK": 16384, "PART": 4096, "HERE": here, "BELOW": below},
            aligned=("best_N", "reached_N", "num_neurons"),
            num_warps=16,
        )
        for precision, here, below in (("full", 7, 6), ("int8", 6, 4), ("int4", 4, 0))
    ),
    Variant(
        name="select_neurons.collect",
        kernel=collect_kernel,
        signature={
            "reached_BN": "*u8",
            "ids_3N": "*i64",
            "counts_3": "*i32",
            "num_neurons": "i32",
            "num_tokens": "i32",
        },
        constants={"BLOCK": 4096},
        aligned=("reached_BN", "ids_3N", "counts_3", "num_neurons"),
        num_warps=16,
    ),
)
