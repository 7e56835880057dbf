# SPDX-License-Identifier: Apache-2.0
"""FFNs of an engine on the CPU backend, on the GPU's device over a fake CUDA runtime."""

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
    """From now on copies and products of an engine's FFN run in the fake's streams, until vLLM is
    given a layer's output.

    Args:
        haste: of the fake.
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
    # So small a model is computed faster densely.
    monkeypatch.setattr(DenseSparseCostModel, "prefers_dense", lambda *args: False)
    return deferred
