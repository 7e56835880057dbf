# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of near pages, compared with brute force."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_tiered.kv.layout import (
    PARTIAL_WHILE_PREFILLING,
    STAGING_BUFFERS,
    KvGeometry,
    LayerStack,
    expansion_of,
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
        num_resident=len(order.resident),
        num_staging_buffers=order.num_staging_buffers,
        page_bytes=64,
        block_tokens=draw(st.integers(1, 32)),
        near_pages=draw(st.integers(0, 400)),
    )


partial = st.integers(0, 12)


@given(geometry=geometries(), num_partial=partial)
def test_block_limit_is_the_most_that_fit(geometry, num_partial):
    fitting = [
        blocks
        for blocks in range(geometry.near_pages + 1)
        if geometry.pages_needed(blocks, num_partial) <= geometry.near_pages
    ]
    assert geometry.block_limit(num_partial) == max(fitting, default=0)


@given(geometry=geometries(), num_partial=partial)
def test_more_partial_blocks_never_leave_more_blocks(geometry, num_partial):
    assert geometry.block_limit(num_partial + 1) <= geometry.block_limit(num_partial)


@given(geometry=geometries(), num_partial=partial, fewer=st.integers(1, 39), keeps=st.booleans())
def test_a_smaller_stage_of_a_pipeline_holds_the_blocks_of_the_largest(
    geometry, num_partial, fewer, keeps
):
    """With as many pages and offloaded layers; it reads no more blocks where full ones are kept."""
    num_layers = max(geometry.num_far + 1, geometry.num_layers - fewer)
    largest = replace(geometry, keeps_blocks=keeps)
    smaller = replace(largest, num_layers=num_layers, num_resident=num_layers - geometry.num_far)
    limit = largest.block_limit(num_partial)
    assert smaller.block_limit(num_partial) >= limit
    assert smaller.pages_needed(limit, num_partial) <= largest.pages_needed(limit, num_partial)
    for used in range(num_partial, limit + 1, 7):
        staged = smaller.staged_blocks(used, num_partial)
        assert staged <= largest.staged_blocks(used, num_partial)


@given(geometry=geometries(), blocks=st.integers(0, 60), num_partial=partial)
def test_pages_needed_grow_with_blocks_and_partial_blocks(geometry, blocks, num_partial):
    pages = geometry.pages_needed(blocks, num_partial)
    assert geometry.pages_needed(blocks + 1, num_partial) > pages
    assert geometry.pages_needed(blocks, num_partial + 1) >= pages


@given(geometry=geometries(), blocks=st.integers(0, 60), num_partial=partial)
def test_the_needed_pages_hold_a_steps_blocks(geometry, blocks, num_partial):
    """A step has all blocks in every resident layer, all partial blocks in every offloaded layer,
    and at least one layer of all other blocks."""
    used_partial_blocks = min(blocks, num_partial)
    step = geometry.num_resident * blocks + geometry.num_far * used_partial_blocks
    if geometry.num_staging_buffers:
        step += blocks - used_partial_blocks
    assert geometry.pages_needed(blocks, num_partial) >= step


@given(geometry=geometries())
def test_expansion_is_what_block_limit_gives(geometry):
    """Without partial blocks there are P / (n - m + buffers) blocks, as in Pie's formula."""
    num_far = geometry.num_far
    if geometry.num_resident:  # interleave, or no far layer at all
        per_block = geometry.num_resident + min(STAGING_BUFFERS, num_far)
        assert geometry.block_limit(0) == geometry.near_pages // per_block
        assert per_block * expansion_of(geometry.num_layers, num_far) == pytest.approx(
            geometry.num_layers
        )


@pytest.mark.parametrize(
    ("num_layers", "num_far", "expansion"),
    [(30, 0, 1.0), (30, 1, 1.0), (30, 2, 1.0), (30, 3, 30 / 29), (30, 17, 2.0), (30, 29, 10.0)],
)
def test_expansion_of(num_layers, num_far, expansion):
    assert expansion_of(num_layers, num_far) == expansion


@given(num_layers=st.integers(1, 100), expansion=st.floats(1.0, 40.0))
def test_far_layers_for_expansion_are_the_fewest(num_layers, expansion):
    reaching = [
        num_far
        for num_far in range(LayerStack(num_layers).max_num_far + 1)
        if expansion_of(num_layers, num_far) >= expansion
    ]
    assert LayerStack(num_layers).num_far_for(expansion) == min(reaching, default=None)


def test_far_layers_for_expansion_none_and_zero():
    assert LayerStack(30).num_far_for(1.0) == 0
    assert LayerStack(1).num_far_for(1.0) == 0
    assert LayerStack(30).num_far_for(2.0) == 17
    assert LayerStack(30).num_far_for(10.0) == 29
    assert LayerStack(30).num_far_for(10.01) is None
    assert LayerStack(3).num_far_for(1.1) is None


def test_bytes_and_longest_request():
    geometry = KvGeometry(
        num_layers=4,
        num_resident=1,
        num_staging_buffers=2,
        page_bytes=100,
        block_tokens=8,
        near_pages=30,
    )
    assert geometry.num_far == 3
    assert geometry.near_bytes == 3000
    assert geometry.far_bytes(11) == 3 * 11 * 100
    # 1 G + 3 T + 2 (G - T) <= 30
    assert [geometry.block_limit(num_partial) for num_partial in range(3)] == [10, 9, 9]
    assert PARTIAL_WHILE_PREFILLING == 2
    assert geometry.max_request_tokens(100) == 9 * 8
    assert geometry.max_request_tokens(5) == 5 * 8
    assert geometry.block_limit(11) == 0
