# SPDX-License-Identifier: Apache-2.0
"""Prefetch of memory into the L2 before it is read (PRESERVE, section 3), without a result.

A span of memory is cut at multiples of the unit, so that no line is asked for twice:

    unit      |        |        |        |        |      multiples of UNIT_BYTES
    span           [=====================]               not aligned itself
    asks           [---][-------][-------]               one each, a thread each

One ask is an instruction: on sm_90 and later ``cp.async.bulk.prefetch.L2`` of a whole unit, which
starts and ends at multiples of 16 bytes; on sm_80 ``prefetch.global.L2``, and units are lines of
128 bytes. Neither has a result, so every kernel can be told (BY = RECORDED) to write down what it
asks for instead: that is what tests read.

Whether to ask at all is read from device memory, ``switch``: a captured CUDA graph replays what it
was, and would not see a switch of the host's.

N spans, B requests, M blocks at most in each.
"""

import triton
import triton.language as tl

from vllm_tiered.kernels.variants import Variant

LINES: int = 0
BULK: int = 1
RECORDED: int = 2
"""What ``BY`` may be; in the kernels by number, where names of modules are not read."""

LINE_BYTES = 128


@triton.jit
def ask(addresses, sizes, at, asked_A2, is_within, BY: tl.constexpr):
    """Request ``sizes`` bytes from ``addresses``; sizes of 0 and less request nothing."""
    if BY == 2:
        tl.store(asked_A2 + 2 * at, addresses, mask=is_within)
        tl.store(asked_A2 + 2 * at + 1, tl.maximum(sizes, 0), mask=is_within)
    elif BY == 1:
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.gt.s32 wanted, $2, 0;
            @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [addresses, sizes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.gt.s32 wanted, $2, 0;
            @wanted prefetch.global.L2 [$1];
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [addresses, sizes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def cut(first, past, unit, UNIT_BYTES: tl.constexpr):
    """Return address and bytes of the span's ``unit``-th request; at most 0 bytes past its end.

    Widened to multiples of 16 bytes, as bulk prefetches want it: never to another line.
    """
    first = first // 16 * 16
    past = tl.cdiv(past, 16) * 16
    start = (first // UNIT_BYTES + unit) * UNIT_BYTES
    addresses = tl.maximum(first, start)
    sizes = tl.minimum(past, start + UNIT_BYTES) - addresses
    return addresses, sizes.to(tl.int32)


@triton.jit(do_not_specialize=["address", "num_bytes"])
def prefetch_kernel(
    address,
    num_bytes,
    switch,
    asked_A2,
    UNIT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    BY: tl.constexpr,
):
    """Prefetch ``num_bytes`` (> 0) from ``address`` on; programs take turns of BLOCK requests."""
    if tl.load(switch) != 0:
        address = address.to(tl.int64)
        past = address + num_bytes
        num_asks = (past - 1) // UNIT_BYTES - address // UNIT_BYTES + 1
        num_turns = tl.cdiv(num_asks, BLOCK)
        for turn in range(tl.program_id(0).to(tl.int64), num_turns, tl.num_programs(0)):
            units = turn * BLOCK + tl.arange(0, BLOCK)
            addresses, sizes = cut(address, past, units, UNIT_BYTES)
            ask(addresses, sizes, units, asked_A2, units < num_asks, BY)


@triton.jit(do_not_specialize=["address", "max_pages", "num_requests"])
def prefetch_kv_kernel(
    address,
    page_stride_bytes,
    page_bytes,
    block_table_BM,
    table_stride,
    seq_lens_B,
    num_requests,
    block_tokens,
    max_pages,
    switch,
    asked_A2,
    UNIT_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    BY: tl.constexpr,
):
    """Prefetch the pages of this step's requests in order, at most ``max_pages`` in all.

    Program (b, p) takes every programs-th turn of request b. REQUESTS is a power of two, at least
    ``num_requests``.
    """
    if tl.load(switch) != 0:
        request = tl.program_id(0)
        requests = tl.arange(0, REQUESTS)
        lengths = tl.load(seq_lens_B + requests, mask=requests < num_requests, other=0)
        pages_of = tl.cdiv(lengths, block_tokens).to(tl.int64)
        before = tl.sum(tl.where(requests < request, pages_of, 0))
        mine = tl.sum(tl.where(requests == request, pages_of, 0))
        allowed = tl.maximum(tl.minimum(mine, max_pages - before), 0)
        # A page that is not aligned reaches into one unit more.
        asks_a_page = tl.cdiv(page_bytes, UNIT_BYTES) + 1
        num_asks = allowed * asks_a_page
        num_turns = tl.cdiv(num_asks, BLOCK)
        for turn in range(tl.program_id(1).to(tl.int64), num_turns, tl.num_programs(1)):
            asks = turn * BLOCK + tl.arange(0, BLOCK)
            is_within = asks < num_asks
            blocks = asks // asks_a_page
            table = block_table_BM + request.to(tl.int64) * table_stride
            pages = tl.load(table + blocks, mask=is_within, other=0).to(tl.int64)
            first = address.to(tl.int64) + pages * page_stride_bytes
            addresses, sizes = cut(first, first + page_bytes, asks % asks_a_page, UNIT_BYTES)
            sizes = tl.where(is_within, sizes, 0)
            ask(addresses, sizes, before * asks_a_page + asks, asked_A2, is_within, BY)


def _variants(by: int, unit_bytes: int, name: str, min_architecture: int) -> tuple[Variant, ...]:
    constants = {"UNIT_BYTES": unit_bytes, "BLOCK": 32, "BY": by, "asked_A2": None}
    return (
        Variant(
            name=f"l2_prefetch.prefetch_{name}",
            kernel=prefetch_kernel,
            signature={"address": "i64", "num_bytes": "i32", "switch": "*i32"},
            constants=constants,
            aligned=("switch",),
            num_warps=1,
            min_architecture=min_architecture,
        ),
        Variant(
            name=f"l2_prefetch.prefetch_kv_{name}",
            kernel=prefetch_kv_kernel,
            signature={
                "address": "i64",
                "page_stride_bytes": "i32",
                "page_bytes": "i32",
                "block_table_BM": "*i32",
                "table_stride": "i32",
                "seq_lens_B": "*i32",
                "num_requests": "i32",
                "block_tokens": "i32",
                "max_pages": "i32",
                "switch": "*i32",
            },
            constants={**constants, "REQUESTS": 256},
            aligned=("page_stride_bytes", "page_bytes", "block_tokens", "switch"),
            num_warps=1,
            min_architecture=min_architecture,
        ),
    )


VARIANTS = (*_variants(LINES, LINE_BYTES, "lines", 80), *_variants(BULK, 4096, "bulk", 90))
