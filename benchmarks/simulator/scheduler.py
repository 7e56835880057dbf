# SPDX-License-Identifier: Apache-2.0
"""Model of vLLM's scheduler under an elastic block limit, with one call per step.

Running requests come first, in the order of admission. A decoding request takes one token; a
prefilling request takes a chunk of the remaining token budget. A request that finds no free block
preempts the last admitted request, which is recomputed later. Then waiting requests are admitted
while their blocks and partial blocks fit. Decoding requests are visited only when they need a block
or end, so the cost of a step depends only on its changes.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulator.trace import Arrival
from vllm_tiered.kv.admission import Admission, LeftOver
from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.expansion import Expansion
from vllm_tiered.kv.layout import KvLevels, Level


class Request:
    """Request that waits, prefills, and then decodes; after a preemption it waits again."""

    __slots__ = (
        "arrival",
        "blocks",
        "computed",
        "epoch",
        "finished_s",
        "made",
        "name",
        "order",
        "prefill_end",
        "since",
    )

    def __init__(self, name: str, arrival: Arrival) -> None:
        self.name = name
        self.arrival = arrival
        self.blocks = 0
        self.computed = 0  # tokens with KV; for a decoding request, at step `since`
        self.epoch = 0  # number of preemptions; entries of `_due` from an older epoch are invalid
        self.finished_s: float | None = None
        self.made = 0  # output tokens; for a decoding request, at step `since`
        self.order = 0
        self.prefill_end = arrival.prompt_tokens
        self.since: int | None = None  # the step before its first decode step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """Work of one step, and the controller's signals about it.

    Attributes:
        prefilled_blocks: blocks that prefill fills in this step.
        filled_blocks: these, and those that decoding filled in the step before.
        has_same_blocks: requests hold the blocks that they held in the step before.
        fetched_blocks: blocks of prefix hits, which the step's layers read from the far tier.
        is_prefill: a prompt is computed for the first time.
    """

    num_requests: int
    scheduled_tokens: int
    context_tokens: int
    output_tokens: int
    is_blocked: bool
    num_preempted: int
    used_blocks: int
    prefilled_blocks: int
    filled_blocks: int
    has_same_blocks: bool
    fetched_blocks: int = 0
    is_prefill: bool = False


class CountedBlocks:
    """Free list of which only the length matters; block ids are invented when blocks are taken."""

    def __init__(self, num_blocks: int) -> None:
        self._num_free = num_blocks
        self._ids = itertools.count()

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds and that are not reserved."""
        return self._num_free

    def take(self, count: int) -> list[int]:
        """Take blocks to reserve them."""
        self.allocate(count)
        return list(itertools.islice(self._ids, count))

    def release(self, block_ids: Sequence[int]) -> None:
        """Put reserved blocks back."""
        self.free(len(block_ids))

    def evict(self, block_ids: Sequence[int]) -> None:
        """Do nothing, as no content is modelled."""

    def allocate(self, count: int) -> None:
        """Allocate blocks for a request."""
        self._num_free -= count

    def free(self, count: int) -> None:
        """Free a request's blocks."""
        self._num_free += count


