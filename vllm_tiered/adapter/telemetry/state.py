# SPDX-License-Identifier: Apache-2.0
"""State of one worker now: each part on, off or stepped aside, with its reason and its figures.

It is the worker's answer to ``GET /tiered``. The names of figures are those of ``/metrics`` without
``vllm:tiered_``; here they count one rank and one engine, since its start. Two answers give rates:
`monotonic_seconds` is the rank's clock as it was asked, which no change of the time of day moves.
"""

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from vllm_tiered.adapter.connector_name import ASIDE_KEY
from vllm_tiered.adapter.telemetry import link_peak, manifest, preload, totals
from vllm_tiered.adapter.telemetry.figures import COUNTERS, GAUGES
from vllm_tiered.adapter.telemetry.totals import GAUGES_KEY
from vllm_tiered.config import ROOT_KEY, TieredConfig

ON, OFF, ASIDE, STARTING = "on", "off", "stepped aside", "starting"


def worker_state(worker: Any) -> dict[str, Any] | None:
    """Return the state of a worker process, JSON-safe; None if the plugin is off in it."""
    additional = getattr(worker.vllm_config, "additional_config", None)
    if not isinstance(additional, Mapping) or ROOT_KEY not in additional:
        return None
    config = TieredConfig.from_dict(additional[ROOT_KEY])
    stated = manifest.current() or {}
    aside = additional.get(ASIDE_KEY, {})
    why_not = aside.get("kv")
    if why_not is not None:  # there is no connector that states anything
        stated = {**stated, "kv": {"active": False, "why_not": why_not, "is_supported": False}}
    parts = {
        "kv": _kv_state(config, stated.get("kv")),
        "weights": _weights_state(config, stated.get("weights")),
        "ffn": _ffn_state(config, stated.get("ffn"), aside.get("ffn")),
        "experts": _experts_state(config, stated.get("experts")),
        "l2": _l2_state(config, stated.get("l2")),
    }
    described = {
        name: {"state": state, "reason": reason} | stated.get(name, {}) | _counters(name)
        for name, (state, reason) in parts.items()
    }
    described["experts"] |= {"hit_ratio_by_layer": _hit_ratio_by_layer()}
    for part in preload.PARTS:
        described[part] |= {"preload": preload.current(part)}
    where = {
        "replica": worker.vllm_config.parallel_config.data_parallel_index,
        "rank": worker.rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "monotonic_seconds": time.monotonic(),
    }
    gauges = {name: value for name, value in totals.current("kv").items() if name in GAUGES}
    described["link"] = link_peak.current()
    return where | described | {"energy": _counters("energy"), GAUGES_KEY: gauges}


def _counters(part: str) -> dict[str, Any]:
    figures = totals.current(part)
    return {"counters": {name: value for name, value in figures.items() if name in COUNTERS}}


def _hit_ratio_by_layer() -> dict[str, float]:
    hits, misses = totals.current(totals.EXPERT_HITS), totals.current(totals.EXPERT_MISSES)
    wanted = {name: hits[name] + misses[name] for name in hits}
    return {name: hits[name] / number for name, number in wanted.items() if number}


State = tuple[str, str | None]
"""The word, and the reason unless the part is on."""


def _kv_state(config: TieredConfig, stated: dict[str, Any] | None) -> State:
    if not config.kv.enabled:
        return OFF, "kv.enabled is false"
    if stated is None:
        return STARTING, None
    if not stated["active"]:
        return ASIDE, stated["why_not"]
    if totals.current("kv").get("kv_storage_failed"):
        return ON, "the storage tier failed and was given up: the log has the reason"
    return ON, None


def _weights_state(config: TieredConfig, stated: dict[str, Any] | None) -> State:
    if not config.weights.places:
        return OFF, 'weights.placement is "off"'
    if stated is None:
        return STARTING, None
    return (ON, None) if stated["far_sublayers"] else (ASIDE, "all of the layers fit near")


def _ffn_state(config: TieredConfig, stated: dict[str, Any] | None, why_dense: str | None) -> State:
    if why_dense is not None:
        return ASIDE, why_dense
    if not config.ffn.is_used:
        return OFF, "ffn.store is not set"
    return (ON, None) if stated is not None else (STARTING, None)


def _experts_state(config: TieredConfig, stated: dict[str, Any] | None) -> State:
    if not config.experts.is_used:
        return OFF, 'experts.near_gib is "auto"'
    if stated is None:
        return STARTING, None
    return (ON, None) if stated["active"] else (ASIDE, "all experts fit near")


def _l2_state(config: TieredConfig, stated: dict[str, Any] | None) -> State:
    if not config.l2.is_wanted:
        return OFF, 'l2.prefetch is "off"'
    if stated is None:
        return STARTING, None
    if not stated["active"]:
        return ASIDE, stated["why_not"]
    verdicts = stated["verdicts"]
    if verdicts and not any(verdict["kept"] for verdict in verdicts):
        ratios = ", ".join(f"{v['ratio']:.3f} at {v['batch_size']} requests" for v in verdicts)
        return ASIDE, f"a step with prefetches took this share of one without: {ratios}"
    return ON, None
