# SPDX-License-Identifier: Apache-2.0
"""The route GET /tiered on vLLM's API server: the state of every rank now, as JSON or a page.

A browser gets a page (page.py) that asks this route for the JSON; a program gets the JSON.

Who may read it: with `--api-key` (or VLLM_API_KEY) the route wants the key as vLLM's guarded routes
do, which are those below /v1. Without a key it answers everybody, as those do, but paths of the
configuration are left out: vLLM itself shows its configuration (/server_info) only with
VLLM_SERVER_DEV_MODE=1, and so are they. The page itself needs no key: a browser cannot send one
when it opens an address, and the page is a file of this package without any data. The page asks for
the key when its own question for the JSON is answered with 401.

vLLM serves an endpoint plugin only if VLLM_PLUGINS names it. `--plugin tiered` names it just as
plainly, so then the route is added as well. VLLM_PLUGINS itself is left unchanged: it is one list
for every kind of plugin; setting it would drop platform plugins and open other packages' routes.
vLLM's warning that VLLM_PLUGINS is not set would be wrong about this route; it is suppressed where
this route is the only one.
"""

import importlib.metadata
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_tiered import __version__
from vllm_tiered.adapter.compat import wrap_once
from vllm_tiered.adapter.telemetry.monitor import WORKER_METHOD, Answer, EngineMonitor
from vllm_tiered.adapter.telemetry.page import load_page, page_headers, prefers_html
from vllm_tiered.adapter.telemetry.serving import ServerFigures
from vllm_tiered.adapter.telemetry.totals import GAUGES_KEY
from vllm_tiered.config import ROOT_KEY, SECTIONS

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.datastructures import Headers, State
    from vllm.engine.protocol import EngineClient

logger = logging.getLogger("vllm.tiered")  # inside the hierarchy that vLLM configures

PATH = "/tiered"
TIMEOUT_S = 10.0
"""Longest wait for the workers: they answer between two steps, and a step may be a long prompt."""

HIDDEN = "(set; shown with the server's --api-key)"
"""What is shown instead of a path to whom it is not shown."""

_HEADERS = {"Cache-Control": "no-store", "Vary": "Accept"}

_announced = False


class TieredEndpoint:
    """The route, in the form of vLLM's `EndpointPlugin` protocol."""

    name = ROOT_KEY
    required_tasks = ("generate",)

    def attach_router(self, app: "FastAPI") -> None:
        from fastapi import Request
        from fastapi.responses import HTMLResponse, JSONResponse, Response

        from vllm_tiered.adapter.telemetry.scrape import RefreshBeforeScrape

        async def tiered(request: Request) -> Response:
            """Return what vllm-tiered does now, per worker: parts, bytes per tier, counters.

            A page that shows it if the Accept header prefers text/html. 503 if the workers do not
            answer in time; the body has what is known of them.
            """
            if prefers_html(",".join(request.headers.getlist("accept"))):
                return HTMLResponse(load_page(), headers=_HEADERS | page_headers())
            state = request.app.state
            if not state.tiered_guard.admits(request.headers):
                # The body is vLLM's.
                return JSONResponse({"error": "Unauthorized"}, status_code=401, headers=_HEADERS)
            answer = await state.tiered_monitor.ask(TIMEOUT_S)
            content = _content(state.tiered_monitor, answer, state.tiered_guard.shows_paths)
            content["server"] = state.tiered_server.read()
            status = 503 if answer.problem else 200
            return JSONResponse(content, status_code=status, headers=_HEADERS)

        app.add_api_route(PATH, tiered, methods=["GET"], response_model=None)
        app.add_middleware(RefreshBeforeScrape)

    async def init_state(
        self, engine_client: "EngineClient | None", state: "State", args: "Namespace"
    ) -> None:
        """Prepare the route, and set the gauges of /metrics that no step has set yet."""
        from vllm_tiered.adapter.telemetry import metrics, scrape

        state.tiered_guard = Guard.of_server(args)
        state.tiered_server = ServerFigures(engine_client)
        state.tiered_monitor = monitor = EngineMonitor(engine_client)
        answer = await monitor.ask(TIMEOUT_S)
        if answer.problem:
            logger.warning("tiered: no state at start: %s", answer.problem)
        for replica, gauges in _gauges_by_replica(answer).items():
            metrics.fill_gauges(gauges, engine=replica)
        state.tiered_scraped = scrape.open_scraped(engine_client, monitor)


