# SPDX-License-Identifier: Apache-2.0
"""Metrics of `/metrics` that are read from the workers when somebody scrapes it.

vLLM carries figures from workers to `/metrics` only for a KV connector, which is ours only with
`kv.enabled`. A connector that moves no KV would switch other things of vLLM off. So without one,
the workers' counters since the start are asked for as `GET /tiered` does, before each scrape: no
cost per step, and none while nobody looks. What a part does, and why not, is asked for in the same
way with and without a connector.

Limits: the metrics are those of a server (not of `LLM.get_metrics()`). Of several API servers only
the first asks, so that nothing is counted twice; the others show what it last heard. If the workers
do not answer within `PATIENCE_S`, the scrape shows what they said last.
"""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, Gauge

from vllm_tiered.adapter.telemetry import metrics
from vllm_tiered.adapter.telemetry.figures import COUNTER_METRICS, PART_ACTIVE, PREFIX
from vllm_tiered.adapter.telemetry.monitor import EngineMonitor
from vllm_tiered.adapter.transfer_config import has_tiered_connector
from vllm_tiered.config import ROOT_KEY

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("vllm.tiered")

PATIENCE_S = 0.5
"""Longest delay of a scrape; Prometheus gives up after 10 s by default."""

PARTS = ("kv", "weights", "experts", "ffn", "l2")
_OF_PARTS = ("weights", "experts", "ffn", "l2", "energy")
"""Sections of a worker's state whose counters have no other way to `/metrics`."""

_OF_CONNECTOR = "kv_"
"""Prefix of the counters that there are with a connector alone."""

_REFRESH_S = 0.5
_LABELS = ("model_name", "engine")

_ASIDE = {
    "kv": "nothing_to_swap",
    "weights": "all_near",
    "experts": "all_near",
    "ffn": "dense_is_smaller",
}


class Scraped:
    """Metrics of a server's engines that a scrape refreshes; each replica is an engine.

    Args:
        monitor: asks the workers.
        model_name: label of vLLM's metrics.
        has_connector: whether vLLM carries the parts' counters.
    """

    def __init__(self, monitor: EngineMonitor, model_name: str, *, has_connector: bool) -> None:
        _unregister()
        self._monitor = monitor
        self._model_name = model_name
        self._active = Gauge(
            f"{PREFIX}{PART_ACTIVE}",
            "1 for the reason why a part is at work or not, 0 for reasons that held before.",
            [*_LABELS, "part", "reason"],
            multiprocess_mode="mostrecent",
        )
        self._counters: dict[str, tuple[Any, list[str]]] = {}  # with the label's value, if any
        _registered.append(self._active)
        for metric in COUNTER_METRICS:
            if not has_connector and not metric.name.startswith(_OF_CONNECTOR):
                registered = metrics.register(metric, Counter, _LABELS)
                _registered.append(registered)
                for value, figure in metric.figures.items():
                    self._counters[figure] = registered, [value] if metric.label else []
        self._reasons: dict[tuple[int, str], str] = {}
        self._shown: dict[tuple[int, str], float] = {}
        self._asked = float("-inf")

    async def refresh(self) -> None:
        """Bring the metrics up to date; scrapes in quick succession ask once."""
        if time.monotonic() - self._asked < _REFRESH_S:
            return
        self._asked = time.monotonic()
        answer = await self._monitor.ask(PATIENCE_S)
        if answer.workers and not answer.problem:
            self.show(answer.workers)

    def show(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Set the metrics to the state of these workers, which are all ranks of all replicas."""
        for replica in {worker["replica"] for worker in workers}:
            self._show(replica, [worker for worker in workers if worker["replica"] == replica])

    def _show(self, replica: int, workers: Sequence[Mapping[str, Any]]) -> None:
        labels = self._model_name, str(replica)
        for part in PARTS:
            reason = part_reason(part, workers[0])
            # prometheus_client cannot remove a series that several API servers share, so a reason
            # that is over becomes 0.
            if (before := self._reasons.get((replica, part), reason)) != reason:
                self._active.labels(*labels, part, before).set(0)
            self._reasons[replica, part] = reason
            self._active.labels(*labels, part, reason).set(1)
        for figure, (counter, own) in self._counters.items():
            total = sum(
                worker.get(part, {}).get("counters", {}).get(figure, 0.0)
                for worker in workers
                for part in _OF_PARTS
            )
            rise = total - self._shown.get((replica, figure), 0.0)
            counter.labels(*labels, *own).inc(max(0.0, rise))
            self._shown[replica, figure] = total


def part_reason(part: str, worker: Mapping[str, Any]) -> str:
    """Return why a part is at work or not, as one of `figures.PART_REASONS`."""
    state: str = worker[part]["state"]
    if state == "on" and part == "kv" and worker["gauges"].get("kv_storage_failed"):
        return "storage_failed"
    if state != "stepped aside":
        return state
    if part == "l2":
        return "no_gain" if worker[part].get("verdicts") else "nothing_to_prefetch"
    if part == "kv" and not worker[part].get("is_supported", True):
        return "unsupported"
    return _ASIDE[part]


class RefreshBeforeScrape:
    """ASGI middleware that refreshes the metrics before `/metrics` is answered."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app
        self._has_failed = False

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/") == "/metrics":
            scraped: Scraped | None = getattr(scope["app"].state, "tiered_scraped", None)
            if scraped is not None:
                await self._refresh(scraped)
        await self._app(scope, receive, send)

    async def _refresh(self, scraped: Scraped) -> None:
        """Refresh, and keep vLLM's own metrics on `/metrics` whatever goes wrong here."""
        try:
            await scraped.refresh()
        except Exception:
            if not self._has_failed:
                logger.exception("tiered: the metrics of /metrics could not be refreshed")
            self._has_failed = True


def open_scraped(engine_client: Any, monitor: EngineMonitor) -> Scraped | None:
    """Return the metrics of an engine that is tiered; None in any but the first API server."""
    vllm_config = getattr(engine_client, "vllm_config", None)
    core: Any = getattr(engine_client, "engine_core", None)
    is_first = not vars(core).get("client_index") if core else True
    if vllm_config is None or not is_first:
        return None
    additional = vllm_config.additional_config
    if not isinstance(additional, Mapping) or ROOT_KEY not in additional:
        return None
    return Scraped(
        monitor,
        str(vllm_config.model_config.served_model_name),
        has_connector=has_tiered_connector(vllm_config.kv_transfer_config),
    )


_registered: list[Any] = []


def _unregister() -> None:
    """Remove an earlier server's metrics from this process."""
    while _registered:
        with contextlib.suppress(KeyError):
            REGISTRY.unregister(_registered.pop())
