# SPDX-License-Identifier: Apache-2.0
"""Kernels that resolve a step's experts to slots on the GPU, and fill the slots of missing ones.

``resolve_kernel`` is one program. Values that other threads wrote are read after a barrier:

    1   mark the wanted experts                                      wanted_E
    2   sort the slots that may be taken: empty ones, then by key    free_S
    3   assign missing experts to them, in order                     missing_experts, missing_slots
    4   count the uses                                               keys_E, clock, totals
    5   replace ids by slots                                         slots_P

``fill_kernel`` copies rows over the link in chunks, as ``kv_pages`` does. The number of missing
experts is on the GPU, so the grid is fixed and a step may be part of a CUDA graph:

    program p copies chunks p, p + programs, p + 2 programs, ...
    chunk c is words [c % per_row * BLOCK, ... + BLOCK) of missing expert c // per_row

Suffixes: E experts of the layer, S slots, P pairs of a token and an expert, W words of a row.

Expected performance (estimated, not measured): resolving takes some 10 us, most of it the sort and
five barriers. Filling reads at the link's bandwidth: a 4-bit expert of Qwen3-30B-A3B, 2.7 MB, in
0.1 ms at 25 GB/s. It replaces a wait for the router on the host in every layer.
"""

import triton
import triton.language as tl

from vllm_tiered.kernels.variants import Variant

_TAKEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)
"""Sorts behind all slots that may be taken."""


