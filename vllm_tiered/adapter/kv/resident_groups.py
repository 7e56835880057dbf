# SPDX-License-Identifier: Apache-2.0
"""Hooks in vLLM's scheduler that follow the blocks of resident groups.

vLLM has one block pool for all groups, which does not know the group of a block. But each group has
a manager of its own. So a resident group's manager gets the pool through a view that records which
blocks it allocates, and the pool itself is watched for blocks that are freed, hit or reused.

A block of a resident group costs pages in offloaded layers in addition. vLLM asks the coordinator
how many blocks an allocation takes; the answer is raised by the blocks that must be reserved for
those pages.

State blocks lie in columns, which the workers must see instead of the block ids
(:func:`name_columns`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm_tiered.adapter.kv.groups import ResidentGroup
from vllm_tiered.kv.admission import LeftOver
from vllm_tiered.kv.resident_blocks import ResidentBlocks


class ResidentGroupHooks:
    """Hooks in one engine's KV cache manager.

    Args:
        kv_cache_manager: vLLM's manager.
        groups: the resident groups.
        blocks: the tracker, which the hooks call.

    Attributes:
        was_postponed: the last allocation asked for more blocks than there are. vLLM does so to
            allocate in a later step, when a state that the request hits has been computed.
    """

    def __init__(
        self, kv_cache_manager: Any, groups: Iterable[ResidentGroup], blocks: ResidentBlocks
    ) -> None:
        self._blocks = blocks
        self._num_asked = 0  # blocks that resident groups ask for in one allocation
        self._left_over: LeftOver | None = None
        self.was_postponed = False
        coordinator = kv_cache_manager.coordinator
        pool = coordinator.block_pool
        self._pool_blocks = pool.num_gpu_blocks
        for group in groups:
            manager = coordinator.single_type_managers[group.index]
            hold = blocks.hold_states if group.has_states else blocks.hold
            manager.block_pool = _GroupView(pool, hold)
            manager.get_num_blocks_to_allocate = self._counted(manager.get_num_blocks_to_allocate)
        coordinator.get_num_blocks_to_allocate = self._with_reserve(
            coordinator.get_num_blocks_to_allocate
        )
        self._watch(pool)

    @contextmanager
    def leaving_over(self, left_over: LeftOver) -> Iterator[None]:
        """Add to the needed blocks of allocations what must be left over beside them.

        The number for no block of a resident group is left out: vLLM is told that one directly.
        """
        self._left_over, self.was_postponed = left_over, False
        try:
            yield
        finally:
            self._left_over = None

    def _counted(self, get_num_blocks: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(get_num_blocks)
        def counted(
            request_id: str, num_tokens: int, new_computed_blocks: Any, *args: Any, **kwargs: Any
        ) -> int:
            count = get_num_blocks(request_id, num_tokens, new_computed_blocks, *args, **kwargs)
            # vLLM counts free blocks that are hit. They have their pages already.
            hits = sum(
                not block.ref_cnt and block.block_id in self._blocks
                for block in new_computed_blocks
            )
            self._num_asked += max(0, count - hits)
            return count

        return counted

    def _with_reserve(self, get_num_blocks: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(get_num_blocks)
        def with_reserve(*args: Any, **kwargs: Any) -> int:
            self._num_asked = 0
            count = get_num_blocks(*args, **kwargs)
            if self._left_over is None or not self._num_asked:
                return count
            self.was_postponed |= self._num_asked > self._pool_blocks
            return count + self._left_over(self._num_asked) - self._left_over(0)

        return with_reserve

    def _watch(self, pool: Any) -> None:
        """Record what happens to blocks of resident groups, whoever calls the pool."""
        blocks = self._blocks
        get_new, touch, free = pool.get_new_blocks, pool.touch, pool.free_blocks

        @functools.wraps(get_new)
        def get_new_blocks(num_blocks: int) -> Any:
            new = get_new(num_blocks)
            blocks.drop(block.block_id for block in new)
            return new

        @functools.wraps(touch)
        def touch_blocks(hit: Sequence[Any]) -> None:
            blocks.hold([block.block_id for block in hit if block.block_id in blocks])
            touch(hit)

        @functools.wraps(free)
        def free_blocks(ordered_blocks: Iterable[Any]) -> None:
            freed = list(ordered_blocks)
            free(freed)
            for block in freed:
                if block.ref_cnt or block.block_id not in blocks:
                    continue
                if pool.enable_caching and block.block_hash is not None:
                    blocks.cache(block.block_id)
                else:
                    blocks.drop((block.block_id,))

        pool.get_new_blocks = get_new_blocks
        pool.touch = touch_blocks
        pool.free_blocks = free_blocks


class _GroupView:
    """vLLM's block pool as the manager of a resident group sees it."""

    def __init__(self, pool: Any, hold: Callable[[Iterable[int]], None]) -> None:
        self._pool = pool
        self._hold = hold

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def get_new_blocks(self, num_blocks: int) -> Any:
        new = self._pool.get_new_blocks(num_blocks)
        self._hold(block.block_id for block in new)
        return new


def name_columns(scheduler_output: Any, groups: Iterable[ResidentGroup], columns: Any) -> None:
    """Replace state blocks by their columns in what vLLM's scheduler sends to its workers.

    Args:
        columns: the :class:`StateColumns`.
    """
    indices = {group.index for group in groups if group.has_states}

    def renamed(block_ids: Sequence[Sequence[int]]) -> tuple[Sequence[int], ...]:
        return tuple(
            columns.rename(of_group) if index in indices else of_group
            for index, of_group in enumerate(block_ids)
        )

    for new in scheduler_output.scheduled_new_reqs:
        new.block_ids = renamed(new.block_ids)
    cached = scheduler_output.scheduled_cached_reqs
    cached.new_block_ids = [
        None if block_ids is None else renamed(block_ids) for block_ids in cached.new_block_ids
    ]
