# SPDX-License-Identifier: Apache-2.0
"""Narrow far pages in the plan: their bytes, the levels that they leave, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm_tiered.adapter.kv import plan as kv_plan
from vllm_tiered.adapter.kv.far_dtype import check_elements, page_format
from vllm_tiered.config import KvConfig
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.kv.layout import LayerStack, Level, PartialBlocks

INT8 = KvConfig(far_dtype="int8")
STACK = LayerStack(12)


def spec(dtype=torch.bfloat16, *, page_bytes=4096, padded=None, quant_mode=0, content=None):
    return SimpleNamespace(
        dtype=dtype,
        block_size=16,
        head_size=32,
        head_size_v=32,
        page_size_bytes=padded or page_bytes,
        real_page_size_bytes=page_bytes,
        page_size_padded=padded,
        kv_quant_mode=quant_mode,
        state_content_bytes=content,
    )


def levels(kv):
    return kv_plan.make_levels(kv, spec(), STACK, 600, PartialBlocks())


def test_far_bytes_are_those_of_narrow_pages_and_near_bytes_are_not():
    plain, narrow = (levels(kv).geometry(Level(6)) for kv in (KvConfig(), INT8))
    assert narrow.page_bytes == plain.page_bytes == plain.far_page_bytes == 4096
    assert narrow.far_page_bytes == 2048 + 2 * 32
    assert narrow.far_bytes(10) == 6 * 10 * narrow.far_page_bytes
    assert narrow.near_bytes == plain.near_bytes
    order = kv_plan.layer_order("interleave", STACK, 6)
    fixed = kv_plan.make_geometry(INT8, order, spec(), 600, PartialBlocks())
    assert fixed.far_page_bytes == narrow.far_page_bytes


def test_a_far_budget_holds_more_levels():
    plain, narrow = levels(replace(KvConfig(), max_expansion=4.0)), levels(INT8)
    budget = 800_000
    most = [kv_plan.within_far_budget(found, budget).max_num_far for found in (plain, narrow)]
    assert 0 < most[0] < most[1]


def test_partial_blocks_are_never_rounded():
    assert any(not level.partial_blocks_resident for level in levels(KvConfig()).ladder)
    assert all(level.partial_blocks_resident for level in levels(INT8).ladder)


def test_pages_of_floats_can_be_narrow():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = page_format(KvConfig(far_dtype="fp8"), spec(dtype, padded=4096))
        assert found is not None
        assert (found.element, found.code) == (str(dtype).removeprefix("torch."), "fp8")


@pytest.mark.parametrize(
    ("unfit", "message"),
    [
        (spec(torch.uint8), r"narrow itself: uint8 \(--kv-cache-dtype\)"),
        (spec(torch.float8_e4m3fn), "narrow itself: float8_e4m3fn"),
        (spec(quant_mode=1), "narrow itself"),
        (spec(content=100), "packs other things than floats"),
        (spec(padded=8192), "padded from 4096 to 8192 bytes"),
        (spec(page_bytes=4100), "4100 bytes, no multiple of 8"),
    ],
    ids=["bytes", "fp8", "quantised", "packed", "padded", "odd"],
)
def test_others_are_refused_with_the_knob(unfit, message):
    with pytest.raises(UnsupportedError, match=message) as refusal:
        page_format(INT8, unfit)
    assert 'leave kv.far_dtype at "auto"' in str(refusal.value)
    assert page_format(KvConfig(), unfit) is None
    check_elements(KvConfig(), unfit)
