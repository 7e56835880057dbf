# SPDX-License-Identifier: Apache-2.0
"""FFN layers with failed, interrupted or slow reads raise or compute the right neurons."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.devices import DelayedDevice
from tests.fixtures.ffn_models import Ffn, random_ffn
from tests.fixtures.ffn_runtimes import (
    POLICIES,
    Scripted,
    check_bytes,
    check_precisions,
    close,
    exact,
    mixed,
)
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.errors import IntegrityError
from vllm_tiered.ffn import memory_plan
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.loader.arrival import settle
from vllm_tiered.ffn.loader.backend import NeuronBackend
from vllm_tiered.ffn.memory_plan import FfnPlan
from vllm_tiered.ffn.runtime import CachePolicy, FfnRuntime
from vllm_tiered.ffn.selection import Mix, select
from vllm_tiered.ffn.store.format import NEURONS


@pytest.fixture(scope="module")
def ffn(tmp_path_factory: pytest.TempPathFactory) -> Ffn:
    return random_ffn(tmp_path_factory.mktemp("store") / "ffn", gated=True, num_layers=5)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "_CHUNK_BYTES", 10 * 1024)


def scripted(ffn: Ffn, plan: FfnPlan, policy: CachePolicy = "atu", device: CpuDevice | None = None):
    predictors = [Scripted(ffn.shape.neurons) for _ in range(ffn.shape.num_layers)]
    device = device or CpuDevice()
    runtime = FfnRuntime(ffn.open(), plan, device, predictors, policy=policy, window=2)
    return runtime, predictors


class Faults:
    """Injected faults: some loads fail when they are submitted, others when they are waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.share = 0.0
        self._rng = np.random.default_rng(seed)
        load = NeuronBackend.load

        def loaded(backend, layer, precision, *args, **kwargs):
            if self._rng.random() < self.share:
                raise IntegrityError(f"layer {layer}, {precision.value}")
            arrival = load(backend, layer, precision, *args, **kwargs)
            return Failing(arrival, self) if self._rng.random() < self.share else arrival

        monkeypatch.setattr(NeuronBackend, "load", loaded)


class Failing:
    """Arrival whose wait fails while the test injects faults."""

    def __init__(self, arrival, faults: Faults) -> None:
        self._arrival = arrival
        self._faults = faults

    def wait(self) -> None:
        self._arrival.wait()
        if self._faults.share:
            raise IntegrityError("damaged")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_steps_after_failed_ones_have_the_right_neurons(ffn, policy, seed, monkeypatch) -> None:
    """That holds for failures in any buffer and with any pending moves."""
    faults = Faults(monkeypatch, seed)
    mix = (0.1, 0.15, 0.2)
    runtime, predictors = scripted(ffn, mixed(ffn, mix), policy)
    rng = np.random.default_rng(seed)
    failed = 0
    for _ in range(60):
        batch = int(rng.integers(1, 4))
        predictors[0].next_BN = torch.from_numpy(rng.random((batch, 96))).float()
        x_BH = torch.from_numpy(rng.standard_normal((batch, 64))).float()
        faults.share = 0.3
        try:
            runtime.layers[0].compute(x_BH, True)
        except IntegrityError:
            failed += 1
        faults.share = 0
        runtime.layers[0].check_integrity()
        cache = runtime.layers[0].resources.cache
        for precision in cache.caches:
            check_bytes(ffn, runtime, 0, precision)
        before = runtime.stats.sparse_steps
        found = runtime.layers[0].compute(x_BH, True)
        if runtime.stats.sparse_steps == before:
            assert close(found, ffn.dense(0, x_BH))
            continue
        near = {p: torch.from_numpy(one.resident()) for p, one in cache.caches.items()}
        wanted = select(predictors[0].next_BN, Mix.from_shares(mix))
        check_precisions(wanted, near)
        assert close(found, ffn.output_of(0, x_BH, near))
    assert failed > 10
    runtime.close()


def test_dense_steps_after_failed_ones_have_every_neuron(ffn, monkeypatch) -> None:
    """That holds even if the caught errors, and so the step's frames, are kept alive."""
    faults = Faults(monkeypatch, seed=1)
    runtime = FfnRuntime(ffn.open(), exact(ffn, num_permanent=10, num_far_layers=1), CpuDevice())
    x_BH = torch.randn(2, 64)
    errors = []
    for layer in itertools.islice(itertools.cycle(range(5)), 60):
        faults.share = 0.2
        try:
            runtime.layers[layer].compute(x_BH, False)
        except IntegrityError as error:
            errors.append(error)
        faults.share = 0
        assert close(runtime.layers[layer].compute(x_BH, False), ffn.dense(layer, x_BH))
    assert len(errors) > 10
    runtime.close()


