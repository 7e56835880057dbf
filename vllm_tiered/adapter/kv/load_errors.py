# SPDX-License-Identifier: Apache-2.0
"""Handling of load errors: requests whose far pages did not come back intact are recomputed.

vLLM's own handling of a connector's load errors recomputes inside the lost block. That is wrong in
two cases. With asynchronous scheduling the next step is already running, and vLLM would deliver the
tokens that it computes from the lost block. And a request that shares the block may read it before
it is recomputed. So the affected requests are preempted instead, as for a reset of the prefix
cache. Their blocks leave the cache, and tokens that running steps sample for them are dropped.

Blocks that a step computed from a lost page are wrong too, and vLLM put them into its prefix cache
when it scheduled the step. So all blocks that the latest steps wrote leave the cache. A request
that has hit one of them since then also counts as affected, whichever request wrote the block. No
other request is affected. All blocks of resident groups leave the cache, as it is not known which
of them these steps wrote.

When the storage tier has failed, all requests are preempted, and the levels of expansion that need
it are given up. A request that cannot be served any more ends with an error. The engine goes on.

A session that waits for its client's next input holds blocks too. It starts over when the input
comes. It cannot start over earlier, as until then vLLM uses its number of computed tokens to decide
which output tokens belong to it.

With asynchronous scheduling every turn of a session starts over. Between turns vLLM drops a token.
A step that was scheduled ahead may already have put it into a block, filled the block and written
it out, and a page in the far tier cannot be continued. What the prefix cache has is not computed
again.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from vllm_tiered.adapter import compat

logger = logging.getLogger("vllm.tiered")


def install() -> None:
    """Wrap vLLM's scheduler. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    compat.wrap_once(Scheduler, "_handle_invalid_blocks", _handle_invalid_blocks)
    compat.wrap_once(Scheduler, "_update_request_as_session", _update_request_as_session)
    compat.wrap_once(Scheduler, "update_from_output", _update_from_output)


def _handle_invalid_blocks(
    original: Any, scheduler: Any, invalid_block_ids: set[int], *args: Any, **kwargs: Any
) -> set[str]:
    """Recompute requests that used lost blocks; return those whose output is invalid."""
    from vllm.v1.request import RequestStatus

    from vllm_tiered.adapter.kv.multi_connector import find_tiered

    connector = find_tiered(scheduler.connector)
    if connector is None or connector.recomputes is None:
        result: set[str] = original(scheduler, invalid_block_ids, *args, **kwargs)
        return result
    recent, recomputes = connector.recent_steps, connector.recomputes
    scheduler.kv_cache_manager.evict_blocks(
        invalid_block_ids | recent.written_blocks() | connector.resident_blocks
    )
    has_hit_wrong_blocks = recent.requests_that_hit_written_blocks()

    def is_affected(request: Any) -> bool:
        by_group = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        block_ids = by_group[connector.group_index]
        is_hit = request.request_id in has_hit_wrong_blocks
        return is_hit or not invalid_block_ids.isdisjoint(block_ids)

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
    _preempt(scheduler, affected)
    affected_ids = {request.request_id for request in affected}
    connector.recomputed(affected_ids | {session.request_id for session in sessions})
    logger.warning(
        "tiered kv: %d blocks did not come back intact from the far tier%s: %d requests are "
        "computed anew",
        len(invalid_block_ids),
        "" if connector is scheduler.connector else " or from another KV connector",
        len(affected) + len(sessions),
    )
    return affected_ids


def _update_request_as_session(
    original: Any, scheduler: Any, session: Any, *args: Any, **kwargs: Any
) -> None:
    """Start a session over when its next input comes, if it was postponed or scheduled ahead."""
    from vllm_tiered.adapter.kv.multi_connector import find_tiered

    original(scheduler, session, *args, **kwargs)
    connector = find_tiered(scheduler.connector)
    if connector is not None:
        recomputes = connector.recomputes
        if recomputes is None:
            return
        if connector.schedules_ahead or session.request_id in recomputes.postponed:
            recomputes.postponed.discard(session.request_id)
            _start_over(scheduler, session)


def _update_from_output(
    original: Any, scheduler: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Give up a failed storage tier after the step, and end the requests that cannot be served."""
    from vllm_tiered.adapter.kv.multi_connector import find_tiered

    outputs = original(scheduler, scheduler_output, *args, **kwargs)
    connector = find_tiered(scheduler.connector)
    ours = None if connector is None else connector.scheduler_side
    if ours is not None:
        ours.end_step(scheduler_output)
    if ours is not None and ours.must_give_up_storage:
        ours.give_up_storage()
        _preempt(scheduler, list(scheduler.running))
        # Blocks that stay in the prefix cache are lost when they are read back.
        if not scheduler.kv_cache_manager.reset_prefix_cache():  # a session holds blocks
            ours.reserve_excess()
    if ours is not None and ours.unservable:
        _end_with_error(scheduler, ours.unservable, outputs)
        ours.unservable.clear()
    return outputs


def _preempt(scheduler: Any, requests: list[Any]) -> None:
    """Preempt running requests, and drop the tokens that running steps sample for them."""
    now = time.monotonic()
    for request in reversed(requests):  # in reverse, so that they resume in their order
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now, drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _end_with_error(scheduler: Any, reasons: Mapping[str, str], outputs: Any) -> None:
    """End requests as vLLM ends those whose KV cannot be loaded, and add this to ``outputs``."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    for request in scheduler.finish_requests(list(reasons), RequestStatus.FINISHED_ERROR):
        logger.error(
            "tiered kv: request %s ends with an error: %s",
            request.request_id,
            reasons[request.request_id],
        )
        end = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(end)


def _start_over(scheduler: Any, session: Any) -> None:
    """Make a queued session recompute all its tokens in its own new blocks."""
    scheduler._free_request_blocks(session)
    session.num_computed_tokens = 0
    # The connector learns from this that the blocks and a resident partial block are free.
    scheduler.reset_preempted_req_ids.add(session.request_id)
