# SPDX-License-Identifier: Apache-2.0
"""Scheduler side of the connector: plans each step and reserves blocks of vLLM's pool."""

import dataclasses
import functools
import inspect
import logging
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from vllm_tiered.adapter.kv.adaptive import AdaptiveExpansion
from vllm_tiered.adapter.kv.drafts import Drafts
from vllm_tiered.adapter.kv.free_list import VllmFreeList
from vllm_tiered.adapter.kv.gauges import kv_gauges
from vllm_tiered.adapter.kv.plan import KvPlan, max_request_tokens, with_max_num_far
from vllm_tiered.adapter.kv.prefix_hits import PrefixHits
from vllm_tiered.adapter.kv.resident_groups import ResidentGroupHooks, name_columns
from vllm_tiered.adapter.kv.steps import DecodeStreak, FirstPrefills, StepReport, StepWatch
from vllm_tiered.adapter.telemetry.metrics import TieredStats
from vllm_tiered.adapter.telemetry.timeline import Timeline
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.kv.admission import Admission, LeftOver
from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.expansion import Expansion
from vllm_tiered.kv.kept_blocks import KeptBlocks
from vllm_tiered.kv.layout import KvLevels
from vllm_tiered.kv.prefix_store import PrefixStore
from vllm_tiered.kv.recompute import MAX_RECOMPUTES, RecentSteps, RecomputeLog
from vllm_tiered.kv.state_columns import StateColumns
from vllm_tiered.kv.step_plan import NO_BLOCKS, BlockIds, ScheduledRequest, StepPlan
from vllm_tiered.kv.step_planner import StepPlanner
from vllm_tiered.kv.store_trial import StoreTrial
from vllm_tiered.kv.tuning import DEFAULT_TUNING, NEAR_TUNING, STORAGE_TUNING, Tuning

logger = logging.getLogger("vllm.tiered")


@dataclass
class TieredMetadata(KVConnectorMetadata):
    """Plan of one step that the scheduler sends to every worker.

    Attributes:
        planning_seconds: the time that planning took.
        loaded: blocks that another KV connector loads for the step, which count as written by it.
    """

    plan: StepPlan
    planning_seconds: float = 0.0
    loaded: BlockIds = field(default_factory=lambda: NO_BLOCKS)


