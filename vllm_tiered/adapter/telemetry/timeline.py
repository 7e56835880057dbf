# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the timeline file that ``vllm-tiered report`` reads."""

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import vllm_tiered
from vllm_tiered.adapter import compat
from vllm_tiered.adapter.kv.plan import KvPlan, far_homes
from vllm_tiered.adapter.kv.steps import Step
from vllm_tiered.adapter.replicas import is_first_here, path_of_replica
from vllm_tiered.adapter.telemetry import energy, manifest
from vllm_tiered.adapter.telemetry.manifest import KvManifest
from vllm_tiered.config import ReportConfig
from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.layout import Level
from vllm_tiered.report.records import Header, Machine, StepSample
from vllm_tiered.report.writer import TimelineWriter


class Timeline:
    """One engine's timeline, from its start.

    Args:
        path: the file.
        plan: the KV plan.
        model: the model as the engine names it.
        world_size: the number of ranks, whose bytes are added.
        report: what emissions are computed with.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self, path: str, plan: KvPlan, model: str, world_size: int, report: ReportConfig
    ) -> None:
        self._start = time.perf_counter()
        self._plan = plan
        # A worker in this process knows where far pages are; without one they are estimated.
        stated = manifest.current_kv() or KvManifest.of(plan, far_homes(plan, world_size))
        self._writer = TimelineWriter(
            path,
            Header(
                vllm_tiered=vllm_tiered.__version__,
                vllm=compat.vllm_version() or "unknown",
                model=model,
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                num_layers=plan.geometry.num_layers,
                block_tokens=plan.geometry.block_tokens,
                num_blocks=plan.num_blocks - 1,
                near_bytes=plan.near_bytes * world_size,
                far_bytes=stated.far_bytes * world_size,
                storage_bytes=stated.storage_bytes * world_size,
                machine=Machine.here(),
                carbon_intensity=report.carbon_intensity,
                embodied_grams_per_second=energy.embodied_rate(report),
                manifest=stated.to_dict() | {"energy": energy.labels()},
            ),
        )

    def record_step(self, step: Step, elastic: ElasticBlocks, level: Level) -> None:
        """Record a finished step."""
        report = step.report
        begin = step.end - step.seconds - self._start
        at_level = min(elastic.usable_blocks, elastic.geometry.block_limit(0))
        self._writer.add_step(
            StepSample(
                time=step.end - self._start,
                seconds=step.seconds,
                tokens=step.tokens,
                stall_seconds=report.stall_seconds,
                read_seconds=report.read_seconds,
                read_bytes=report.read_bytes,
                write_seconds=report.write_seconds,
                write_bytes=report.write_bytes,
                joules=report.joules,
                assumed_joules=report.assumed_joules,
                far_layers=level.num_far,
                expansion=self._plan.expansion_at(level),
                released_blocks=elastic.released_blocks,
                reserved_blocks=max(0, at_level - elastic.released_blocks),
                used_blocks=step.used_blocks,
                partial_blocks=elastic.num_partial,
                num_running=step.num_running,
                num_waiting=step.num_waiting,
                num_preempted=step.num_preempted,
            )
        )
        for layers in report.layers:
            self._writer.add_layer_timeline(replace(layers, time=begin))
        for use in report.experts:
            self._writer.add_expert_use(replace(use, time=step.end - self._start))

    def record_event(self, kind: str, text: str) -> None:
        """Record an event that happens now; `kind` groups events."""
        self._writer.add_event(time.perf_counter() - self._start, kind, text)

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()


def open_timeline(
    vllm_config: Any, plan: KvPlan, world_size: int, report: ReportConfig
) -> Timeline | None:
    """Open the timeline if ``report.path`` is set; return None otherwise."""
    if report.path is None:
        return None
    model = str(vllm_config.model_config.model)
    path = path_of_replica(report.path, vllm_config)
    if not is_first_here(vllm_config.parallel_config):  # whose report has all of the machine's
        report = replace(report, embodied_kg=0.0)
    return Timeline(path, plan, model, world_size, report)