def test_one_layer_is_streamed_once_a_step(tmp_path) -> None:
    """The chunks loaded ahead of a single layer's end are its first ones."""
    ffn = random_ffn(tmp_path / "one", gated=False, num_layers=1)
    runtime = FfnRuntime(ffn.open(), exact(ffn, num_permanent=0, num_far_layers=0), CpuDevice())
    chunks = runtime._rank.stream.chunks(0, wraps=True)
    found = [chunk.num_neurons for chunk in itertools.islice(chunks, 200)]
    assert sum(found) == 96 and len(found) > 3
    for _ in range(3):
        x_BH = torch.randn(3, 64)
        assert close(runtime.layers[0].compute(x_BH, False), ffn.dense(0, x_BH))
    runtime.close()


def test_streamed_in_8_bit(ffn, monkeypatch) -> None:
    """A store without full precision; the last chunk is smaller than the others."""
    monkeypatch.setattr(memory_plan, "_CHUNK_BYTES", 7 * bundle_stride(ffn.shape, Precision.INT8))
    plan = memory_plan.plan_mixed(
        ffn.shape,
        Mix.from_shares((0, 0.5, 0)),
        active_shares=[1.0] * ffn.shape.num_layers,
        streamed=Precision.INT8,
        near_bytes=None,
        far_bytes=0,
        table_bytes=0,
    )
    assert ffn.shape.neurons % plan.chunk_neurons
    runtime, _ = scripted(ffn, plan)
    x_BH = torch.randn(4, 64)
    everyone = {Precision.INT8: torch.arange(96)}
    for layer in range(5):
        found = runtime.layers[layer].compute(x_BH, False)
        assert close(found, ffn.output_of(layer, x_BH, everyone))
    runtime.close()


@pytest.mark.parametrize("only_decodes", [True, False])
def test_no_token_at_all(ffn, only_decodes) -> None:
    runtime, predictors = scripted(ffn, mixed(ffn, (0.1, 0, 0.1)))
    predictors[0].next_BN = torch.rand(0, 96)
    assert runtime.layers[0].compute(torch.empty(0, 64), only_decodes).shape == (0, 64)
    x_BH = torch.randn(2, 64)
    assert close(runtime.layers[0].compute(x_BH, False), ffn.dense(0, x_BH))
    runtime.close()


# Prefetch -------------------------------------------------------------------------------


def test_a_dense_layer_does_not_use_what_is_prefetched_for_others(ffn) -> None:
    """Layers share the prefetch buffers, and a chunk loaded ahead may be used much later."""
    plan = replace(mixed(ffn, (1, 0, 0)), prefetches=True)
    device = DelayedDevice(seed=1, max_delay_seconds=0.05)
    runtime, _ = scripted(ffn, plan, device=device)
    everyone = {Precision.FULL: np.arange(96)}
    x_BH = torch.randn(1, 64)
    for _ in range(10):
        runtime.backend.prefetch(1, everyone)
        runtime.layers[0].compute(x_BH, False)
        runtime.backend.prefetch(4, everyone)  # into the same prefetch buffer
        assert close(runtime.layers[1].compute(x_BH, False), ffn.dense(1, x_BH))
    runtime.close()


def test_unused_prefetched_neurons_may_be_damaged(tmp_path: Path) -> None:
    ffn = random_ffn(tmp_path / "ffn", gated=True)
    plan = replace(mixed(ffn, (0.25, 0, 0)), prefetches=True)
    runtime, predictors = scripted(ffn, plan)
    store = ffn.open()
    offset = store._form.offset(2, Precision.FULL) + 40 * bundle_stride(ffn.shape, Precision.FULL)
    store.close()
    with (ffn.path / NEURONS).open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * 8)
    scores = torch.arange(96, dtype=torch.float32)[None]
    x_BH = torch.randn(1, 64)
    runtime.backend.prefetch(2, {Precision.FULL: np.array([40, 90, 95])})
    predictors[2].next_BN = scores
    chosen = {Precision.FULL: torch.arange(72, 96)}
    assert close(runtime.layers[2].compute(x_BH, True), ffn.output_of(2, x_BH, chosen))
    predictors[2].next_BN = -scores
    runtime.backend.prefetch(2, {Precision.FULL: np.array([0, 40])})
    predictors[2].next_BN = -(scores - 40).abs()
    with pytest.raises(IntegrityError, match=r"layer 2, neuron 40, full .* damaged"):
        runtime.layers[2].compute(x_BH, True)
    runtime.close()


# Interrupts -----------------------------------------------------------------------------


class Interrupted:
    """Arrival whose first two waits are interrupted."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.num_calls = 0
        self._error = error

    def wait(self) -> None:
        self.num_calls += 1
        if self.num_calls < 3:
            raise KeyboardInterrupt
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, IntegrityError("damaged"), SystemExit("a reader's end")])
def test_no_load_is_under_way_after_an_interrupt(error) -> None:
    arrivals = [Interrupted(), Interrupted(error), Interrupted()]
    errors = settle(arrivals)
    assert all(arrival.num_calls >= 3 for arrival in arrivals)
    assert isinstance(errors[0], KeyboardInterrupt)
    assert error is None or error in errors
