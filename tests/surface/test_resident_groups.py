# SPDX-License-Identifier: Apache-2.0
"""The hooks follow vLLM's own KV cache manager, with groups that no CPU engine runs together.

Above all prefix caching of recurrent states (``mamba_cache_mode="align"``), vLLM's default on GPUs.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_tiered.adapter.kv.groups import ResidentGroup
from vllm_tiered.adapter.kv.resident_groups import ResidentGroupHooks, name_columns
from vllm_tiered.kv.resident_blocks import ResidentBlocks
from vllm_tiered.kv.state_columns import StateColumns

BLOCK = 16
NUM_BLOCKS = 300
NUM_COLUMNS = 200
WINDOW, STATES = 1, 2  # indices of the groups; 0 is that of full attention


class Manager:
    """vLLM's manager with three groups, and requests that share prefixes."""

    def __init__(self, seed: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
            SlidingWindowSpec,
        )

        kv: dict[str, Any] = {
            "block_size": BLOCK,
            "num_kv_heads": 1,
            "head_size": 8,
            "dtype": torch.float32,
        }
        states = MambaSpec(
            block_size=BLOCK,
            shapes=((BLOCK, 8), (BLOCK, 8)),
            dtypes=(torch.float32, torch.float32),
            mamba_cache_mode="align",
        )
        specs = [FullAttentionSpec(**kv), SlidingWindowSpec(**kv, sliding_window=40), states]
        groups = [KVCacheGroupSpec([f"layers.{at}"], spec) for at, spec in enumerate(specs)]
        config = KVCacheConfig(NUM_BLOCKS, [], groups)
        self.manager = KVCacheManager(
            config, max_model_len=1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.rng = random.Random(seed)
        self.blocks = ResidentBlocks()
        self.blocks.columns = StateColumns(NUM_COLUMNS)
        group: dict[str, Any] = {"layer_names": (), "block_tokens": BLOCK, "most_blocks": 9}
        self.groups = (
            ResidentGroup(index=WINDOW, **group),
            ResidentGroup(index=STATES, **group, has_states=True),
        )
        self._hooks = ResidentGroupHooks(self.manager, self.groups, self.blocks)
        self.asked: list[int] = []
        self.running: list[Any] = []
        self.num_hits = 0
        self._count = 0

    def begin(self) -> Any:
        """Begin a request; return its blocks by group, None if vLLM postpones it."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._count += 1
        family = self.rng.randrange(2)
        shared = self.rng.choice((0, 4, 4, 8)) * BLOCK
        length = shared + self.rng.randint(1, 60)
        tokens = [family + 1] * shared + [1000 + self._count] * (length - shared)
        params = SamplingParams(max_tokens=99)
        params.update_from_generation_config({}, eos_token_id=5)
        request = Request(f"r{self._count}", tokens, params, None, block_hasher=self._hasher)
        hit, num_hit, _ = self.manager.get_computed_blocks(request)
        chunk = min(request.num_tokens - num_hit, 2 * BLOCK)
        if request.num_tokens - num_hit > chunk:
            chunk -= (num_hit + chunk) % BLOCK
        if self._allocate(request, chunk, num_hit, hit) is None:
            self.manager.free(request)
            return None
        self.num_hits += num_hit
        request.num_computed_tokens = num_hit + chunk
        self.running.append(request)
        return self.manager.get_block_ids(request.request_id)

    def go_on(self, request: Any) -> None:
        left = request.num_tokens - request.num_computed_tokens
        if left <= 0:
            request.append_output_token_ids(7)
            left = 1
        chunk = min(left, 2 * BLOCK)
        if left > chunk:
            chunk -= (request.num_computed_tokens + chunk) % BLOCK
        assert self._allocate(request, chunk) is not None
        request.num_computed_tokens += chunk

    def end(self, request: Any) -> None:
        self.manager.free(request)
        self.running.remove(request)

    def _allocate(self, request: Any, *args: Any) -> Any:
        def left_over(count: int) -> int:
            self.asked.append(count)
            return 0

        with self._hooks.leaving_over(left_over):
            blocks = self.manager.allocate_slots(request, *args)
        assert (blocks is None) == self._hooks.was_postponed, "there is room for all requests"
        return blocks

    def check(self) -> None:
        managers = self.manager.coordinator.single_type_managers
        held = {
            index: {b.block_id for of in managers[index].req_to_blocks.values() for b in of}
            for index in (0, WINDOW, STATES)
        }
        for ids in held.values():
            ids.discard(0)
        free = [b for b in self.manager.block_pool.blocks if not b.ref_cnt and not b.is_null]
        cached = {b.block_id for b in free if b.block_hash and group_of(b) in (WINDOW, STATES)}
        assert self.blocks._held == held[WINDOW] | held[STATES]
        assert set(self.blocks._cached) == cached
        assert not self.blocks.block_ids & held[0]
        changes = self.blocks.take_changes()
        columns = self.blocks.columns
        assert columns is not None
        assert not set(changes.new) & held[STATES] and not set(changes.new_states) & held[WINDOW]
        named = columns.rename(held[STATES])
        assert len(set(named)) == len(named) and min(named, default=1) > 0


def group_of(block: Any) -> int:
    from vllm.v1.core.kv_cache_utils import get_group_id

    return int(get_group_id(block.block_hash))


@pytest.mark.parametrize("seed", range(4))
def test_the_tracker_knows_what_vllm_holds_and_caches(seed):
    model = Manager(seed)
    for _ in range(300):
        model.manager.new_step_starts()
        while len(model.running) < 5 and model.rng.random() < 0.6:
            model.begin()
        for request in [*model.running]:
            if model.rng.random() < 0.8:
                model.go_on(request)
        if model.running and model.rng.random() < 0.15:
            model.end(model.rng.choice(model.running))
        model.check()
    assert model.num_hits > 20 * BLOCK
    assert max(model.asked) > 2 and 0 in model.asked


def test_a_request_that_hits_a_state_of_this_step_waits_for_the_next():
    """It is not short of blocks: no cached block gives way for it."""
    model = Manager(1)
    while not any(request.num_prompt_tokens > 4 * BLOCK for request in model.running):
        model.begin()
    cached = {*model.blocks._cached}
    model.rng.seed(1)
    while not model._hooks.was_postponed:
        model.begin()
    assert max(model.asked) > NUM_BLOCKS
    assert cached <= {*model.blocks._cached}


def test_workers_see_columns_instead_of_state_blocks():
    model = Manager(0)
    filler = model.manager.block_pool.get_new_blocks(NUM_COLUMNS + 9)  # ids beyond the columns
    block_ids = model.begin()
    model.manager.block_pool.free_blocks(filler)
    model.blocks.take_changes()
    new = SimpleNamespace(block_ids=block_ids)
    cached = SimpleNamespace(new_block_ids=[None, ([9], [], [])])
    output = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached)
    name_columns(output, model.groups, model.blocks.columns)
    assert new.block_ids[0] == block_ids[0] and new.block_ids[WINDOW] == block_ids[WINDOW]
    assert all(block_id >= NUM_COLUMNS for block_id in block_ids[STATES] if block_id)
    assert all(column < NUM_COLUMNS for column in new.block_ids[STATES])
    assert [bool(c) for c in new.block_ids[STATES]] == [bool(b) for b in block_ids[STATES]]
    assert cached.new_block_ids == [None, ([9], [], [])]
