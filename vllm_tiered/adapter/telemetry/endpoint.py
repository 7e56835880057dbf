# SPDX-License-Identifier: Apache-2.0
"""The route GET /tiered on vLLM's API server, which returns the manifest of every rank.

The manifest is made in the worker processes. The server asks them with `collective_rpc`, as vLLM's
own handlers do, for a method that `install` adds to the worker class. A method name can be sent
between processes; a function would need vLLM's insecure serialization.

vLLM serves an endpoint plugin only if VLLM_PLUGINS names it. `--plugin tiered` names it just as
plainly, so then the route is added as well. VLLM_PLUGINS itself is left unchanged: it is one list
for every kind of plugin; setting it would drop platform plugins and open other packages' routes.
vLLM's warning that VLLM_PLUGINS is not set would be wrong about this route; it is suppressed where
this route is the only one.
"""

import importlib.metadata
import logging
from typing import TYPE_CHECKING, Any

from vllm_tiered import __version__
from vllm_tiered.adapter.compat import wrap_once
from vllm_tiered.config import ROOT_KEY

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

logger = logging.getLogger("vllm.tiered")  # inside the hierarchy that vLLM configures

PATH = "/tiered"
WORKER_METHOD = "tiered_manifest"
_TIMEOUT_S = 10.0

_announced = False


class TieredEndpoint:
    """The route, in the form of vLLM's `EndpointPlugin` protocol."""

    name = ROOT_KEY
    required_tasks = ("generate",)

    def attach_router(self, app: "FastAPI") -> None:
        from fastapi import Request
        from fastapi.responses import JSONResponse

        async def tiered(request: Request) -> JSONResponse:
            """Return what vllm-tiered took over, per worker, and the bytes per tier."""
            return JSONResponse(await _manifests(request.app.state.tiered_engine_client))

        app.add_api_route(PATH, tiered, methods=["GET"])

    async def init_state(
        self, engine_client: "EngineClient | None", state: "State", args: "Namespace"
    ) -> None:
        state.tiered_engine_client = engine_client


def make_endpoint_plugin() -> TieredEndpoint:
    """Return the plugin for the entry point group `vllm.endpoint_plugins`."""
    return TieredEndpoint()


def install() -> None:
    """Add the worker method that the route calls, and the route itself once it is announced."""
    import vllm.plugins
    from vllm.v1.worker.worker_base import WorkerBase

    if not hasattr(WorkerBase, WORKER_METHOD):
        setattr(WorkerBase, WORKER_METHOD, _worker_manifest)
    wrap_once(vllm.plugins, "load_endpoint_plugins", _load_endpoint_plugins)


def announce() -> None:
    """Make this process's server serve the route, as an engine has the plugin switched on."""
    global _announced
    _announced = True


def _load_endpoint_plugins(original: Any, *args: Any, **kwargs: Any) -> Any:
    plugins = [] if _would_warn_of_this_route_alone() else original(*args, **kwargs)
    if _announced and all(plugin.name != ROOT_KEY for plugin in plugins):
        logger.info("tiered: serving GET %s, because the plugin is switched on", PATH)
        plugins.append(make_endpoint_plugin())
    return plugins


def _would_warn_of_this_route_alone() -> bool:
    """Return whether vLLM would load no endpoint plugin and warn that it found one, this one."""
    from vllm import envs
    from vllm.plugins import ENDPOINT_PLUGINS_GROUP

    found = importlib.metadata.entry_points(group=ENDPOINT_PLUGINS_GROUP)
    return envs.VLLM_PLUGINS is None and found.names == {ROOT_KEY}


def _worker_manifest(worker: Any) -> dict[str, Any] | None:
    """Return the manifest of a worker process, or None if nothing was taken over in it."""
    from vllm_tiered.adapter.telemetry import manifest

    return manifest.current()


async def _manifests(engine_client: Any) -> dict[str, Any]:
    """Return our version, the configuration in force, and one manifest per rank."""
    manifests = await engine_client.collective_rpc(WORKER_METHOD, timeout=_TIMEOUT_S)
    return {
        "version": __version__,
        "config": engine_client.vllm_config.additional_config.get(ROOT_KEY),
        "workers": [manifest for manifest in manifests if manifest is not None],
    }
