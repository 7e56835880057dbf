# SPDX-License-Identifier: Apache-2.0
"""What one engine step reads, writes and keeps near: decided once, applied by every rank.

KV is append-only, so a block lives through three stages, each a class of the plan:

    written first ──► full at the end of this step ──────────► `store_new`: computed in a staging
         │                                                      buffer, written to the far tier
         └─► partly filled ─► `alloc_partial`: gets pages of partial blocks
                 │ … steps …
                 └─► full at the end of this step ───────────► `store_partial`: written to the
                                                                far tier, pages of partial blocks
                                                                drain
    full before this step ──────────────────────────────────► `load`: staged for this step

Where partial blocks do not stay near, a block that is not full is `store_new` in the step that
writes it first, and `load_and_store` in every later one that adds to it: staged, computed, and
written out again. When the level becomes one at which they do not stay, those that are near go to
the far tier (`evict_partial`); when it becomes one at which they do, those that are far remain so
until they are full.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_tiered.errors import IntegrityError

BlockIds = npt.NDArray[np.int64]


class ScheduledRequest(NamedTuple):
    """A request's part in one step. (A tuple: one is made for every request in every step.)

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


_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int64)
_NO_NAMES: Set[str] = frozenset()


def _no_blocks() -> BlockIds:
    return _NO_BLOCKS


def _block_ids(ids: Sequence[int]) -> BlockIds:
    return np.array(ids, dtype=np.int64) if ids else _NO_BLOCKS


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Block ids by what happens to them in the offloaded layers; int64, one dimension.

    Attributes:
        load: full before this step and used by it: staged from the far tier; ascending.
        load_and_store: partly filled before this step, which adds to them: staged, and written out
            again.
        store_new: first written by this step, and filled unless partial blocks do not stay.
        alloc_partial: first written by this step and partly filled at its end.
        store_partial: partial blocks that this step fills.
        free_partial: partial blocks whose requests ended or were preempted.
        evict_partial: partial blocks that go to the far tier before this step.
        released: blocks that the engine may use from this step on.
        reserved: blocks that it may not.
        num_far: how many from this step on; None where it never changes.
        num_far_next: how many the next step may have: the new ones are written out behind this
            step.
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


class _Request:
    """One request's blocks in an array that grows by doubling, and its partial block if it has
    one."""

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
class _Blocks:
    """Block ids of one step, by what happens to them, as requests are looked at."""

    store_new: list[BlockIds] = field(default_factory=list)
    acquired: list[int] = field(default_factory=list)
    flushed: list[int] = field(default_factory=list)


