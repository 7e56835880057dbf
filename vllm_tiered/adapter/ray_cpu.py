# SPDX-License-Identifier: Apache-2.0
"""vLLM's Ray executor on its CPU backend: ranks as Ray actors that hold a CPU each.

vLLM 0.32 refuses Ray where a platform names no device that Ray counts, and the CPU platform names
none. Ray counts CPUs itself, so that is what a rank's place in the cluster is made of; which cores
it then runs on is VLLM_CPU_OMP_THREADS_BIND's to say, as without Ray. On a GPU Ray is vLLM's own,
and nothing here is used.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

DEVICE_KEY = "CPU"


class CpuRayWorkerProc(RayWorkerProc):
    """A rank in its Ray actor."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """The actor's node, and its rank for the device that it has none of."""
        node: str = ray_executor_v2.ray.get_runtime_context().get_node_id()
        return node, [self._init_kwargs["rank"]]


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
