# SPDX-License-Identifier: Apache-2.0
"""The block pool model allocates the same blocks as vLLM's own ``BlockPool``."""

from types import SimpleNamespace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fakes.kv.block_pool_model import BlockPool

NUM_BLOCKS = 7


class PoolMachine(RuleBasedStateMachine):
    """State machine in which holders of blocks come and go; each has a list of block ids."""

    def __init__(self):
        super().__init__()
        from vllm.v1.core.block_pool import BlockPool as VllmBlockPool

        self.model = BlockPool(NUM_BLOCKS)
        self.vllm = VllmBlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=1)
        self.held = []

    def vllm_blocks(self, block_ids):
        return [self.vllm.blocks[block_id] for block_id in block_ids]

    @rule(count=st.integers(1, 3))
    def take(self, count):
        if count <= len(self.model.free):
            block_ids = self.model.take(count)
            assert [block.block_id for block in self.vllm.get_new_blocks(count)] == block_ids
            self.held.append(block_ids)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 9), key=st.integers(0, 3))
    def fill(self, index, key):
        """Fill a held block, so that it is found by its content from now on."""
        block_id = self.held[index % len(self.held)][0]
        if block_id not in self.model.prefix_of:
            self.model.cache(block_id, (key,))
            content = SimpleNamespace(block_hashes=[bytes([key])])
            self.vllm.cache_full_blocks(content, self.vllm_blocks([block_id]), 0, 1, 1, 0)

    @rule(key=st.integers(0, 3))
    def hit(self, key):
        block_id = self.model.hit((key,))
        found = self.vllm.get_cached_block(bytes([key]), [0])
        assert (None if found is None else found[0].block_id) == block_id
        if block_id is not None:
            self.model.touch([block_id])
            self.vllm.touch(self.vllm_blocks([block_id]))
            self.held.append([block_id])

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 9))
    def release(self, index):
        block_ids = self.held.pop(index % len(self.held))
        self.model.release(block_ids)
        self.vllm.free_blocks(self.vllm_blocks(block_ids))

    @invariant()
    def same_queue_and_references(self):
        free = self.vllm.free_block_queue.get_all_free_blocks()
        assert [block.block_id for block in free] == list(self.model.free)
        references = [block.ref_cnt for block in self.vllm.blocks[1:]]
        assert references == self.model.references[1:]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
