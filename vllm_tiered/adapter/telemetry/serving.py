# SPDX-License-Identifier: Apache-2.0
"""Figures of the API server itself for GET /tiered: its clock, model, requests and tokens."""

import time
from pathlib import PurePath
from typing import Any

_FIGURES = {
    "requests_running": "vllm:num_requests_running",
    "requests_waiting": "vllm:num_requests_waiting",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generated_tokens": "vllm:generation_tokens_total",
}
"""Names here, and of vLLM's samples on ``/metrics``."""


class ServerFigures:
    """Figures of one API server since its start.

    Args:
        engine_client: vLLM's client of the engine; None on a server without an engine.
    """

    def __init__(self, engine_client: Any) -> None:
        self._began = time.monotonic()
        self._model = _model_name(engine_client)

    def read(self) -> dict[str, Any]:
        """Return the figures now, JSON-safe.

        None stands for what is not known: requests and tokens with ``--disable-log-stats``. They
        are summed over the engines that this process serves.
        """
        return {
            "time_seconds": round(time.time(), 3),
            "uptime_seconds": round(time.monotonic() - self._began, 3),
            "model": self._model,
        } | _vllm_figures()


def _model_name(engine_client: Any) -> str | None:
    """Return the name by which clients call the model; of a path only the last component."""
    config = getattr(getattr(engine_client, "vllm_config", None), "model_config", None)
    served = getattr(config, "served_model_name", None)
    name = served[0] if isinstance(served, list) and served else served
    if not isinstance(name, str):
        return None
    return PurePath(name).name if PurePath(name).is_absolute() else name


def _vllm_figures() -> dict[str, float | None]:
    """Read vLLM's own metrics from this process's registry."""
    from prometheus_client import REGISTRY

    sums: dict[str, float] = {}
    # Only the collectors of these names are read, not every histogram of vLLM.
    for metric in REGISTRY.restricted_registry(list(_FIGURES.values())).collect():
        for sample in metric.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return {name: sums.get(sample) for name, sample in _FIGURES.items()}
