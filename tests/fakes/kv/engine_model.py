# SPDX-License-Identifier: Apache-2.0
"""Small model of vLLM's scheduler and block pool, as far as they concern KV blocks.

Blocks come from a free queue, and full blocks stay in a prefix cache after they are freed. Requests
share blocks, are prefilled in chunks, preempted, resumed and aborted. Admission is the product's
own code (``vllm_tiered/kv/admission.py``). With ``window_tokens`` there is a second group of
layers, whose blocks are freed once a sliding window has passed them. With ``num_columns`` there is
another, with a block per request for its recurrent state, and no prefix cache. With ``ahead`` the
next step is scheduled before the last one has run, as under vLLM's async scheduling. Then
``defer_frees`` keeps a request's blocks until the steps that still write them have run, as vLLM
does for connectors. With ``num_drafts`` a decode step also computes drafts, of which a prefix is
accepted; ``ahead``, that is known when the next step is scheduled already. With ``num_slots`` a
prefix store keeps blocks that leave the prefix cache. With ``keeps_blocks`` full blocks stay near
while there are pages; without ``has_cache`` there is no prefix cache.
"""

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from tests.fakes.kv.block_pool_model import BlockPool
from tests.fakes.kv.request_model import Part, Request, Status, Step
from vllm_tiered.kv.admission import Admission, LeftOver
from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.expansion import Expansion
from vllm_tiered.kv.kept_blocks import KeptBlocks
from vllm_tiered.kv.layout import KvGeometry, KvLevels
from vllm_tiered.kv.prefix_store import PrefixStore
from vllm_tiered.kv.state_columns import StateColumns
from vllm_tiered.kv.step_plan import NO_BLOCKS, ScheduledRequest, StepPlan
from vllm_tiered.kv.step_planner import StepPlanner


