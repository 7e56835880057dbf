# SPDX-License-Identifier: Apache-2.0
"""Deferred FFNs of an engine on the CPU backend, with the GPU's device over a fake CUDA runtime."""

import random
from typing import Any

import pytest
import torch

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fakes.deferred_torch import NEAR, DeferredTorch
from vllm_tiered.adapter.ffn import engine as ffn_engine
from vllm_tiered.ffn.cost_model import DenseSparseCostModel
from vllm_tiered.ffn.layer import FfnLayer


def defer_compute(monkeypatch: pytest.MonkeyPatch, haste: float) -> DeferredTorch:
    """Run the copies and matmuls of an engine's FFN in the fake's streams from now on.

    Each layer's work is complete when vLLM gets the layer's output.

    Args:
        haste: 0 runs only work that is waited for, 1 all at once, others in between.
    """
    device = SimulatedCudaDevice(random.Random(3), haste=haste)
    deferred = DeferredTorch(device)
    deferred.defer_matmul(monkeypatch)
    monkeypatch.setattr(ffn_engine, "make_device", lambda: device)
    start, compute = ffn_engine.FfnEngine.start, FfnLayer.compute

    def start_near(self: Any, near_device: torch.device) -> None:
        with deferred:
            start(self, NEAR)
        device.cuda.run_all()
        deferred.keep()

    def compute_near(self: Any, x_BH: torch.Tensor, only_decodes: bool) -> torch.Tensor:
        with deferred:
            found = compute(self, x_BH, only_decodes)
            device.compute_event().wait()
        deferred.release()
        return found

    monkeypatch.setattr(ffn_engine.FfnEngine, "start", start_near)
    monkeypatch.setattr(FfnLayer, "compute", compute_near)
    # Such a small model is computed faster densely.
    monkeypatch.setattr(DenseSparseCostModel, "prefers_dense", lambda *args: False)
    return deferred
