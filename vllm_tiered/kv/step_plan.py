# SPDX-License-Identifier: Apache-2.0
"""The plan of one engine step: which blocks are loaded, stored and kept near, for every rank.

The scheduler decides it once (``step_planner.py``), every rank applies it (``swapper.py``). KV is
append-only, so a block lives through three stages in an offloaded layer, each a field of the plan:

    first written ──► full at the end of this step ──────────► `store_new`: computed in a staging
         │                                                      buffer, written to the far tier
         └─► partial ─► `alloc_partial`: gets near pages
                 │ ... steps ...
                 └─► full at the end of this step ───────────► `store_partial`: written to the far
                                                                tier, its near pages drain
    full before this step ──────────────────────────────────► `load`: staged for this step

Where partial blocks are offloaded, a block that is not full is `store_new` in the step that writes
it first, and `load_and_store` in every later one that adds to it: staged, computed, and written out
again. When the level becomes one that offloads partial blocks, those that are near go to the far
tier (`evict_partial`). When it becomes one that does not, those that are far remain far until they
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

    A tuple, as one is made for every request in every step.

    Attributes:
        request_id: the engine's id.
        new_block_ids: blocks appended since the request was scheduled last, or all its blocks
            if ``restarts``.
        restarts: first step, or first after a preemption.
        computed_tokens: tokens whose KV exists before this step.
        scheduled_tokens: tokens that this step computes.
    """

    request_id: str
    new_block_ids: Sequence[int]
    restarts: bool
    computed_tokens: int
    scheduled_tokens: int


def _no_blocks() -> BlockIds:
    return NO_BLOCKS


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Block ids by what happens to them in the offloaded layers; int64, one dimension.

    Attributes:
        load: full before this step and used by it: staged from the far tier; ascending.
        load_and_store: partial before this step, which adds to them: staged, and written out again.
        store_new: first written by this step, and filled unless partial blocks are offloaded.
        alloc_partial: first written by this step, and partial at its end.
        store_partial: resident partial blocks that this step fills.
        free_partial: resident partial blocks whose requests ended or were preempted.
        evict_partial: resident partial blocks that go to the far tier before this step.
        released: blocks that the engine may use from this step on.
        reserved: blocks that it may not use from this step on.
        num_far: offloaded layers from this step on; None where their number never changes.
        num_far_next: offloaded layers that the next step may have: the new ones are written out
            behind this step.
    """

    load: BlockIds = field(default_factory=_no_blocks)
    load_and_store: BlockIds = field(default_factory=_no_blocks)
    store_new: BlockIds = field(default_factory=_no_blocks)
    alloc_partial: BlockIds = field(default_factory=_no_blocks)
    store_partial: BlockIds = field(default_factory=_no_blocks)
    free_partial: BlockIds = field(default_factory=_no_blocks)
    evict_partial: BlockIds = field(default_factory=_no_blocks)
    released: BlockIds = field(default_factory=_no_blocks)
    reserved: BlockIds = field(default_factory=_no_blocks)
    num_far: int | None = None
    num_far_next: int | None = None
