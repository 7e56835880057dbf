# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler side: plans each step and keeps the block pool elastic."""

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from vllm_tiered.adapter.kv_config import KvPlan
from vllm_tiered.adapter.metrics import TieredStats
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.kv.elastic import ElasticBlocks
from vllm_tiered.kv.step_plan import ScheduledRequest, StepPlan, StepPlanner


@dataclass
class TieredMetadata(KVConnectorMetadata):
    """One step's plan, on its way from the scheduler to every worker."""

    plan: StepPlan


def gauges(plan: KvPlan, world_size: int, *, withheld: int = 0) -> TieredStats:
    """What the scheduler knows of the KV tiers; bytes are all ranks'."""
    geometry = plan.geometry
    return TieredStats(
        data={
            "kv_expansion": plan.expansion,
            "kv_near_bytes": geometry.near_bytes * world_size,
            "kv_far_bytes": geometry.far_bytes(plan.num_blocks) * world_size,
            "kv_blocks_granted": plan.num_blocks - 1 - withheld,
            "kv_blocks_withheld": withheld,
        }
    )


class TieredScheduler:
    """Runs beside vLLM's scheduler.

    Args:
        plan: what was configured; it swaps (has rotating layers).
        world_size: ranks, for the gauges.
    """

    def __init__(self, plan: KvPlan, world_size: int) -> None:
        self._plan = plan
        self._world_size = world_size
        self._planner = StepPlanner(
            num_blocks=plan.num_blocks, block_tokens=plan.geometry.block_tokens
        )
        self.elastic = ElasticBlocks(geometry=plan.geometry, usable_blocks=plan.num_blocks - 1)
        self._announced: set[int] = set()
        self._pool: Any = None
        self._withheld: dict[int, Any] = {}

    def bind(self, kv_cache_manager: Any) -> None:
        """Take the block pool, and see every allocation of a request that begins.

        vLLM asks ``allocate_slots`` whether a request fits, and leaves ``reserved_blocks`` free;
        partly filled blocks cost near pages beside the blocks themselves, so their share is
        reserved by this argument and withheld when the request is admitted.
        """
        self._pool = kv_cache_manager.block_pool
        kv_cache_manager.allocate_slots = self._reserving(kv_cache_manager.allocate_slots)
        kv_cache_manager.reset_prefix_cache = self._resetting(kv_cache_manager.reset_prefix_cache)

    def build_metadata(self, scheduler_output: Any) -> TieredMetadata:
        """Plan the step that was just scheduled.

        Raises:
            UnsupportedError: the step copies blocks, which only hybrid models do.
        """
        start = time.perf_counter()
        if scheduler_output.kv_cache_block_copies:
            raise UnsupportedError("vLLM copies KV blocks (copy on write): not under KV swapping")
        scheduled = scheduler_output.num_scheduled_tokens
        ended = set(scheduler_output.finished_req_ids)
        ended.update(scheduler_output.preempted_req_ids or ())
        for request_id in ended:
            if request_id not in scheduled:
                self.elastic.end(request_id)
        self.grant()
        withheld = set(self.elastic.withheld)
        step = self._planner.plan(
            self._scheduled_requests(scheduler_output),
            ended,
            granted=sorted(self._announced - withheld),
            withheld=sorted(withheld - self._announced),
        )
        self._announced = withheld
        return TieredMetadata(replace(step, planning_seconds=time.perf_counter() - start))

    def request_finished(self, request_id: str) -> None:
        """Its tail slots are free: grant blocks at once, so that an idle engine has them all."""
        self.elastic.end(request_id)
        self.grant()

    def grant(self) -> None:
        granted = [self._withheld.pop(block_id) for block_id in self.elastic.grant()]
        if granted:
            self._pool.free_blocks(granted)

    def stats(self) -> TieredStats:
        """The gauges."""
        return gauges(self._plan, self._world_size, withheld=len(self.elastic.withheld))

    def _reserving(self, allocate_slots: Any) -> Any:
        @functools.wraps(allocate_slots)
        def allocate(request: Any, *args: Any, reserved_blocks: int = 0, **kwargs: Any) -> Any:
            request_id = request.request_id
            if self.elastic.is_admitted(request_id) and not _begins(request):
                return allocate_slots(request, *args, reserved_blocks=reserved_blocks, **kwargs)
            extra = self.elastic.blocks_to_withhold(request_id)
            blocks = allocate_slots(
                request, *args, reserved_blocks=reserved_blocks + extra, **kwargs
            )
            if blocks is not None:
                withheld = self._pool.get_new_blocks(extra) if extra else []
                self._withheld.update((block.block_id, block) for block in withheld)
                self.elastic.admit(
                    request_id,
                    [block.block_id for block in withheld],
                    prefill_tokens=max(request.num_prompt_tokens, request.num_tokens - 1),
                )
            return blocks

        return allocate

    def _resetting(self, reset_prefix_cache: Any) -> Any:
        """vLLM resets only a pool of which no block is held; withheld ones must not count."""

        @functools.wraps(reset_prefix_cache)
        def reset() -> bool:
            held = list(self._withheld.values())
            self._pool.free_blocks(held)
            if reset_prefix_cache():
                self._withheld.clear()
                self.elastic.end_all()
                return True
            self._pool.touch(held)
            return False

        return reset

    def _scheduled_requests(self, scheduler_output: Any) -> Iterator[ScheduledRequest]:
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            yield ScheduledRequest(
                request_id=new.req_id,
                new_block_ids=new.block_ids[0],
                restarts=True,
                computed_tokens=new.num_computed_tokens,
                scheduled_tokens=scheduled[new.req_id],
            )
        cached = scheduler_output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, computed_tokens in rows:
            self.elastic.progress(request_id, computed_tokens)
            yield ScheduledRequest(
                request_id=request_id,
                new_block_ids=block_ids[0] if block_ids else (),
                restarts=request_id in cached.resumed_req_ids,
                computed_tokens=computed_tokens,
                scheduled_tokens=scheduled[request_id],
            )


def _begins(request: Any) -> bool:
    """Whether the request waits for its first blocks, now or again after a preemption."""
    return str(request.status.name) in ("WAITING", "PREEMPTED")
