# SPDX-License-Identifier: Apache-2.0
"""Selection of the device by vLLM's platform."""

import pytest
import torch
from vllm.platforms import current_platform

from vllm_tiered.adapter import device
from vllm_tiered.devices.cpu import CpuDevice


@pytest.mark.parametrize(
    ("has_gpu", "platform_is_cuda", "is_gpus"),
    [(False, False, False), (True, False, False), (True, True, True)],
    ids=["no-gpu", "vllm-for-cpu", "vllm-for-cuda"],
)
def test_the_device_is_the_platforms(has_gpu, platform_is_cuda, is_gpus, monkeypatch):
    """A GPU in the machine is not enough: with vLLM's CPU backend pages are in DRAM."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: platform_is_cuda)
    gpus = object()
    monkeypatch.setattr(device, "cuda_device", lambda: gpus)
    made = device.make_device()
    assert (made is gpus) == is_gpus
    if isinstance(made, CpuDevice):
        made.close()
