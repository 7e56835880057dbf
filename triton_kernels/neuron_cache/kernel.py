# SPDX-License-Identifier: Apache-2.0
"""A step's books in one program: what the host's caches do (ffn/cache), where compute is.

    1   how many each precision wants, and of how many a better one is near
    2   those stay where they are, as far as there is room       final_N
    3   ages: which of the last tokens' neurons have room        cutoffs
    4   a region's rows: who stays, which are free               present, free_PC, neuron_at_PC
    5   missing neurons to free rows, in their order             neurons, near_rows, place_N

Each is a pass over the layer's neurons or a region's rows, a part at a time; three counts are in
one sum, as 20 bits hold one. What a pass writes another thread reads in a later one: barriers are
between them, and one program needs no more.

Expected, by reasoning and not measured: 16,384 neurons are eight parts of 2,048 in each pass, and a
part is a load, a scan and a store, about a microsecond: 20 to 40 us a layer. It replaces a wait for
the GPU, two transfers, and the host's own books: 50 us for 1,638 neurons of 16,384 in one
precision, 200 in three, 1,070 for all of 13,824 in three (numpy on an EPYC core, medians of 300,
2026-11-24).
"""

import triton
import triton.language as tl

from vllm_tiered.kernels.variants import Variant

_NONE = tl.constexpr(3)
"""The region of what is in none, or wanted in none."""


@triton.jit
def _packed(first, second, third):
    """Three counts in one number."""
    return first.to(tl.int64) | (second.to(tl.int64) << 20) | (third.to(tl.int64) << 40)


@triton.jit
def _count(packed, index: tl.constexpr):
    return ((packed >> 20 * index) & 0xFFFFF).to(tl.int32)


@triton.jit
def _of_region(packed, region):
    """The count of each one's own region."""
    return ((packed >> (20 * tl.where(region == _NONE, 0, region)).to(tl.int64)) & 0xFFFFF).to(
        tl.int32
    )


@triton.jit
def _ranks(packed, before):
    """How many there are up to each and with it, and in all so far."""
    return before + tl.cumsum(packed), before + tl.sum(packed)


@triton.jit
def _asked(reached_N, place_N, neuron, is_neuron, capacity0, capacity1, capacity2):
    """The region that each neuron is wanted in, and the one that it is in."""
    reached = tl.load(reached_N + neuron, mask=is_neuron, other=0)
    full = (reached == 7) & (capacity0 > 0)
    int8 = (reached == 6) & (capacity1 > 0)
    int4 = (reached == 4) & (capacity2 > 0)
    wanted = tl.where(full, 0, tl.where(int8, 1, tl.where(int4, 2, _NONE)))
    place = tl.load(place_N + neuron, mask=is_neuron, other=-1)
    return wanted, tl.where(place >= 0, place & 3, _NONE), place, reached


@triton.jit
def _is_recent(used_N, neuron, is_one, cutoff, now, WINDOW: tl.constexpr):
    """Whether one of the last tokens wanted it, and has room still."""
    recent = is_one & False
    if WINDOW > 1:
        recent = is_one & (now - tl.load(used_N + neuron, mask=is_one, other=0) < cutoff)
    return recent


