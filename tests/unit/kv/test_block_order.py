# SPDX-License-Identifier: Apache-2.0
"""Pages in the order of block ids: copies to and from wherever the blocks' pages are."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import BudgetError
from vllm_tiered.kv.block_order import BlockOrderedPages
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.policy import interleave

NUM_LAYERS, NUM_BLOCKS, PAGE_BYTES = 3, 7, 24


def make(
    seed: int = 0, page_bytes: int = PAGE_BYTES
) -> tuple[BlockOrderedPages, MappingTable, PageBuffer]:
    """Return pages over a table that scatters every layer's blocks over the pool."""
    rng = np.random.default_rng(seed)
    table = MappingTable(interleave(NUM_LAYERS, 1), NUM_BLOCKS)
    pages = rng.permutation(40)[: NUM_LAYERS * NUM_BLOCKS]
    table.pages[:] = pages.reshape(NUM_LAYERS, NUM_BLOCKS)
    near = PageBuffer(torch.from_numpy(rng.integers(0, 256, (40, page_bytes), dtype=np.uint8)))
    return BlockOrderedPages(table, near), table, near


def test_each_block_is_at_its_own_number() -> None:
    ordered, table, near = make()
    block_ids = np.array([1, 2, 5])
    for layer in range(NUM_LAYERS):
        ordered.gather(layer, block_ids)
        for block in range(NUM_BLOCKS):
            page = near.data[int(table.pages[layer, block])]
            expected = page if block in block_ids else torch.zeros_like(page)
            assert torch.equal(ordered.data[layer, block], expected)


def test_only_the_blocks_that_are_named_are_written() -> None:
    ordered, table, near = make(1)
    before = near.data.clone()
    ordered.begin_writing()
    ordered.data.fill_(7)
    ordered.scatter(1, np.array([4, 0]))
    written = table.pages[1, [4, 0]].tolist()
    for page in range(40):
        expected = torch.full_like(before[page], 7) if page in written else before[page]
        assert torch.equal(near.data[page], expected)


def test_a_layer_may_get_other_pages() -> None:
    ordered, table, near = make(2)
    ordered.gather(0, np.array([3]))
    table.pages[0, 3] = table.pages[1, 3]
    ordered.gather(0, np.array([3]))
    assert torch.equal(ordered.data[0, 3], near.data[int(table.pages[1, 3])])


def test_memory_is_returned() -> None:
    ordered, _, _ = make(3, page_bytes=4096)
    ordered.data.fill_(1)
    ordered.release()
    assert ordered.data.any(), "nothing was said to be used"
    ordered.begin_writing()
    ordered.release()
    assert not ordered.data.any()
    ordered.gather(0, np.array([3]))
    assert ordered.data[0, 3].any()


def test_too_many_addresses_are_refused() -> None:
    table = MappingTable(interleave(NUM_LAYERS, 1), NUM_BLOCKS)
    near: Any = SimpleNamespace(data=SimpleNamespace(shape=(40, 1 << 60)))
    with pytest.raises(BudgetError, match=r"vm\.overcommit_memory"):
        BlockOrderedPages(table, near)
