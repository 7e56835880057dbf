# SPDX-License-Identifier: Apache-2.0
"""Kernels that prefetch memory into the L2 cache before it is read (PRESERVE, section 3).

A span of memory is cut at multiples of the unit, so that no line is requested twice:

    unit      |        |        |        |        |      multiples of UNIT_BYTES
    span           [=====================]               not aligned itself
    asks           [---][-------][-------]               one request for each unit, by one thread

One request is one instruction. On sm_90 and later it is ``cp.async.bulk.prefetch.L2`` of a whole
unit, which starts and ends at multiples of 16 bytes. On sm_80 it is ``prefetch.global.L2``, and
units are lines of 128 bytes. Neither instruction has a result. For tests, a kernel with BY =
RECORDED writes its requests to memory instead.

The kernels read from device memory, ``switch``, whether to prefetch at all. A replayed CUDA graph
would not see a switch on the host.

N spans, B requests, M blocks at most in each.
"""

import triton
import triton.language as tl

from vllm_tiered.kernels.variants import Variant

LINES: int = 0
BULK: int = 1
RECORDED: int = 2
"""Values of ``BY``; kernels use the numbers, because they cannot read these module names."""

LINE_BYTES = 128


@triton.jit
def ask(addresses, sizes, at, asked_A2, is_within, BY: tl.constexpr):
    """Request ``sizes`` bytes from ``addresses``; sizes of 0 or less request nothing."""
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
    """Return address and bytes of the span's ``unit``-th request; 0 or less past the span's end.

    The span is widened to multiples of 16 bytes for bulk prefetches, which never adds a line.
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
    """Prefetch ``num_bytes`` (> 0) from ``address`` on.

    Programs make BLOCK requests at a time in turn.
    """
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
    """Prefetch the pages of this step's requests in order, at most ``max_pages`` in total.

    The programs (b, p) of request b make BLOCK prefetches at a time in turn. REQUESTS is a power of
    two, at least ``num_requests``.
    """
    if tl.load(switch) != 0:
        request = tl.program_id(0)
        requests = tl.arange(0, REQUESTS)
        lengths = tl.load(seq_lens_B + requests, mask=requests < num_requests, other=0)
        pages_of = tl.cdiv(lengths, block_tokens).to(tl.int64)
        before = tl.sum(tl.where(requests < request, pages_of, 0))
        mine = tl.sum(tl.where(requests == request, pages_of, 0))
        allowed = tl.maximum(tl.minimum(mine, max_pages - before), 0)
        # A page that is not aligned can touch one more unit.
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
