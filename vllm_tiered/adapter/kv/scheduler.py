# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler side: plans each step and keeps the block pool elastic."""

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from vllm_tiered.adapter.kv.adaptive import AdaptiveExpansion
from vllm_tiered.adapter.kv.load_errors import RecentSteps, RecomputeLog
from vllm_tiered.adapter.kv.plan import KvPlan
from vllm_tiered.adapter.kv.steps import DecodeStreak, StepReport, StepWatch
from vllm_tiered.adapter.telemetry.metrics import TieredStats
from vllm_tiered.adapter.telemetry.timeline import Timeline
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.layout import expansion_of
from vllm_tiered.kv.step_plan import ScheduledRequest, StepPlan, StepPlanner


@dataclass
class TieredMetadata(KVConnectorMetadata):
    """One step's plan, on its way from the scheduler to every worker.

    Attributes:
        planning_seconds: what deciding it took.
    """

    plan: StepPlan
    planning_seconds: float = 0.0


def gauges(
    plan: KvPlan,
    world_size: int,
    *,
    num_far: int | None = None,
    reserved: int = 0,
    partial_blocks_resident: bool = True,
) -> TieredStats:
    """What the scheduler knows of the KV tiers; bytes are all ranks'."""
    if num_far is None:
        num_far = plan.order.num_far
    # Only workers know where far pages are, if there are any.
    no_far_pages = {} if plan.swaps else {"kv_far_bytes": 0, "kv_storage_bytes": 0}
    return TieredStats(
        data={
            "kv_expansion": expansion_of(plan.geometry.num_layers, num_far),
            "kv_far_layers": num_far,
            "kv_partial_blocks_far": int(not partial_blocks_resident),
            "kv_near_bytes": plan.near_bytes * world_size,
            "kv_blocks_released": plan.num_blocks - 1 - reserved,
            "kv_blocks_reserved": reserved,
            **no_far_pages,
        }
    )


