# SPDX-License-Identifier: Apache-2.0
"""Questions to an engine's workers from its API server, answered within a time limit.

The workers are asked with `collective_rpc`, as vLLM's own handlers do, for a method that
`endpoint.install` adds to the worker class. A method name can be sent between processes; a function
would need vLLM's insecure serialization.

The engine runs such a call between two steps. So it waits while a step runs, and for ever if a
worker hangs. The wait ends here and not in the engine: vLLM's executor would leave the late answer
in a queue, where the next call would take it for its own. Therefore at most one call is under way,
and everybody who asks meanwhile waits for the same one.
"""

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from vllm_tiered.config import ROOT_KEY

WORKER_METHOD = "tiered_state"

_HALTED = (
    psutil.STATUS_STOPPED,
    psutil.STATUS_TRACING_STOP,
    psutil.STATUS_DISK_SLEEP,
    psutil.STATUS_ZOMBIE,
    psutil.STATUS_DEAD,
)
_GONE = "gone"
_SAMPLE_S = 0.1
"""Time in which the processes' use of CPU is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """State of the workers.

    Attributes:
        workers: the state of each rank; those that were last known if there is a problem.
        problem: why there is no newer state; None if there is.
        age_seconds: time since the workers were seen; None if they never were.
        processes: the workers' processes, if there is a problem.
    """

    workers: Sequence[dict[str, Any]] = ()
    problem: str | None = None
    age_seconds: float | None = None
    processes: Sequence[dict[str, Any]] = field(default=())


class EngineMonitor:
    """Asks one engine's workers for their state.

    Args:
        engine_client: vLLM's client of the engine; None on a server without an engine.
    """

    def __init__(self, engine_client: Any) -> None:
        self._client = engine_client
        self._call: asyncio.Task[list[Any]] | None = None
        self._workers: list[dict[str, Any]] = []
        self._seen: float | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration in force."""
        if self._client is None:
            return {}
        additional: Mapping[str, Any] = self._client.vllm_config.additional_config
        return additional.get(ROOT_KEY) or {}

    async def ask(self, timeout_s: float) -> Answer:
        """Return the workers' state, after at most `timeout_s` and a moment for the processes."""
        if self._client is None:
            return Answer(problem="this server has no engine")
        if self._call is None or self._call.done():
            self._call = asyncio.ensure_future(self._ask_workers())
        call = self._call
        # `wait` does not cancel the call when the time is over or the HTTP client has gone.
        await asyncio.wait({call}, timeout=timeout_s)
        if not call.done():
            return await self._describe(f"the workers did not answer within {timeout_s:g} s")
        if call.cancelled() or (error := call.exception()) is None:
            return Answer(workers=self._workers)
        # The message may name paths, and not everybody may read those.
        return await self._describe(f"the engine failed ({type(error).__name__})")

    async def _ask_workers(self) -> list[Any]:
        from vllm import envs

        # In the engine the call has the patience of a step: after that vLLM gives the worker up.
        patience = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        states = await _ask_replicas(self._client, patience)
        self._workers = [state for state in states if state is not None]
        self._seen = time.monotonic()
        return self._workers

    async def _describe(self, problem: str) -> Answer:
        processes = await asyncio.to_thread(find_processes, self._workers)
        halted = [p for p in processes if p["status"] in (*_HALTED, _GONE)]
        if halted:
            named = ", ".join(f"{p['name']} (pid {p['pid']}) is {p['status']}" for p in halted)
            problem += f": {named}"
        elif processes:
            idle = [p for p in processes if not p["cpu_percent"]]
            names = ", ".join(p["name"] for p in idle)
            problem += f": every process lives; without CPU use: {names or 'none'}"
        return Answer(
            workers=self._workers,
            problem=problem,
            age_seconds=None if self._seen is None else round(time.monotonic() - self._seen, 1),
            processes=processes,
        )


async def _ask_replicas(client: Any, timeout_s: float) -> list[Any]:
    """Return the states of all replicas' workers; vLLM's own call returns the first replica's."""
    core: Any = getattr(client, "engine_core", None)
    if len(getattr(core, "core_engines", ())) <= 1:
        states: list[Any] = await client.collective_rpc(WORKER_METHOD, timeout=timeout_s)
        return states
    by_replica = await core.call_utility_all_async(
        "collective_rpc", WORKER_METHOD, timeout_s, (), {}
    )
    return [state for states in by_replica for state in states]


def find_processes(workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the workers' processes on this host and their engine core's, with status and CPU use.

    A worker that waits for another one, as ranks do in an all-reduce, usually burns CPU.
    """
    here = socket.gethostname()
    several = any(w["replica"] for w in workers)
    names = {
        w["pid"]: f"worker rank {w['rank']}" + (f" of replica {w['replica']}" if several else "")
        for w in workers
        if w["host"] == here
    }
    for pid in list(names):
        parent = _parent(pid)
        if parent is not None and parent not in names and parent != os.getpid():
            names[parent] = "engine core"
    before = {pid: _cpu_seconds(pid) for pid in names}
    time.sleep(_SAMPLE_S)
    return [
        {
            "name": name,
            "pid": pid,
            "status": _status(pid),
            "cpu_percent": round(100 * (_cpu_seconds(pid) - before[pid]) / _SAMPLE_S),
        }
        for pid, name in names.items()
    ]


def _status(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return _GONE


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _parent(pid: int) -> int | None:
    """Return the engine core above a worker; None if the worker is in it."""
    try:
        parent = psutil.Process(pid).parent()
        is_core = parent is not None and "EngineCore" in " ".join(parent.cmdline())
    except psutil.Error:
        return None
    return parent.pid if parent is not None and is_core else None
