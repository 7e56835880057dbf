# SPDX-License-Identifier: Apache-2.0
"""Requests whose far pages did not come back intact are computed anew.

vLLM's own way for a connector's load errors goes on in the lost block. With steps scheduled ahead
it delivers what the next step, already under way, made of that block; and a request that shares the
block may read it before it is whole again. So the affected requests are preempted instead, as for a
reset of the prefix cache: their blocks leave the cache, and what steps under way sample for them is
dropped.

What a step computed from a lost page is wrong too, and vLLM put those blocks into its prefix cache
when it scheduled the step. So all blocks that the latest steps wrote leave the cache, and a request
that has hit one of them meanwhile counts as affected, whoever wrote it. Nobody else's are touched.

A session that waits for its client's next input holds blocks too. It starts over when the input
comes: until then vLLM reads off its computed tokens which of its output belongs to it.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from typing import Any

from vllm_tiered.adapter import compat
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.step_plan import ScheduledRequest, StepPlan

logger = logging.getLogger("vllm.tiered")

MAX_RECOMPUTES = 8
"""A request that loses blocks more often than this says that the far tier cannot be relied on."""


def install() -> None:
    """Wrap vLLM's scheduler. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    compat.wrap_once(Scheduler, "_handle_invalid_blocks", _handle_invalid_blocks)
    compat.wrap_once(Scheduler, "_update_request_as_session", _update_request_as_session)


def _handle_invalid_blocks(
    original: Any, scheduler: Any, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
) -> set[str]:
    """Returns the ids of requests whose output of this step must not be used.

    Raises:
        IntegrityError: the same request lost blocks again and again.
    """
    from vllm.v1.request import RequestStatus

    from vllm_tiered.adapter.kv.connector import TieredConnector

    if not isinstance(scheduler.connector, TieredConnector):
        result: set[str] = original(scheduler, invalid_block_ids, num_scheduled_tokens)
        return result
    recent = scheduler.connector.recent_steps
    scheduler.kv_cache_manager.evict_blocks(invalid_block_ids | recent.written())
    has_hit_wrong_blocks = recent.hit_what_was_written()

    def is_affected(request: Any) -> bool:
        block_ids = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        is_hit = request.request_id in has_hit_wrong_blocks
        return is_hit or not invalid_block_ids.isdisjoint(block_ids)

    recomputes = scheduler.connector.recomputes
    assert recomputes is not None, "blocks are lost where layers are far"
    sessions = [
        request
        for request in scheduler.kv_holding_waiting
        if request.request_id not in recomputes.postponed and is_affected(request)
    ]
    for session in sessions:
        if session.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            recomputes.postponed.add(session.request_id)
        else:
            _start_over(scheduler, session)
    affected = [request for request in scheduler.running if is_affected(request)]
    now = time.monotonic()
    for request in reversed(affected):  # so that they come back in their order
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now, drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    affected_ids = {request.request_id for request in affected}
    scheduler.connector.recomputed(affected_ids | {session.request_id for session in sessions})
    logger.warning(
        "tiered kv: %d blocks did not come back intact from the far tier: %d requests are "
        "computed anew",
        len(invalid_block_ids),
        len(affected) + len(sessions),
    )
    return affected_ids


def _update_request_as_session(original: Any, scheduler: Any, session: Any, update: Any) -> None:
    """The next input of a session came."""
    from vllm_tiered.adapter.kv.connector import TieredConnector

    original(scheduler, session, update)
    if isinstance(scheduler.connector, TieredConnector):
        recomputes = scheduler.connector.recomputes
        if recomputes is not None and session.request_id in recomputes.postponed:
            recomputes.postponed.remove(session.request_id)
            _start_over(scheduler, session)


def _start_over(scheduler: Any, session: Any) -> None:
    """A session in the queue computes all its tokens anew, in blocks of its own."""
    scheduler._free_request_blocks(session)
    session.num_computed_tokens = 0
    # What tells the connector that the blocks, and a partial block that stayed near, are free.
    scheduler.reset_preempted_req_ids.add(session.request_id)


class RecentSteps:
    """Blocks that the latest steps wrote, and who hit which in the prefix cache.

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

    def written(self) -> Set[int]:
        """Blocks to which these steps added tokens, but for partial blocks that stay partial
        blocks."""
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

    def hit_what_was_written(self) -> set[str]:
        """Requests that began on blocks which one of these steps wrote."""
        written = self.written()
        return {
            request_id
            for hits in self._hits
            for request_id, block_ids in hits.items()
            if not written.isdisjoint(block_ids)
        }


class RecomputeLog:
    """How often each live request was computed anew, and which sessions will be."""

    def __init__(self) -> None:
        self.num_recomputed = 0
        self.postponed: set[str] = set()
        self._times: Counter[str] = Counter()

    def add(self, request_ids: set[str]) -> None:
        """
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
        self._times.pop(request_id, None)
        self.postponed.discard(request_id)
