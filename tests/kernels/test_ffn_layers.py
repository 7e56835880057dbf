# SPDX-License-Identifier: Apache-2.0
"""Tests of FFN layers that select, load and multiply neurons with the GPU's kernels.

Without a GPU the device is the fake CUDA runtime with ``haste=1``: copies are complete when they
are submitted, as the interpreter's kernels are.
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fixtures.ffn_models import Ffn, random_ffn
from tests.fixtures.ffn_runtimes import (
    Scripted,
    check_bytes,
    check_precisions,
    mixed,
)
from vllm_tiered import native
from vllm_tiered.devices.base import Device
from vllm_tiered.ffn import runtime
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.matmul import compute
from vllm_tiered.ffn.matmul.quantise import expand, quantise
from vllm_tiered.ffn.memory_plan import FfnPlan
from vllm_tiered.ffn.predictor.gate import Gate
from vllm_tiered.ffn.runtime import FfnRuntime
from vllm_tiered.ffn.selection import Mix, select
from vllm_tiered.ffn.selector import Selector
from vllm_tiered.ffn.strategy import sparse_on_device
from vllm_tiered.ffn.strategy.base import LayerStats
from vllm_tiered.ffn.strategy.sparse_on_device import MAX_DEVICE_TOKENS
from vllm_tiered.kernels.neuron_ffn import api

MIX = (0.1, 0.2, 0.3)


@pytest.fixture(params=[True, False], ids=["gated", "plain"])
def ffn(request: pytest.FixtureRequest, tmp_path) -> Ffn:
    return random_ffn(tmp_path / "ffn", gated=request.param, num_layers=2, hidden=64, neurons=40)


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Device:
    """Return the GPU's device, or the fake device with its buffers treated as a GPU's."""
    if device.type == "cuda":
        from vllm_tiered.adapter.device import cuda_device

        return cuda_device()
    for module in (compute, runtime):
        monkeypatch.setattr(module, "gpu_kernels", lambda buffer: api)
    monkeypatch.setattr(Selector, "encode", Selector.rank)
    monkeypatch.setattr(native, "best", lambda: pytest.fail("that was the processor"))
    return SimulatedCudaDevice(random.Random(0), haste=1.0)


class Steps:
    """Steps of two layers, with scores similar to the previous step's."""

    def __init__(self, ffn: Ffn, plan: FfnPlan, tiers: Device, device: torch.device, **kwargs: Any):
        self.ffn, self.device = ffn, device
        neurons = ffn.shape.neurons
        self.rng = np.random.default_rng(1)
        self.predictors = [Near(neurons, device) for _ in range(ffn.shape.num_layers)]
        self.runtime = FfnRuntime(
            ffn.open(), plan, tiers, self.predictors, near_device=device, **kwargs
        )
        self.drawn = self.rng.random((2, neurons))

    def scores(self, layer: int, num_tokens: int, *, spread: float = 0.02) -> torch.Tensor:
        """Draw scores; tokens want nearly the same neurons if ``spread`` is small."""
        neurons = self.ffn.shape.neurons
        self.drawn[layer] = 0.6 * self.drawn[layer] + 0.4 * self.rng.random(neurons)
        drawn = self.drawn[layer] + spread * self.rng.random((num_tokens, neurons))
        self.predictors[layer].next_BN = scores_BN = torch.from_numpy(drawn).float()
        return scores_BN

    def compute(self, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a layer on random input, and return the input and the output."""
        x_BH = torch.from_numpy(self.rng.standard_normal((num_tokens, 64))).float()
        return x_BH, self.runtime.layers[layer].compute(x_BH.to(self.device), True).cpu()

    def stats(self) -> LayerStats:
        """Return statistics of all steps, after the GPU has reported its own."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.runtime.stats

    def owns_index(self, layer: int) -> bool:
        """Return whether the GPU owns a layer's cache index."""
        on_device = self.runtime.layers[layer].on_device
        return on_device is not None and on_device.owns_index

    def near(self, layer: int) -> dict[Precision, torch.Tensor]:
        """Return the neurons in the slots, after checking their bytes and the cache index."""
        self.runtime.layers[layer].check_integrity()
        rows = self.runtime.layers[layer].resident_neurons()
        for precision in rows:
            check_bytes(self.ffn, self.runtime, layer, precision)
        return {p: torch.from_numpy(neurons[neurons >= 0]) for p, neurons in rows.items()}


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    atol = 1e-4 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_far_layers", [0, 2], ids=["stored", "far"])
@pytest.mark.parametrize("policy", ["atu", "window"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_chosen_neurons(ffn, num_far_layers, policy, num_tokens, tiers, device) -> None:
    """The FFN kernel loads neurons from far memory; copies load neurons from the store."""
    plan = mixed(ffn, MIX, far_bytes=num_far_layers * 1 << 20)
    assert plan.num_far_layers == num_far_layers
    steps = Steps(ffn, plan, tiers, device, policy=policy, window=2)
    for step in range(6):
        layer = step % 2
        scores_BN = steps.scores(layer, num_tokens)
        x_BH, found = steps.compute(layer, num_tokens)
        near = steps.near(layer)
        check_precisions(select(scores_BN, Mix.from_shares(MIX)), near)
        check(found, ffn.output_of(layer, x_BH, near))
        assert steps.owns_index(layer) == bool(num_far_layers)
    stats, backend = steps.stats(), steps.runtime.backend.stats
    assert stats.sparse_steps == 6 and stats.misses > 0 and stats.hits > 0
    assert bool(backend.far_bytes) == bool(num_far_layers) != bool(backend.storage_bytes)
    steps.runtime.close()


@pytest.mark.slow
def test_the_cache_index_migrates(ffn, tiers, device) -> None:
    """The index migrates with more tokens than the GPU plans for; cached neurons stay cached."""
    steps = Steps(ffn, mixed(ffn, MIX, far_bytes=2 << 20), tiers, device)
    for num_tokens in (2, MAX_DEVICE_TOKENS + 1, MAX_DEVICE_TOKENS, 1):
        scores_BN = steps.scores(0, num_tokens, spread=0.001)
        x_BH, found = steps.compute(0, num_tokens)
        near = steps.near(0)
        check_precisions(select(scores_BN, Mix.from_shares(MIX)), near)
        check(found, ffn.output_of(0, x_BH, near))
        assert steps.owns_index(0) == (num_tokens <= MAX_DEVICE_TOKENS)
        before = steps.stats()
        steps.compute(0, num_tokens)  # the same scores
        after = steps.stats()
        assert after.misses == before.misses and after.hits > before.hits
    assert steps.runtime.stats.sparse_steps == 8
    steps.runtime.close()


def test_neurons_without_a_slot_are_multiplied(monkeypatch, ffn, tiers, device) -> None:
    """With a plan on the GPU, a batch that wants more than a buffer holds stays sparse."""
    plan = mixed(ffn, (0.25, 0, 0), far_bytes=2 << 20)
    plan = replace(plan, cache_slots=[{Precision.FULL: 12}] * ffn.shape.num_layers)
    steps = Steps(ffn, plan, tiers, device)
    for _ in range(3):
        scores_BN = steps.scores(0, 4, spread=2.0)
        x_BH, found = steps.compute(0, 4)
        wanted = torch.from_numpy(select(scores_BN, Mix.from_shares((0.25, 0, 0))).full)
        near = steps.near(0)[Precision.FULL]
        assert len(near) == 12 < len(wanted) and set(near.tolist()) <= set(wanted.tolist())
        check(found, ffn.output_of(0, x_BH, {Precision.FULL: wanted}))
    stats = steps.stats()
    assert stats.dense_steps == 0 and stats.sparse_steps == 3
    stride = steps.runtime.layers[0].resources.buffers[Precision.FULL].bundles.shape[1]
    # 4 tokens take one launch, so nothing is read twice.
    assert steps.runtime.backend.stats.far_bytes == stats.misses * stride
    before = steps.runtime.backend.stats.far_bytes
    monkeypatch.setattr(sparse_on_device, "num_fills", lambda buffer, num_tokens: 3)
    steps.scores(0, 4, spread=2.0)
    steps.compute(0, 4)
    missing = steps.stats().misses - stats.misses
    num_wanted = missing + steps.stats().hits - stats.hits
    read = steps.runtime.backend.stats.far_bytes - before
    assert read == (missing + 2 * (num_wanted - 12)) * stride
    steps.runtime.close()


def test_a_gate_in_4_bit_selects(ffn, tiers, device) -> None:
    """All neurons whose gate (or fc1) is positive in 4 bit, and they alone."""
    gates = [Gate.of(ffn.weights[layer], ffn.up_bias[layer]) for layer in range(2)]
    plan = mixed(ffn, (1, 0, 0), far_bytes=2 << 20)
    runtime = FfnRuntime(ffn.open(), plan, tiers, gates, near_device=device)
    for step in range(4):
        layer, x_BH = step % 2, torch.randn(1 + step // 2, 64)
        found_BH = runtime.layers[layer].compute(x_BH.to(device), True).cpu()
        near = {
            p: torch.from_numpy(ids[ids >= 0])
            for p, ids in runtime.layers[layer].resident_neurons().items()
        }
        codes, scales = quantise(ffn.weights[layer][:, :2], Precision.INT4, None)
        shape = replace(ffn.shape, gated=False)
        gate_NH = expand(codes, scales, shape, Precision.INT4, torch.float32)[:, 0]
        bias_N = ffn.up_bias[layer]
        first_BN = x_BH @ gate_NH.T + (0 if bias_N is None else bias_N)
        active = (first_BN > 0).any(dim=0).nonzero()[:, 0]
        assert 0 < len(active) < 40 and sorted(near[Precision.FULL].tolist()) == active.tolist()
        check(found_BH, ffn.output_of(layer, x_BH, near))
    assert runtime.stats.sparse_steps == 4
    runtime.close()


def test_a_failed_step_leaves_no_neuron_marked_as_near(monkeypatch, ffn, tiers, device) -> None:
    steps = Steps(ffn, mixed(ffn, MIX, far_bytes=2 << 20), tiers, device)
    steps.scores(0, 1)
    steps.compute(0, 1)
    failing = pytest.raises(RuntimeError, match="out of memory")
    with monkeypatch.context() as patched, failing:
        patched.setattr(api, "load_and_compute", out_of_memory)
        steps.scores(0, 1)
        steps.compute(0, 1)
    assert all(len(one) == 0 for one in steps.near(0).values())
    steps.scores(0, 1)
    x_BH, found = steps.compute(0, 1)
    check(found, ffn.output_of(0, x_BH, steps.near(0)))
    steps.runtime.close()


def out_of_memory(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("out of memory")


class Near(Scripted):
    """Predictor with given scores, on the model's device."""

    def __init__(self, num_neurons: int, device: torch.device) -> None:
        super().__init__(num_neurons)
        self._device = device

    def scores(self, x_BH: torch.Tensor) -> torch.Tensor:
        return self.next_BN.to(self._device)
