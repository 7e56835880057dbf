# SPDX-License-Identifier: Apache-2.0
"""Device for vLLM's platform; each worker has one for KV pages and one for weights."""

import os

import torch

from vllm_tiered.devices.base import Device
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.narrow_pages import NarrowCodec, conversion_arguments
from vllm_tiered.devices.pages import PageCodec


def make_device() -> Device:
    """Make a device for vLLM's platform. Tests replace this function."""
    if on_gpu():
        return cuda_device()
    return CpuDevice(cpus=process_cpus())


def on_gpu() -> bool:
    """Return whether vLLM computes on a GPU that it sees."""
    # Ask torch first: it is already imported, and importing vLLM's platforms takes a second.
    if not torch.cuda.is_available():
        return False
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def near_torch_device() -> torch.device:
    """Return the torch device of near memory: the current GPU, or the host where vLLM has none."""
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")


def cuda_device(index: int | None = None) -> Device:
    """Make a GPU's device, with our kernels and the settings tuned for it.

    Args:
        index: index of the GPU; None for the current one, which is the worker's own.
    """
    from functools import partial

    from vllm_tiered.devices.cuda.device import CudaDevice
    from vllm_tiered.devices.cuda.runtime import CudaRuntime
    from vllm_tiered.kernels import tuned
    from vllm_tiered.kernels.kv_pages.api import copy_pages
    from vllm_tiered.kernels.kv_pages.narrow import convert_pages

    name = torch.cuda.get_device_name(index)
    parameters = tuned.parameters("kv_pages", name)

    def convert(
        src_PW: torch.Tensor,
        src_ids: torch.Tensor,
        dst_PW: torch.Tensor,
        dst_ids: torch.Tensor,
        codec: PageCodec,
    ) -> None:
        assert isinstance(codec, NarrowCodec)
        arguments = conversion_arguments(codec.page_format)
        convert_pages(src_PW, src_ids, dst_PW, dst_ids, **arguments, device_name=name)

    return CudaDevice(
        CudaRuntime(partial(copy_pages, device_name=name), convert, index),
        engine_run_bytes=parameters["engine_run_bytes"],
    )


def process_cpus() -> set[int]:
    """Return the CPUs that this process had before vLLM bound its threads to single cores.

    The masks of its other threads show them: a thread that was not bound still has all CPUs.
    """
    cpus: set[int] = set()
    for thread_id in os.listdir("/proc/self/task"):
        try:
            cpus |= os.sched_getaffinity(int(thread_id))
        except ProcessLookupError:  # the thread ended in the meantime
            continue
    return cpus
