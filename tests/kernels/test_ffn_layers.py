# SPDX-License-Identifier: Apache-2.0
"""Layers of ffn/ over the GPU's kernels: chosen, brought from far memory and multiplied by them.

Without a GPU the device is the double of CUDA, in haste: its copies are over when they are
submitted, as the interpreter's kernels are.
"""

import random

import numpy as np
import pytest
import torch

from tests.cuda_double import SimulatedCudaDevice
from tests.ffn.models import Ffn, random_ffn
from tests.ffn.test_runtime import Scripted, check_bytes, mixed
from vllm_tiered.cost.ffn import Precision
from vllm_tiered.ffn import choice, compute, native
from vllm_tiered.ffn.runtime import FfnRuntime
from vllm_tiered.ffn.selection import Mix, select
from vllm_tiered.kernels.neuron_ffn import api
from vllm_tiered.tiers.base import Device

MIX = (0.1, 0.2, 0.3)


@pytest.fixture(params=[True, False], ids=["gated", "plain"])
def ffn(request: pytest.FixtureRequest, tmp_path) -> Ffn:
    return random_ffn(tmp_path / "ffn", gated=request.param, num_layers=2, hidden=64, neurons=40)


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Device:
    """The GPU's, or the double's, whose regions are taken for a GPU's."""
    if device.type == "cuda":
        from vllm_tiered.adapter.device import cuda_device

        return cuda_device()
    monkeypatch.setattr(compute, "gpu_kernels", lambda region: api)
    monkeypatch.setattr(choice.Choice, "begin", choice.Choice.ranked)
    monkeypatch.setattr(native, "best", lambda: pytest.fail("that was the processor"))
    return SimulatedCudaDevice(random.Random(0), haste=1.0)


@pytest.mark.parametrize("far_layers", [0, 2], ids=["stored", "far"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_chosen_neurons(monkeypatch, ffn, far_layers, num_tokens, tiers, device) -> None:
    """Those of far memory come with the product, and those of the store by copies."""
    far_bytes = far_layers * 1 << 20
    plan = mixed(ffn, MIX, far_bytes=far_bytes)
    assert plan.far_layers == far_layers
    brought: list[int] = []
    fill_and_multiply = api.fill_and_multiply

    def counting(x_BH, bundles, missing, *args, **kwargs):
        brought.append(len(missing.near_ids))
        return fill_and_multiply(x_BH, bundles, missing, *args, **kwargs)

    monkeypatch.setattr(api, "fill_and_multiply", counting)
    predictors = [Near(ffn.shape.neurons, device) for _ in range(ffn.shape.num_layers)]
    runtime = FfnRuntime(ffn.open(), plan, tiers, predictors, near_device=device)
    rng = np.random.default_rng(1)
    for step in range(6):
        layer = step % 2
        # Tokens that want nearly the same, which fits.
        drawn = rng.random(ffn.shape.neurons) + 0.02 * rng.random((num_tokens, ffn.shape.neurons))
        scores_BN = torch.from_numpy(drawn).float()
        predictors[layer].next_BN = scores_BN
        x_BH = torch.from_numpy(rng.standard_normal((num_tokens, 64))).float()
        found = runtime.layers[layer].compute(x_BH.to(device), True).cpu()
        cache = runtime.layers[layer].cache
        assert cache is not None
        cache.check_integrity()
        near = {p: torch.from_numpy(one.resident()) for p, one in cache.caches.items()}
        better: set[int] = set()
        for precision in (p for p in Precision if p in near):
            better |= set(near[precision].tolist())
            assert set(select(scores_BN, Mix.of(MIX)).of(precision).tolist()) <= better
            if device.type == "cpu":
                check_bytes(ffn, runtime, layer, precision)
        expected = ffn.product(layer, x_BH, near)
        atol = 1e-4 * float(expected.abs().max())
        torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)
    assert runtime.use.sparse_steps == 6
    assert (sum(brought) == runtime.use.misses) if far_layers else not brought
    use = runtime.source.use
    assert bool(use.far_bytes) == bool(far_layers) and bool(use.storage_bytes) != bool(far_layers)
    runtime.close()


class Near(Scripted):
    """Scores where the model is."""

    def __init__(self, num_neurons: int, device: torch.device) -> None:
        super().__init__(num_neurons)
        self._device = device

    def scores(self, x_BH: torch.Tensor) -> torch.Tensor:
        return self.next_BN.to(self._device)