class EngineModel:
    """Scheduler of steps; call ``update`` with the sampled tokens when a step has run."""

    def __init__(
        self,
        *,
        geometry: KvGeometry,
        usable_blocks: int,
        max_running: int = 4,
        ahead: bool = False,
        defer_frees: bool = False,
        levels: KvLevels | None = None,
        window_tokens: int = 0,
        window_blocks: int = 0,
        num_columns: int = 0,
        num_drafts: int = 0,
        num_slots: int = 0,
        keeps_blocks: bool = False,
        has_cache: bool = True,
    ) -> None:
        self.num_drafts = num_drafts
        self.num_accepted = self.num_rejected = 0
        self.window_tokens = window_tokens
        self.has_states = num_columns > 0
        self.usable_blocks = usable_blocks
        self.block_tokens = geometry.block_tokens
        self.max_tokens = geometry.max_request_tokens(usable_blocks, window_blocks)
        self.max_running = max_running
        self.ahead = ahead
        self.pool = BlockPool(usable_blocks + 1)
        self.planner = StepPlanner(
            num_blocks=usable_blocks + 1,
            block_tokens=geometry.block_tokens,
            has_drafts=num_drafts > 0,
        )
        self.kept = KeptBlocks(usable_blocks + 1) if keeps_blocks else None
        self.has_cache = has_cache
        self.elastic = ElasticBlocks(geometry=geometry, usable_blocks=usable_blocks)
        if num_columns:
            self.elastic.resident.columns = StateColumns(num_columns)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.holding: deque[Request] = deque()  # sessions between turns: they keep their blocks
        self.num_preemptions = self.num_hits = self.num_turns = 0
        self._defer_frees = defer_frees
        self._deferred: list[tuple[int, list[int]]] = []
        self._finished: set[str] = set()
        self._started_over: set[str] = set()
        self.expansion: Expansion | None = None
        if levels:
            self.expansion = Expansion(levels, self.elastic, levels.ladder[0])
            limits = [
                levels.block_limit(level, levels.partial.prefilling, window_blocks)
                for level in levels.ladder
            ]
            self.max_tokens = self.block_tokens * (min(limits) - window_blocks)
        self.admission = Admission(self.elastic, self.pool, self.expansion)
        self.admission.start()
        self.store: PrefixStore | None = None
        if num_slots:
            reserved = set(self.elastic.reserved)
            self.store = PrefixStore(
                num_blocks=usable_blocks + 1,
                num_slots=num_slots,
                released=[b for b in range(1, usable_blocks + 1) if b not in reserved],
                is_full=self.planner.is_full,
            )
            self.pool.on_reuse = self.store.evict
        self._scheduled_steps = self._updated_steps = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        next(
            queue for queue in (self.running, self.waiting, self.holding) if request in queue
        ).remove(request)
        self._finish(request)

    def schedule(self, chunk: Callable[[], int]) -> Step:
        """Schedule at most ``chunk()`` tokens of each request; with 0 the request is left out."""
        self._scheduled_steps += 1
        preempted: list[Request] = []
        parts = self._schedule_running(chunk, preempted)
        if not preempted:
            parts += self._schedule_waiting(chunk)
        plan = self._plan(parts, {request.request_id for request in preempted})
        if self.has_states:
            parts = [self._with_column(part) for part in parts]
        for part in parts:
            request = part.request
            request.computed += part.num_tokens
            request.certain = part.kept_end
            request.last_step = self._scheduled_steps
            request.late_drafts = part.num_drafts if self.ahead else 0
            if part.samples and self.ahead:
                request.placeholders += 1 + part.num_drafts
        released = frozenset(range(1, self.usable_blocks + 1)) - frozenset(self.elastic.reserved)
        return Step(number=self._scheduled_steps, parts=tuple(parts), plan=plan, released=released)

    def update(self, step: Step) -> None:
        """Process a step that has run: deliver tokens, finish requests, free deferred blocks."""
        self._updated_steps = step.number
        while self._deferred and self._deferred[0][0] <= self._updated_steps:
            self._release(self._deferred.pop(0)[1])
        for part in step.parts:
            request = part.request
            is_stale = part.preemptions != request.preemptions
            if not is_stale:
                request.processed = part.kept_end
            if request.status is Status.FINISHED or not part.samples:
                continue
            if step.number <= request.drop_until:
                continue
            num_rejected = part.num_drafts - part.num_accepted
            self.num_accepted += part.num_accepted
            self.num_rejected += num_rejected
            num_new = min(1 + part.num_accepted, len(request.tokens) - request.known)
            request.known += num_new
            if not is_stale:
                request.computed -= num_rejected
                if self.ahead:
                    request.placeholders -= num_rejected + num_new
                if self.ahead or self.num_drafts:  # vLLM 0.32 does the latter only if ahead
                    self._cache_full_blocks(request, request.computed - request.placeholders)
            if request.known == len(request.tokens):
                if request.turns and request.status is Status.RUNNING:
                    self._next_turn(request)
                else:
                    self.abort(request)

    # Scheduling -------------------------------------------------------------------------

    def _schedule_running(self, chunk: Callable[[], int], preempted: list[Request]) -> list[Part]:
        parts: list[Part] = []
        index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            room = self.max_tokens - request.computed - 1
            if (num_tokens := min(chunk(), request.remaining, room)) <= 0:
                continue
            num_drafts = 0
            if num_tokens == request.remaining == 1 and self.num_drafts:
                # None of them behind the last token of the request, which tokens stand for.
                left = len(request.tokens) - request.known - request.placeholders
                num_drafts = max(0, min(self.num_drafts, chunk() - 1, room - 1, left - 1))
                num_tokens += num_drafts
            new_blocks = self._grow(request, request.computed + num_tokens)
            while new_blocks is None:
                victim = self.running[-1]
                if not self._can_free(victim):
                    return parts
                self.running.pop()
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    return parts
                new_blocks = self._grow(request, request.computed + num_tokens)
            parts.append(
                self._part(request, new_blocks, num_tokens, restarts=False, num_drafts=num_drafts)
            )
        return parts

    def _schedule_waiting(self, chunk: Callable[[], int]) -> list[Part]:
        parts: list[Part] = []
        while len(self.running) < self.max_running and (queue := self.holding or self.waiting):
            request = queue[0]
            hits = [] if request.blocks or self.has_states else self._hits(request)
            keys = [] if request.blocks or not self.has_cache else self._stored(request, len(hits))
            computed = request.computed + (len(hits) + len(keys)) * self.block_tokens
            if (num_tokens := min(chunk(), request.known - computed)) <= 0:
                break
            if not self._admit(request, hits, computed + num_tokens):
                break
            if self.store and keys:
                self.store.fetch(keys, request.blocks[len(hits) : len(hits) + len(keys)])
            queue.popleft()
            self.running.append(request)
            request.status = Status.RUNNING
            request.computed = request.certain = computed
            request.late_drafts = 0
            self.num_hits += len(hits)
            parts.append(self._part(request, request.blocks, num_tokens, restarts=True))
        return parts

    def _admit(self, request: Request, hits: list[int], end_tokens: int) -> bool:
        """Admit a request, as ``TieredScheduler`` does around vLLM's ``allocate_slots``."""
        blocks = self.admission.admit(
            request.request_id,
            max(request.num_prompt, request.known - 1),
            lambda left_over: self._allocate(request, end_tokens, left_over, hits=hits),
            {*hits, *(block or 0 for block in self._window_hits(request, len(hits)))},
        )
        self.elastic.check_integrity()
        return blocks is not None

    def _grow(self, request: Request, end_tokens: int) -> list[int] | None:
        """Allocate a running request's blocks, as ``TieredScheduler`` does."""
        return self.admission.grow(lambda left_over: self._allocate(request, end_tokens, left_over))

    def _plan(self, parts: list[Part], preempted: set[str]) -> StepPlan:
        """Plan as ``TieredScheduler.build_metadata`` does with vLLM's ``SchedulerOutput``."""
        scheduled = {part.request.request_id for part in parts}
        ended = preempted | self._finished | self._started_over
        self._finished, self._started_over = set(), set()
        self.admission.end_requests(ended - scheduled)
        for part in parts:
            if not part.scheduled.restarts:
                self.elastic.progress(part.request.request_id, part.scheduled.computed_tokens)
        level = self.admission.change_level()
        self.elastic.check_integrity()
        resident = self.elastic.resident.take_changes()
        released, reserved = self.admission.take_changes()
        plan = self.planner.plan(
            [part.scheduled for part in parts],
            ended,
            released=released,
            reserved=reserved,
            resident=resident,
            **level._asdict(),
        )
        if self.store:
            plan = replace(plan, prefixes=self.store.take_moves(released, reserved))
        if self.kept:
            elastic, dropped = self.elastic, self.planner.dropped
            plan = self.kept.apply(
                plan,
                elastic.geometry,
                elastic.released_blocks,
                self.planner.held_blocks,
                NO_BLOCKS if self.has_cache else dropped,
            )
        return plan

    def _part(
        self,
        request: Request,
        new_blocks: Sequence[int],
        num_tokens: int,
        *,
        restarts: bool,
        num_drafts: int = 0,
    ) -> Part:
        was_in_last_step = request.last_step == self._scheduled_steps - 1
        late = request.late_drafts if was_in_last_step else 0
        num_accepted = 0
        if num_drafts:
            draw = f"{request.request_id} {request.certain} {self._scheduled_steps}"
            num_accepted = zlib.crc32(draw.encode()) % (num_drafts + 1)
        return Part(
            request=request,
            tokens=request.tokens,
            blocks=tuple(request.blocks),
            window_blocks=tuple(request.window_blocks),
            state_block=request.state_block,
            state_column=0,
            scheduled=ScheduledRequest(
                request_id=request.request_id,
                new_block_ids=tuple(new_blocks),
                restarts=restarts,
                computed_tokens=request.computed - late,
                scheduled_tokens=num_tokens - num_drafts,
                draft_tokens=num_drafts + late,
            ),
            samples=num_tokens - num_drafts == request.remaining,
            preemptions=request.preemptions,
            first=request.certain,
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            num_accepted=num_accepted,
        )

    def _with_column(self, part: Part) -> Part:
        """Name the state's column to the worker, as ``TieredScheduler`` does."""
        columns = self.elastic.resident.columns
        assert columns is not None
        (column,) = columns.rename([part.request.state_block])
        return replace(part, state_column=column)

    # Blocks -----------------------------------------------------------------------------

    def _hits(self, request: Request) -> list[int]:
        """Return the longest prefix in the cache, with the window at its end."""
        hits: list[int] = []
        for end in range(self.block_tokens, request.known, self.block_tokens):
            if (block := self.pool.hit(tuple(request.tokens[:end]))) is None:
                break
            hits.append(block)
        while None in self._window_hits(request, len(hits)):
            hits.pop()
        return hits

    def _stored(self, request: Request, num_hits: int) -> list[Hashable]:
        """Return the keys of the blocks behind the hits whose content the prefix store has."""
        if self.store is None:
            return []
        ends = range((num_hits + 1) * self.block_tokens, request.known, self.block_tokens)
        return self.store.match(tuple(request.tokens[:end]) for end in ends)

    def _window_hits(self, request: Request, num_hits: int) -> list[int | None]:
        """Return the window's blocks at a prefix's end, 0 for those it has passed."""
        passed = self._num_passed(num_hits * self.block_tokens)
        if not self.window_tokens:
            return []
        ends = ((index + 1) * self.block_tokens for index in range(passed, num_hits))
        return [0] * passed + [self.pool.hit((-1, *request.tokens[:end])) for end in ends]

    def _num_passed(self, num_computed: int) -> int:
        """Return the blocks that no token from this one on sees in its window."""
        return max(0, num_computed - self.window_tokens + 1) // self.block_tokens

    def _allocate(
        self,
        request: Request,
        end_tokens: int,
        left_over: LeftOver,
        *,
        hits: Sequence[int] = (),
    ) -> list[int] | None:
        """Allocate blocks up to ``end_tokens`` as vLLM's ``allocate_slots`` does.

        If None is returned, only blocks that a window has passed were freed.
        """
        self._free_passed(request)
        needed = -(-end_tokens // self.block_tokens)
        window_hits = self._window_hits(request, len(hits)) if hits else []
        window = [block for block in window_hits if block]
        count = max(0, needed - len(request.blocks) - len(hits))
        window_count = 0
        if self.window_tokens:
            window_count = max(0, needed - len(request.window_blocks) - len(window_hits))
        freed_hits = sum(not self.pool.references[block] for block in hits)
        freed_window = sum(not self.pool.references[block] for block in window)
        needs_state = self.has_states and not request.state_block
        taken = count + window_count + needs_state + freed_hits + freed_window
        if taken + left_over(window_count + needs_state) > len(self.pool.free):
            return None
        self.pool.touch([*hits, *window])
        self.elastic.resident.hold(window)
        new_blocks, new_window = self.pool.take(count), self.pool.take(window_count)
        self.elastic.resident.drop([*new_blocks, *new_window])
        self.elastic.resident.hold(new_window)
        if needs_state:
            (request.state_block,) = self.pool.take(1)
            self.elastic.resident.drop([request.state_block])
            self.elastic.resident.hold_states([request.state_block])
        request.blocks += [*hits, *new_blocks]
        request.window_blocks += [*(block or 0 for block in window_hits), *new_window]
        self._cache_full_blocks(request, end_tokens)
        return new_blocks

    def _free_passed(self, request: Request) -> None:
        """Free the blocks that the window of all tokens to come has passed."""
        if not self.window_tokens:
            return
        passed = min(self._num_passed(request.processed), len(request.window_blocks))
        freed = [block for block in request.window_blocks[:passed] if block]
        request.window_blocks[:passed] = [0] * passed
        self._release(freed[::-1])

    def _release(self, blocks: Sequence[int]) -> None:
        """Release blocks, and track what becomes of a window's."""
        self.pool.release(blocks)
        resident = self.elastic.resident
        for block in blocks:
            if block in resident and not self.pool.references[block]:
                if block in self.pool.prefix_of:
                    resident.cache(block)
                else:
                    resident.drop([block])

    def _cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Cache full blocks when they are scheduled, so that others may hit them in the same step.

        They are not computed yet.
        """
        if not self.has_cache:
            return
        for index in range(min(num_tokens, request.known) // self.block_tokens):
            end = (index + 1) * self.block_tokens
            self.pool.cache(request.blocks[index], tuple(request.tokens[:end]))
            if self.window_tokens and request.window_blocks[index]:
                self.pool.cache(request.window_blocks[index], (-1, *request.tokens[:end]))

    def _can_free(self, request: Request) -> bool:
        return not self._defer_frees or request.last_step <= self._updated_steps

    def _free(self, request: Request) -> None:
        blocks = request.blocks[::-1]
        blocks += [block for block in request.window_blocks[::-1] if block]
        blocks += [request.state_block] * bool(request.state_block)
        request.blocks, request.window_blocks, request.state_block = [], [], 0
        if self._can_free(request):
            self._release(blocks)
        else:
            self._deferred.append((self._scheduled_steps, blocks))

    def _preempt(self, request: Request) -> None:
        self._free(request)
        request.computed = request.placeholders = request.processed = request.certain = 0
        request.late_drafts = 0
        request.preemptions += 1
        request.status = Status.WAITING
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _next_turn(self, request: Request) -> None:
        """Continue the session after the tokens that are surely computed; drop the last token.

        With steps ahead, one of which may have filled a block with that token, all of the session's
        tokens are computed anew, as the connector has it.
        """
        frontier = request.computed - request.placeholders
        turn = request.turns.popleft()
        num_prompt = min(frontier + turn.num_prompt, self.max_tokens - 1)
        if num_prompt <= frontier:
            self.abort(request)
            return
        end = min(num_prompt + turn.num_output, self.max_tokens)
        request.tokens = request.tokens[:frontier] + (turn.token,) * (end - frontier)
        request.known = request.num_prompt = num_prompt
        request.computed = frontier
        request.placeholders = 0
        request.drop_until = self._scheduled_steps
        request.status = Status.WAITING
        self.running.remove(request)
        self.holding.append(request)
        self.num_turns += 1
        if self.ahead:
            self._free(request)
            request.computed = request.processed = request.certain = request.late_drafts = 0
            request.preemptions += 1
            self._started_over.add(request.request_id)

    def _finish(self, request: Request) -> None:
        """Finish a request as vLLM does: free its blocks, and release blocks as the connector."""
        request.status = Status.FINISHED
        self._finished.add(request.request_id)
        self.admission.end_requests((request.request_id,))
        self._free(request)

    def check_integrity(self) -> None:
        """Check that every usable block is free, held by a request, reserved or deferred."""
        self.elastic.check_integrity()
        if self.store:
            self.store.check_integrity()
        window = [
            block for r in self.running for block in (*r.window_blocks, r.state_block) if block
        ]
        held = [
            block for queue in (self.running, self.holding) for r in queue for block in r.blocks
        ]
        held += window
        held += [block for _, blocks in self._deferred for block in blocks]
        held += self.elastic.reserved
        assert self.elastic.released_blocks + len(self.elastic.reserved) == self.usable_blocks
        for block in range(1, self.usable_blocks + 1):
            assert self.pool.references[block] == held.count(block)
        free = sorted(self.pool.free)
        assert free == [b for b in range(1, self.usable_blocks + 1) if b not in held]
        resident = self.elastic.resident
        assert all(block in resident for block in window)
        assert resident.num_charged >= resident.num_held >= len(set(window))
        assert not any(request.blocks for request in self.waiting)
