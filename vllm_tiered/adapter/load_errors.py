# SPDX-License-Identifier: Apache-2.0
"""Requests whose far pages did not come back intact are computed anew, and nobody else's.

vLLM's own way for a connector's load errors goes on in the lost block. With steps scheduled ahead
it delivers what the next step, already under way, made of that block; and a request that shares the
block may read it before it is whole again. So the affected requests are preempted instead, as for a
reset of the prefix cache: their blocks leave the cache, and what steps under way sample for them is
dropped.
"""

import logging
import time
from collections import Counter
from typing import Any

from vllm_tiered.adapter import compat
from vllm_tiered.errors import IntegrityError

logger = logging.getLogger("vllm.tiered")

MAX_RECOMPUTES = 8
"""A request that loses blocks more often than this says that the far tier cannot be relied on."""


def install() -> None:
    """Wrap vLLM's scheduler. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    compat.wrap_once(Scheduler, "_handle_invalid_blocks", _handle_invalid_blocks)


def _handle_invalid_blocks(
    original: Any, scheduler: Any, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
) -> set[str]:
    """Returns the ids of requests whose output of this step must not be used.

    Raises:
        IntegrityError: the same request lost blocks again and again.
    """
    from vllm_tiered.adapter.connector import TieredConnector

    if not isinstance(scheduler.connector, TieredConnector):
        result: set[str] = original(scheduler, invalid_block_ids, num_scheduled_tokens)
        return result
    scheduler.kv_cache_manager.evict_blocks(invalid_block_ids)
    affected = [
        request
        for request in scheduler.running
        if not invalid_block_ids.isdisjoint(
            scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        )
    ]
    now = time.monotonic()
    for request in reversed(affected):  # so that they come back in their order
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now, drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    affected_ids = {request.request_id for request in affected}
    scheduler.connector.recomputed(affected_ids)
    logger.warning(
        "tiered kv: %d blocks did not come back intact from the far tier: %d requests are "
        "computed anew",
        len(invalid_block_ids),
        len(affected),
    )
    return affected_ids


class RecomputeLog:
    """How often each live request was computed anew."""

    def __init__(self) -> None:
        self.num_recomputed = 0
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
