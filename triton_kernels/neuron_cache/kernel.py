# SPDX-License-Identifier: Apache-2.0
"""Kernel that plans a step on the GPU, as the host's caches do (ffn/cache), in one program.

    1   count the neurons wanted in each precision, and those cached in a better one
    2   keep neurons in a better buffer while it has free slots   final_N
    3   find the age up to which recent neurons fit               cutoffs
    4   split a buffer's slots into retained and free slots       retained_slots, free
    5   assign missing neurons to free slots, in order            missing_neurons, missing_slots

Each pass goes over the layer's neurons or a buffer's slots, PART at a time. One 64-bit sum holds
three counts of 20 bits. A pass reads values that other threads wrote in the previous pass, so
barriers separate the passes. Barriers suffice because there is one program.

Suffixes: P neuron cache buffers (precisions), C slots of the largest one, N neurons of the layer.

Expected performance (estimated, not measured): 16,384 neurons are eight parts of 2,048 in each
pass. A part takes a load, a scan and a store, about 1 us, so a layer takes 20 to 40 us. The kernel
replaces a wait for the GPU, two transfers, and the update of the host's index. That update takes
50 us for 1,638 neurons of 16,384 in one precision, 200 us in three, and 1,070 us for all of 13,824
in three (numpy on an EPYC core, medians of 300, 2026-11-24).
"""

import triton
import triton.language as tl

from vllm_tiered.kernels.variants import Variant

_NONE = tl.constexpr(3)
"""Buffer number of neurons that are in no buffer or are not wanted."""


@triton.jit
def _packed(first, second, third):
    """Pack three counts into one number."""
    return first.to(tl.int64) | (second.to(tl.int64) << 20) | (third.to(tl.int64) << 40)


@triton.jit
def _count(packed, index: tl.constexpr):
    return ((packed >> 20 * index) & 0xFFFFF).to(tl.int32)


@triton.jit
def _count_of_buffer(packed, buffer):
    """Return, for each element, the count of its own buffer."""
    return ((packed >> (20 * tl.where(buffer == _NONE, 0, buffer)).to(tl.int64)) & 0xFFFFF).to(
        tl.int32
    )


@triton.jit
def _ranks(packed, before):
    """Return the packed counts up to and including each element, and the new total."""
    return before + tl.cumsum(packed), before + tl.sum(packed)


@triton.jit
def _wanted_and_home(reached_N, location_N, neuron, is_neuron, capacity0, capacity1, capacity2):
    """Return each neuron's wanted buffer, current buffer and location."""
    reached = tl.load(reached_N + neuron, mask=is_neuron, other=0)
    full = (reached == 7) & (capacity0 > 0)
    int8 = (reached == 6) & (capacity1 > 0)
    int4 = (reached == 4) & (capacity2 > 0)
    wanted = tl.where(full, 0, tl.where(int8, 1, tl.where(int4, 2, _NONE)))
    location = tl.load(location_N + neuron, mask=is_neuron, other=-1)
    return wanted, tl.where(location >= 0, location & 3, _NONE), location


@triton.jit
def _is_recent(last_used_N, neuron, is_one, cutoff, now, WINDOW: tl.constexpr):
    """Return whether the neuron's last use is less than ``cutoff`` steps ago."""
    recent = is_one & False
    if WINDOW > 1:
        recent = is_one & (now - tl.load(last_used_N + neuron, mask=is_one, other=0) < cutoff)
    return recent