class TieredScheduler:
    """Runs beside vLLM's scheduler.

    Args:
        plan: what was configured; it swaps, now or when the load asks for it.
        world_size: ranks, for the gauges.
        max_model_len: tokens of the longest request that the engine accepts.
        max_num_seqs: requests that it runs at a time.
        timeline: told what happens, if anybody wants to know.
    """

    def __init__(
        self,
        plan: KvPlan,
        world_size: int,
        *,
        max_model_len: int,
        max_num_seqs: int,
        timeline: Timeline | None = None,
    ) -> None:
        self._plan = plan
        self._world_size = world_size
        self._planner = StepPlanner(
            num_blocks=plan.num_blocks,
            block_tokens=plan.geometry.block_tokens,
        )
        self.elastic = ElasticBlocks(geometry=plan.geometry, usable_blocks=plan.num_blocks - 1)
        self.adaptive: AdaptiveExpansion | None = None
        if plan.levels is not None:
            max_model_blocks = -(-max_model_len // plan.levels.block_tokens)
            self.adaptive = AdaptiveExpansion(
                plan.levels,
                self.elastic,
                max_model_blocks=max_model_blocks,
                max_num_seqs=max_num_seqs,
                on_change=self._note,
                uses_storage=plan.config.tier == "storage",
            )
        self._watch = StepWatch(plan.geometry.block_tokens)
        self._timeline = timeline
        self._announced: set[int] = set()
        self._pool: Any = None
        self._manager: Any = None
        self._watermark = 0.0  # share of the released blocks
        self._reserved: dict[int, Any] = {}
        self._reserved_changed = False  # since the workers were told
        self._streak = DecodeStreak()
        self._num_tokens = 0  # output tokens of the step that is being planned
        self._reported_changes = 0
        self.recomputes = RecomputeLog()
        self.recent = RecentSteps(
            plan.geometry.block_tokens,
            plan.num_blocks,
            notices_late=plan.config.verify == "sample",
        )
        self._reported_recomputes = 0

    def bind(self, kv_cache_manager: Any) -> None:
        """Take the block pool, and see every allocation of a request that begins.

        vLLM asks ``allocate_slots`` whether a request fits, and leaves ``reserved_blocks`` free.
        Where partly filled blocks stay near they cost pages beside the blocks themselves; their
        share is reserved by this argument and reserved when the request is admitted.
        """
        self._pool = kv_cache_manager.block_pool
        self._reserve_excess()
        self._announced = set(self._reserved)
        kv_cache_manager.allocate_slots = self._reserving(kv_cache_manager.allocate_slots)
        kv_cache_manager.reset_prefix_cache = self._resetting(kv_cache_manager.reset_prefix_cache)
        # vLLM takes both of all blocks, reserved ones included.
        self._pool.get_usage = self._usage
        self._manager = kv_cache_manager
        self._watermark = kv_cache_manager.watermark_blocks / self._plan.num_blocks

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
        self.release()
        goes_on = self._streak.goes_on(scheduler_output) and not ended
        goes_on &= not self.elastic.num_prefilling
        requests: list[ScheduledRequest] = []
        if goes_on:
            self._num_tokens = len(scheduled)
        else:
            requests = list(self._scheduled_requests(scheduler_output))
        num_far = num_far_next = None
        partial_blocks_resident = True
        # Nothing runs, but somebody asks for blocks: a request that this level does not hold.
        if scheduled or self._watch.is_blocked:
            self._look_back(len(scheduled), len(scheduler_output.preempted_req_ids or ()))
        if self.adaptive:
            self._reserve(min(self.elastic.excess, self._pool.get_num_free_blocks()))
            num_far, num_far_next = self.adaptive.expansion.next_step()
            partial_blocks_resident = self.adaptive.expansion.partial_blocks_resident
        step = None
        if goes_on and not self._reserved_changed:
            step = self._planner.plan_on(
                list(self._changed_requests(scheduler_output)),
                num_far=num_far,
                num_far_next=num_far_next,
                partial_blocks_resident=partial_blocks_resident,
            )
        if step is None:
            if goes_on:
                requests = list(self._scheduled_requests(scheduler_output))
            reserved = set(self.elastic.reserved)
            step = self._planner.plan(
                requests,
                ended,
                released=sorted(self._announced - reserved),
                reserved=sorted(reserved - self._announced),
                num_far=num_far,
                num_far_next=num_far_next,
                partial_blocks_resident=partial_blocks_resident,
            )
            self._announced = reserved
            self._reserved_changed = False
        self.recent.add(step, requests)
        return TieredMetadata(step, planning_seconds=time.perf_counter() - start)

    def begin_request(self, request: Any) -> None:
        self._watch.begin_request(
            request.request_id, request.num_tokens, is_session=request.resumable
        )

    def report(self, report: StepReport) -> None:
        """Workers have run a step."""
        self._watch.report(report)

    def recomputed(self, request_ids: set[str]) -> None:
        """Requests are computed anew because blocks of theirs were lost."""
        self._note("load error", f"{len(request_ids)} requests are computed anew")
        self.recomputes.add(request_ids)

    def close(self) -> None:
        if self._timeline:
            self._timeline.close()

    def request_finished(self, request_id: str) -> None:
        """Its partial blocks are free: release blocks at once, so that an idle engine has them
        all."""
        self.elastic.end(request_id)
        self.recomputes.end(request_id)
        self._watch.end_request(request_id)
        self.release()

    def release(self) -> None:
        released = [self._reserved.pop(block_id) for block_id in self.elastic.release()]
        if released:
            self._reserved_changed = True
            self._pool.free_blocks(released)

    def stats(self) -> TieredStats:
        """The gauges, and how often the level changed since the last call."""
        expansion = self.adaptive.expansion if self.adaptive else None
        stats = gauges(
            self._plan,
            self._world_size,
            num_far=expansion.num_far if expansion else None,
            reserved=len(self.elastic.reserved),
            partial_blocks_resident=expansion.partial_blocks_resident if expansion else True,
        )
        num_changes = expansion.num_changes if expansion else 0
        num_recomputed = self.recomputes.num_recomputed
        stats.data["kv_level_changes"] = num_changes - self._reported_changes
        stats.data["kv_recomputed_requests"] = num_recomputed - self._reported_recomputes
        self._reported_changes, self._reported_recomputes = num_changes, num_recomputed
        return stats

    def _look_back(self, num_running: int, num_preempted: int) -> None:
        """The step before is over: tell the controller and the timeline."""
        step = self._watch.take(
            tokens=self._num_tokens,
            num_running=num_running,
            num_preempted=num_preempted,
            used_blocks=self.elastic.released_blocks - self._pool.get_num_free_blocks(),
        )
        if step is None:
            return
        if self.adaptive:
            self.adaptive.decide(step)
        if self._timeline:
            num_far = self._plan.order.num_far
            if self.adaptive:
                num_far = self.adaptive.expansion.num_far
            self._timeline.record_step(step, self.elastic, num_far)

    def _usage(self) -> float:
        """Blocks that requests hold, of those that they could at the highest level (vLLM's
        ``kv_cache_usage_perc``). Withheld blocks are not used."""
        num_partial, levels = self.elastic.num_partial, self._plan.levels
        if levels is None:
            most = self._plan.geometry.block_limit(num_partial)
        else:
            most = levels.block_limit(levels.highest, num_partial)
        used = self.elastic.released_blocks - self._pool.get_num_free_blocks()
        return min(1.0, used / max(1, most))

    def _note(self, kind: str, text: str) -> None:
        if self._timeline:
            self._timeline.record_event(kind, text)

    def _reserve_excess(self) -> None:
        """Of a pool whose blocks are all free, reserve those above the limit, highest ids."""
        blocks = self._pool.get_new_blocks(self._pool.get_num_free_blocks())
        blocks.sort(key=lambda block: block.block_id)
        limit = self.elastic.limit
        self._pool.free_blocks(blocks[:limit])
        self._reserved = {block.block_id: block for block in blocks[limit:]}
        self._reserved_changed = True
        self.elastic.reserved = sorted(self._reserved, reverse=True)  # released from the end

    def _reserve(self, count: int) -> list[int]:
        """Take free blocks away from the engine; their ids."""
        blocks = self._pool.get_new_blocks(count) if count else []
        self._reserved_changed |= bool(blocks)
        self._reserved.update((block.block_id, block) for block in blocks)
        self.elastic.reserved.extend(block.block_id for block in blocks)
        return [block.block_id for block in blocks]

    def _reserving(self, allocate_slots: Any) -> Any:
        @functools.wraps(allocate_slots)
        def allocate(request: Any, *args: Any, reserved_blocks: int = 0, **kwargs: Any) -> Any:
            request_id = request.request_id
            if self.elastic.is_admitted(request_id) and not _begins(request):
                blocks = allocate_slots(request, *args, reserved_blocks=reserved_blocks, **kwargs)
                if blocks is None:
                    self._watch.asked_in_vain(request_id, request.num_tokens)
                return blocks
            self._manager.watermark_blocks = round(self._watermark * self.elastic.released_blocks)
            extra = self.elastic.blocks_to_reserve(request_id)
            blocks = allocate_slots(
                request, *args, reserved_blocks=reserved_blocks + extra, **kwargs
            )
            if blocks is not None:
                self._reserve(extra)
                self.elastic.admit(
                    request_id,
                    prefill_tokens=max(request.num_prompt_tokens, request.num_tokens - 1),
                )
            else:
                self._watch.asked_in_vain(request_id, request.num_tokens)
            return blocks

        return allocate

    def _resetting(self, reset_prefix_cache: Any) -> Any:
        """vLLM resets only a pool of which no block is held; reserved ones must not count."""

        @functools.wraps(reset_prefix_cache)
        def reset() -> bool:
            held = list(self._reserved.values())
            self._pool.free_blocks(held)
            if reset_prefix_cache():
                self.elastic.end_all()
                self._reserve_excess()
                return True
            self._pool.touch(held)
            return False

        return reset

    def _scheduled_requests(self, scheduler_output: Any) -> Iterator[ScheduledRequest]:
        scheduled = scheduler_output.num_scheduled_tokens
        self._num_tokens = 0
        for new in scheduler_output.scheduled_new_reqs:
            self._follow(new.req_id, new.num_computed_tokens + scheduled[new.req_id])
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
            self._follow(request_id, computed_tokens + scheduled[request_id])
            yield ScheduledRequest(
                request_id,
                block_ids[0] if block_ids else (),
                request_id in cached.resumed_req_ids,
                computed_tokens,
                scheduled[request_id],
            )

    def _changed_requests(self, scheduler_output: Any) -> Iterator[ScheduledRequest]:
        """In a step of a token for each, those whose last block fills or that got blocks."""
        due = self._planner.due
        cached = scheduler_output.scheduled_cached_reqs
        for at, block_ids in enumerate(cached.new_block_ids):
            request_id = cached.req_ids[at]
            if block_ids or request_id in due:
                computed_tokens = cached.num_computed_tokens[at]
                self._watch.follow(request_id, computed_tokens + 1)
                yield ScheduledRequest(
                    request_id, block_ids[0] if block_ids else (), False, computed_tokens, 1
                )

    def _follow(self, request_id: str, end_tokens: int) -> None:
        self._num_tokens += not self.elastic.is_prefilling(request_id, end_tokens)
        self._watch.follow(request_id, end_tokens)


def _begins(request: Any) -> bool:
    """Whether the request waits for its first blocks, now or again after a preemption."""
    return str(request.status.name) in ("WAITING", "PREEMPTED")
