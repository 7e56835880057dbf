# SPDX-License-Identifier: Apache-2.0
"""Plan of one engine step: the blocks that every rank loads, stores and keeps near.

The scheduler makes the plan once (``step_planner.py``), and every rank applies it (``swapper.py``).
KV is append-only, so a block goes through these stages in an offloaded layer. Each stage is a field
of the plan:

    first written ──► full at the end of this step ──────────► `store_new`: computed in a staging
         │                                                      buffer, written to the far tier
         └─► partial ─► `alloc_partial`: gets near pages
                 │ ... steps ...
                 └─► full at the end of this step ───────────► `store_partial`: written to the far
                                                                tier, its near pages drain
    full before this step ──────────────────────────────────► `load`: staged for this step

A block is full when its tokens are certain. Drafts of speculative decoding may be rejected, so they
leave the blocks that they are written to partial.

At a level that offloads partial blocks, a partial block is `store_new` in the step that first
writes it. In every later step that adds to it, it is `load_and_store`: staged, computed, and
written out again. When the level begins to offload partial blocks, those that are near are written
to the far tier (`evict_partial`). When it stops, partial blocks that are far stay far until they
are full.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int64]

NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int64)


class ScheduledRequest(NamedTuple):
    """One request's part in one step.

    It is a tuple because one is made for every request in every step.

    Attributes:
        request_id: the engine's id.
        new_block_ids: blocks appended since the request was scheduled last, or all its blocks
            if ``restarts``.
        restarts: this is the request's first step, or its first after a preemption.
        computed_tokens: tokens whose KV exists for certain before this step.
        scheduled_tokens: tokens that this step computes, and that will be kept.
        draft_tokens: tokens behind these whose KV this step may write, and which may be rejected.
    """

    request_id: str
    new_block_ids: Sequence[int]
    restarts: bool
    computed_tokens: int
    scheduled_tokens: int
    draft_tokens: int = 0


def _no_blocks() -> BlockIds:
    return NO_BLOCKS


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixMoves:
    """What one step does to slots, before it computes; int64, one dimension.

    Attributes:
        keep: blocks whose content stays in the slots that they have before the step.
        keep_tags: numbers that stand for these contents.
        fetch: blocks that get content from their new slots.
        fetch_tags: the numbers that these slots must have.
        blocks: blocks that get another slot.
        slots: these slots.
    """

    keep: BlockIds = field(default_factory=_no_blocks)
    keep_tags: BlockIds = field(default_factory=_no_blocks)
    fetch: BlockIds = field(default_factory=_no_blocks)
    fetch_tags: BlockIds = field(default_factory=_no_blocks)
    blocks: BlockIds = field(default_factory=_no_blocks)
    slots: BlockIds = field(default_factory=_no_blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Block ids of one step, by their treatment in the offloaded layers; int64, one dimension.

    Attributes:
        load: full blocks that this step uses; they are staged from the far tier; ascending.
        load_and_store: offloaded partial blocks that this step adds to; they are staged, and
            written out again.
        store_new: blocks that this step writes first; it also fills them, unless partial blocks
            are offloaded.
        alloc_partial: blocks that this step writes first and leaves partial; and blocks of resident
            groups that it begins to use, which are near in the offloaded layers as those are.
        store_partial: resident partial blocks that this step fills.
        free_partial: resident partial blocks whose requests ended or were preempted, and blocks of
            resident groups that nothing uses any more. A block may be freed and allocated in one
            step, in this order.
        evict_partial: resident partial blocks to write to the far tier before this step, or kept
            ones.
        keep: blocks that this step fills and that stay near (``kept_blocks.py``).
        alloc_state: blocks that recurrent states get.
        state_columns: the columns of near pages in which they lie (``state_columns.py``).
        free_state: blocks whose recurrent states are not needed any more.
        released: blocks that the engine may use from this step on.
        reserved: blocks that the engine may not use from this step on.
        num_far: offloaded layers from this step on; None if their number never changes.
        num_far_next: offloaded layers that the next step may have. The layers to be added are
            written out during this step.
        prefixes: moves of the prefix store (``prefix_store.py``); None if there are none.
    """

    load: BlockIds = field(default_factory=_no_blocks)
    load_and_store: BlockIds = field(default_factory=_no_blocks)
    store_new: BlockIds = field(default_factory=_no_blocks)
    alloc_partial: BlockIds = field(default_factory=_no_blocks)
    store_partial: BlockIds = field(default_factory=_no_blocks)
    free_partial: BlockIds = field(default_factory=_no_blocks)
    evict_partial: BlockIds = field(default_factory=_no_blocks)
    keep: BlockIds = field(default_factory=_no_blocks)
    alloc_state: BlockIds = field(default_factory=_no_blocks)
    state_columns: BlockIds = field(default_factory=_no_blocks)
    free_state: BlockIds = field(default_factory=_no_blocks)
    released: BlockIds = field(default_factory=_no_blocks)
    reserved: BlockIds = field(default_factory=_no_blocks)
    num_far: int | None = None
    num_far_next: int | None = None
    prefixes: PrefixMoves | None = None
