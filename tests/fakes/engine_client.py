# SPDX-License-Identifier: Apache-2.0
"""An engine client as vLLM's API server has one, whose workers' states a test sets."""

import asyncio
from types import SimpleNamespace
from typing import Any

from vllm_tiered.adapter.connector_name import CONNECTOR
from vllm_tiered.adapter.telemetry import scrape


def worker_state(rank: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the state of a rank whose weights are placed and whose KV is vLLM's."""
    state: dict[str, Any] = {"rank": rank, "pid": 1, "host": "elsewhere", "gauges": {}}
    state["monotonic_seconds"] = 1.0
    state |= {part: {"state": "off", "reason": "text", "counters": {}} for part in scrape.PARTS}
    state["energy"] = {"counters": {}}
    state["weights"] = {"state": "on", "reason": None, "counters": {"weights_read_bytes": 100}}
    return state | changes


class FakeEngineClient:
    """Answers `collective_rpc` with `workers`; not at all while `hangs`."""

    def __init__(
        self, *workers: dict[str, Any], has_connector: bool = False, client_index: int = 0
    ) -> None:
        self.workers, self.num_calls, self.hangs = list(workers), 0, False
        self.engine_core = SimpleNamespace(client_index=client_index)
        self.vllm_config = SimpleNamespace(
            additional_config={"tiered": {"kv": {"far_gib": 8.0}}},
            kv_transfer_config=SimpleNamespace(kv_connector=CONNECTOR) if has_connector else None,
            model_config=SimpleNamespace(served_model_name="a-model"),
        )

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[dict[str, Any]]:
        self.num_calls += 1
        while self.hangs:
            await asyncio.sleep(0.01)
        return self.workers
