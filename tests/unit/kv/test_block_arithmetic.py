# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of near pages against brute force."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_tiered.kv.layout import (
    STAGING_AREAS,
    TAILS_WHILE_PREFILLING,
    KvGeometry,
    expansion_of,
    far_layers_for_expansion,
    max_far_layers,
)
from vllm_tiered.kv.policy import POLICIES


@st.composite
def geometries(draw):
    num_layers = draw(st.integers(1, 40))
    order = POLICIES[draw(st.sampled_from(sorted(POLICIES)))](
        num_layers, draw(st.integers(0, num_layers - 1))
    )
    return KvGeometry(
        num_layers=num_layers,
        pinned_layers=len(order.pinned),
        areas=order.areas,
        page_bytes=64,
        block_tokens=draw(st.integers(1, 32)),
        near_pages=draw(st.integers(0, 400)),
    )


tails = st.integers(0, 12)


@given(geometry=geometries(), tail_slots=tails)
def test_block_limit_is_the_most_that_fit(geometry, tail_slots):
    fitting = [
        blocks
        for blocks in range(geometry.near_pages + 1)
        if geometry.pages_needed(blocks, tail_slots) <= geometry.near_pages
    ]
    assert geometry.block_limit(tail_slots) == max(fitting, default=0)


@given(geometry=geometries(), tail_slots=tails)
def test_more_tails_never_leave_more_blocks(geometry, tail_slots):
    assert geometry.block_limit(tail_slots + 1) <= geometry.block_limit(tail_slots)


@given(geometry=geometries(), blocks=st.integers(0, 60), tail_slots=tails)
def test_pages_needed_grow_with_blocks_and_tails(geometry, blocks, tail_slots):
    pages = geometry.pages_needed(blocks, tail_slots)
    assert geometry.pages_needed(blocks + 1, tail_slots) > pages
    assert geometry.pages_needed(blocks, tail_slots + 1) >= pages


@given(geometry=geometries(), blocks=st.integers(0, 60), tail_slots=tails)
def test_pages_needed_hold_what_a_step_has(geometry, blocks, tail_slots):
    """All blocks in every pinned layer, all tails, and at least one layer of all other blocks."""
    used_tails = min(blocks, tail_slots)
    step = geometry.pinned_layers * blocks + geometry.rotating_layers * used_tails
    if geometry.areas:
        step += blocks - used_tails
    assert geometry.pages_needed(blocks, tail_slots) >= step


@given(geometry=geometries())
def test_expansion_is_what_block_limit_gives(geometry):
    """Without tails the blocks are P / (n - m + areas), as Pie's formula has it."""
    far_layers = geometry.rotating_layers
    if geometry.pinned_layers:  # interleave, or no far layer at all
        per_block = geometry.pinned_layers + min(STAGING_AREAS, far_layers)
        assert geometry.block_limit(0) == geometry.near_pages // per_block
        assert per_block * expansion_of(geometry.num_layers, far_layers) == pytest.approx(
            geometry.num_layers
        )


@pytest.mark.parametrize(
    ("num_layers", "far_layers", "expansion"),
    [(30, 0, 1.0), (30, 1, 1.0), (30, 2, 1.0), (30, 3, 30 / 29), (30, 17, 2.0), (30, 29, 10.0)],
)
def test_expansion_of(num_layers, far_layers, expansion):
    assert expansion_of(num_layers, far_layers) == expansion


@given(num_layers=st.integers(1, 100), expansion=st.floats(1.0, 40.0))
def test_far_layers_for_expansion_are_the_fewest(num_layers, expansion):
    reaching = [
        far_layers
        for far_layers in range(max_far_layers(num_layers) + 1)
        if expansion_of(num_layers, far_layers) >= expansion
    ]
    assert far_layers_for_expansion(num_layers, expansion) == min(reaching, default=None)


def test_far_layers_for_expansion_none_and_zero():
    assert far_layers_for_expansion(30, 1.0) == 0
    assert far_layers_for_expansion(1, 1.0) == 0
    assert far_layers_for_expansion(30, 2.0) == 17
    assert far_layers_for_expansion(30, 10.0) == 29
    assert far_layers_for_expansion(30, 10.01) is None
    assert far_layers_for_expansion(3, 1.1) is None


def test_bytes_and_longest_request():
    geometry = KvGeometry(
        num_layers=4, pinned_layers=1, areas=2, page_bytes=100, block_tokens=8, near_pages=30
    )
    assert geometry.rotating_layers == 3
    assert geometry.near_bytes == 3000
    assert geometry.far_bytes(11) == 3 * 11 * 100
    # 1 G + 3 T + 2 (G - T) <= 30
    assert [geometry.block_limit(tail_slots) for tail_slots in range(3)] == [10, 9, 9]
    assert TAILS_WHILE_PREFILLING == 2
    assert geometry.max_request_tokens(100) == 9 * 8
    assert geometry.max_request_tokens(5) == 5 * 8
    assert geometry.block_limit(11) == 0
