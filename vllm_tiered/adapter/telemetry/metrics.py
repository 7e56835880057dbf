# SPDX-License-Identifier: Apache-2.0
"""The plugin's counters and gauges on vLLM's own ``/metrics``."""

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_tiered.devices.pages import PageError

_REASONS = {
    PageError.CHECKSUM: "their bytes were not those that had been written",
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
    "kv_lost_blocks": "KV blocks of which a page did not come back intact from the far tier.",
    "kv_recomputed_requests": "Requests computed anew because a block of theirs was lost.",
    "kv_level_changes": "Changes of the number of far layers at run time.",
    "weights_read_bytes": "Bytes of far weights that passed through staging slots.",
    "weights_read_seconds": "Seconds in which far weights were being copied.",
    "weights_stall_seconds": "Seconds in which compute waited for far weights.",
    "ffn_far_bytes": "Bytes of FFN neurons brought from far memory.",
    "ffn_storage_bytes": "Bytes of FFN neurons brought from the neuron store.",
    "ffn_wait_seconds": "Seconds in which compute waited for FFN neurons.",
    "ffn_hits": "FFN neurons that a sparse step wanted and that were near.",
    "ffn_misses": "FFN neurons that a sparse step wanted and that had to be brought.",
    "ffn_sparse_steps": "Layers' steps computed with chosen neurons.",
    "ffn_dense_steps": "Layers' steps computed with all neurons.",
    "l2_prefetched_bytes": "Bytes asked for behind all-reduces, to the last-level cache.",
    "l2_dropped_bytes": "Bytes that were still to be asked for when their all-reduce was over.",
    "energy_joules": "Joules drawn while steps ran: processor and memory of the host by RAPL, GPUs "
    "by NVML, where these can be read; else memory by constants, and the disk always.",
    "energy_assumed_joules": "Joules of tiered_energy_joules that are assumed, by constants.",
    "co2e_grams": "Operational emissions of tiered_energy_joules, gCO2e, at "
    "report.carbon_intensity.",
}
"""Counted by the workers and summed over ranks; recomputed requests and level changes once."""


def page_errors_metric(kind: PageError) -> str:
    """The counter of far pages that were lost for this reason."""
    return f"kv_page_errors_{kind.value}"


COUNTERS |= {
    page_errors_metric(kind): f"Far pages lost: {reason}." for kind, reason in _REASONS.items()
}

GAUGES = {
    "kv_expansion": "Full KV blocks that fit over those that the near memory holds alone.",
    "kv_far_layers": "Layers whose KV lives in the far tier.",
    "kv_partial_blocks_far": "1 if their partly filled blocks live there too, else 0.",
    "kv_near_bytes": "Near-tier bytes of the KV page pool, all ranks.",
    "kv_far_bytes": "Far memory reserved for KV, bytes, all ranks.",
    "kv_storage_bytes": "KV pages in files, bytes, all ranks.",
    "kv_blocks_released": "KV blocks that requests may use now.",
    "kv_blocks_reserved": "KV blocks held back: more far layers would give them, or partly filled "
    "blocks that stay near take their memory.",
}
"""Set by the scheduler, but for the bytes of far pages."""


class TieredStats(KVConnectorStats):
    """What happened since the last report: counters add up, of gauges the later value counts."""

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
            "blocks withheld": self.data.get("kv_blocks_reserved", 0),
        }

    def is_empty(self) -> bool:
        return not self.data


class TieredPromMetrics(KVConnectorPromMetrics):
    """Registers ``vllm:tiered_*`` for every engine and follows the reports."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
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
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if name in COUNTERS:
                metric.inc(value)
            else:
                metric.set(value)
