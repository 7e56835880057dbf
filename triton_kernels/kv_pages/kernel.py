# SPDX-License-Identifier: Apache-2.0
"""Kernels that copy KV pages and translate block ids to page ids.

``copy_pages_kernel`` copies scattered pages in one launch with the GPU's loads and stores
(zero-copy). Far memory is host memory pinned with CUDA, so a kernel reads and writes it over the
link. A few programs saturate a link and leave the other multiprocessors to the model:

    program p copies chunks p, p + programs, p + 2 programs, ...
    chunk c is words [c % per_page * BLOCK, ... + BLOCK) of the page at position c / per_page

P pages, W words of 4 bytes in each page. A thread loads 16 bytes at once if W is divisible by 4.

``translate_kernel`` writes block tables and slot mappings of all layers in one launch. Programs are
(chunk, layer): the first chunks are entries of the block table, row by row, the others are slots.

    chunk   0          1          2          3
            │ entries of R x C    │ │ slots of T  │       the last chunk of each may be partial

L layers, B blocks, R requests, C blocks of the longest request, T tokens.
"""

import triton
import triton.language as tl

from vllm_tiered.kernels.variants import Variant


# Otherwise Triton compiles again, in a step, if the number of pages is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["num_pages"])
def copy_pages_kernel(
    src_PW,
    src_ids,
    dst_PW,
    dst_ids,
    num_pages,
    page_words,
    BLOCK: tl.constexpr,
):
    per_page = tl.cdiv(page_words, BLOCK)
    for chunk in range(tl.program_id(0), num_pages * per_page, tl.num_programs(0)):
        position = chunk // per_page
        # A far tier can have more than 2^32 words.
        src = tl.load(src_ids + position).to(tl.int64)
        dst = tl.load(dst_ids + position).to(tl.int64)
        words = chunk % per_page * BLOCK + tl.arange(0, BLOCK)
        is_within = words < page_words
        values = tl.load(src_PW + src * page_words + words, mask=is_within)
        tl.store(dst_PW + dst * page_words + words, values, mask=is_within)


# The numbers of requests and tokens change from step to step: see above.
@triton.jit(do_not_specialize=["num_requests", "num_columns", "num_tokens"])
def translate_kernel(
    pages_LB,
    blocks_RC,
    tables_LRC,
    slots_T,
    layer_slots_LT,
    num_blocks,
    num_requests,
    num_columns,
    num_tokens,
    pages_stride,
    blocks_stride,
    tables_layer_stride,
    tables_stride,
    slots_stride,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64 bits: the tables of all layers, and pages times tokens, can exceed 32 bits.
    layer = tl.program_id(1).to(tl.int64)
    pages_B = pages_LB + layer * pages_stride
    num_entries = num_requests * num_columns
    table_chunks = tl.cdiv(num_entries, BLOCK)
    chunk = tl.program_id(0)
    if chunk < table_chunks:
        entries = chunk * BLOCK + tl.arange(0, BLOCK)
        is_within = entries < num_entries
        rows = (entries // num_columns).to(tl.int64)
        columns = entries % num_columns
        blocks = tl.load(blocks_RC + rows * blocks_stride + columns, mask=is_within, other=-1)
        is_block = (blocks >= 0) & (blocks < num_blocks)
        pages = tl.load(pages_B + blocks, mask=is_block, other=0)
        tables_RC = tables_LRC + layer * tables_layer_stride
        tl.store(tables_RC + rows * tables_stride + columns, pages, mask=is_within)
    else:
        tokens = (chunk - table_chunks) * BLOCK + tl.arange(0, BLOCK)
        is_token = tokens < num_tokens
        slots = tl.load(slots_T + tokens, mask=is_token, other=-1)
        slot_blocks = slots // BLOCK_TOKENS
        is_slot = (slots >= 0) & (slot_blocks < num_blocks)
        slot_pages = tl.load(pages_B + slot_blocks, mask=is_slot, other=0).to(tl.int64)
        moved = tl.where(is_slot, slot_pages * BLOCK_TOKENS + slots % BLOCK_TOKENS, -1)
        tl.store(layer_slots_LT + layer * slots_stride + tokens, moved, mask=is_token)


VARIANTS = (
    Variant(
        name="kv_pages.copy_pages",
        kernel=copy_pages_kernel,
        signature={
            "src_PW": "*i32",
            "src_ids": "*i64",
            "dst_PW": "*i32",
            "dst_ids": "*i64",
            "num_pages": "i32",
            "page_words": "i32",
        },
        constants={"BLOCK": 2048},
        aligned=("src_PW", "src_ids", "dst_PW", "dst_ids", "page_words"),
    ),
    Variant(
        name="kv_pages.translate",
        kernel=translate_kernel,
        signature={
            "pages_LB": "*i32",
            "blocks_RC": "*i32",
            "tables_LRC": "*i32",
            "slots_T": "*i64",
            "layer_slots_LT": "*i64",
            "num_blocks": "i32",
            "num_requests": "i32",
            "num_columns": "i32",
            "num_tokens": "i32",
            "pages_stride": "i32",
            "blocks_stride": "i32",
            "tables_layer_stride": "i32",
            "tables_stride": "i32",
            "slots_stride": "i32",
        },
        constants={"BLOCK_TOKENS": 16, "BLOCK": 1024},
        aligned=("pages_LB", "blocks_RC", "tables_LRC", "slots_T", "layer_slots_LT"),
    ),
)
