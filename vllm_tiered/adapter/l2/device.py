# SPDX-License-Identifier: Apache-2.0
"""The prefetching runtime of each of vLLM's platforms, and its budget per all-reduce."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from vllm_tiered.adapter.device import process_cpus
from vllm_tiered.adapter.l2.kv import StepKv
from vllm_tiered.config import L2Config
from vllm_tiered.l2 import cuda
from vllm_tiered.l2.budget import SHARE, auto_budget_bytes, last_level_cache
from vllm_tiered.l2.cuda import CudaRuntime
from vllm_tiered.l2.prefetcher import open_prefetcher
from vllm_tiered.l2.runtime import L2Runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class L2Device:
    """Prefetching runtime of one rank.

    Attributes:
        runtime: does the prefetches.
        budget_bytes: limit of the prefetches behind one all-reduce.
        spare_cpus: CPUs that no rank computes on, for the prefetching thread; None on a GPU, which
            has a stream for it.
    """

    runtime: L2Runtime | CudaRuntime
    budget_bytes: int
    spare_cpus: int | None

    def synchronize(self) -> None:
        """Wait until the GPU is idle, so that a clock may be read."""
        if isinstance(self.runtime, CudaRuntime):
            self.runtime.synchronize()


def open_device(config: L2Config, device_type: str, kv: StepKv, group: Any) -> L2Device:
    """Open the prefetching runtime of this process's rank.

    Args:
        config: section `l2` of the configuration.
        device_type: as vLLM's platform names it.
        kv: where a step's KV lies.
        group: vLLM's tensor-parallel group.

    Raises:
        UnsupportedError: the size of the cache is not known.
    """
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        auto_bytes = int(SHARE * cuda.cache_bytes(device))
        return L2Device(
            runtime=cuda.make_runtime(device, kv.tables),
            budget_bytes=_fixed_bytes(config) or auto_bytes,
            spare_cpus=None,
        )
    mine = os.sched_getaffinity(0)
    masks: list[set[int]] = [set()] * group.world_size
    torch.distributed.all_gather_object(masks, mine, group=group.cpu_group)
    # A spare core if there is one; else the rank's own cores, which wait in the all-reduce.
    spare = process_cpus() - set().union(*masks)
    return L2Device(
        budget_bytes=_fixed_bytes(config) or _shared_bytes(min(mine), masks),
        runtime=L2Runtime(open_prefetcher(spare or mine), kv.spans),
        spare_cpus=len(spare),
    )


def _fixed_bytes(config: L2Config) -> int | None:
    return None if config.budget_mib == "auto" else int(config.budget_mib * (1 << 20))


def _shared_bytes(cpu: int, masks: list[set[int]]) -> int:
    cache = last_level_cache(cpu)
    return auto_budget_bytes(cache, sum(bool(mask & cache.cpus) for mask in masks))
