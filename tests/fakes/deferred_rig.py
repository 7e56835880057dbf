# SPDX-License-Identifier: Apache-2.0
"""FFN runtimes on the fake CUDA runtime, and the faults that tests inject into them.

The fake runs compute and copies deferred, in any order that events allow.
"""

import random

import pytest
import torch

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fakes.deferred_torch import NEAR, DeferredTorch, now
from tests.fixtures.ffn_models import Ffn
from tests.fixtures.ffn_runtimes import Scripted, close
from vllm_tiered.devices.mailbox import Mailbox
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.runtime import FfnRuntime

HASTES = pytest.mark.parametrize("haste", [0.0, 0.6, 0.95])

Due = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of an output, which is valid after its computation, and the expected output."""


class ScriptedNear(Scripted):
    """Scripted predictor whose scores are on the GPU."""

    def scores(self, x_BH: torch.Tensor) -> torch.Tensor:
        return self.next_BN.to(NEAR)


class DeferredRig:
    """Builder of runtimes on the fake; it compares their outputs after the fake has run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ffn: Ffn, seed: int, haste: float) -> None:
        print(f"seed {seed}, haste {haste}")
        self.rng = random.Random(seed)
        self.ffn = ffn
        self.device = SimulatedCudaDevice(self.rng, haste=haste)
        self.torch = DeferredTorch(self.device)
        self.due: Due = []
        self.torch.defer_matmul(monkeypatch)

    def runtime(self, plan, predictors=(), **kwargs) -> FfnRuntime:
        return FfnRuntime(
            self.ffn.open(), plan, self.device, predictors, near_device=NEAR, **kwargs
        )

    def near(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(NEAR)

    def settle(self) -> None:
        with now():
            self.device.cuda.run_all()
            for found, expected in self.due:
                assert close(found, expected)
        self.due.clear()


def resident_neurons(runtime: FfnRuntime, layer: int) -> dict[Precision, torch.Tensor]:
    rows = runtime.layers[layer].resident_neurons()
    return {p: torch.from_numpy(neurons[neurons >= 0]) for p, neurons in rows.items()}


def done_event(device):
    """Return an event that counts as done but was never recorded: no stream waits for it."""
    event = device._new_event()
    event.is_recorded = event._is_done = True
    return event


def compute_is_not_held(monkeypatch):
    monkeypatch.setattr(SimulatedCudaDevice, "wait", lambda self, event: 0.0)


def scores_are_read_early(monkeypatch):
    d2h = Mailbox.d2h

    def hasty(self, tensors):
        with monkeypatch.context() as patched:
            patched.setattr(self._device, "compute_event", lambda: done_event(self._device))
            return d2h(self, tensors)

    monkeypatch.setattr(Mailbox, "d2h", hasty)
