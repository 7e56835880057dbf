# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping for requests that are recomputed because a far page did not come back intact."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set

from vllm_tiered.kv.step_plan import NO_BLOCKS, ScheduledRequest, StepPlan

MAX_RECOMPUTES = 8
"""Number of recomputes of one request beyond which the request fails. The engine goes on."""


class RecentSteps:
    """Log of the latest steps: the blocks that they wrote and the prefix-cache hits of requests.

    It keeps the steps that are in flight at a time and ``_FINISHED`` more: no more are planned
    before the first one's result is known.

    Args:
        num_blocks: number of vLLM's block ids, the null block included.
        notices_late: not every read compares checksums. Then any block may have been computed from
            the damaged page, so all blocks count as written.
        num_batches: the most steps that are in flight at a time.
    """

    _FINISHED = 2

    def __init__(
        self, block_tokens: int, num_blocks: int, *, notices_late: bool, num_batches: int = 2
    ) -> None:
        self._block_tokens = block_tokens
        self._all = frozenset(range(1, num_blocks)) if notices_late else None
        num_steps = num_batches + self._FINISHED
        self._plans: deque[StepPlan] = deque(maxlen=num_steps)
        self._hits: deque[dict[str, Sequence[int]]] = deque(maxlen=num_steps)

    def add(self, plan: StepPlan, requests: Iterable[ScheduledRequest]) -> None:
        """Record a planned step."""
        self._plans.append(plan)
        self._hits.append(
            {
                request.request_id: request.new_block_ids[
                    : request.computed_tokens // self._block_tokens
                ]
                for request in requests
                if request.restarts and request.computed_tokens
            }
        )

    def written_blocks(self) -> Set[int]:
        """Return the blocks that these steps wrote, except resident ones that stayed partial.

        What they fetched from a prefix store counts: one of them may have written that, too.
        """
        if self._all is not None:
            return self._all
        return {
            block_id
            for plan in self._plans
            for block_ids in (
                plan.store_new,
                plan.load_and_store,
                plan.alloc_partial,
                plan.store_partial,
                plan.keep,
                NO_BLOCKS if plan.prefixes is None else plan.prefixes.fetch,
            )
            for block_id in block_ids.tolist()
        }

    def requests_that_hit_written_blocks(self) -> set[str]:
        """Return the requests whose prefix-cache hits include a block that these steps wrote."""
        written = self.written_blocks()
        return {
            request_id
            for hits in self._hits
            for request_id, block_ids in hits.items()
            if not written.isdisjoint(block_ids)
        }


class RecomputeLog:
    """Counts of each live request's recomputes, and the sessions whose recompute is postponed."""

    def __init__(self) -> None:
        self.num_recomputed = 0
        self.postponed: set[str] = set()
        self._times: Counter[str] = Counter()

    def add(self, request_ids: set[str]) -> set[str]:
        """Count a recompute of each request.

        Returns:
            The requests that have now lost blocks more than ``MAX_RECOMPUTES`` times.
        """
        self.num_recomputed += len(request_ids)
        self._times.update(request_ids)
        return {name for name in request_ids if self._times[name] > MAX_RECOMPUTES}

    def has(self, request_id: str) -> bool:
        """Return whether a live request was recomputed."""
        return request_id in self._times

    def end(self, request_id: str) -> None:
        """Remove a request that ended."""
        self._times.pop(request_id, None)
        self.postponed.discard(request_id)
