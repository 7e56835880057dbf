# SPDX-License-Identifier: Apache-2.0
"""Handling of load errors: requests whose far pages did not come back intact are computed anew.

vLLM's own handling of a connector's load errors continues in the lost block. With steps scheduled
ahead it delivers what the next step, already under way, made of that block; and a request that
shares the block may read it before it is whole again. So the affected requests are preempted
instead, as for a reset of the prefix cache: their blocks leave the cache, and what steps under way
sample for them is dropped.

What a step computed from a lost page is wrong too, and vLLM put those blocks into its prefix cache
when it scheduled the step. So all blocks that the latest steps wrote leave the cache, and a request
that has hit one of them meanwhile counts as affected, whichever wrote it. Others are not touched.

A session that waits for its client's next input holds blocks too. It starts over when the input
comes: until then vLLM reads off its computed tokens which of its output belongs to it.
"""

import logging
import time
from typing import Any

from vllm_tiered.adapter import compat

logger = logging.getLogger("vllm.tiered")


def install() -> None:
    """Wrap vLLM's scheduler. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    compat.wrap_once(Scheduler, "_handle_invalid_blocks", _handle_invalid_blocks)
    compat.wrap_once(Scheduler, "_update_request_as_session", _update_request_as_session)


def _handle_invalid_blocks(
    original: Any, scheduler: Any, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
) -> set[str]:
    """Recompute requests that used lost blocks; return those whose output of this step is void.

    Raises:
        IntegrityError: the same request lost blocks again and again.
    """
    from vllm.v1.request import RequestStatus

    from vllm_tiered.adapter.kv.connector import TieredConnector

    if not isinstance(scheduler.connector, TieredConnector):
        result: set[str] = original(scheduler, invalid_block_ids, num_scheduled_tokens)
        return result
    recent = scheduler.connector.recent_steps
    scheduler.kv_cache_manager.evict_blocks(invalid_block_ids | recent.written_blocks())
    has_hit_wrong_blocks = recent.requests_that_hit_written_blocks()

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
    """Start a postponed session over when its next input comes."""
    from vllm_tiered.adapter.kv.connector import TieredConnector

    original(scheduler, session, update)
    if isinstance(scheduler.connector, TieredConnector):
        recomputes = scheduler.connector.recomputes
        if recomputes is not None and session.request_id in recomputes.postponed:
            recomputes.postponed.remove(session.request_id)
            _start_over(scheduler, session)


def _start_over(scheduler: Any, session: Any) -> None:
    """Let a session in the queue compute all its tokens anew, in blocks of its own."""
    scheduler._free_request_blocks(session)
    session.num_computed_tokens = 0
    # This tells the connector that the blocks, and a partial block that stayed near, are free.
    scheduler.reset_preempted_req_ids.add(session.request_id)
