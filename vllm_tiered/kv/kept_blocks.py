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
step is kept if there are pages for it, also those of kept blocks that no request holds. When pages
are lacking, kept blocks are written to the far tier: first those that no request holds, then those
that the step does not use, then the oldest. A far block stays far until its content is lost.

This is bookkeeping in the scheduler: a plan goes in, as ``step_planner.py`` makes it, and a plan
with kept blocks comes out. For the workers a kept block is a partial one that is never filled.
"""

from collections.abc import Callable
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
    def num_kept(self) -> int:
        """Number of kept blocks."""
        return len(self._oldest_first)

    @property
    def block_ids(self) -> list[int]:
        """The kept blocks, oldest first."""
        return list(self._oldest_first)

    def apply(
        self,
        plan: StepPlan,
        geometry: KvGeometry,
        released_blocks: int,
        held: Callable[[], BlockIds],
        dropped: BlockIds = NO_BLOCKS,
    ) -> StepPlan:
        """Return the plan with kept blocks: what it fills stays near, and it loads fewer blocks.

        Args:
            plan: a step's plan without kept blocks.
            geometry: the sizes at the step's level.
            released_blocks: the blocks that the engine may use in the step.
            held: returns the full blocks that requests hold, also those that the step leaves out.
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
        per_used = geometry.num_far - geometry.num_staging_buffers
        spare = self._spare_pages(plan, geometry, released_blocks)
        wanted = per_used * len(store_new) if keeps else 0
        if spare < wanted:
            held_ids = np.union1d(held(), plan.load)
            classes = (
                (False, held_ids, geometry.num_far, wanted),
                (False, plan.load, geometry.num_far, 0),
                (True, plan.load, per_used, 0),
            )
            for is_in, block_ids, pages, needed in classes:
                count = -(-(needed - spare) // pages) if spare < needed and pages > 0 else 0
                chosen = self._oldest(count, block_ids, num_old, is_in=is_in)
                num_old -= len(chosen)
                spare += pages * len(chosen)
                evicted += self._drop(chosen)
        if keeps and spare >= 0:
            count = spare // per_used if per_used > 0 else len(store_new)
            new = store_new[:count].tolist()
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

    def _oldest(self, count: int, of: BlockIds, num_old: int, *, is_in: bool) -> list[int]:
        """Return the oldest kept blocks that are, or are not, among others.

        Args:
            num_old: so many of the oldest blocks are full before the step; no other may leave.
        """
        if not count:
            return []
        block_ids = np.fromiter(islice(self._oldest_first, num_old), np.int64)
        chosen: list[int] = block_ids[np.isin(block_ids, of) == is_in][:count].tolist()
        return chosen

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


def _joined(block_ids: BlockIds, more: list[int]) -> BlockIds:
    return np.concatenate([block_ids, np.array(more, dtype=np.int64)]) if more else block_ids
