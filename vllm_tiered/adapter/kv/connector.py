# SPDX-License-Identifier: Apache-2.0
"""KV connector that vLLM loads: a thin layer over the scheduler side and the worker side.

The hooks of a step, in vLLM's order:

    scheduler   build_connector_meta      plan the step
    worker      handle_preemptions        apply the plan, queue all copies; vLLM then prepares input
                begin_runner_step         the same under model runner V2, which calls the other one
                                          when it has prepared input and copied recurrent states
                bind_connector_metadata   translate block tables in the forward context
                do_kv_cache_update (wrapped) / wait_for_layer_load   wait for the layer's pages
                save_kv_layer             the layer is computed: its new KV is written out, and a
                                          later layer is read
                wait_for_save             write out the partial blocks that were filled
"""

import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.forward_context import get_forward_context, is_forward_context_available

from vllm_tiered.adapter.kv import full_graphs, runner_steps
from vllm_tiered.adapter.kv.drafts import Drafts, num_draft_tokens
from vllm_tiered.adapter.kv.full_graphs import FullGraphs
from vllm_tiered.adapter.kv.gauges import kv_gauges
from vllm_tiered.adapter.kv.plan import plan_from_config, tiered_config
from vllm_tiered.adapter.kv.scheduler import TieredMetadata, TieredScheduler
from vllm_tiered.adapter.kv.stages import count_stages
from vllm_tiered.adapter.kv.steps import StepReport
from vllm_tiered.adapter.kv.worker import TieredWorker, announce
from vllm_tiered.adapter.l2 import hooks as l2_hooks
from vllm_tiered.adapter.replicas import is_first_here
from vllm_tiered.adapter.telemetry import totals
from vllm_tiered.adapter.telemetry.energy import EngineEnergy, open_energy
from vllm_tiered.adapter.telemetry.expert_use import ExpertUseClock
from vllm_tiered.adapter.telemetry.metrics import TieredPromMetrics, TieredStats
from vllm_tiered.adapter.telemetry.timeline import open_timeline
from vllm_tiered.adapter.worker_hooks import drain_metrics
from vllm_tiered.config import TieredConfig
from vllm_tiered.errors import ConfigError
from vllm_tiered.kv.far_tier import FarHomes
from vllm_tiered.kv.recompute import RecentSteps, RecomputeLog
from vllm_tiered.kv.step_plan import StepPlan

logger = logging.getLogger("vllm.tiered")


TRACE_EVERY = 64
"""Number of steps between two that the report shows layer by layer."""


class TieredConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector that swaps the KV cache layer by layer.

    If no layer is ever offloaded, every hook does nothing.

    With ``SupportsHMA`` vLLM groups the layers as it does without a connector.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        plan = plan_from_config(vllm_config, kv_cache_config)
        if plan is None:
            raise ConfigError(
                "TieredConnector was configured without the plugin: use --plugin tiered or "
                'additional_config={"tiered": {...}} instead of kv_transfer_config'
            )
        parallel = vllm_config.parallel_config
        config = tiered_config(vllm_config) or TieredConfig()
        report_path = config.report.path
        self._plan = plan
        self._world_size = parallel.world_size
        self.schedules_ahead = bool(vllm_config.scheduler_config.async_scheduling)
        self._is_scheduler = role is KVConnectorRole.SCHEDULER
        self._begins_early = bool(vllm_config.use_v2_model_runner)
        self._begun: KVConnectorMetadata | None = None  # of the step whose plan is applied
        self._scheduler: TieredScheduler | None = None
        self._worker: TieredWorker | None = None
        self._energy: EngineEnergy | None = None
        self._expert_use: ExpertUseClock | None = None
        if role is KVConnectorRole.WORKER:
            is_first = parallel.rank == 0
            self._energy = open_energy(config.report, is_first_engine=is_first_here(parallel))
            if not plan.swaps:
                announce(plan, FarHomes(), log=is_first)
                totals.publish("kv", lambda: kv_gauges(plan, parallel.world_size).data)
            else:
                layers = vllm_config.compilation_config.static_forward_context
                traces = report_path is not None and is_first
                self._expert_use = ExpertUseClock() if traces else None
                self._worker = TieredWorker(
                    plan,
                    layers,
                    self._world_size,
                    is_first=is_first,
                    trace_every=TRACE_EVERY if traces else 0,
                )
                if vllm_config.compilation_config.cudagraph_mode:
                    self._worker.full_graphs = FullGraphs(self._worker.stays_as_vllm, log=is_first)
                if self._worker.full_graphs or self._begins_early:
                    runner_steps.watch(vllm_config, self)
        elif plan.swaps:
            self._scheduler = TieredScheduler(
                plan,
                self._world_size,
                max_model_len=vllm_config.model_config.max_model_len,
                max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
                num_batches=count_stages(vllm_config) + 1,
                drafts=Drafts() if num_draft_tokens(vllm_config) else None,
                timeline=open_timeline(vllm_config, plan, self._world_size, config.report),
            )
        elif report_path is not None:
            logger.warning(
                "tiered: report.path is set, but there is nothing to report: no layer is ever far"
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # no KV is sent to another engine

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return not extra_config.get(full_graphs.KEPT, False)

    # Scheduler side ---------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler:
            self._scheduler.bind(kv_cache_manager)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        hits = self._scheduler.prefix_hits if self._scheduler else None
        return (hits.match(request, num_computed_tokens) if hits else 0), False

    def on_new_request(self, request: Any) -> None:
        if self._scheduler:
            self._scheduler.begin_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler and self._scheduler.prefix_hits and num_external_tokens:
            block_ids = blocks.get_block_ids()[self.group_index]
            self._scheduler.prefix_hits.allocated(block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._scheduler:
            return self._scheduler.build_metadata(scheduler_output)
        return TieredMetadata(StepPlan())

    def reset_cache(self) -> bool:
        """Drop what the prefix store has, as vLLM asks when the weights have changed."""
        if self._scheduler and self._scheduler.prefix_hits:
            self._scheduler.prefix_hits.store.drop_all()
        return True

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler:
            self._scheduler.request_finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._scheduler and report is not None:
            self._scheduler.report(report)

    # Worker side ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker:
            self._worker.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """End all copies, as vLLM is about to unmap the near pages (sleep mode, since vLLM 0.33).

        vLLM has ended or preempted all requests, and reset its prefix cache.
        """
        if self._worker:
            self._worker.end_copies()

    def restore_kv_caches(self) -> None:
        """Clear the near pages, which vLLM has mapped again at the same addresses."""
        if self._worker:
            self._worker.restore_near_pages()

    def clear_near_pages(self) -> None:
        """Fill all near pages with zeros; before the first step, as it undoes what was written."""
        assert self._worker is not None
        self._worker.swapper.clear_near_pages()

    def begin_runner_step(self, runner: Any, metadata: KVConnectorMetadata | None) -> None:
        """Remove graphs that the step must not replay; under model runner V2, apply its plan."""
        assert self._worker is not None
        if metadata is None:
            return
        assert isinstance(metadata, TieredMetadata)
        if self._worker.full_graphs:
            self._worker.full_graphs.begin_step(runner, metadata.plan)
        if self._begins_early:
            self._apply_plan(metadata)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._energy:
            self._energy.begin_step()
        if self._worker:
            self._apply_plan(kv_connector_metadata)

    def _apply_plan(self, metadata: KVConnectorMetadata) -> None:
        """Apply the step's plan, unless that has been done."""
        assert self._worker is not None and isinstance(metadata, TieredMetadata)
        if metadata is not self._begun:
            self._begun = metadata
            self._worker.begin_step(metadata.plan, metadata.planning_seconds)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker:
            # Model runner V2 has no context in a step that computes nothing or is one graph.
            self._worker.translate(
                get_forward_context() if is_forward_context_available() else None
            )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._worker:
            self._worker.layer_done(layer_name)

    def wait_for_save(self) -> None:
        if self._worker:
            self._worker.end_step()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_lost_blocks() if self._worker else set()

    @property
    def scheduler_side(self) -> TieredScheduler | None:
        """The scheduler side; None in a worker, or if no layer is ever offloaded."""
        return self._scheduler

    @property
    def worker_side(self) -> TieredWorker | None:
        """The worker side; None in the scheduler, or if no layer is ever offloaded."""
        return self._worker

    @property
    def recent_steps(self) -> RecentSteps:
        assert self._scheduler is not None
        return self._scheduler.recent

    @property
    def group_index(self) -> int:
        """The index in vLLM of the group whose layers may be offloaded."""
        assert self._plan.groups is not None
        return self._plan.groups.index

    @property
    def resident_blocks(self) -> frozenset[int]:
        """Blocks of resident groups that hold any content."""
        assert self._scheduler is not None
        return self._scheduler.elastic.resident.block_ids

    @property
    def recomputes(self) -> RecomputeLog | None:
        """Log of recomputed requests; None if no layer is ever offloaded."""
        return self._scheduler.recomputes if self._scheduler else None

    def recomputed(self, request_ids: set[str]) -> None:
        """Record that requests are recomputed because they lost blocks."""
        assert self._scheduler is not None
        self._scheduler.recomputed(request_ids)

    def build_connector_worker_meta(self) -> StepReport | None:
        report = self._worker.drain_report() if self._worker else None
        if report is not None and self._energy:
            report.joules, report.assumed_joules = self._energy.drain_for_report()
        if report is not None and self._expert_use:
            report.experts = self._expert_use.take()
        return report

    def shutdown(self) -> None:
        if self._worker:
            self._worker.close()
            runner_steps.unwatch(self._vllm_config)
        if self._scheduler:
            self._scheduler.close()

    # Metrics ----------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TieredStats | None:
        if not self._is_scheduler:
            stats = self._worker.drain_stats() if self._worker else TieredStats()
            energy = self._energy.drain_metrics() if self._energy else {}
            return TieredStats(
                data=stats.data | drain_metrics() | l2_hooks.drain_metrics() | energy
            )
        if self._scheduler:
            return self._scheduler.stats()
        return kv_gauges(self._plan, self._world_size)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TieredStats:
        return TieredStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TieredPromMetrics:
        return TieredPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
