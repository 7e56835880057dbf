# SPDX-License-Identifier: Apache-2.0
"""The plugin's counters and gauges on vLLM's own ``/metrics``."""

import weakref
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_tiered.devices.pages import PageError

_REASONS = {
    PageError.CHECKSUM: "their bytes differed from those that were written",
    PageError.SHORT: "the file ended before them",
    PageError.IO: "the system reported an error",
    PageError.LATE: "the device did not answer in time",
    PageError.UNWRITTEN: "read, but never written, or the last write had failed",
    PageError.WRITE: "their write failed",
}

COUNTERS = {
    "kv_read_bytes": "KV bytes staged from the far to the near tier.",
    "kv_write_bytes": "KV bytes written from the near to the far tier.",
    "kv_read_seconds": "Seconds in which the far-to-near direction was copying.",
    "kv_write_seconds": "Seconds in which the near-to-far direction was copying.",
    "kv_stall_seconds": "Seconds in which compute waited for staging.",
    "kv_bookkeeping_seconds": "Seconds of planning, translation and hooks, without stall.",
    "kv_step_seconds": "Seconds of the steps of which stall and bookkeeping are shares.",
    "kv_steps": "Engine steps under KV swapping.",
    "kv_lost_blocks": "KV blocks with a page that did not come back intact from the far tier.",
    "kv_recomputed_requests": "Requests recomputed because one of their blocks was lost.",
    "kv_level_changes": "Changes of the number of far layers at run time.",
    "weights_read_bytes": "Bytes of far weights that passed through weight buffers.",
    "weights_read_seconds": "Seconds in which far weights were copied.",
    "weights_stall_seconds": "Seconds in which compute waited for far weights.",
    "ffn_far_bytes": "Bytes of FFN neurons loaded from far memory.",
    "ffn_storage_bytes": "Bytes of FFN neurons loaded from the neuron store.",
    "ffn_wait_seconds": "Seconds in which compute waited for FFN neurons.",
    "ffn_hits": "FFN neurons that a sparse step needed and found near.",
    "ffn_misses": "FFN neurons that a sparse step needed and had to load.",
    "ffn_sparse_steps": "Layer steps computed with selected neurons.",
    "ffn_dense_steps": "Layer steps computed with all neurons.",
    "l2_prefetched_bytes": "Bytes prefetched into the last-level cache behind all-reduces.",
    "l2_dropped_bytes": "Bytes that were not yet prefetched when their all-reduce was over.",
    "energy_joules": "Joules drawn while steps ran: processor and memory of the host by RAPL, GPUs "
    "by NVML, where these can be read; else memory by constants, and the disk always.",
    "energy_assumed_joules": "Joules of tiered_energy_joules that are assumed, by constants.",
    "co2e_grams": "Operational emissions of tiered_energy_joules, gCO2e, at "
    "report.carbon_intensity.",
}
"""Counters of the workers, summed over ranks; recomputed requests and level changes count once."""


def page_errors_metric(kind: PageError) -> str:
    """Return the name of the counter of far pages that were lost for this reason."""
    return f"kv_page_errors_{kind.value}"


COUNTERS |= {
    page_errors_metric(kind): f"Far pages lost: {reason}." for kind, reason in _REASONS.items()
}

GAUGES = {
    "kv_expansion": "Full KV blocks that fit over those that the near memory holds alone.",
    "kv_far_layers": "Layers whose KV lives in the far tier.",
    "kv_partial_blocks_far": "1 if their partial blocks live there too, 0 if those stay near.",
    "kv_near_bytes": "Near-tier bytes of the KV page pool, all ranks.",
    "kv_far_bytes": "Far memory reserved for KV, bytes, all ranks.",
    "kv_storage_bytes": "KV pages in files, bytes, all ranks.",
    "kv_storage_failed": "1 if the storage tier failed and is not used any more.",
    "kv_blocks_released": "KV blocks that requests may use now.",
    "kv_blocks_reserved": "KV blocks held back: more far layers would free them, or partial blocks "
    "that stay near take their memory.",
}
"""Gauges that the scheduler sets, except for the bytes of far pages."""


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
        self._metrics: dict[str, dict[int, Any]] = {}
        self._latest: dict[int, dict[str, float]] = {
            engine: {} for engine in per_engine_labelvalues
        }
        _served.append(weakref.ref(self))
        for names, kind in ((COUNTERS, Counter), (GAUGES, Gauge)):
            for name, documentation in names.items():
                metric = metric_types[kind](
                    name=f"vllm:tiered_{name}", documentation=documentation, labelnames=labelnames
                )
                self._metrics[name] = {
                    engine: metric.labels(*labels)
                    for engine, labels in per_engine_labelvalues.items()
                }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        latest = self._latest[engine_idx]
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if name in COUNTERS:
                metric.inc(value)
            else:
                metric.set(value)
                latest[name] = value
            if name in _SCHEDULER_COUNTERS:
                latest[name] = latest.get(name, 0) + value

    def fill_gauges(self, gauges: Mapping[str, float]) -> None:
        """Set gauges of every engine that has not reported them yet."""
        for engine, latest in self._latest.items():
            new = {name: value for name, value in gauges.items() if name not in latest}
            self.observe(new, engine)


def fill_gauges(gauges: Mapping[str, float]) -> None:
    """Set gauges that no step has set yet, on this process's ``/metrics``."""
    for metrics in _live():
        metrics.fill_gauges(gauges)


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
