# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping for requests that are computed anew because a far page did not come back intact."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set

from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.step_plan import ScheduledRequest, StepPlan

MAX_RECOMPUTES = 8
"""If a request loses blocks more often than this, the far tier cannot be relied on."""


class RecentSteps:
    """Blocks that the latest steps wrote, and which requests hit which in the prefix cache.

    At most ``_IN_FLIGHT`` steps are planned before the first one's result is known.

    Args:
        num_blocks: vLLM's block ids, the null block included.
        notices_late: checksums are not compared in every read. Any block may then have been
            computed from the damaged page, and counts as written.
    """

    _IN_FLIGHT = 4

    def __init__(self, block_tokens: int, num_blocks: int, *, notices_late: bool) -> None:
        self._block_tokens = block_tokens
        self._all = frozenset(range(1, num_blocks)) if notices_late else None
        self._plans: deque[StepPlan] = deque(maxlen=self._IN_FLIGHT)
        self._hits: deque[dict[str, Sequence[int]]] = deque(maxlen=self._IN_FLIGHT)

    def add(self, plan: StepPlan, requests: Iterable[ScheduledRequest]) -> None:
        """Record a step that was planned."""
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
        """Return the blocks that these steps wrote, but for partial blocks that stay partial."""
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
            )
            for block_id in block_ids.tolist()
        }

    def requests_that_hit_written_blocks(self) -> set[str]:
        """Return the requests that began on blocks which one of these steps wrote."""
        written = self.written_blocks()
        return {
            request_id
            for hits in self._hits
            for request_id, block_ids in hits.items()
            if not written.isdisjoint(block_ids)
        }


class RecomputeLog:
    """Counts of how often each live request was computed anew, and the sessions that will be."""

    def __init__(self) -> None:
        self.num_recomputed = 0
        self.postponed: set[str] = set()
        self._times: Counter[str] = Counter()

    def add(self, request_ids: set[str]) -> None:
        """Count requests that are computed anew.

        Raises:
            IntegrityError: one of them was computed anew too often.
        """
        self.num_recomputed += len(request_ids)
        self._times.update(request_ids)
        for request_id in request_ids:
            if self._times[request_id] > MAX_RECOMPUTES:
                raise IntegrityError(
                    f"request {request_id} lost KV blocks {self._times[request_id]} times: the "
                    "far tier does not keep what is written to it; see the storage device's "
                    "health, move kv.path, or set kv.tier=far"
                )

    def end(self, request_id: str) -> None:
        """Drop a request that ended."""
        self._times.pop(request_id, None)
        self.postponed.discard(request_id)
