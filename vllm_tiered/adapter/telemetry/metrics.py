# SPDX-License-Identifier: Apache-2.0
"""The plugin's counters and gauges on vLLM's own ``/metrics``."""

import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_tiered.adapter.telemetry.figures import (
    COUNTER_METRICS,
    COUNTERS,
    GAUGE_METRICS,
    PREFIX,
    STEP_BUCKETS,
    STEP_HISTOGRAMS,
    Metric,
)

_SCHEDULER_COUNTERS = ("kv_level_changes", "kv_recomputed_requests")


class TieredStats(KVConnectorStats):
    """What happened since the last report: counters add up, gauges keep the later value."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value if name in COUNTERS else value
        return self

    def reduce(self) -> dict[str, int | float]:
        steps = self.data.get("kv_step_seconds", 0.0)
        share = 100 / steps if steps else 0.0
        weights = (
            {
                "tiered weights read MiB": round(self.data["weights_read_bytes"] / 2**20, 1),
                "weights stall s": round(self.data["weights_stall_seconds"], 3),
            }
            if "weights_read_bytes" in self.data
            else {}
        )
        return weights | {
            "tiered kv read MiB": round(self.data.get("kv_read_bytes", 0) / 2**20, 1),
            "write MiB": round(self.data.get("kv_write_bytes", 0) / 2**20, 1),
            "stall %": round(self.data.get("kv_stall_seconds", 0.0) * share, 2),
            "bookkeeping %": round(self.data.get("kv_bookkeeping_seconds", 0.0) * share, 2),
            "expansion": round(self.data.get("kv_expansion", 1.0), 2),
            "blocks reserved": self.data.get("kv_blocks_reserved", 0),
        }

    def is_empty(self) -> bool:
        return not self.data


class TieredPromMetrics(KVConnectorPromMetrics):
    """The registered metrics ``vllm:tiered_*`` of every engine, updated from reports."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._num_ranks = vllm_config.parallel_config.world_size
        self._latest: dict[int, dict[str, float]] = {
            engine: {} for engine in per_engine_labelvalues
        }
        self._counters = self._register(COUNTER_METRICS, metric_types[Counter])
        # Several API servers share a figure: the one that set it last heard of the engine last.
        latest = partial(metric_types[Gauge], multiprocess_mode="mostrecent")
        self._gauges = self._register(GAUGE_METRICS, latest)
        self._are_shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        # Labels are looked up once, not per step.
        self._histograms = {
            name: {
                engine: histogram.labels(*labels)
                for engine, labels in per_engine_labelvalues.items()
            }
            for name in STEP_HISTOGRAMS
            for histogram in [
                metric_types[Histogram](
                    name=f"{PREFIX}{name}",
                    documentation="Seconds that compute of a rank waited in an engine step.",
                    buckets=list(STEP_BUCKETS),
                    labelnames=labelnames,
                )
            ]
        }
        _served.append(weakref.ref(self))

    def _register(self, metrics: Sequence[Metric], kind: Any) -> dict[str, dict[int, Any]]:
        """Return the registered metrics' children, by figure and engine."""
        return {
            figure: {
                engine: child
                for engine, labels in self.per_engine_labelvalues.items()
                for child in [registered.labels(*labels, *([value] if metric.label else []))]
            }
            for metric in metrics
            for registered in [register(metric, kind, self._labelnames)]
            for value, figure in metric.figures.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        latest = self._latest[engine_idx]
        for figure, value in transfer_stats_data.items():
            if figure in COUNTERS:
                self._counters[figure][engine_idx].inc(value)
            # Most gauges stay from step to step, but another API server may have heard more.
            elif self._are_shared or latest.get(figure) != value:
                self._gauges[figure][engine_idx].set(value)
                latest[figure] = value
            if figure in _SCHEDULER_COUNTERS:
                latest[figure] = latest.get(figure, 0) + value
        for name, (figure, sign) in STEP_HISTOGRAMS.items():
            if sign in transfer_stats_data:
                seconds = transfer_stats_data.get(figure, 0.0) / self._num_ranks
                self._histograms[name][engine_idx].observe(seconds)

    def fill_gauges(self, gauges: Mapping[str, float], engine: int) -> None:
        """Set gauges of an engine that has not reported them yet."""
        latest = self._latest.get(engine)
        if latest is not None:
            new = {name: value for name, value in gauges.items() if name not in latest}
            self.observe(new, engine)


def register(metric: Metric, kind: Any, labelnames: Sequence[str]) -> Any:
    """Return a metric registered with vLLM's labels and its own."""
    own = [] if metric.label is None else [metric.label]
    return kind(
        name=f"{PREFIX}{metric.name}", documentation=metric.help, labelnames=[*labelnames, *own]
    )


def fill_gauges(gauges: Mapping[str, float], *, engine: int) -> None:
    """Set gauges of an engine that no step has set yet, on this process's ``/metrics``."""
    for metrics in _live():
        metrics.fill_gauges(gauges, engine)


def latest_of_schedulers() -> dict[int, dict[str, float]]:
    """Return what this process last heard of each engine's scheduler, by the engine's index.

    It has the gauges, the level changes and the recomputed requests; nothing with
    ``--disable-log-stats``.
    """
    return {
        engine: dict(latest) for metrics in _live() for engine, latest in metrics._latest.items()
    }


def _live() -> list[TieredPromMetrics]:
    return [metrics for reference in _served if (metrics := reference()) is not None]


_served: list[weakref.ref[TieredPromMetrics]] = []
"""Metrics on this process's ``/metrics``."""
