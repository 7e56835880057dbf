# SPDX-License-Identifier: Apache-2.0
"""Planner of engine steps: tracks and classifies every request's blocks, in the scheduler.

With speculative decoding a step also writes the KV of drafts, which may be rejected. A block is
full when its tokens are certain, so a request may have several partial blocks. A rejected draft's
KV is overwritten before it is read, as the next step continues at the first token in doubt.

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
    """One request's blocks, in an array that grows by doubling, and which of them are partial.

    Attributes:
        num_full: its first blocks, which are full.
        partial: the blocks behind them that a step has written to. Without drafts it is one.
        num_far: the first of the partial ones, which are offloaded.
        end_in_doubt: the tokens that it has if all drafts of its latest step are accepted.
    """

    __slots__ = ("_blocks", "end_in_doubt", "num_blocks", "num_far", "num_full", "partial")

    def __init__(self, num_full: int) -> None:
        self._blocks = np.empty(16, dtype=np.int64)
        self.num_blocks = 0
        self.num_full = num_full
        self.partial: list[int] = []
        self.num_far = 0
        self.end_in_doubt = 0

    @property
    def near_partial(self) -> list[int]:
        """Partial blocks that are near."""
        return self.partial[self.num_far :]

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

    def begin_partial(self, first: int, end: int, *, are_near: bool) -> list[int]:
        """Record that a step begins these blocks and leaves them partial; return their ids."""
        if end > self.num_blocks:
            raise IntegrityError(f"block {end - 1} of a request that has {self.num_blocks}")
        begun: list[int] = self._blocks[first:end].tolist()
        self.partial += begun
        if not are_near:
            self.num_far = len(self.partial)
        return begun

    def fill(self, num_full: int) -> list[int]:
        """Record that the first blocks are full; return those that were near partial ones."""
        filled = self.partial[: num_full - self.num_full]
        near = filled[self.num_far :]
        self.partial = self.partial[len(filled) :]
        self.num_far -= len(filled) - len(near)
        self.num_full = num_full
        return near

    def keeps_blocks_of(self, before: "_Request") -> bool:
        """Return whether the request goes on in the partial blocks that it had before."""
        first, end = before.num_full, before.num_full + len(before.partial)
        return bool(before.partial) and self._blocks[first:end].tolist() == before.partial


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
        has_drafts: steps write drafts of speculative decoding. Once some are accepted, the engine
            may cache a block as full that is partial here.

    Attributes:
        dropped: full blocks of the requests that ended before the step that was planned last; their
            content is needed only for the prefix cache.
        is_full: bool [num_blocks], whether a planned step has filled the block. It is never unset
            here.
    """

    def __init__(self, *, num_blocks: int, block_tokens: int, has_drafts: bool = False) -> None:
        self._block_tokens = block_tokens
        self._has_drafts = has_drafts
        self._requests: dict[str, _Request] = {}
        self.dropped = NO_BLOCKS
        self._dropped: list[BlockIds] = []
        self.is_full = np.zeros(num_blocks, dtype=np.bool_)
        self._is_loaded = np.zeros(num_blocks, dtype=np.bool_)  # blocks the previous step loaded
        self._filled: list[BlockIds] = []  # blocks that the previous step filled
        # Offloaded partial blocks that the next step extends, by request.
        self._extended: dict[str, list[int]] = {}
        self._steady = StepPlan()
        self._is_steady = False  # the next step loads and extends the same blocks
        self._partial_blocks_resident = True
        self._steps_on = 0  # steps since `plan` looked at all requests
        self._due: dict[int, set[str]] = {}  # requests by the `_steps_on` at which blocks change

    @property
    def num_partial(self) -> int:
        """Partial blocks of all requests."""
        return sum(len(request.partial) for request in self._requests.values())

    def held_blocks(self) -> BlockIds:
        """Return the full blocks of all requests, a shared one several times."""
        requests = self._requests.values()
        return _joined([request.blocks(0, request.num_full) for request in requests])

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
        self._dropped = []
        freed: list[int] = []
        evicted: list[int] = []
        for name in ended:
            self._end(name, freed, evicted)
        if not partial_blocks_resident:
            evicted += self._evict_partial()
        self._steps_on = 0
        self._due, self._filled, self._extended = {}, [], {}
        full: list[BlockIds] = []
        extended: list[int] = []
        written = _WrittenBlocks()
        goes_on: list[BlockIds] = []  # a session drops its blocks, and goes on in them
        for part in scheduled:
            request = self._track(part, freed)
            if part.restarts and self._dropped:
                goes_on.append(request.blocks(0, request.num_blocks))
            full_before = part.computed_tokens // self._block_tokens
            if full_before and num_far != 0:
                full.append(request.blocks(0, full_before))
            if request.num_far:
                extended += request.partial[: request.num_far]
            self._classify(part, request, written)
        self.dropped = _joined(self._dropped)
        if goes_on and len(self.dropped):
            self.dropped = np.setdiff1d(self.dropped, np.concatenate(goes_on))
        store_new, store_partial = _joined(written.store_new), _block_ids(written.store_partial)
        load_and_store = _block_ids(extended)
        near_partial = self._near_partial() if self._has_drafts else NO_BLOCKS
        load = self._unique(full, store_new, load_and_store, store_partial, near_partial)
        self._steady = StepPlan(load=load, load_and_store=load_and_store, num_far=num_far)
        self._is_steady = not self._filled and self._all_extended() == extended
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
        self.dropped = NO_BLOCKS
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
        load, extended = self._steady.load, self._all_extended()
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

    def _all_extended(self) -> list[int]:
        return [block for blocks in self._extended.values() for block in blocks]

    def _classify(self, part: ScheduledRequest, request: _Request, written: _WrittenBlocks) -> None:
        """Add the blocks that the request writes to ``written``."""
        block_tokens = self._block_tokens
        end = part.computed_tokens + part.scheduled_tokens
        num_full, partial_after = divmod(end, block_tokens)
        # After this many steps of one token each, the partial block is full or a new block begins.
        left = block_tokens - partial_after if partial_after else 1
        self._due.setdefault(self._steps_on + left, set()).add(part.request_id)
        begun = request.num_full + len(request.partial)
        if not request.num_full <= part.computed_tokens / block_tokens <= begun:
            raise IntegrityError(
                f"request {part.request_id} continues at token {part.computed_tokens}, but "
                f"{request.num_full} blocks of {block_tokens} tokens are full, and behind them "
                f"{request.partial} are partial"
            )
        end_begun = max(begun, -(-(end + part.draft_tokens) // block_tokens))
        request.end_in_doubt = end + part.draft_tokens
        if num_full != request.num_full or end_begun != begun:
            self._write(request, num_full, end_begun, written)
        if request.num_far:
            self._extended[part.request_id] = request.partial[: request.num_far]
        else:
            self._extended.pop(part.request_id, None)

    def _write(
        self, request: _Request, num_full: int, end_begun: int, written: _WrittenBlocks
    ) -> None:
        """Record that the request has so many full blocks, and the others up to an end partial."""
        self._is_steady = False
        begun = request.num_full + len(request.partial)
        if num_full > request.num_full:
            filled = request.blocks(request.num_full, num_full)
            self._filled.append(filled)
            self.is_full[filled] = True
            written.store_partial += request.fill(num_full)
        end_new = max(begun, num_full)
        if end_new < end_begun:
            are_near = self._partial_blocks_resident
            partial = request.begin_partial(end_new, end_begun, are_near=are_near)
            if are_near:
                written.alloc_partial += partial
            else:
                end_new = end_begun
        if begun < end_new:
            written.store_new.append(request.blocks(begun, end_new))

    def _track(self, part: ScheduledRequest, freed: list[int]) -> _Request:
        """Return the request with its new blocks; add near partial blocks it left to ``freed``."""
        if not part.restarts:
            request = self._requests[part.request_id]
            if part.new_block_ids:
                request.append(part.new_block_ids)
            return request
        before = self._requests.get(part.request_id)
        near_partial = self._drop(part.request_id)
        request = _Request(part.computed_tokens // self._block_tokens)
        self._requests[part.request_id] = request
        request.append(part.new_block_ids)
        if before and request.keeps_blocks_of(before):  # a streaming session
            request.num_full, request.partial = before.num_full, before.partial
            request.num_far = before.num_far
        else:
            freed += near_partial
        return request

    def _end(self, request_id: str, freed: list[int], evicted: list[int]) -> None:
        """Stop tracking a request; add its near partial blocks to those to free or to evict."""
        request = self._requests.get(request_id)
        near = self._drop(request_id)
        if request and self._has_drafts and near:
            # Drafts that were accepted may have filled these, and other requests may hit them.
            num_full = request.end_in_doubt // self._block_tokens - request.num_full
            count = max(0, num_full - request.num_far)
            evicted += near[:count]
            near = near[count:]
        freed += near

    def _near_partial(self) -> BlockIds:
        """Return all near partial blocks: another request may hit one that is full by now."""
        requests = self._requests.values()
        return _block_ids([block for request in requests for block in request.near_partial])

    def _drop(self, request_id: str) -> list[int]:
        """Stop tracking the request; return its partial blocks that are near."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        if request.num_full:
            self._dropped.append(request.blocks(0, request.num_full))
        return request.near_partial

    def _evict_partial(self) -> list[int]:
        """Mark all partial blocks as far; return those that were near."""
        evicted: list[int] = []
        for request in self._requests.values():
            evicted += request.near_partial
            request.num_far = len(request.partial)
        return evicted

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
