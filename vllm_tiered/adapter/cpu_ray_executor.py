# SPDX-License-Identifier: Apache-2.0
"""vLLM's Ray executor for its CPU backend: ranks as Ray actors that reserve a CPU each.

vLLM 0.32 refuses Ray if the platform names no Ray device, and the CPU platform names none. Ray
counts CPUs itself, so each rank reserves one. VLLM_CPU_OMP_THREADS_BIND determines the cores on
which a rank runs, as without Ray. On a GPU vLLM's own Ray executor is used.

vLLM binds a rank's threads through the environment of the process that it starts, but here Ray
starts the processes. Without binding, every rank has as many threads as the machine has cores, and
the ranks wait for each other: a step takes 463 ms, against 78 ms with vLLM's own processes (2 ranks
on 2 cores, 2026-11-22).
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm import envs
from vllm.utils.cpu_resource_utils import parse_id_list
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from vllm_tiered.adapter import compat
from vllm_tiered.errors import ConfigError

DEVICE_KEY = "CPU"


class CpuRayWorkerProc(RayWorkerProc):
    """One rank in its Ray actor."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Return the actor's node, and its rank in place of a GPU id."""
        node: str = ray_executor_v2.ray.get_runtime_context().get_node_id()
        return node, [self._init_kwargs["rank"]]

    def initialize_worker(
        self,
        local_rank: int,
        env_vars: dict[str, str],
        distributed_init_method: str,  # not read, but before what is
        driver_env_vars: dict[str, str] | None = None,
        assigned_physical_gpu_ids: list[int] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Initialize the worker as vLLM does, bound to the rank's cores.

        ``assigned_physical_gpu_ids`` are the ranks of this machine.

        Raises:
            ConfigError: there are too few cores, or the number of core lists is not that of ranks.
        """
        # The base class sets the driver's variables, but one is needed before that.
        bind = {**(driver_env_vars or {}), **os.environ, **env_vars}.get(
            "VLLM_CPU_OMP_THREADS_BIND", envs.VLLM_CPU_OMP_THREADS_BIND
        )
        num_ranks = len(assigned_physical_gpu_ids or [local_rank])
        cores = cores_of_rank(local_rank, num_ranks, bind, os.sched_getaffinity(0))
        if cores is not None:
            # This binds this thread and the compute threads that it starts. Copy threads use all
            # cores of the process, which they find in the masks of its other threads.
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))
        ids = None if compat.takes_ids_for_nodes() else assigned_physical_gpu_ids
        super().initialize_worker(
            local_rank, env_vars, distributed_init_method, driver_env_vars, ids, *args, **kwargs
        )


def cores_of_rank(
    local_rank: int, num_ranks: int, bind: str, available: Iterable[int]
) -> list[int] | None:
    """Return the cores on which a rank computes; None leaves the choice to the system.

    Args:
        local_rank: the rank's index on this machine.
        num_ranks: the number of ranks on this machine.
        bind: VLLM_CPU_OMP_THREADS_BIND: "0-3|4-7" for two ranks, "auto" for equal shares, "nobind".
        available: the cores of this process.

    Raises:
        ConfigError: there are too few cores, or the number of core lists is not that of ranks.
    """
    if bind == "nobind":
        return None
    if bind != "auto":
        lists = bind.split("|")
        if len(lists) != num_ranks:
            raise ConfigError(
                f"VLLM_CPU_OMP_THREADS_BIND={bind} lists the cores of {len(lists)} ranks, and "
                f"{num_ranks} are on this machine: give one list per rank, set apart by |, or "
                "set it to auto"
            )
        cores: list[int] = parse_id_list(lists[local_rank])
        return cores
    shared = sorted(available)
    if len(shared) < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks on a machine of which Ray may use {len(shared)} cores: lower "
            "--tensor-parallel-size, or set VLLM_CPU_OMP_THREADS_BIND=nobind"
        )
    share = len(shared) // num_ranks
    return shared[local_rank * share : (local_rank + 1) * share]


class CpuRayExecutor(RayExecutorV2):
    """vLLM's `RayExecutorV2` with ranks that reserve one CPU of the cluster each."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {}  # the placement group's bundle reserves the actor's CPU

    def _init_executor(self) -> None:
        with _placing_ranks_on_cpus():
            super()._init_executor()


@contextlib.contextmanager
def _placing_ranks_on_cpus() -> Iterator[None]:
    """Patch the names that vLLM's functions look up while they place the ranks."""
    from vllm.platforms import current_platform

    before = current_platform.ray_device_key
    current_platform.ray_device_key = DEVICE_KEY
    ray_executor_v2.RayWorkerProc = CpuRayWorkerProc
    try:
        yield
    finally:
        current_platform.ray_device_key = before
        ray_executor_v2.RayWorkerProc = RayWorkerProc