@triton.jit
def plan_kernel(
    reached_N,
    place_N,
    neuron_at_PC,
    used_N,
    step,
    final_N,
    free_PC,
    neurons_PN,
    near_rows_PN,
    present_PC,
    counts_P4,
    unused_N,
    capacity0,
    capacity1,
    capacity2,
    num_neurons,
    num_columns,
    WINDOW: tl.constexpr,
    PART: tl.constexpr,
):
    """``final_N`` uint8 and ``free_PC`` int32 are scratch; ``unused_N`` uint8."""
    zero = tl.program_id(0).to(tl.int64)  # 0: there is one program
    now = tl.load(step) + 1
    # 1
    wants = zero
    betters = zero
    for first in range(0, num_neurons, PART):
        neuron = first + tl.arange(0, PART)
        wanted, home, _, _ = _asked(
            reached_N, place_N, neuron, neuron < num_neurons, capacity0, capacity1, capacity2
        )
        wants += tl.sum(_packed(wanted == 0, wanted == 1, wanted == 2))
        betters += tl.sum(
            _packed(
                (wanted == 1) & (home == 0),
                (wanted == 2) & (home == 0),
                (wanted == 2) & (home == 1),
            )
        )
    room0 = tl.maximum(capacity0 - _count(wants, 0), 0)
    moved10 = tl.minimum(room0, _count(betters, 0))
    moved20 = tl.minimum(room0 - moved10, _count(betters, 1))
    room1 = tl.maximum(capacity1 - _count(wants, 1) + moved10, 0)
    moved21 = tl.minimum(room1, _count(betters, 2))
    # 2
    before = zero
    wants = zero
    hits = zero
    for first in range(0, num_neurons, PART):
        neuron = first + tl.arange(0, PART)
        is_neuron = neuron < num_neurons
        wanted, home, _, _ = _asked(
            reached_N, place_N, neuron, is_neuron, capacity0, capacity1, capacity2
        )
        from10 = (wanted == 1) & (home == 0)
        from20 = (wanted == 2) & (home == 0)
        from21 = (wanted == 2) & (home == 1)
        ranks, before = _ranks(_packed(from10, from20, from21), before)
        stays = from10 & (_count(ranks, 0) <= moved10)
        stays |= from20 & (_count(ranks, 1) <= moved20)
        stays |= from21 & (_count(ranks, 2) <= moved21)
        final = tl.where(stays, home, wanted)
        tl.store(final_N + neuron, final.to(tl.uint8), mask=is_neuron)
        wants += tl.sum(_packed(final == 0, final == 1, final == 2))
        is_hit = final == home
        hits += tl.sum(_packed(is_hit & (final == 0), is_hit & (final == 1), is_hit & (final == 2)))
    tl.debug_barrier()
    # 3
    cutoffs = _packed(zero + WINDOW, zero + WINDOW, zero + WINDOW)
    if WINDOW > 1:
        left0 = capacity0 - _count(wants, 0)
        left1 = capacity1 - _count(wants, 1)
        left2 = capacity2 - _count(wants, 2)
        cutoff0 = tl.load(step) * 0 + WINDOW
        cutoff1 = cutoff0
        cutoff2 = cutoff0
        for age in range(1, WINDOW):
            old = zero
            for first in range(0, num_neurons, PART):
                neuron = first + tl.arange(0, PART)
                is_neuron = neuron < num_neurons
                place = tl.load(place_N + neuron, mask=is_neuron, other=-1)
                final = tl.load(final_N + neuron, mask=is_neuron, other=0)
                used = tl.load(used_N + neuron, mask=is_neuron, other=0)
                is_old = is_neuron & (place >= 0) & (final == _NONE) & (now - used == age)
                home = place & 3
                old += tl.sum(
                    _packed(is_old & (home == 0), is_old & (home == 1), is_old & (home == 2))
                )
            left0 -= _count(old, 0)
            left1 -= _count(old, 1)
            left2 -= _count(old, 2)
            cutoff0 = tl.where(left0 < 0, tl.minimum(cutoff0, age), cutoff0)
            cutoff1 = tl.where(left1 < 0, tl.minimum(cutoff1, age), cutoff1)
            cutoff2 = tl.where(left2 < 0, tl.minimum(cutoff2, age), cutoff2)
        cutoffs = _packed(cutoff0, cutoff1, cutoff2)
    # 4
    frees = zero
    for region in tl.static_range(3):
        capacity = capacity0
        if region == 1:
            capacity = capacity1
        if region == 2:
            capacity = capacity2
        begin = region * num_columns
        before = zero
        for first in range(0, capacity, PART):
            row = first + tl.arange(0, PART)
            is_row = row < capacity
            neuron = tl.load(neuron_at_PC + begin + row, mask=is_row, other=-1)
            is_held = is_row & (neuron >= 0)
            final = tl.load(final_N + neuron, mask=is_held, other=0)
            is_idle = is_held & (final == _NONE)
            stays = is_held & (final == region)
            stays |= _is_recent(used_N, neuron, is_idle, _count(cutoffs, region), now, WINDOW)
            is_free = is_row & (stays == 0)
            ranks, before = _ranks(_packed(stays, is_free, is_free & False), before)
            present = begin + _count(ranks, 0) - 1
            tl.store(present_PC + present, row.to(tl.int64), mask=stays)
            tl.store(free_PC + begin + _count(ranks, 1) - 1, row, mask=is_free)
            tl.store(neuron_at_PC + begin + row, -1, mask=is_free)
        num_missing = _count(wants, region) - _count(hits, region)
        without_row = tl.maximum(num_missing - _count(before, 1), 0)
        tl.store(counts_P4 + region * 4, num_missing)
        tl.store(counts_P4 + region * 4 + 1, _count(before, 0))
        tl.store(counts_P4 + region * 4 + 2, _count(wants, region))
        tl.store(counts_P4 + region * 4 + 3, without_row)
        frees += ((before >> 20) & 0xFFFFF) << 20 * region
    tl.debug_barrier()
    # 5
    before = zero
    for first in range(0, num_neurons, PART):
        neuron = first + tl.arange(0, PART)
        is_neuron = neuron < num_neurons
        reached = tl.load(reached_N + neuron, mask=is_neuron, other=0)
        final = tl.load(final_N + neuron, mask=is_neuron, other=_NONE).to(tl.int32)
        place = tl.load(place_N + neuron, mask=is_neuron, other=-1)
        home = tl.where(place >= 0, place & 3, _NONE)
        is_missing = is_neuron & (final != _NONE) & (final != home)
        packed = _packed(
            is_missing & (final == 0), is_missing & (final == 1), is_missing & (final == 2)
        )
        ranks, before = _ranks(packed, before)
        rank = _of_region(ranks, final) - 1
        has_row = is_missing & (rank < _of_region(frees, final))
        row = tl.load(free_PC + final * num_columns + rank, mask=has_row, other=-1)
        listed = final.to(tl.int64) * num_neurons + rank
        tl.store(neurons_PN + listed, neuron.to(tl.int64), mask=is_missing)
        tl.store(near_rows_PN + listed, row.to(tl.int64), mask=is_missing)
        tl.store(neuron_at_PC + final * num_columns + row, neuron, mask=has_row)
        is_idle = is_neuron & (final == _NONE) & (place >= 0)
        stays = is_neuron & (final != _NONE) & (final == home)
        stays |= _is_recent(used_N, neuron, is_idle, _of_region(cutoffs, home), now, WINDOW)
        place = tl.where(has_row, row * 4 + final, tl.where(stays, place, -1))
        tl.store(place_N + neuron, place, mask=is_neuron)
        tl.store(used_N + neuron, now, mask=is_neuron & (final != _NONE))
        is_unused = (place >= 0) | (reached != 4)
        tl.store(unused_N + neuron, is_unused.to(tl.uint8), mask=is_neuron)
    # Every thread has read it.
    tl.debug_barrier()
    tl.store(step, now)


VARIANTS = tuple(
    Variant(
        name=f"neuron_cache.{name}",
        kernel=plan_kernel,
        signature={
            "reached_N": "*u8",
            "place_N": "*i32",
            "neuron_at_PC": "*i32",
            "used_N": "*i32",
            "step": "*i32",
            "final_N": "*u8",
            "free_PC": "*i32",
            "neurons_PN": "*i64",
            "near_rows_PN": "*i64",
            "present_PC": "*i64",
            "counts_P4": "*i32",
            "unused_N": "*u8",
            **dict.fromkeys(
                ("capacity0", "capacity1", "capacity2", "num_neurons", "num_columns"), "i32"
            ),
        },
        constants={"WINDOW": window, "PART": 2048},
        aligned=(
            "reached_N",
            "place_N",
            "neuron_at_PC",
            "used_N",
            "step",
            "final_N",
            "free_PC",
            "neurons_PN",
            "near_rows_PN",
            "present_PC",
            "counts_P4",
            "unused_N",
            "num_neurons",
        ),
        num_warps=16,
    )
    for name, window in (("last_token", 1), ("window", 4))
)
