# SPDX-License-Identifier: Apache-2.0
"""Use of a mixture's experts by layer, taken once a second for the report's timeline."""

import time

from vllm_tiered.adapter.telemetry import totals
from vllm_tiered.report.records import ExpertUse, LayerExperts

INTERVAL_S = 1.0


class ExpertUseClock:
    """Reader of what this process's layers with experts have counted since the last reading."""

    def __init__(self) -> None:
        self._due = time.monotonic() + INTERVAL_S
        self._before: dict[str, tuple[float, float]] = {}

    def take(self) -> list[ExpertUse]:
        """Return a record, once a second if an expert was needed; its time is the caller's."""
        if time.monotonic() < self._due:
            return []
        self._due = time.monotonic() + INTERVAL_S
        hits, misses = totals.current(totals.EXPERT_HITS), totals.current(totals.EXPERT_MISSES)
        layers = []
        for name, now in {name: (hits[name], misses[name]) for name in hits}.items():
            before = self._before.get(name, (0, 0))
            if now != before:
                layers.append(
                    LayerExperts(
                        layer=_layer_index(name),
                        hits=int(now[0] - before[0]),
                        misses=int(now[1] - before[1]),
                    )
                )
            self._before[name] = now
        layers.sort(key=lambda one: one.layer)
        return [ExpertUse(time=0.0, layers=tuple(layers))] if layers else []


def _layer_index(name: str) -> int:
    from vllm.model_executor.models.utils import extract_layer_index

    return int(extract_layer_index(name))