class SimulatedScheduler:
    """Scheduler of requests, blocks and the level, without a notion of time.

    Args:
        levels: the levels of the near budget.
        max_num_seqs: the most requests that may run at once.
        max_batched_tokens: the most tokens of a step.
        level: the level at the start.
        reads_hits: the hit tokens of prompts are read from the far tier, whole blocks of them.
    """

    def __init__(
        self,
        levels: KvLevels,
        *,
        max_num_seqs: int,
        max_batched_tokens: int,
        level: Level,
        reads_hits: bool = False,
    ) -> None:
        self.levels = levels
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.finished: list[Request] = []
        self.elastic = ElasticBlocks(
            geometry=levels.geometry(level), usable_blocks=levels.max_blocks
        )
        self.expansion = Expansion(levels, self.elastic, level)
        self._pool = CountedBlocks(levels.max_blocks)
        self._admission = Admission(self.elastic, self._pool, self.expansion)
        self._admission.start()
        self.num_preempted = 0
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._reads_hits = reads_hits
        self._fetched_blocks = 0
        self._names = itertools.count()
        self._orders = itertools.count()
        self._prefilling: dict[str, Request] = {}
        self._due: dict[int, list[tuple[Request, int]]] = {}
        self._ending: dict[int, list[tuple[Request, int]]] = {}
        self._num_decoding = 0
        self._context_tokens = 0  # sum over decoding requests
        self._step = 0
        self._has_same_blocks = False
        self._prefilled_blocks = self._decoded_blocks = 0  # filled since the step before
        self._is_prefill = False

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self._admission.used_blocks

    def add(self, arrival: Arrival) -> None:
        """Add a request that arrives."""
        self.waiting.append(Request(f"r{next(self._names)}", arrival))

    def longest_blocks(self) -> int:
        """Return the present blocks of the largest request that runs or is among the next 8."""
        longest = 0
        for request in self.running.values():
            longest = max(longest, request.blocks)
        for request in itertools.islice(self.waiting, 8):
            longest = max(longest, self._blocks_of(request.prefill_end))
        return longest

    def schedule(self) -> StepWork:
        """Plan one step and count it as run; a request must be running or waiting."""
        self._step += 1
        preempted_before = self.num_preempted
        self._is_prefill = False
        self._extend_decoding()
        budget = self._max_batched_tokens - self._num_decoding
        prefill_tokens, context = self._extend_prefilling(budget)
        budget -= prefill_tokens
        is_blocked = self.num_preempted > preempted_before
        if not is_blocked:
            tokens, more_context, is_blocked = self._admit(budget)
            prefill_tokens += tokens
            context += more_context
        self._context_tokens += self._num_decoding
        context += self._context_tokens
        num_decoding = self._num_decoding
        num_requests = len(self.running)
        used_blocks = self.used_blocks
        output_tokens = num_decoding + self._begin_decoding()
        prefilled, decoded = self._prefilled_blocks, self._decoded_blocks
        has_same_blocks, self._has_same_blocks = self._has_same_blocks, True
        self._prefilled_blocks = self._decoded_blocks = 0
        fetched, self._fetched_blocks = self._fetched_blocks, 0
        return StepWork(
            num_requests=num_requests,
            scheduled_tokens=num_decoding + prefill_tokens,
            context_tokens=context,
            output_tokens=output_tokens,
            is_blocked=is_blocked,
            num_preempted=self.num_preempted - preempted_before,
            used_blocks=used_blocks,
            prefilled_blocks=prefilled,
            filled_blocks=prefilled + decoded,
            has_same_blocks=has_same_blocks,
            fetched_blocks=fetched,
            is_prefill=self._is_prefill,
        )

    def end_step(self, now_s: float) -> None:
        """Finish requests that made their last token; the next step may use their blocks."""
        for request, epoch in self._ending.pop(self._step, ()):
            if request.epoch == epoch:
                self._num_decoding -= 1
                self._context_tokens -= self._context_of(request)
                self._leave(request)
                request.epoch += 1
                request.finished_s = now_s
                self.finished.append(request)
        self._admission.release_blocks()

    def change_level(self) -> tuple[int, int]:
        """Advance one step towards the target level (see `Admission`).

        Returns the number of offloaded layers in the next step, and the number for which layers are
        written out during it.
        """
        level = self._admission.change_level()
        assert level.num_far is not None and level.num_far_next is not None
        return level.num_far, level.num_far_next

    # Running requests -------------------------------------------------------------------

    def _extend_decoding(self) -> None:
        due = self._due.pop(self._step, None)
        if not due:
            return
        due.sort(key=lambda entry: entry[0].order)
        for request, epoch in due:
            if request.epoch == epoch and self._take(request, 1):
                self._decoded_blocks += 1
                self._due_again(request, self._step + self.levels.block_tokens)

    def _due_again(self, request: Request, step: int) -> None:
        self._due.setdefault(step, []).append((request, request.epoch))

    def _extend_prefilling(self, budget: int) -> tuple[int, int]:
        """Schedule chunks of prefilling requests; return (tokens, context tokens)."""
        tokens = context = 0
        for request in list(self._prefilling.values()):
            chunk = min(request.prefill_end - request.computed, budget - tokens)
            if chunk <= 0 or request.name not in self._prefilling:
                continue
            more = self._blocks_of(request.computed + chunk) - request.blocks
            if not self._take(request, more):
                continue
            self._prefilled_blocks += self._full_blocks(request, chunk)
            self._is_prefill |= not request.epoch
            request.computed += chunk
            tokens += chunk
            context += request.computed
        return tokens, context

    def _take(self, request: Request, count: int) -> bool:
        """Allocate blocks for a running request; return False if it was itself preempted."""
        while self._pool.num_free < count:
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks += count
        self._pool.allocate(count)
        self._has_same_blocks &= not count
        return True

    def _preempt(self, request: Request) -> None:
        self.num_preempted += 1
        if request.since is not None:
            decoded = self._step - 1 - request.since
            self._num_decoding -= 1
            self._context_tokens -= request.computed + decoded
            request.made += decoded
        request.epoch += 1
        request.since = None
        request.computed = 0
        request.prefill_end = request.arrival.prompt_tokens + request.made
        self._leave(request)
        self._admission.release_blocks()
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        del self.running[request.name]
        self._prefilling.pop(request.name, None)
        self._pool.free(request.blocks)
        request.blocks = 0
        self._has_same_blocks = False
        self.elastic.end(request.name)

    def _context_of(self, request: Request) -> int:
        assert request.since is not None
        return request.computed + self._step - request.since

    # Waiting requests -------------------------------------------------------------------

    def _admit(self, budget: int) -> tuple[int, int, bool]:
        """Admit waiting requests.

        Returns (tokens, context tokens, whether a request was refused for lack of blocks).
        """
        tokens = context = 0
        while self.waiting and len(self.running) < self._max_num_seqs and tokens < budget:
            request = self.waiting[0]
            hits = self._hit_blocks(request) * self.levels.block_tokens
            chunk = min(request.prefill_end - hits, budget - tokens)
            count = self._blocks_of(hits + chunk)
            whole = self._blocks_of(request.prefill_end)
            allocate = functools.partial(self._allocate_first, count, whole)
            if self._admission.admit(request.name, request.prefill_end, allocate) is None:
                return tokens, context, True
            self.waiting.popleft()
            request.order = next(self._orders)
            request.computed = hits
            self._fetched_blocks += self._hit_blocks(request)
            self._prefilled_blocks += self._full_blocks(request, chunk)
            self._is_prefill |= not request.epoch
            request.computed += chunk
            request.blocks = count
            self._has_same_blocks = False
            self.running[request.name] = self._prefilling[request.name] = request
            tokens += chunk
            context += request.computed
        return tokens, context, False

    def _begin_decoding(self) -> int:
        """Start decoding for requests whose prefill is over; return the number of their tokens."""
        over = [r for r in self._prefilling.values() if r.computed >= r.prefill_end]
        for request in over:
            del self._prefilling[request.name]
            self.elastic.progress(request.name, request.computed)
            request.made += 1
            request.since = self._step
            self._num_decoding += 1
            self._context_tokens += request.computed
            left = request.arrival.output_tokens - request.made
            end = self._step + max(0, left)
            self._ending.setdefault(end, []).append((request, request.epoch))
            room = request.blocks * self.levels.block_tokens - request.computed
            if room < left:
                self._due_again(request, self._step + room + 1)
        return len(over)

    # Blocks -----------------------------------------------------------------------------

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.levels.block_tokens)

    def _hit_blocks(self, request: Request) -> int:
        """Return the blocks of a request's prompt that are read; a token is left to compute."""
        if not self._reads_hits:
            return 0
        tokens = min(request.arrival.hit_tokens, request.prefill_end - 1)
        return tokens // self.levels.block_tokens

    def _full_blocks(self, request: Request, chunk: int) -> int:
        """Return the blocks that a chunk of a request's prompt fills."""
        size = self.levels.block_tokens
        return (request.computed + chunk) // size - request.computed // size

    def _allocate_first(self, count: int, whole: int, left_over: LeftOver) -> int | None:
        """Allocate a request's first blocks if its whole prefill would fit, as in vLLM."""
        if whole > self._pool.num_free or count > self._pool.num_free - left_over(0):
            return None
        self._pool.allocate(count)
        return count