class Guard:
    """Check of a request's API key, by vLLM's own rule.

    Args:
        tokens: the server's keys; none if anybody may ask.
        is_developer: whether the server shows its configuration to anybody.
    """

    def __init__(self, tokens: list[str], *, is_developer: bool = False) -> None:
        from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

        async def nothing(*_: Any) -> None:
            return

        self._middleware = AuthenticationMiddleware(nothing, tokens) if tokens else None
        self.shows_paths = bool(tokens) or is_developer

    @classmethod
    def of_server(cls, args: "Namespace") -> "Guard":
        """Return the guard with the keys of the command line, else of the environment."""
        from vllm import envs

        given = getattr(args, "api_key", None) or [envs.VLLM_API_KEY]
        tokens = [key for key in given if key]
        return cls(tokens, is_developer=envs.VLLM_SERVER_DEV_MODE)

    def admits(self, headers: "Headers") -> bool:
        """Return whether a request with these headers may be answered."""
        return self._middleware is None or self._middleware.verify_token(headers)


def make_endpoint_plugin() -> TieredEndpoint:
    """Return the plugin for the entry point group `vllm.endpoint_plugins`."""
    return TieredEndpoint()


def install() -> None:
    """Add the worker method that the route calls, and the route itself once it is announced."""
    import vllm.plugins
    from vllm.v1.worker.worker_base import WorkerBase

    if not hasattr(WorkerBase, WORKER_METHOD):
        setattr(WorkerBase, WORKER_METHOD, _worker_state)
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


def _worker_state(worker: Any) -> dict[str, Any] | None:
    """Return the state of a worker process, or None if the plugin is off in it."""
    from vllm_tiered.adapter.telemetry.state import worker_state

    return worker_state(worker)


def _content(monitor: EngineMonitor, answer: Answer, shows_paths: bool) -> dict[str, Any]:
    """Return the body: version, configuration, the schedulers' figures, one state per rank."""
    from vllm_tiered.adapter.telemetry import metrics  # imports vLLM, which `doctor` must not

    config = monitor.config
    workers = [
        {name: value for name, value in worker.items() if name not in (GAUGES_KEY, "host")}
        for worker in answer.workers
    ]
    if not shows_paths:
        config = _without_paths(config)
        workers = [_without_paths(worker) for worker in workers]
    latest = metrics.latest_of_schedulers()
    gauges = _gauges_by_replica(answer)
    engines = sorted(latest.keys() | gauges.keys()) or [0]
    content = {
        "version": __version__,
        "config": config,
        "engines": [
            {"engine": engine} | gauges.get(engine, {}) | latest.get(engine, {})
            for engine in engines
        ],
        "workers": workers,
    }
    if answer.problem:
        problem = {"error": answer.problem, "workers_seen_seconds_ago": answer.age_seconds}
        return problem | {"processes": answer.processes} | content
    return content


def _gauges_by_replica(answer: Answer) -> dict[int, dict[str, float]]:
    """Return the gauges that each replica's first rank knows, by the replica's number."""
    gauges: dict[int, dict[str, float]] = {}
    for worker in answer.workers:
        gauges.setdefault(worker["replica"], worker[GAUGES_KEY])
    return gauges


def _without_paths(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables by section with the values of all keys that are paths hidden."""
    names = {section.NAME: section.path_names() for section in SECTIONS}
    return {
        section: {
            key: HIDDEN if value is not None and key in names.get(section, ()) else value
            for key, value in values.items()
        }
        if isinstance(values, Mapping)
        else values
        for section, values in sections.items()
    }