class StepPlanner:
    """Follows every request's blocks and classifies them step by step. Runs in the scheduler.

    Most steps are the one before with a token more for each request. Of those only the requests
    are looked at whose last block fills, or a new one begins: it is known when (``due``).

    Args:
        num_blocks: block ids are below this.
        block_tokens: tokens a block holds.
    """

    def __init__(self, *, num_blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._requests: dict[str, _Request] = {}
        # Of the step before: what it read, and by its end all that is full of what it used.
        self._is_read = np.zeros(num_blocks, dtype=np.bool_)
        self._filled: list[BlockIds] = []
        self._extended: dict[str, int] = {}  # partial blocks that the next step would extend
        self._steady = StepPlan()
        self._is_steady = False  # the next one reads and extends the same
        self._partial_blocks_resident = True
        self._steps_on = 0  # since all requests were looked at
        self._due: dict[int, set[str]] = {}  # by `_steps_on`

    @property
    def num_partial(self) -> int:
        """Requests whose last block is partly filled."""
        return sum(request.partial_block is not None for request in self._requests.values())

    @property
    def due(self) -> Set[str]:
        """Requests whose blocks change if the next step is one token more for each."""
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
    ) -> StepPlan:
        """The plan of one step; follows ``ended`` (finished or preempted) requests no longer.

        Args:
            partial_blocks_resident: partly filled blocks stay near in offloaded layers.

        Raises:
            IntegrityError: a request continues behind a partly filled block that is not its
                partial block.
        """
        self._partial_blocks_resident = partial_blocks_resident
        freed = [
            partial_block for name in ended if (partial_block := self._forget(name)) is not None
        ]
        leaving = [] if partial_blocks_resident else self._evict_near_partial()
        self._steps_on = 0
        self._due, self._filled, self._extended = {}, [], {}
        read: list[BlockIds] = []
        extended: list[int] = []
        blocks = _Blocks()
        for part in scheduled:
            request = self._follow(part, freed)
            full_before, partial = divmod(part.computed_tokens, self._block_tokens)
            if full_before and num_far != 0:
                read.append(request.blocks(0, full_before))
            if partial and not request.partial_is_near:
                extended.append(self._partial_at(part, request, full_before))
            self._classify(part, request, blocks)
        store_new = np.concatenate(blocks.store_new) if blocks.store_new else _NO_BLOCKS
        extended_ids, flushed = _block_ids(extended), _block_ids(blocks.flushed)
        read_ids = self._unique(read, store_new, extended_ids, flushed)
        self._steady = StepPlan(load=read_ids, load_and_store=extended_ids, num_far=num_far)
        self._is_steady = not self._filled and [*self._extended.values()] == extended
        return StepPlan(
            load=read_ids,
            load_and_store=extended_ids,
            store_new=store_new,
            alloc_partial=_block_ids(blocks.acquired),
            store_partial=flushed,
            free_partial=_block_ids(freed),
            evict_partial=_block_ids(leaving),
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
    ) -> StepPlan | None:
        """The plan of a step in which each request of the one before computes one token more.

        Args:
            changed: of its requests those that are ``due``, and those that got blocks.

        Returns:
            None if the level is another: ``plan`` must look at all requests. If None is returned,
            no state changes are made.

        Raises:
            IntegrityError: as ``plan``, or one that is due is not there.
        """
        if (
            num_far != self._steady.num_far
            or partial_blocks_resident != self._partial_blocks_resident
        ):
            return None
        steady = self._going_on(num_far)
        self._steps_on += 1
        due = self._due.pop(self._steps_on, _NO_NAMES)
        if left_out := due - {part.request_id for part in changed}:
            raise IntegrityError(f"{sorted(left_out)} are left out, whose blocks change")
        blocks = _Blocks()
        for part in changed:
            self._classify(part, self._follow(part, []), blocks)
        if not changed:
            if num_far_next is None:
                return steady  # the same arrays: whoever has them need not compare
            return replace(steady, num_far_next=num_far_next)
        return replace(
            steady,
            store_new=np.concatenate(blocks.store_new) if blocks.store_new else _NO_BLOCKS,
            alloc_partial=_block_ids(blocks.acquired),
            store_partial=_block_ids(blocks.flushed),
            num_far_next=num_far_next,
        )

    def _going_on(self, num_far: int | None) -> StepPlan:
        """What a step reads and extends that goes on where the one before ended."""
        if self._is_steady:
            return self._steady
        read, extend = self._steady.load, [*self._extended.values()]
        if self._filled and num_far != 0:
            self._is_read[np.concatenate(self._filled)] = True
            read = np.flatnonzero(self._is_read)
        self._filled = []
        if extend == self._steady.load_and_store.tolist():
            extend_ids = self._steady.load_and_store
        else:
            extend_ids = _block_ids(extend)
        self._steady = StepPlan(load=read, load_and_store=extend_ids, num_far=num_far)
        self._is_steady = True
        return self._steady

    def _classify(self, part: ScheduledRequest, request: _Request, blocks: _Blocks) -> None:
        """Add what happens to the blocks that the request computes in, but for what it reads."""
        block_tokens = self._block_tokens
        full_before, partial = divmod(part.computed_tokens, block_tokens)
        full_after, partial_after = divmod(
            part.computed_tokens + part.scheduled_tokens, block_tokens
        )
        # In so many steps of a token each the partial block is full, or a block begins.
        left = block_tokens - partial_after if partial_after else 1
        self._due.setdefault(self._steps_on + left, set()).add(part.request_id)
        first_new = full_before
        if partial:
            partial_block = self._partial_at(part, request, full_before)
            if full_after == full_before:  # the partial block fills further
                if not request.partial_is_near:
                    self._extended[part.request_id] = partial_block
                return
            request.partial_block = None
            self._extended.pop(part.request_id, None)
            if request.partial_is_near:
                blocks.flushed.append(partial_block)
            first_new += 1
        self._is_steady = False
        if full_after > full_before:
            self._filled.append(request.blocks(full_before, full_after))
        end_ring = full_after
        if partial_after:
            request.partial_block = request.block(full_after)
            request.partial_is_near = self._partial_blocks_resident
            if self._partial_blocks_resident:
                blocks.acquired.append(request.partial_block)
            else:
                end_ring += 1
                self._extended[part.request_id] = request.partial_block
        if first_new < end_ring:
            blocks.store_new.append(request.blocks(first_new, end_ring))

    def _follow(self, part: ScheduledRequest, freed: list[int]) -> _Request:
        if not part.restarts:
            request = self._requests[part.request_id]
            if part.new_block_ids:
                request.append(part.new_block_ids)
            return request
        before = self._requests.get(part.request_id)
        partial_block = before.partial_block if before else None
        near_partial = self._forget(part.request_id)
        request = self._requests[part.request_id] = _Request()
        request.append(part.new_block_ids)
        position, partial = divmod(part.computed_tokens, self._block_tokens)
        if partial and partial_block == request.block(position):
            # Sent anew, but it goes on in its blocks (a streaming session).
            request.partial_block, request.partial_is_near = partial_block, near_partial is not None
        elif near_partial is not None:
            freed.append(near_partial)
        return request

    def _forget(self, request_id: str) -> int | None:
        """Follow the request no longer; its partial block, if that is near."""
        request = self._requests.pop(request_id, None)
        return request.partial_block if request and request.partial_is_near else None

    def _evict_near_partial(self) -> list[int]:
        """Partial blocks that are near, which are far from now on."""
        near = [request for request in self._requests.values() if request.partial_is_near]
        partial = [request.partial_block for request in near if request.partial_block is not None]
        for request in near:
            request.partial_is_near = False
        return partial

    def _partial_at(self, part: ScheduledRequest, request: _Request, position: int) -> int:
        block_id = request.block(position)
        if request.partial_block != block_id:
            raise IntegrityError(
                f"request {part.request_id} continues at token {part.computed_tokens} in block "
                f"{block_id}, but its partial block is {request.partial_block}"
            )
        return block_id

    def _unique(self, read: list[BlockIds], *written: BlockIds) -> BlockIds:
        """Each block once, though requests share prefixes; none that this step writes.

        A request may hit a prefix that another one computes in this very step.
        """
        self._is_read[:] = False
        if not read:
            return _NO_BLOCKS
        self._is_read[np.concatenate(read)] = True
        for block_ids in written:
            self._is_read[block_ids] = False
        return np.flatnonzero(self._is_read)