@triton.jit
def plan_kernel(
    reached_N,
    location_N,
    neuron_in_slot_PC,
    last_used_N,
    step,
    final_N,
    free_PC,
    missing_neurons_PN,
    missing_slots_PN,
    retained_slots_PC,
    counts_P4,
    capacity0,
    capacity1,
    capacity2,
    num_neurons,
    num_slots,
    WINDOW: tl.constexpr,
    PART: tl.constexpr,
):
    """Plan one layer's step in one program.

    Shapes and types are those of ``index.CacheIndex`` and ``index.CachePlan``; ``reached_N`` is
    uint8. ``final_N`` (uint8) and ``free_PC`` (int32) are scratch memory.
    """
    zero = tl.program_id(0).to(tl.int64)  # 0: there is one program
    now = tl.load(step) + 1
    # 1
    wants = zero
    betters = zero
    for first in range(0, num_neurons, PART):
        neuron = first + tl.arange(0, PART)
        wanted, home, _ = _wanted_and_home(
            reached_N, location_N, neuron, neuron < num_neurons, capacity0, capacity1, capacity2
        )
        wants += tl.sum(_packed(wanted == 0, wanted == 1, wanted == 2))
        betters += tl.sum(
            _packed(
                (wanted == 1) & (home == 0),
                (wanted == 2) & (home == 0),
                (wanted == 2) & (home == 1),
            )
        )
    num_free0 = tl.maximum(capacity0 - _count(wants, 0), 0)
    moved10 = tl.minimum(num_free0, _count(betters, 0))
    moved20 = tl.minimum(num_free0 - moved10, _count(betters, 1))
    num_free1 = tl.maximum(capacity1 - _count(wants, 1) + moved10, 0)
    moved21 = tl.minimum(num_free1, _count(betters, 2))
    # 2
    before = zero
    wants = zero
    hits = zero
    for first in range(0, num_neurons, PART):
        neuron = first + tl.arange(0, PART)
        is_neuron = neuron < num_neurons
        wanted, home, _ = _wanted_and_home(
            reached_N, location_N, neuron, is_neuron, capacity0, capacity1, capacity2
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
                location = tl.load(location_N + neuron, mask=is_neuron, other=-1)
                final = tl.load(final_N + neuron, mask=is_neuron, other=0)
                used = tl.load(last_used_N + neuron, mask=is_neuron, other=0)
                is_old = is_neuron & (location >= 0) & (final == _NONE) & (now - used == age)
                home = location & 3
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
    for buffer in tl.static_range(3):
        capacity = capacity0
        if buffer == 1:
            capacity = capacity1
        if buffer == 2:
            capacity = capacity2
        begin = buffer * num_slots
        before = zero
        for first in range(0, capacity, PART):
            slot = first + tl.arange(0, PART)
            is_slot = slot < capacity
            neuron = tl.load(neuron_in_slot_PC + begin + slot, mask=is_slot, other=-1)
            is_held = is_slot & (neuron >= 0)
            final = tl.load(final_N + neuron, mask=is_held, other=0)
            is_idle = is_held & (final == _NONE)
            stays = is_held & (final == buffer)
            stays |= _is_recent(last_used_N, neuron, is_idle, _count(cutoffs, buffer), now, WINDOW)
            is_free = is_slot & (stays == 0)
            ranks, before = _ranks(_packed(stays, is_free, is_free & False), before)
            retained = begin + _count(ranks, 0) - 1
            tl.store(retained_slots_PC + retained, slot.to(tl.int64), mask=stays)
            tl.store(free_PC + begin + _count(ranks, 1) - 1, slot, mask=is_free)
            tl.store(neuron_in_slot_PC + begin + slot, -1, mask=is_free)
        num_missing = _count(wants, buffer) - _count(hits, buffer)
        without_slot = tl.maximum(num_missing - _count(before, 1), 0)
        tl.store(counts_P4 + buffer * 4, num_missing)
        tl.store(counts_P4 + buffer * 4 + 1, _count(before, 0))
        tl.store(counts_P4 + buffer * 4 + 2, _count(wants, buffer))
        tl.store(counts_P4 + buffer * 4 + 3, without_slot)
        frees += ((before >> 20) & 0xFFFFF) << 20 * buffer
    tl.debug_barrier()
    # 5
    before = zero
    for first in range(0, num_neurons, PART):
        neuron = first + tl.arange(0, PART)
        is_neuron = neuron < num_neurons
        final = tl.load(final_N + neuron, mask=is_neuron, other=_NONE).to(tl.int32)
        location = tl.load(location_N + neuron, mask=is_neuron, other=-1)
        home = tl.where(location >= 0, location & 3, _NONE)
        is_missing = is_neuron & (final != _NONE) & (final != home)
        packed = _packed(
            is_missing & (final == 0), is_missing & (final == 1), is_missing & (final == 2)
        )
        ranks, before = _ranks(packed, before)
        rank = _count_of_buffer(ranks, final) - 1
        has_slot = is_missing & (rank < _count_of_buffer(frees, final))
        slot = tl.load(free_PC + final * num_slots + rank, mask=has_slot, other=-1)
        listed = final.to(tl.int64) * num_neurons + rank
        tl.store(missing_neurons_PN + listed, neuron.to(tl.int64), mask=is_missing)
        tl.store(missing_slots_PN + listed, slot.to(tl.int64), mask=is_missing)
        tl.store(neuron_in_slot_PC + final * num_slots + slot, neuron, mask=has_slot)
        is_idle = is_neuron & (final == _NONE) & (location >= 0)
        stays = is_neuron & (final != _NONE) & (final == home)
        stays |= _is_recent(
            last_used_N, neuron, is_idle, _count_of_buffer(cutoffs, home), now, WINDOW
        )
        location = tl.where(has_slot, slot * 4 + final, tl.where(stays, location, -1))
        tl.store(location_N + neuron, location, mask=is_neuron)
        tl.store(last_used_N + neuron, now, mask=is_neuron & (final != _NONE))
    # Wait until all threads have read the old value.
    tl.debug_barrier()
    tl.store(step, now)


VARIANTS = tuple(
    Variant(
        name=f"neuron_cache.{name}",
        kernel=plan_kernel,
        signature={
            "reached_N": "*u8",
            "location_N": "*i32",
            "neuron_in_slot_PC": "*i32",
            "last_used_N": "*i32",
            "step": "*i32",
            "final_N": "*u8",
            "free_PC": "*i32",
            "missing_neurons_PN": "*i64",
            "missing_slots_PN": "*i64",
            "retained_slots_PC": "*i64",
            "counts_P4": "*i32",
            **dict.fromkeys(
                ("capacity0", "capacity1", "capacity2", "num_neurons", "num_slots"), "i32"
            ),
        },
        constants={"WINDOW": window, "PART": 2048},
        aligned=(
            "reached_N",
            "location_N",
            "neuron_in_slot_PC",
            "last_used_N",
            "step",
            "final_N",
            "free_PC",
            "missing_neurons_PN",
            "missing_slots_PN",
            "retained_slots_PC",
            "counts_P4",
            "num_neurons",
        ),
        num_warps=16,
    )
    for name, window in (("last_token", 1), ("window", 4))
)
