# SPDX-License-Identifier: Apache-2.0
"""Engine clients as vLLM's API server has one, and a server with the route of GET /tiered."""

import asyncio
import contextlib
import os
import socket
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from vllm_tiered.adapter.connector_name import CONNECTOR
from vllm_tiered.adapter.telemetry import endpoint, scrape


def worker_state(rank: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the state of a rank whose weights are placed and whose KV is vLLM's."""
    state: dict[str, Any] = {"replica": 0, "rank": rank, "pid": 1, "host": "elsewhere"}
    state |= {"monotonic_seconds": 1.0, "gauges": {}}
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


class BusyEngineClient:
    """Client of an engine of one worker whose KV is swapped; its counters grow with its clock."""

    def __init__(self) -> None:
        model = SimpleNamespace(served_model_name=["demo"])
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=None,
            additional_config={"tiered": {"kv": {"far_gib": 8.0}}},
            model_config=model,
        )
        self.hangs = False
        self.num_calls = 0
        self.far_layers = 12
        self.kv: dict[str, Any] = {"state": "on", "reason": None}
        self.link: dict[str, Any] = {}
        self.experts: dict[str, Any] = {}
        self.ffn: dict[str, Any] = {"state": "off", "reason": "ffn.store is <not> set"}
        self.weights: dict[str, Any] = {"state": "off", "reason": 'weights.placement is "off"'}

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[dict[str, Any]]:
        self.num_calls += 1
        while self.hangs:
            await asyncio.sleep(0.01)
        return [self.worker()]

    def worker(self) -> dict[str, Any]:
        now = time.monotonic()
        counters = {
            "kv_read_bytes": 3e6 * now,
            "kv_write_bytes": 1e6 * now,
            "kv_read_seconds": 0.5 * now,
            "kv_step_seconds": 0.8 * now,
            "kv_stall_seconds": 0.2 * now,
            "kv_lost_blocks": 0,
        }
        copied = {"weights_read_bytes": (100 << 20) * now, "weights_read_seconds": 0.5 * now}
        copied |= {"weights_steps": 50 * now, "weights_stall_seconds": 0.25 * now}
        kv = {
            "num_layers": 24,
            "far_layers": self.far_layers,
            "max_far_layers": 20,
            "policy": "interleave",
            "near_bytes": 64 << 20,
            "far_bytes": 256 << 20,
            "storage_bytes": 0,
            "tier": "far",
            "counters": counters,
        }
        energy = {"energy_joules": 20 * now, "energy_assumed_joules": 20 * now}
        return {
            "replica": 0,
            "rank": 0,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "monotonic_seconds": now,
            "kv": kv | self.kv,
            "weights": self.weights | {"counters": copied},
            "link": self.link,
            **({"experts": _grown(self.experts, now)} if self.experts else {}),
            "ffn": _grown(self.ffn, now),
            "l2": {"state": "stepped aside", "reason": "one rank", "counters": {}},
            "energy": {"counters": energy},
            "gauges": {
                "kv_expansion": 24 / (26 - self.far_layers),
                "kv_far_layers": self.far_layers,
                "kv_blocks_released": 70 * self.far_layers,
                "kv_blocks_reserved": 100,
            },
        }


def _grown(part: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return a part whose counters have grown by `grows` in each of the seconds."""
    counters = {name: rate * seconds for name, rate in part.get("grows", {}).items()}
    return {"counters": counters} | {key: part[key] for key in part if key != "grows"}


def make_app(engine: Any, **args: Any) -> FastAPI:
    """Return an app with the route of `engine`; `args` are the server's, such as api_key."""
    plugin = endpoint.make_endpoint_plugin()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await plugin.init_state(engine, app.state, Namespace(**args))
        yield

    app = FastAPI(lifespan=lifespan)
    plugin.attach_router(app)
    return app
