# SPDX-License-Identifier: Apache-2.0
"""What one engine step reads, writes and keeps near: decided once, applied by every rank.

KV is append-only, so a block lives through three stages, each a class of the plan:

    written first ──► full at the end of this step ──────────► `ring`: computed in a staging
         │                                                      area, written to the far tier
         └─► partly filled ─► `tail_acquire`: gets tail pages
                 │ … steps …
                 └─► full at the end of this step ───────────► `tail_flush`: written to the
                                                                far tier, tail pages drain
    full before this step ──────────────────────────────────► `read`: staged for this step

Where tails do not stay near, a block that is not full is `ring` in the step that writes it first,
and `extend` in every later one that adds to it: staged, computed, and written out again. When the
level becomes one at which they do not stay, those that are near go to the far tier (`tail_leave`);
when it becomes one at which they do, those that are far remain so until they are full.
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
    """Block ids by what happens to them in the rotating layers; int64, one dimension.

    Attributes:
        read: full before this step and used by it: staged from the far tier; ascending.
        extend: partly filled before this step, which adds to them: staged, and written out again.
        ring: first written by this step, and filled unless tails do not stay.
        tail_acquire: first written by this step and partly filled at its end.
        tail_flush: tails that this step fills.
        tail_release: tails whose requests ended or were preempted.
        tail_leave: tails that go to the far tier before this step.
        granted: blocks that the engine may use from this step on.
        withheld: blocks that it may not.
        far_layers: how many from this step on; None where it never changes.
        write_out_for: how many the next step may have: the new ones are written out behind this
            step.
    """

    read: BlockIds = field(default_factory=_no_blocks)
    extend: BlockIds = field(default_factory=_no_blocks)
    ring: BlockIds = field(default_factory=_no_blocks)
    tail_acquire: BlockIds = field(default_factory=_no_blocks)
    tail_flush: BlockIds = field(default_factory=_no_blocks)
    tail_release: BlockIds = field(default_factory=_no_blocks)
    tail_leave: BlockIds = field(default_factory=_no_blocks)
    granted: BlockIds = field(default_factory=_no_blocks)
    withheld: BlockIds = field(default_factory=_no_blocks)
    far_layers: int | None = None
    write_out_for: int | None = None


class _Request:
    """A request's blocks in an array that grows by doubling, and its tail block if it has one."""

    __slots__ = ("_blocks", "num_blocks", "tail", "tail_is_near")

    def __init__(self) -> None:
        self._blocks = np.empty(16, dtype=np.int64)
        self.num_blocks = 0
        self.tail: int | None = None
        self.tail_is_near = False

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

    ring: list[BlockIds] = field(default_factory=list)
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
        self._extended: dict[str, int] = {}  # tails that the next step would extend
        self._steady = StepPlan()
        self._is_steady = False  # the next one reads and extends the same
        self._tails_stay = True
        self._steps_on = 0  # since all requests were looked at
        self._due: dict[int, set[str]] = {}  # by `_steps_on`

    @property
    def num_tails(self) -> int:
        """Requests whose last block is partly filled."""
        return sum(request.tail is not None for request in self._requests.values())

    @property
    def due(self) -> Set[str]:
        """Requests whose blocks change if the next step is one token more for each."""
        return self._due.get(self._steps_on + 1, _NO_NAMES)

    def plan(
        self,
        scheduled: Iterable[ScheduledRequest],
        ended: Iterable[str],
        *,
        granted: Sequence[int] = (),
        withheld: Sequence[int] = (),
        far_layers: int | None = None,
        write_out_for: int | None = None,
        tails_stay: bool = True,
    ) -> StepPlan:
        """The plan of one step; follows ``ended`` (finished or preempted) requests no longer.

        Args:
            tails_stay: partly filled blocks stay near in rotating layers.

        Raises:
            IntegrityError: a request continues behind a partly filled block that is not its tail.
        """
        self._tails_stay = tails_stay
        released = [tail for name in ended if (tail := self._forget(name)) is not None]
        leaving = [] if tails_stay else self._take_near_tails()
        self._steps_on = 0
        self._due, self._filled, self._extended = {}, [], {}
        read: list[BlockIds] = []
        extended: list[int] = []
        blocks = _Blocks()
        for part in scheduled:
            request = self._follow(part, released)
            full_before, partial = divmod(part.computed_tokens, self._block_tokens)
            if full_before and far_layers != 0:
                read.append(request.blocks(0, full_before))
            if partial and not request.tail_is_near:
                extended.append(self._tail_at(part, request, full_before))
            self._classify(part, request, blocks)
        ring = np.concatenate(blocks.ring) if blocks.ring else _NO_BLOCKS
        extended_ids, flushed = _block_ids(extended), _block_ids(blocks.flushed)
        read_ids = self._unique(read, ring, extended_ids, flushed)
        self._steady = StepPlan(read=read_ids, extend=extended_ids, far_layers=far_layers)
        self._is_steady = not self._filled and [*self._extended.values()] == extended
        return StepPlan(
            read=read_ids,
            extend=extended_ids,
            ring=ring,
            tail_acquire=_block_ids(blocks.acquired),
            tail_flush=flushed,
            tail_release=_block_ids(released),
            tail_leave=_block_ids(leaving),
            granted=_block_ids(granted),
            withheld=_block_ids(withheld),
            far_layers=far_layers,
            write_out_for=write_out_for,
        )

    def plan_on(
        self,
        changed: Sequence[ScheduledRequest] = (),
        *,
        far_layers: int | None = None,
        write_out_for: int | None = None,
        tails_stay: bool = True,
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
        if far_layers != self._steady.far_layers or tails_stay != self._tails_stay:
            return None
        steady = self._going_on(far_layers)
        self._steps_on += 1
        due = self._due.pop(self._steps_on, _NO_NAMES)
        if left_out := due - {part.request_id for part in changed}:
            raise IntegrityError(f"{sorted(left_out)} are left out, whose blocks change")
        blocks = _Blocks()
        for part in changed:
            self._classify(part, self._follow(part, []), blocks)
        if not changed:
            if write_out_for is None:
                return steady  # the same arrays: whoever has them need not compare
            return replace(steady, write_out_for=write_out_for)
        return replace(
            steady,
            ring=np.concatenate(blocks.ring) if blocks.ring else _NO_BLOCKS,
            tail_acquire=_block_ids(blocks.acquired),
            tail_flush=_block_ids(blocks.flushed),
            write_out_for=write_out_for,
        )

    def _going_on(self, far_layers: int | None) -> StepPlan:
        """What a step reads and extends that goes on where the one before ended."""
        if self._is_steady:
            return self._steady
        read, extend = self._steady.read, [*self._extended.values()]
        if self._filled and far_layers != 0:
            self._is_read[np.concatenate(self._filled)] = True
            read = np.flatnonzero(self._is_read)
        self._filled = []
        if extend == self._steady.extend.tolist():
            extend_ids = self._steady.extend
        else:
            extend_ids = _block_ids(extend)
        self._steady = StepPlan(read=read, extend=extend_ids, far_layers=far_layers)
        self._is_steady = True
        return self._steady

    def _classify(self, part: ScheduledRequest, request: _Request, blocks: _Blocks) -> None:
        """Add what happens to the blocks that the request computes in, but for what it reads."""
        block_tokens = self._block_tokens
        full_before, partial = divmod(part.computed_tokens, block_tokens)
        full_after, partial_after = divmod(
            part.computed_tokens + part.scheduled_tokens, block_tokens
        )
        # In so many steps of a token each the tail is full, or a block begins.
        left = block_tokens - partial_after if partial_after else 1
        self._due.setdefault(self._steps_on + left, set()).add(part.request_id)
        first_new = full_before
        if partial:
            tail = self._tail_at(part, request, full_before)
            if full_after == full_before:  # the tail fills further
                if not request.tail_is_near:
                    self._extended[part.request_id] = tail
                return
            request.tail = None
            self._extended.pop(part.request_id, None)
            if request.tail_is_near:
                blocks.flushed.append(tail)
            first_new += 1
        self._is_steady = False
        if full_after > full_before:
            self._filled.append(request.blocks(full_before, full_after))
        end_ring = full_after
        if partial_after:
            request.tail = request.block(full_after)
            request.tail_is_near = self._tails_stay
            if self._tails_stay:
                blocks.acquired.append(request.tail)
            else:
                end_ring += 1
                self._extended[part.request_id] = request.tail
        if first_new < end_ring:
            blocks.ring.append(request.blocks(first_new, end_ring))

    def _follow(self, part: ScheduledRequest, released: list[int]) -> _Request:
        if not part.restarts:
            request = self._requests[part.request_id]
            if part.new_block_ids:
                request.append(part.new_block_ids)
            return request
        before = self._requests.get(part.request_id)
        tail = before.tail if before else None
        near_tail = self._forget(part.request_id)
        request = self._requests[part.request_id] = _Request()
        request.append(part.new_block_ids)
        position, partial = divmod(part.computed_tokens, self._block_tokens)
        if partial and tail == request.block(position):
            # Sent anew, but it goes on in its blocks (a streaming session).
            request.tail, request.tail_is_near = tail, near_tail is not None
        elif near_tail is not None:
            released.append(near_tail)
        return request

    def _forget(self, request_id: str) -> int | None:
        """Follow the request no longer; its tail, if that is near."""
        request = self._requests.pop(request_id, None)
        return request.tail if request and request.tail_is_near else None

    def _take_near_tails(self) -> list[int]:
        """Tails that are near, which are far from now on."""
        near = [request for request in self._requests.values() if request.tail_is_near]
        tails = [request.tail for request in near if request.tail is not None]
        for request in near:
            request.tail_is_near = False
        return tails

    def _tail_at(self, part: ScheduledRequest, request: _Request, position: int) -> int:
        block_id = request.block(position)
        if request.tail != block_id:
            raise IntegrityError(
                f"request {part.request_id} continues at token {part.computed_tokens} in block "
                f"{block_id}, but its tail is {request.tail}"
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