class TieredScheduler:
    """Planner of the steps that vLLM's scheduler scheduled.

    Args:
        plan: the KV plan, in which layers are offloaded or may become so.
        world_size: number of ranks, for the gauges.
        max_model_len: tokens of the longest request that the engine accepts.
        max_num_seqs: the most requests that the engine runs at a time.
        num_batches: the most steps that are in flight at a time; one for each stage of a pipeline,
            and one that is scheduled ahead.
        drafts: drafts of speculative decoding; None without it.
        timeline: records steps and events; None without a report.

    Attributes:
        expansion: the transition between levels; None if the level never changes.
        storage_failure: why the storage tier is not used any more; "" while it is, or without one.
        prefix_hits: the prefix store; None without one.
        unservable: requests that cannot be served, by the reason, until they are taken out.
    """

    def __init__(
        self,
        plan: KvPlan,
        world_size: int,
        *,
        max_model_len: int,
        max_num_seqs: int,
        num_batches: int,
        drafts: Drafts | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        assert plan.groups is not None, "there are groups where layers may be offloaded"
        self._plan = plan
        self._groups = plan.groups
        self._group_hooks: ResidentGroupHooks | None = None
        self._world_size = world_size
        self._planner = StepPlanner(
            num_blocks=plan.num_blocks,
            block_tokens=plan.geometry.block_tokens,
            has_drafts=drafts is not None,
        )
        self.elastic = ElasticBlocks(geometry=plan.geometry, usable_blocks=plan.num_blocks - 1)
        self.adaptive: AdaptiveExpansion | None = None
        self.expansion: Expansion | None = None
        if plan.levels is not None and plan.is_adaptive:
            max_model_blocks = -(-max_model_len // plan.levels.block_tokens)
            self.adaptive = AdaptiveExpansion(
                plan.levels,
                self.elastic,
                max_model_blocks=max_model_blocks,
                max_num_seqs=max_num_seqs,
                resident_blocks=self._groups.resident_blocks,
                on_change=self._record_event,
                tuning=_tuning_for(plan),
            )
            self.expansion = self.adaptive.expansion
        elif plan.levels is not None:
            self.expansion = Expansion(plan.levels, self.elastic, plan.start)
        self.storage_failure = ""
        self.prefix_hits: PrefixHits | None = None
        self._kept = KeptBlocks(plan.num_blocks) if plan.keeps_blocks else None
        self.unservable: dict[str, str] = {}
        self._max_model_len = self._max_request_tokens = max_model_len
        self._restricted_by = ""  # why levels that the engine began with are not reached any more
        self._latest_report = StepReport()
        self._watch = StepWatch(plan.geometry.block_tokens)
        self._timeline = timeline
        self._admission: Admission
        self._manager: Any = None
        self._watermark = 0.0  # share of the released blocks
        self._streak = DecodeStreak()
        self._prefills = FirstPrefills()
        self._drafts = drafts
        self._num_tokens = 0  # output tokens of the step that is being planned
        self._external_tokens: dict[str, int] = {}  # that another connector will load
        self._loaded: list[int] = []  # the blocks of these in the step that is being planned
        self._reported_changes = 0
        self.recomputes = RecomputeLog()
        self.recent = RecentSteps(
            plan.geometry.block_tokens,
            plan.num_blocks,
            notices_late=plan.config.verify == "sample",
            num_batches=num_batches,
        )
        self._reported_recomputes = 0

    def bind(self, kv_cache_manager: Any) -> None:
        """Reserve blocks of the manager's pool, and wrap its allocation for requests.

        vLLM calls ``allocate_slots`` to learn whether a request fits. The call leaves the number of
        its argument ``reserved_blocks`` free. Resident partial blocks cost pages in addition to the
        blocks themselves. So the wrapper raises this argument by the number of blocks that must be
        reserved for those pages, and reserves them when the request is admitted. Blocks of resident
        groups cost pages too (``resident_groups.py``).
        """
        pool = kv_cache_manager.block_pool
        free_list = VllmFreeList(pool)
        self._admission = Admission(self.elastic, free_list, self.expansion)
        self._admission.start()
        if self._groups.resident:
            resident = self.elastic.resident
            if self._groups.has_states:
                num_columns = self._plan.near_pages // self._plan.geometry.num_layers
                resident.columns = StateColumns(num_columns)
            self._group_hooks = ResidentGroupHooks(
                kv_cache_manager, self._groups.resident, resident
            )
        kv_cache_manager.allocate_slots = self._wrap_allocate(kv_cache_manager.allocate_slots)
        kv_cache_manager.reset_prefix_cache = self._wrap_reset(
            kv_cache_manager.reset_prefix_cache, free_list
        )
        # vLLM computes the usage and the watermark from all blocks, reserved ones included.
        pool.get_usage = self._usage
        if self._plan.num_slots is not None:
            reserved = set(self.elastic.reserved)
            store = PrefixStore(
                num_blocks=self._plan.num_blocks,
                num_slots=self._plan.num_slots,
                released=[b for b in range(1, self._plan.num_blocks) if b not in reserved],
                is_full=self._planner.is_full,
            )
            self.prefix_hits = PrefixHits(
                store,
                pool,
                group_index=self._groups.index,
                block_tokens=self._plan.geometry.block_tokens,
                trial=(
                    StoreTrial(self._plan.num_slots)
                    if self._plan.config.prefix_store == "auto"
                    else None
                ),
            )
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
        preempted = scheduler_output.preempted_req_ids or ()
        ended = {*scheduler_output.finished_req_ids, *preempted}
        self._admission.end_requests(ended - scheduled.keys())
        continues = self._streak.continues(scheduler_output) and not ended
        continues &= not self.elastic.num_prefilling
        requests: list[ScheduledRequest] = []
        if self._drafts:
            self._drafts.begin_step(scheduler_output)
        if continues:
            self._num_tokens = len(scheduled)
        else:
            requests = list(self._scheduled_requests(scheduler_output))
        # A step may run nothing and still have a blocked request, which this level does not hold.
        if scheduled or self._watch.is_blocked:
            self._end_previous_step(len(scheduled), len(preempted))
        self._prefills.add(scheduler_output, continues=continues)
        changes: dict[str, Any] = self._admission.change_level()._asdict()
        if self._group_hooks:
            changes["resident"] = self.elastic.resident.take_changes()
        step = None
        if continues and not self._admission.has_changes:
            step = self._planner.plan_on(list(self._changed_requests(scheduler_output)), **changes)
        if step is None:
            if continues:
                requests = list(self._scheduled_requests(scheduler_output))
            released, reserved = self._admission.take_changes()
            step = self._planner.plan(
                requests, ended, released=released, reserved=reserved, **changes
            )
            if self.prefix_hits:
                step = self._with_prefixes(step, released, reserved)
        elif self.prefix_hits:
            step = self._with_prefixes(step)
        if self._kept:
            step = self._with_kept_blocks(self._kept, step)
        self.recent.add(step, requests)
        if self.elastic.resident.columns:
            name_columns(scheduler_output, self._groups.resident, self.elastic.resident.columns)
        loaded = np.array(self._loaded, dtype=np.int64) if self._loaded else NO_BLOCKS
        self._loaded = []
        return TieredMetadata(step, time.perf_counter() - start, loaded)

    def _with_prefixes(
        self, step: StepPlan, released: Sequence[int] = (), reserved: Sequence[int] = ()
    ) -> StepPlan:
        """Add the moves of the prefix store to a plan."""
        assert self.prefix_hits is not None
        moves = self.prefix_hits.store.take_moves(released, reserved)
        return step if moves is None else dataclasses.replace(step, prefixes=moves)

    def _with_kept_blocks(self, kept: KeptBlocks, step: StepPlan) -> StepPlan:
        """Let full blocks stay near while there are pages for them."""
        return kept.apply(
            step,
            self.elastic.geometry,
            self.elastic.released_blocks,
            self._planner.held_blocks,
            NO_BLOCKS if self._manager.enable_caching else self._planner.dropped,
        )

    def end_step(self, scheduler_output: Any) -> None:
        """Record that the outcome of this step is known."""
        if self._drafts:
            self._drafts.end_step(scheduler_output)

    @property
    def block_tokens(self) -> int:
        """Tokens a block holds."""
        return self._plan.geometry.block_tokens

    def record_external_tokens(self, request_id: str, num_tokens: int) -> None:
        """Record that another KV connector loads so many tokens in the request's next step.

        They are whole blocks, behind those of vLLM's own prefix cache.
        """
        self._external_tokens[request_id] = num_tokens

    def begin_request(self, request: Any) -> None:
        """Track a request that arrived."""
        self._watch.begin_request(
            request.request_id, request.num_tokens, is_session=request.resumable
        )

    def report(self, report: StepReport) -> None:
        """Record the workers' measurements of a step."""
        if report.why_not and not self._latest_report.why_not:
            self._restrict(0, because=report.why_not)
            if self.prefix_hits:
                self.prefix_hits.close()
        self._latest_report = report
        self._watch.report(report)

    def recomputed(self, request_ids: set[str]) -> None:
        """Record that requests are recomputed because they lost blocks.

        A request that loses blocks again and again is ``unservable``.
        """
        self._record_event("load error", f"{len(request_ids)} requests are computed anew")
        if self.prefix_hits:  # some of it may have been computed from lost pages
            self.prefix_hits.store.drop_all()
        for request_id in self.recomputes.add(request_ids):
            self.unservable[request_id] = (
                f"it lost KV blocks more than {MAX_RECOMPUTES} times: see the storage device's "
                "health, move kv.path, or set kv.tier=far"
            )

    @property
    def must_give_up_storage(self) -> bool:
        """Whether the storage tier has failed since it was last used."""
        return bool(self._latest_report.storage_failure) and not self.storage_failure

    def give_up_storage(self) -> None:
        """Restrict the levels to those whose far layers are in memory.

        The caller then preempts all requests and calls :meth:`storage_is_given_up`.
        """
        self.storage_failure = self._latest_report.storage_failure
        levels = self._restrict(
            self._latest_report.memory_layers, because="without the storage tier, which failed"
        )
        if levels is None:
            text = f'{self.storage_failure}; kv.policy="{self._plan.config.policy}" needs it'
        else:
            text = (
                f"{self.storage_failure}: it is not used any more. Near and far memory hold "
                f"{levels.max_blocks} blocks (expansion "
                f"{levels.expansion(levels.ladder[-1]):.2f}), and "
                f"{self._max_request_tokens} tokens of one request"
            )
        logger.error("tiered kv: %s. Restart with another kv.path to use a disk again", text)
        self._record_event("load error", text)

    def _restrict(self, num_far: int, *, because: str) -> KvLevels | None:
        """Allow `num_far` far layers at most; return the levels left, None if they are fixed."""
        self._restricted_by = because
        if self.expansion is None:
            return None
        levels = self.expansion.levels
        levels = with_max_num_far(levels, min(num_far, levels.max_num_far))
        if self.adaptive:
            self.adaptive.restrict(levels)
        else:
            self.expansion.restrict(levels, levels.ladder[-1])
        resident_blocks = self._groups.resident_blocks(self._max_model_len)
        self._max_request_tokens = max_request_tokens(levels, resident_blocks)
        return levels

    def reserve_excess(self) -> None:
        """Reserve the free blocks above the limit at once."""
        self._admission.reserve_free_excess()

    def close(self) -> None:
        """Close the timeline."""
        if self._timeline:
            self._timeline.close()

    def request_finished(self, request_id: str) -> None:
        """Release blocks at once when a request finishes, so that an idle engine has all blocks."""
        self.recomputes.end(request_id)
        self._watch.end_request(request_id)
        self._admission.end_requests((request_id,))

    def stats(self) -> TieredStats:
        """Return the gauges, and the level changes and recomputes since the last call."""
        expansion = self.expansion
        stats = kv_gauges(
            self._plan,
            self._world_size,
            level=expansion.level if expansion else None,
            num_reserved=len(self.elastic.reserved),
        )
        stats.data["kv_blocks_stored"] = (
            self.prefix_hits.store.num_stored if self.prefix_hits else 0
        )
        stats.data["kv_blocks_kept"] = self._kept.num_kept if self._kept else 0
        stats.data["kv_storage_failed"] = int(bool(self.storage_failure))
        num_changes = expansion.num_changes if expansion else 0
        num_recomputed = self.recomputes.num_recomputed
        stats.data["kv_level_changes"] = num_changes - self._reported_changes
        stats.data["kv_recomputed_requests"] = num_recomputed - self._reported_recomputes
        self._reported_changes, self._reported_recomputes = num_changes, num_recomputed
        return stats

    def _end_previous_step(self, num_scheduled: int, num_preempted: int) -> None:
        """Pass the finished step to the controller and the timeline."""
        # In a pipeline the requests of other batches run too.
        num_running = self.elastic.num_admitted if self._groups.is_stage else num_scheduled
        step = self._watch.take_step(
            tokens=self._num_tokens,
            num_running=num_running,
            num_preempted=num_preempted,
            used_blocks=self._admission.used_blocks,
            is_prefill=self._prefills.is_recent,
        )
        if step is None:
            return
        if self.adaptive:
            self.adaptive.decide(step)
        if self._timeline:
            level = self.expansion.level if self.expansion else self._plan.start
            self._timeline.record_step(step, self.elastic, level)

    def _usage(self) -> float:
        """Return the share of the highest level's blocks that requests hold.

        It is vLLM's ``kv_cache_usage_perc``. Reserved blocks do not count as used.
        """
        num_partial, levels = self.elastic.num_partial, self._plan.levels
        resident = self.elastic.resident.num_held
        if self.expansion is not None:
            levels = self.expansion.levels
        if levels is None:
            limit = self._plan.geometry.block_limit(num_partial, resident)
            most = min(self.elastic.usable_blocks, limit)
        else:
            most = levels.block_limit(levels.ladder[-1], num_partial, resident)
        return min(1.0, self._admission.used_blocks / max(1, most))

    def _record_event(self, kind: str, text: str) -> None:
        if self._timeline:
            self._timeline.record_event(kind, text)

    def _wrap_allocate(self, allocate_slots: Any) -> Any:
        @functools.wraps(allocate_slots)
        def allocate(request: Any, *args: Any, reserved_blocks: int = 0, **kwargs: Any) -> Any:
            def allocate_beside(left_over: LeftOver) -> Any:
                num_reserved = reserved_blocks + left_over(0)
                if self._group_hooks is None:
                    return allocate_slots(request, *args, reserved_blocks=num_reserved, **kwargs)
                with self._group_hooks.leaving_over(left_over):
                    return allocate_slots(request, *args, reserved_blocks=num_reserved, **kwargs)

            request_id = request.request_id
            if self.elastic.is_admitted(request_id) and not _begins(request):
                if self._group_hooks:
                    blocks = self._admission.grow(allocate_beside)
                else:  # nothing to reserve; this is called for every request in every step
                    blocks = allocate_slots(
                        request, *args, reserved_blocks=reserved_blocks, **kwargs
                    )
            else:
                if self._group_hooks:  # vLLM has freed blocks since the last step
                    self._admission.end_requests(())
                self._manager.watermark_blocks = round(
                    self._watermark * self.elastic.released_blocks
                )
                prefill_tokens = max(request.num_prompt_tokens, request.num_tokens - 1)
                hits = self._hits(allocate_slots, request, *args, **kwargs)
                blocks = self._admission.admit(request_id, prefill_tokens, allocate_beside, hits)
            if blocks is None and not (self._group_hooks and self._group_hooks.was_postponed):
                self._watch.record_blocked(request_id, request.num_tokens)
                # vLLM accepted it for a level that is not reached any more.
                if self._restricted_by and request.num_tokens > self._max_request_tokens:
                    self.unservable[request_id] = (
                        f"it has {request.num_tokens} tokens, and {self._restricted_by}, one "
                        f"request can have {self._max_request_tokens}"
                    )
            return blocks

        return allocate

    def _hits(self, allocate_slots: Any, *args: Any, **kwargs: Any) -> Set[int]:
        """Return the blocks of prefix-cache hits among the arguments of ``allocate_slots``."""
        if self._group_hooks is None:
            return frozenset()
        given = inspect.signature(allocate_slots).bind(*args, **kwargs).arguments
        found = given.get("new_computed_blocks")
        groups = () if found is None else found.blocks
        return {block.block_id for blocks in groups for block in blocks}

    def _wrap_reset(self, reset_prefix_cache: Any, free_list: VllmFreeList) -> Any:
        """Wrap vLLM's reset, which fails while a block is held, so that it allows reserved ones."""

        @functools.wraps(reset_prefix_cache)
        def reset() -> bool:
            if not free_list.reset_without_taken(reset_prefix_cache):
                return False
            self.elastic.end_all()
            if self.prefix_hits:  # the weights may have changed
                self.prefix_hits.store.drop_all()
            self._admission.reserve_excess()
            return True

        return reset

    def _scheduled_requests(self, scheduler_output: Any) -> Iterator[ScheduledRequest]:
        self._num_tokens = 0
        index = self._groups.index
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            yield self._scheduled_request(
                new.req_id, new.block_ids[index], True, new.num_computed_tokens, scheduled
            )
        cached = scheduler_output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, by_group, computed_tokens in rows:
            block_ids = by_group[index] if by_group else ()
            restarts = request_id in cached.resumed_req_ids
            request = self._scheduled_request(
                request_id, block_ids, restarts, computed_tokens, scheduled
            )
            self.elastic.progress(request_id, request.computed_tokens)
            yield request
        if self._drafts:
            self._num_tokens += self._drafts.num_accepted

    def _scheduled_request(
        self,
        request_id: str,
        block_ids: Sequence[int],
        restarts: bool,
        computed_tokens: int,
        scheduled: Mapping[str, int],
    ) -> ScheduledRequest:
        counts = computed_tokens, scheduled[request_id], 0
        if external := self._external_tokens.pop(request_id, 0):
            # The step writes these blocks too: they are near first, and become far as it ends.
            counts = computed_tokens - external, counts[1] + external, 0
            ends = (tokens // self.block_tokens for tokens in (counts[0], computed_tokens))
            self._loaded += block_ids[slice(*ends)]
        if self._drafts:
            counts = self._drafts.split(request_id, *counts[:2], restarts=restarts)
        request = ScheduledRequest(request_id, block_ids, restarts, *counts)
        end_tokens = request.computed_tokens + request.scheduled_tokens
        self._num_tokens += not self.elastic.is_prefilling(request_id, end_tokens)
        self._watch.update_tokens(request_id, end_tokens)
        return request

    def _changed_requests(self, scheduler_output: Any) -> Iterator[ScheduledRequest]:
        """Yield the requests of a decode step that are due or that got blocks."""
        due = self._planner.due
        cached = scheduler_output.scheduled_cached_reqs
        for at, by_group in enumerate(cached.new_block_ids):
            request_id = cached.req_ids[at]
            block_ids = by_group[self._groups.index] if by_group else ()
            if block_ids or request_id in due:
                computed_tokens = cached.num_computed_tokens[at]
                self._watch.update_tokens(request_id, computed_tokens + 1)
                yield ScheduledRequest(request_id, block_ids, False, computed_tokens, 1)


def _tuning_for(plan: KvPlan) -> Tuning:
    """Return the controller's constants: where far layers may not pay, it measures if they do."""
    if plan.config.tier == "storage":
        return STORAGE_TUNING
    return NEAR_TUNING if plan.groups is not None and plan.groups.resident else DEFAULT_TUNING


def _begins(request: Any) -> bool:
    """Return whether the request waits for its first blocks, now or after a preemption."""
    return str(request.status.name) in ("WAITING", "PREEMPTED")
