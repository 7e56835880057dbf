# SPDX-License-Identifier: Apache-2.0
"""vLLM's Ray executor on its CPU backend: ranks as Ray actors that hold a CPU each.

vLLM 0.32 refuses Ray where a platform names no device that Ray counts, and the CPU platform names
none. Ray counts CPUs itself, so that is what a rank's place in the cluster is made of; which cores
it then runs on is VLLM_CPU_OMP_THREADS_BIND's to say, as without Ray. On a GPU Ray is vLLM's own,
and nothing here is used.

vLLM binds the threads of a rank by what it starts its process with, and Ray has started these. Left
to themselves all ranks have as many threads as the machine has cores, and wait for each other where
they should compute: 463 ms a step, against 78 with vLLM's own processes (2 ranks on 2 cores,
2026-11-22).
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

from vllm_tiered.errors import ConfigError

DEVICE_KEY = "CPU"


class CpuRayWorkerProc(RayWorkerProc):
    """A rank in its Ray actor."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """The actor's node, and its rank for the device that it has none of."""
        node: str = ray_executor_v2.ray.get_runtime_context().get_node_id()
        return node, [self._init_kwargs["rank"]]

    def initialize_worker(
        self,
        local_rank: int,
        env_vars: dict[str, str],
        distributed_init_method: str,
        driver_env_vars: dict[str, str] | None = None,
        assigned_physical_gpu_ids: list[int] | None = None,
    ) -> None:
        """As vLLM's, on the rank's cores: ``assigned_physical_gpu_ids`` are the machine's ranks.

        Raises:
            ConfigError: there are not enough cores, or not as many lists of them as ranks.
        """
        # The driver's variables are the base class's to set, but one of them is needed before.
        bind = {**(driver_env_vars or {}), **os.environ, **env_vars}.get(
            "VLLM_CPU_OMP_THREADS_BIND", envs.VLLM_CPU_OMP_THREADS_BIND
        )
        num_ranks = len(assigned_physical_gpu_ids or [local_rank])
        cores = cores_of(local_rank, num_ranks, bind, os.sched_getaffinity(0))
        if cores is not None:
            # Of this thread, and with it of those that it starts to compute; copying threads look
            # for the cores of the process, which others still have.
            os.sched_setaffinity(0, cores)
            torch.set_num_threads(len(cores))
        super().initialize_worker(
            local_rank,
            env_vars,
            distributed_init_method,
            driver_env_vars,
            assigned_physical_gpu_ids=assigned_physical_gpu_ids,
        )


def cores_of(
    local_rank: int, num_ranks: int, bind: str, available: Iterable[int]
) -> list[int] | None:
    """Where a rank computes; None leaves it to the system.

    Args:
        num_ranks: on this machine.
        bind: VLLM_CPU_OMP_THREADS_BIND: "0-3|4-7" for two ranks, "auto" for equal shares, "nobind".
        available: this process's cores.

    Raises:
        ConfigError: there are not enough cores, or not as many lists of them as ranks.
    """
    if bind == "nobind":
        return None
    if bind != "auto":
        lists = bind.split("|")
        if len(lists) != num_ranks:
            raise ConfigError(
                f"VLLM_CPU_OMP_THREADS_BIND={bind} lists the cores of {len(lists)} ranks, and "
                f"{num_ranks} are on this machine: name as many, set apart by |, or set it to auto"
            )
        cores: list[int] = parse_id_list(lists[local_rank])
        return cores
    shared = sorted(available)
    if len(shared) < num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks on a machine of which Ray has {len(shared)} cores: lower "
            "--tensor-parallel-size, or set VLLM_CPU_OMP_THREADS_BIND=nobind"
        )
    share = len(shared) // num_ranks
    return shared[local_rank * share : (local_rank + 1) * share]


class CpuRayExecutor(RayExecutorV2):
    """`RayExecutorV2` whose ranks ask the cluster for a CPU."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {}  # the bundle that the actor is placed in holds its CPU

    def _init_executor(self) -> None:
        with _ranks_on_cpus():
            super()._init_executor()


@contextlib.contextmanager
def _ranks_on_cpus() -> Iterator[None]:
    """What vLLM's functions look up while they place the ranks."""
    from vllm.platforms import current_platform

    before = current_platform.ray_device_key
    current_platform.ray_device_key = DEVICE_KEY
    ray_executor_v2.RayWorkerProc = CpuRayWorkerProc
    try:
        yield
    finally:
        current_platform.ray_device_key = before
        ray_executor_v2.RayWorkerProc = RayWorkerProc
