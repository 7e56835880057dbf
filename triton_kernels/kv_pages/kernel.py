# SPDX-License-Identifier: Apache-2.0
"""Copies scattered pages, in one launch, by loads and stores of the GPU itself (zero-copy).

Far memory is host memory registered with CUDA, so a kernel reads and writes it over the link. A few
programs are enough to fill a link, and leave the other multiprocessors to the model:

    program p copies chunks p, p + programs, p + 2 programs, ...
    chunk c is words [c % per_page * BLOCK, ... + BLOCK) of the page at position c / per_page

P pages, W words of 4 bytes in each; 16 bytes a thread and load where W is divisible by 4.
"""

import triton
import triton.language as tl

from vllm_tiered.kernels.variants import Variant


@triton.jit
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
        # A far tier has more words than 32 bits count.
        src = tl.load(src_ids + position).to(tl.int64)
        dst = tl.load(dst_ids + position).to(tl.int64)
        words = chunk % per_page * BLOCK + tl.arange(0, BLOCK)
        is_within = words < page_words
        values = tl.load(src_PW + src * page_words + words, mask=is_within)
        tl.store(dst_PW + dst * page_words + words, values, mask=is_within)


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
)
