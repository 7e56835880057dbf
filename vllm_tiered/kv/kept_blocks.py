# SPDX-License-Identifier: Apache-2.0
"""Kept blocks: full blocks that stay near in every layer while there are pages for them.

Without them, every full block of an offloaded layer is far, and each step reads all that it uses.
So the near pages are used up only at the block limit. Here they hold whole blocks as well, as a
cache of the far tier, and a step reads the other blocks only:

    ┌──── resident · G ────┬─── offloaded · (T + K) ───┬──────── buffers · F ────────┐
    │ as in `layout.py`    │ pages of the T partial    │ staging buffers, for the F  │
    │                      │ and the K kept blocks     │ far blocks that a step uses │
    └──────────────────────┴───────────────────────────┴─────────────────────────────┘

A block that fills up is kept, as its pages are near already. A new block that a prompt fills in one
step is kept if there are pages left. When pages are lacking, kept blocks are written to the far
tier: first those that no request of the step uses, then the oldest. A block that is far stays far
until its content is lost.

This is bookkeeping in the scheduler: a plan goes in, as ``step_planner.py`` makes it, and a plan
with kept blocks comes out. For the workers a kept block is a partial one that is never filled.
"""

from dataclasses import replace
from itertools import islice

import numpy as np

from vllm_tiered.kv.layout import KvGeometry
from vllm_tiered.kv.step_plan import NO_BLOCKS, BlockIds, StepPlan


