# SPDX-License-Identifier: Apache-2.0
"""Planner of engine steps: tracks and classifies every request's blocks, in the scheduler.

Most steps repeat the previous step with one token more for each request. For these the planner
looks only at requests that fill their last block or begin a new one; it knows them in advance
(``due``).
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.resident_blocks import NO_CHANGES, ResidentChanges
from vllm_tiered.kv.step_plan import NO_BLOCKS, BlockIds, ScheduledRequest, StepPlan

_NO_NAMES: Set[str] = frozenset()


def _block_ids(ids: Sequence[int]) -> BlockIds:
    return np.array(ids, dtype=np.int64) if ids else NO_BLOCKS


def _joined(arrays: Sequence[BlockIds]) -> BlockIds:
    return np.concatenate(arrays) if arrays else NO_BLOCKS


class _Request:
    """One request's blocks, in an array that grows by doubling, and its partial block."""

    __slots__ = ("_blocks", "num_blocks", "partial_block", "partial_is_near")

    def __init__(self) -> None:
        self._blocks = np.empty(16, dtype=np.int64)
        self.num_blocks = 0
        self.partial_block: int | None = None
        self.partial_is_near = False

    def append(self, block_ids: Sequence[int]) -> None:
        end = self.num_blocks + len(block_ids)
        if end > len(self._blocks):
            grown = np.empty(max(end, 2 * len(self._blocks)), dtype=np.int64)
            grown[: self.num_blocks] = self._blocks[: self.num_blocks]
            self._blocks = grown
        self._blocks[self.num_blocks : end] = block_ids
        self.num_blocks = end

    def blocks(self, first: int, end: int) -> BlockIds:
        return self._blocks[first:end]

    def block(self, position: int) -> int:
        if position >= self.num_blocks:
            raise IntegrityError(f"block {position} of a request that has {self.num_blocks}")
        return int(self._blocks[position])


@dataclass(slots=True)
class _WrittenBlocks:
    """Ids of the blocks that one step writes, by the plan's field."""

    store_new: list[BlockIds] = field(default_factory=list)
    alloc_partial: list[int] = field(default_factory=list)
    store_partial: list[int] = field(default_factory=list)