@triton.jit(do_not_specialize=["num_pairs"])
def resolve_kernel(
    ids_P,
    slots_P,
    slot_of_E,
    expert_in_S,
    keys_E,
    clock,
    totals,
    wanted_E,
    free_S,
    missing_experts_S,
    missing_slots_S,
    num_missing,
    num_pairs,
    num_experts,
    num_slots,
    decay,
    IS_LFU: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Resolve one layer's step in one program.

    Shapes and types are those of ``index.SlotIndex`` and ``index.SlotPlan``. ``wanted_E`` and
    ``free_S`` (int32) are scratch memory. There are at most ``num_slots`` pairs.
    """
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    slot = tl.arange(0, SLOTS)
    is_slot = slot < num_slots
    is_pair = slot < num_pairs  # no more pairs than slots
    # 1
    tl.store(wanted_E + expert, 0, mask=is_expert)
    tl.debug_barrier()
    named = tl.load(ids_P + slot, mask=is_pair, other=-1)
    is_named = is_pair & (named >= 0) & (named < num_experts)
    tl.store(wanted_E + named, 1, mask=is_named)
    tl.debug_barrier()
    # 2
    held = tl.load(expert_in_S + slot, mask=is_slot, other=-1)
    is_held = is_slot & (held >= 0)
    is_idle = is_held & (tl.load(wanted_E + held, mask=is_held, other=0) == 0)
    key = tl.load(keys_E + held, mask=is_idle, other=0).to(tl.int64) + 1
    order = tl.where(is_slot & (held < 0), slot.to(tl.int64), _TAKEN)
    order = tl.where(is_idle, (key << 32) | held.to(tl.int64), order)
    order = tl.sort(order)
    may_take = order != _TAKEN
    number = (order & 0xFFFFFFFF).to(tl.int32)
    was_held = may_take & ((order >> 32) > 0)
    its_slot = tl.load(slot_of_E + number, mask=was_held, other=0)
    tl.store(free_S + slot, tl.where(was_held, its_slot, number), mask=may_take)
    tl.debug_barrier()
    # 3
    wanted = tl.load(wanted_E + expert, mask=is_expert, other=0)
    at = tl.load(slot_of_E + expert, mask=is_expert, other=0)
    is_missing = (wanted == 1) & (at < 0)
    rank = tl.cumsum(is_missing.to(tl.int32)) - 1
    missing = tl.sum(is_missing.to(tl.int32))
    new_slot = tl.load(free_S + rank, mask=is_missing, other=0)
    evicted = tl.load(expert_in_S + new_slot, mask=is_missing, other=-1)
    tl.debug_barrier()
    tl.store(slot_of_E + evicted, -1, mask=is_missing & (evicted >= 0))
    tl.store(slot_of_E + expert, new_slot, mask=is_missing)
    tl.store(expert_in_S + new_slot, expert, mask=is_missing)
    tl.store(missing_experts_S + rank, expert, mask=is_missing)
    tl.store(missing_slots_S + rank, new_slot, mask=is_missing)
    tl.store(num_missing, missing)
    # 4
    now = tl.load(clock) + 1
    steps = tl.load(totals) + 1
    wants = tl.load(totals + 1) + tl.sum(wanted)
    misses = tl.load(totals + 2) + missing
    pairs = tl.load(totals + 3) + num_pairs
    strays = tl.load(totals + 4) + tl.sum((is_pair & (is_named == 0)).to(tl.int32))
    old_key = tl.load(keys_E + expert, mask=is_expert, other=0)
    if IS_LFU:
        uses = old_key.to(tl.float32, bitcast=True) * decay
        new_key = tl.where(wanted == 1, uses + 1.0, uses).to(tl.int32, bitcast=True)
    else:
        new_key = tl.where(wanted == 1, now, old_key)
    tl.debug_barrier()
    tl.store(keys_E + expert, new_key, mask=is_expert)
    tl.store(clock, now)
    tl.store(totals, steps)
    tl.store(totals + 1, wants)
    tl.store(totals + 2, misses)
    tl.store(totals + 3, pairs)
    tl.store(totals + 4, strays)
    # 5
    found = tl.load(slot_of_E + named, mask=is_named, other=-1)
    tl.store(slots_P + slot, found, mask=is_pair)


@triton.jit
def fill_kernel(
    rows_EW,
    slots_SW,
    missing_experts_S,
    missing_slots_S,
    num_missing,
    row_words,
    BLOCK: tl.constexpr,
):
    per_row = tl.cdiv(row_words, BLOCK)
    num_chunks = tl.load(num_missing) * per_row
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        position = chunk // per_row
        # All experts of a layer can have more than 2^32 words.
        src = tl.load(missing_experts_S + position).to(tl.int64)
        dst = tl.load(missing_slots_S + position).to(tl.int64)
        words = chunk % per_row * BLOCK + tl.arange(0, BLOCK)
        is_within = words < row_words
        values = tl.load(rows_EW + src * row_words + words, mask=is_within)
        tl.store(slots_SW + dst * row_words + words, values, mask=is_within)


_INDEX = {
    "slot_of_E": "*i32",
    "expert_in_S": "*i32",
    "keys_E": "*i32",
    "clock": "*i32",
    "totals": "*i64",
    "wanted_E": "*i32",
    "free_S": "*i32",
    "missing_experts_S": "*i32",
    "missing_slots_S": "*i32",
    "num_missing": "*i32",
}

_ALIGNED = tuple(name for name in _INDEX if name != "clock")

VARIANTS = (
    *(
        Variant(
            name=f"expert_slots.resolve.{name}.{experts}",
            kernel=resolve_kernel,
            signature={
                "ids_P": "*i32",
                "slots_P": "*i32",
                **_INDEX,
                **dict.fromkeys(("num_pairs", "num_experts", "num_slots"), "i32"),
                "decay": "fp32",
            },
            constants={"IS_LFU": name == "lfu", "EXPERTS": experts, "SLOTS": experts // 2},
            aligned=("ids_P", "slots_P", *_ALIGNED, "num_experts"),
            num_warps=8,
        )
        for name, experts in (("lfu", 64), ("lru", 128), ("lfu", 512))
    ),
    *(
        Variant(
            name=f"expert_slots.fill.{name}",
            kernel=fill_kernel,
            signature={
                "rows_EW": kind,
                "slots_SW": kind,
                "missing_experts_S": "*i32",
                "missing_slots_S": "*i32",
                "num_missing": "*i32",
                "row_words": "i32",
            },
            constants={"BLOCK": 2048},
            aligned=("rows_EW", "slots_SW", "missing_experts_S", "missing_slots_S", *whole),
            num_warps=8,
        )
        for name, kind, whole in (("words", "*i32", ("row_words",)), ("bytes", "*u8", ()))
    ),
)
