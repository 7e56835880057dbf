# SPDX-License-Identifier: Apache-2.0
"""The device behind vLLM's platform: one for KV pages, one for weights, in each worker."""

import os

import torch

from vllm_tiered.devices.base import Device
from vllm_tiered.devices.cpu import CpuDevice


def make_device() -> Device:
    """Return the device of vLLM's platform. Tests replace this function."""
    # torch first: it is imported already, and vLLM's platforms take a second.
    if torch.cuda.is_available():
        from vllm.platforms import current_platform

        if current_platform.is_cuda():
            return cuda_device()
    return CpuDevice(cpus=process_cpus())


def cuda_device(index: int | None = None) -> Device:
    """Return a GPU's device, with our kernels and the settings measured for it.

    Args:
        index: the GPU's; the current one if None, which is the worker's own.
    """
    from functools import partial

    from vllm_tiered.devices.cuda.device import CudaDevice
    from vllm_tiered.devices.cuda.runtime import CudaRuntime
    from vllm_tiered.kernels import tuned
    from vllm_tiered.kernels.kv_pages.api import copy_pages

    name = torch.cuda.get_device_name(index)
    parameters = tuned.parameters("kv_pages", name)
    return CudaDevice(
        CudaRuntime(partial(copy_pages, device_name=name), index),
        engine_run_bytes=parameters["engine_run_bytes"],
    )


def process_cpus() -> set[int]:
    """Return the CPUs that this process was given, before vLLM bound its threads to single cores.

    Its other threads' masks still tell: any thread that was not bound has them all.
    """
    cpus: set[int] = set()
    for thread_id in os.listdir("/proc/self/task"):
        try:
            cpus |= os.sched_getaffinity(int(thread_id))
        except ProcessLookupError:  # the thread ended in the meantime
            continue
    return cpus
