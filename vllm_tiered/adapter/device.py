# SPDX-License-Identifier: Apache-2.0
"""The device behind vLLM's platform: one for KV pages, one for weights, in each worker."""

import os

from vllm_tiered.tiers.base import Device
from vllm_tiered.tiers.cpu import CpuDevice


def make_device() -> Device:
    """The device of vLLM's CPU backend. Tests replace this function."""
    return CpuDevice(cpus=process_cpus())


def process_cpus() -> set[int]:
    """The CPUs that this process was given, before vLLM bound its threads to single cores.

    Its other threads' masks still tell: any thread that was not bound has them all.
    """
    cpus: set[int] = set()
    for thread_id in os.listdir("/proc/self/task"):
        try:
            cpus |= os.sched_getaffinity(int(thread_id))
        except ProcessLookupError:  # the thread ended in the meantime
            continue
    return cpus