class StepPlanner:
    """Planner of one step after another, from what the engine scheduled.

    Args:
        num_blocks: block ids are below this.
        block_tokens: tokens a block holds.
    """

    def __init__(self, *, num_blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._requests: dict[str, _Request] = {}
        self._is_loaded = np.zeros(num_blocks, dtype=np.bool_)  # blocks the previous step loaded
        self._filled: list[BlockIds] = []  # blocks that the previous step filled
        self._extended: dict[str, int] = {}  # offloaded partial blocks that the next step extends
        self._steady = StepPlan()
        self._is_steady = False  # the next step loads and extends the same blocks
        self._partial_blocks_resident = True
        self._steps_on = 0  # steps since `plan` looked at all requests
        self._due: dict[int, set[str]] = {}  # requests by the `_steps_on` at which blocks change

    @property
    def num_partial(self) -> int:
        """Requests whose last block is partial."""
        return sum(request.partial_block is not None for request in self._requests.values())

    @property
    def due(self) -> Set[str]:
        """Requests whose blocks change if the next step adds one token to each request."""
        return self._due.get(self._steps_on + 1, _NO_NAMES)

    def plan(
        self,
        scheduled: Iterable[ScheduledRequest],
        ended: Iterable[str],
        *,
        released: Sequence[int] = (),
        reserved: Sequence[int] = (),
        num_far: int | None = None,
        num_far_next: int | None = None,
        partial_blocks_resident: bool = True,
        resident: ResidentChanges = NO_CHANGES,
    ) -> StepPlan:
        """Plan one step, and drop the ``ended`` (finished or preempted) requests.

        Args:
            partial_blocks_resident: partial blocks stay near in offloaded layers.
            resident: changes of the blocks of resident groups.

        Raises:
            IntegrityError: a request continues in a block that is neither new nor its partial one.
        """
        self._partial_blocks_resident = partial_blocks_resident
        freed = [block for name in ended if (block := self._drop(name)) is not None]
        evicted = [] if partial_blocks_resident else self._evict_partial()
        self._steps_on = 0
        self._due, self._filled, self._extended = {}, [], {}
        full: list[BlockIds] = []
        extended: list[int] = []
        written = _WrittenBlocks()
        for part in scheduled:
            request = self._track(part, freed)
            full_before, partial = divmod(part.computed_tokens, self._block_tokens)
            if full_before and num_far != 0:
                full.append(request.blocks(0, full_before))
            if partial and not request.partial_is_near:
                extended.append(self._partial_block_at(part, request, full_before))
            self._classify(part, request, written)
        store_new, store_partial = _joined(written.store_new), _block_ids(written.store_partial)
        load_and_store = _block_ids(extended)
        load = self._unique(full, store_new, load_and_store, store_partial)
        self._steady = StepPlan(load=load, load_and_store=load_and_store, num_far=num_far)
        self._is_steady = not self._filled and [*self._extended.values()] == extended
        return StepPlan(
            load=load,
            load_and_store=load_and_store,
            store_new=store_new,
            alloc_partial=_block_ids([*written.alloc_partial, *resident.new]),
            store_partial=store_partial,
            free_partial=_block_ids([*freed, *resident.lost]),
            alloc_state=_block_ids(resident.new_states),
            state_columns=_block_ids(resident.columns),
            free_state=_block_ids(resident.lost_states),
            evict_partial=_block_ids(evicted),
            released=_block_ids(released),
            reserved=_block_ids(reserved),
            num_far=num_far,
            num_far_next=num_far_next,
        )

    def plan_on(
        self,
        changed: Sequence[ScheduledRequest] = (),
        *,
        num_far: int | None = None,
        num_far_next: int | None = None,
        partial_blocks_resident: bool = True,
        resident: ResidentChanges = NO_CHANGES,
    ) -> StepPlan | None:
        """Plan a step in which each request of the previous step computes one token more.

        Args:
            changed: the requests that are ``due``, and those that got blocks.
            resident: changes of the blocks of resident groups.

        Returns:
            The plan; None if the level has changed, so that ``plan`` must look at all requests. If
            None is returned, no state changes are made.

        Raises:
            IntegrityError: as for ``plan``; or a request that is due is not in ``changed``.
        """
        if (
            num_far != self._steady.num_far
            or partial_blocks_resident != self._partial_blocks_resident
        ):
            return None
        steady = self._continue_steady(num_far)
        self._steps_on += 1
        due = self._due.pop(self._steps_on, _NO_NAMES)
        if left_out := due - {part.request_id for part in changed}:
            raise IntegrityError(f"{sorted(left_out)} are left out, whose blocks change")
        written = _WrittenBlocks()
        for part in changed:
            self._classify(part, self._track(part, []), written)
        if not changed and resident is NO_CHANGES:
            if num_far_next is None:
                return steady  # the same arrays, so that the receiver need not compare
            return replace(steady, num_far_next=num_far_next)
        return replace(
            steady,
            store_new=_joined(written.store_new),
            alloc_partial=_block_ids([*written.alloc_partial, *resident.new]),
            store_partial=_block_ids(written.store_partial),
            free_partial=_block_ids(resident.lost),
            alloc_state=_block_ids(resident.new_states),
            state_columns=_block_ids(resident.columns),
            free_state=_block_ids(resident.lost_states),
            num_far_next=num_far_next,
        )

    def _continue_steady(self, num_far: int | None) -> StepPlan:
        """Return a plan with the blocks that the next step loads and extends."""
        if self._is_steady:
            return self._steady
        load, extended = self._steady.load, [*self._extended.values()]
        if self._filled and num_far != 0:
            self._is_loaded[np.concatenate(self._filled)] = True
            load = np.flatnonzero(self._is_loaded)
        self._filled = []
        if extended == self._steady.load_and_store.tolist():
            load_and_store = self._steady.load_and_store
        else:
            load_and_store = _block_ids(extended)
        self._steady = StepPlan(load=load, load_and_store=load_and_store, num_far=num_far)
        self._is_steady = True
        return self._steady

    def _classify(self, part: ScheduledRequest, request: _Request, written: _WrittenBlocks) -> None:
        """Add the blocks that the request writes to ``written``."""
        block_tokens = self._block_tokens
        full_before, partial = divmod(part.computed_tokens, block_tokens)
        full_after, partial_after = divmod(
            part.computed_tokens + part.scheduled_tokens, block_tokens
        )
        # After this many steps of one token each, the partial block is full or a new block begins.
        left = block_tokens - partial_after if partial_after else 1
        self._due.setdefault(self._steps_on + left, set()).add(part.request_id)
        first_new = full_before
        if partial:
            partial_block = self._partial_block_at(part, request, full_before)
            if full_after == full_before:  # the block stays partial
                if not request.partial_is_near:
                    self._extended[part.request_id] = partial_block
                return
            request.partial_block = None
            self._extended.pop(part.request_id, None)
            if request.partial_is_near:
                written.store_partial.append(partial_block)
            first_new += 1
        self._is_steady = False
        if full_after > full_before:
            self._filled.append(request.blocks(full_before, full_after))
        end_new = full_after
        if partial_after:
            request.partial_block = request.block(full_after)
            request.partial_is_near = self._partial_blocks_resident
            if self._partial_blocks_resident:
                written.alloc_partial.append(request.partial_block)
            else:
                end_new += 1
                self._extended[part.request_id] = request.partial_block
        if first_new < end_new:
            written.store_new.append(request.blocks(first_new, end_new))

    def _track(self, part: ScheduledRequest, freed: list[int]) -> _Request:
        """Return the request with its new blocks; add a near partial block it left to ``freed``."""
        if not part.restarts:
            request = self._requests[part.request_id]
            if part.new_block_ids:
                request.append(part.new_block_ids)
            return request
        before = self._requests.get(part.request_id)
        partial_block = before.partial_block if before else None
        near_partial = self._drop(part.request_id)
        request = self._requests[part.request_id] = _Request()
        request.append(part.new_block_ids)
        position, partial = divmod(part.computed_tokens, self._block_tokens)
        if partial and partial_block == request.block(position):
            # The request is scheduled as new but keeps its blocks (a streaming session).
            request.partial_block, request.partial_is_near = partial_block, near_partial is not None
        elif near_partial is not None:
            freed.append(near_partial)
        return request

    def _drop(self, request_id: str) -> int | None:
        """Stop tracking the request; return its partial block if that is near."""
        request = self._requests.pop(request_id, None)
        return request.partial_block if request and request.partial_is_near else None

    def _evict_partial(self) -> list[int]:
        """Mark all partial blocks as far; return those that were near."""
        near = [request for request in self._requests.values() if request.partial_is_near]
        partial = [request.partial_block for request in near if request.partial_block is not None]
        for request in near:
            request.partial_is_near = False
        return partial

    def _partial_block_at(self, part: ScheduledRequest, request: _Request, position: int) -> int:
        block_id = request.block(position)
        if request.partial_block != block_id:
            raise IntegrityError(
                f"request {part.request_id} continues at token {part.computed_tokens} in block "
                f"{block_id}, but its partial block is {request.partial_block}"
            )
        return block_id

    def _unique(self, full: list[BlockIds], *written: BlockIds) -> BlockIds:
        """Return each block once, ascending, without the blocks that this step writes.

        Requests may share prefixes. A request may also hit a prefix that another request computes
        in this very step.
        """
        self._is_loaded[:] = False
        if not full:
            return NO_BLOCKS
        self._is_loaded[np.concatenate(full)] = True
        for block_ids in written:
            self._is_loaded[block_ids] = False
        return np.flatnonzero(self._is_loaded)