class KeptBlocks:
    """Chooser of the full blocks that stay near.

    Args:
        num_blocks: block ids are below this.
    """

    def __init__(self, num_blocks: int) -> None:
        self._is_kept = np.zeros(num_blocks, dtype=np.bool_)
        self._oldest_first: dict[int, None] = {}
        self._num_others = 0  # blocks with near pages of their own that are not full
        self._before = StepPlan()
        self._released = -1
        self._load = NO_BLOCKS

    @property
    def block_ids(self) -> list[int]:
        """The kept blocks, oldest first."""
        return list(self._oldest_first)

    def apply(
        self,
        plan: StepPlan,
        geometry: KvGeometry,
        released_blocks: int,
        dropped: BlockIds = NO_BLOCKS,
    ) -> StepPlan:
        """Return the plan with kept blocks: what it fills stays near, and it loads fewer blocks.

        Args:
            plan: a step's plan without kept blocks.
            geometry: the sizes at the step's level.
            released_blocks: the blocks that the engine may use in the step.
            dropped: full blocks of requests that ended, whose content nothing needs any more.
        """
        if self._repeats(plan, released_blocks) and not len(dropped):
            return replace(plan, load=self._load)
        keeps = geometry.partial_blocks_resident
        freed, evicted = self._lose(plan, dropped)
        if not keeps:
            evicted += self._drop(list(self._oldest_first))
        self._num_others += len(plan.alloc_partial) - len(plan.free_partial)
        self._num_others += len(plan.alloc_state) - len(plan.free_state)
        self._num_others -= len(plan.evict_partial) + len(plan.store_partial)
        store_new, store_partial = plan.store_new, plan.store_partial
        num_old = len(self._oldest_first)
        new: list[int] = []
        if keeps:
            self._keep(store_partial.tolist())
            store_partial = NO_BLOCKS
        spare = self._spare_pages(plan, geometry, released_blocks)
        if spare < 0:
            evicted += self._make_room(-spare, plan.load, geometry, num_old)
        elif keeps and len(store_new):
            new = store_new[: _fitting(spare, geometry)].tolist()
            self._keep(new)
            store_new = store_new[len(new) :]
        load = self._far_of(plan.load)
        if not np.array_equal(load, self._load):
            self._load = load
        self._before, self._released = plan, released_blocks
        return replace(
            plan,
            load=self._load,
            store_new=store_new,
            store_partial=store_partial,
            alloc_partial=_joined(plan.alloc_partial, new),
            free_partial=_joined(plan.free_partial, freed),
            evict_partial=_joined(plan.evict_partial, evicted),
            keep=_joined(plan.store_partial if keeps else NO_BLOCKS, new),
        )

    def _repeats(self, plan: StepPlan, released_blocks: int) -> bool:
        """Return whether the step writes and loads what the previous one did."""
        changes = (
            plan.store_new,
            plan.alloc_partial,
            plan.store_partial,
            plan.free_partial,
            plan.alloc_state,
            plan.free_state,
            plan.evict_partial,
            plan.reserved,
        )
        return (
            plan.load is self._before.load
            and plan.load_and_store is self._before.load_and_store
            and plan.num_far == self._before.num_far
            and released_blocks == self._released
            and plan.prefixes is None
            and not any(map(len, changes))
        )

    def _lose(self, plan: StepPlan, dropped: BlockIds) -> tuple[list[int], list[int]]:
        """Drop kept blocks that get other content, or whose content nothing needs.

        Returns:
            Blocks whose near pages are free, and blocks that are written to the far tier first, as
            the prefix store keeps their content.
        """
        evicted: list[int] = []
        lost = [plan.store_new, plan.alloc_partial, plan.alloc_state, plan.reserved, dropped]
        if plan.prefixes is not None:
            evicted = self._drop(self._kept_of(plan.prefixes.keep))
            lost.append(plan.prefixes.blocks)
        return self._drop(self._kept_of(np.unique(np.concatenate(lost)))), evicted

    def _spare_pages(self, plan: StepPlan, geometry: KvGeometry, released_blocks: int) -> int:
        """Return the near pages that are left with all buffers open; negative if some lack."""
        staged = len(self._far_of(plan.load)) + len(plan.load_and_store) + len(plan.store_new)
        return (
            geometry.near_pages
            - geometry.num_resident * released_blocks
            - geometry.num_far * (self._num_others + len(self._oldest_first))
            - geometry.num_staging_buffers * staged
        )

    def _make_room(
        self, num_pages: int, used: BlockIds, geometry: KvGeometry, num_old: int
    ) -> list[int]:
        """Drop kept blocks until so many pages are spare, if there are enough; return their ids.

        Args:
            used: the full blocks that the step uses; one of them that is far takes buffers' pages.
            num_old: so many of the oldest blocks are full before the step.
        """
        oldest = np.fromiter(islice(self._oldest_first, num_old), np.int64)
        is_used = np.isin(oldest, used)
        per_used = geometry.num_far - geometry.num_staging_buffers
        evicted: list[int] = []
        for block_ids, pages in ((oldest[~is_used], geometry.num_far), (oldest[is_used], per_used)):
            if num_pages > 0 and pages > 0:
                chosen = block_ids[: -(-num_pages // pages)].tolist()
                num_pages -= pages * len(chosen)
                evicted += chosen
        return self._drop(evicted)

    def _keep(self, block_ids: list[int]) -> None:
        self._is_kept[block_ids] = True
        self._oldest_first.update(dict.fromkeys(block_ids))

    def _drop(self, block_ids: list[int]) -> list[int]:
        self._is_kept[block_ids] = False
        for block_id in block_ids:
            del self._oldest_first[block_id]
        return block_ids

    def _kept_of(self, block_ids: BlockIds) -> list[int]:
        kept: list[int] = block_ids[self._is_kept[block_ids]].tolist()
        return kept

    def _far_of(self, block_ids: BlockIds) -> BlockIds:
        return block_ids[~self._is_kept[block_ids]]


def _fitting(spare_pages: int, geometry: KvGeometry) -> int | None:
    """Return how many new blocks can be kept rather than staged; None if all can."""
    more_pages = geometry.num_far - geometry.num_staging_buffers
    return spare_pages // more_pages if more_pages > 0 else None


def _joined(block_ids: BlockIds, more: list[int]) -> BlockIds:
    return np.concatenate([block_ids, np.array(more, dtype=np.int64)]) if more else block_ids
