# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler under an elastic block limit, one call a step.

Running requests come first, in the order of admission: a decoding one takes a token, a prefilling
one a chunk of what is left of the token budget; one that finds no free block preempts the last
admitted, which is computed again later. Then waiting requests are admitted while their blocks and
partial blocks fit. Decoding requests are not visited in every step but only when they need a block
or end, so a step costs what happens in it.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from benchmarks.simulator.trace import Arrival
from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.expansion import Expansion
from vllm_tiered.kv.layout import KvLevels


class Request:
    """A request's way: waiting, prefilling, decoding; back to waiting when preempted."""

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
        self.computed = 0  # tokens with KV; of a decoding request, at step `since`
        self.epoch = 0  # counts preemptions: what was due before is void
        self.finished_s: float | None = None
        self.made = 0  # output tokens; of a decoding request, at step `since`
        self.order = 0
        self.prefill_end = arrival.prompt_tokens
        self.since: int | None = None  # the step before its first as a decoding request


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """What one step computes, and what the controller is told of it."""

    num_requests: int
    scheduled_tokens: int
    context_tokens: int
    output_tokens: int
    is_blocked: bool
    num_preempted: int
    used_blocks: int


class SimulatedScheduler:
    """Requests, blocks and the level; knows no time.

    Args:
        levels: the near budget.
        max_num_seqs: requests that may run at once.
        max_batched_tokens: tokens of a step.
        level: at the start.
    """

    def __init__(
        self, levels: KvLevels, *, max_num_seqs: int, max_batched_tokens: int, level: int
    ) -> None:
        self.levels = levels
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.finished: list[Request] = []
        self.elastic = ElasticBlocks(
            geometry=levels.geometry(level), usable_blocks=levels.max_blocks
        )
        self.expansion = Expansion(levels, self.elastic, level)
        self.used_blocks = 0
        self.num_preempted = 0
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._block_ids = itertools.count()
        self._names = itertools.count()
        self._orders = itertools.count()
        self._prefilling: dict[str, Request] = {}
        self._due: dict[int, list[tuple[Request, int]]] = {}
        self._ending: dict[int, list[tuple[Request, int]]] = {}
        self._num_decoding = 0
        self._context_tokens = 0  # of decoding requests
        self._step = 0
        self._reserve(self.elastic.excess)

    @property
    def free_blocks(self) -> int:
        return self.elastic.released_blocks - self.used_blocks

    def add(self, arrival: Arrival) -> None:
        """A request arrives."""
        self.waiting.append(Request(f"r{next(self._names)}", arrival))

    def longest_blocks(self) -> int:
        """Blocks of the largest request that runs or is next to run, at its present length."""
        longest = 0
        for request in self.running.values():
            longest = max(longest, request.blocks)
        for request in itertools.islice(self.waiting, 8):
            longest = max(longest, self._blocks_of(request.prefill_end))
        return longest

    def schedule(self) -> StepWork:
        """Plan one step and count it as run. Nothing may run without waiting or running ones."""
        self._step += 1
        preempted_before = self.num_preempted
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
        return StepWork(
            num_requests=num_requests,
            scheduled_tokens=num_decoding + prefill_tokens,
            context_tokens=context,
            output_tokens=output_tokens,
            is_blocked=is_blocked,
            num_preempted=self.num_preempted - preempted_before,
            used_blocks=used_blocks,
        )

    def end_step(self, now_s: float) -> None:
        """Requests that made their last token leave; their blocks are free in the next step."""
        for request, epoch in self._ending.pop(self._step, ()):
            if request.epoch == epoch:
                self._num_decoding -= 1
                self._context_tokens -= self._context_of(request)
                self._leave(request)
                request.epoch += 1
                request.finished_s = now_s
                self.finished.append(request)
        self.elastic.release()

    def change_level(self) -> tuple[int, int]:
        """Withhold what must be, and go one step towards the target (see `Expansion`)."""
        self._reserve(min(self.elastic.excess, self.free_blocks))
        return self.expansion.next_step()

    # Running requests -------------------------------------------------------------------

    def _extend_decoding(self) -> None:
        due = self._due.pop(self._step, None)
        if not due:
            return
        due.sort(key=lambda entry: entry[0].order)
        for request, epoch in due:
            if request.epoch == epoch and self._take(request, 1):
                self._due_again(request, self._step + self.levels.block_tokens)

    def _due_again(self, request: Request, step: int) -> None:
        self._due.setdefault(step, []).append((request, request.epoch))

    def _extend_prefilling(self, budget: int) -> tuple[int, int]:
        """Chunks of requests that were admitted before: (tokens, tokens of context)."""
        tokens = context = 0
        for request in list(self._prefilling.values()):
            chunk = min(request.prefill_end - request.computed, budget - tokens)
            if chunk <= 0 or request.name not in self._prefilling:
                continue
            more = self._blocks_of(request.computed + chunk) - request.blocks
            if not self._take(request, more):
                continue
            request.computed += chunk
            tokens += chunk
            context += request.computed
        return tokens, context

    def _take(self, request: Request, count: int) -> bool:
        """Give a running request blocks; False if it had to be preempted itself."""
        while self.free_blocks < count:
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            if victim is request:
                return False
        request.blocks += count
        self.used_blocks += count
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
        self.elastic.release()
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        del self.running[request.name]
        self._prefilling.pop(request.name, None)
        self.used_blocks -= request.blocks
        request.blocks = 0
        self.elastic.end(request.name)

    def _context_of(self, request: Request) -> int:
        assert request.since is not None
        return request.computed + self._step - request.since

    # Waiting requests -------------------------------------------------------------------

    def _admit(self, budget: int) -> tuple[int, int, bool]:
        """(Tokens, tokens of context, whether one was refused for want of blocks)."""
        tokens = context = 0
        while self.waiting and len(self.running) < self._max_num_seqs and tokens < budget:
            request = self.waiting[0]
            chunk = min(request.prefill_end, budget - tokens)
            extra = self.elastic.blocks_to_reserve(request.name)
            count = self._blocks_of(chunk)
            whole = self._blocks_of(request.prefill_end)
            if whole > self.free_blocks or count > self.free_blocks - extra:
                return tokens, context, True
            self.waiting.popleft()
            self._reserve(extra)
            self.elastic.admit(request.name, request.prefill_end)
            request.order = next(self._orders)
            request.computed = chunk
            request.blocks = count
            self.used_blocks += count
            self.running[request.name] = self._prefilling[request.name] = request
            tokens += chunk
            context += chunk
        return tokens, context, False

    def _begin_decoding(self) -> int:
        """Prefills that are over make a token and decode from the next step on; how many."""
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

    def _reserve(self, count: int) -> None:
        self.elastic.reserved.extend(itertools.islice(self._block_ids, count))
