# SPDX-License-Identifier: Apache-2.0
"""FFN layers against the dense product, with neurons in any tier and layers in any order."""

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

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
from vllm_tiered import trial
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.errors import BudgetError, IntegrityError
from vllm_tiered.ffn import memory_plan
from vllm_tiered.ffn.cost_model import DenseSparseCostModel
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.memory_plan import plan_exact
from vllm_tiered.ffn.runtime import CachePolicy, FfnRuntime
from vllm_tiered.ffn.selection import Mix, select
from vllm_tiered.trial import LONG_PHASE_STEPS, WARM_STEPS


@pytest.fixture(scope="module", params=[True, False], ids=["gated", "plain"])
def ffn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ffn:
    return random_ffn(tmp_path_factory.mktemp("store") / "ffn", gated=request.param)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "_CHUNK_BYTES", 10 * 1024)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill near memory with NaN before loads, and staging buffers after their chunk was used."""
    import vllm_tiered.ffn.loader.stream as stream
    import vllm_tiered.ffn.runtime as runtime

    for module in (runtime, stream):
        make = module.aligned_pages

        def nan_pages(num_pages: int, page_bytes: int, device: torch.device, make=make):
            pages = make(num_pages, page_bytes, device)
            pages.fill_(0xFF)
            return pages

        monkeypatch.setattr(module, "aligned_pages", nan_pages)
    chunks = stream.NeuronStream.chunks

    def poisoning(self, layer: int, *, wraps: bool) -> Iterator:
        for chunk in chunks(self, layer, wraps=wraps):
            yield chunk
            self.staging[chunk.buffer_id].data.fill_(0xFF)

    monkeypatch.setattr(stream.NeuronStream, "chunks", poisoning)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("num_permanent", [0, 1, 50, 96])
@pytest.mark.parametrize("num_far_layers", [0, 2, 3])
def test_every_neuron_wherever_it_is(ffn: Ffn, num_permanent: int, num_far_layers: int) -> None:
    device = DelayedDevice(seed=3, max_delay_seconds=0.0005)
    plan = exact(ffn, num_permanent=num_permanent, num_far_layers=num_far_layers)
    assert plan.num_permanent == num_permanent and plan.num_far_layers == num_far_layers
    runtime = FfnRuntime(ffn.open(), plan, device)
    generator = torch.Generator().manual_seed(1)
    # First in the model's order, then in another order.
    for layer in (0, 1, 2, 0, 1, 2, 2, 1, 1, 0):
        x_BH = torch.randn((int(torch.randint(1, 9, (1,))), 64), generator=generator)
        assert close(runtime.layers[layer].compute(x_BH, False), ffn.dense(layer, x_BH))
    assert runtime.stats.dense_steps == 10 and not runtime.stats.sparse_steps
    runtime.close()


def test_a_resident_layer_reads_nothing(ffn: Ffn) -> None:
    runtime = FfnRuntime(ffn.open(), exact(ffn, num_permanent=96, num_far_layers=0), CpuDevice())
    before = runtime.backend.stats.storage_bytes
    runtime.layers[1].compute(torch.ones(2, 64), False)
    assert runtime.backend.stats.storage_bytes == before
    runtime.close()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mix", [(0.1, 0.2, 0.3), (0.25, 0, 0), (0, 0, 1), (0.25, 0.25, 0.5)])
@pytest.mark.parametrize("seed", range(3))
def test_chosen_neurons_in_their_precision(
    ffn: Ffn, policy: CachePolicy, mix: tuple[float, float, float], seed: int
) -> None:
    """Random selections, batches and layers give the output of exactly the near neurons."""
    shape, chosen_mix = ffn.shape, Mix.from_shares(mix)
    # Seed 0: nothing is far. Seed 1: prefetched neurons are far. Seed 2: a layer is far too.
    plan = replace(mixed(ffn, mix), prefetches=seed > 0, num_far_layers=seed // 2)
    predictors = [Scripted(shape.neurons) for _ in range(shape.num_layers)]
    device = DelayedDevice(seed=seed, max_delay_seconds=0.0005)
    runtime = FfnRuntime(ffn.open(), plan, device, predictors, policy=policy, window=3)
    rng = np.random.default_rng(seed)
    scores = {layer: rng.random((8, shape.neurons)) for layer in range(shape.num_layers)}
    sparse = 0
    for step in range(40):
        layer, batch = step % 3, int(rng.integers(1, 4))
        # Scores change slowly from step to step.
        scores[layer] = 0.8 * scores[layer] + 0.2 * rng.random((8, shape.neurons))
        scores_BN = torch.from_numpy(scores[layer][:batch]).float()
        predictors[layer].next_BN = scores_BN
        x_BH = torch.from_numpy(rng.standard_normal((batch, 64))).float()
        before = runtime.stats.sparse_steps
        found = runtime.layers[layer].compute(x_BH, True)
        runtime.layers[layer].check_integrity()
        if runtime.stats.sparse_steps == before:
            assert close(found, ffn.dense(layer, x_BH))
            continue
        sparse += 1
        wanted = select(scores_BN, chosen_mix)
        cache = runtime.layers[layer].resources.cache
        assert cache is not None
        near = {p: torch.from_numpy(one.resident()) for p, one in cache.caches.items()}
        check_precisions(wanted, near)
        for precision in near:
            check_bytes(ffn, runtime, layer, precision)
        assert close(found, ffn.output_of(layer, x_BH, near))
    assert sparse >= 20
    if runtime.dynamic is not None:
        assert runtime.dynamic.hits > 0
    runtime.close()


def test_a_mix_so_small_that_no_neuron_is_left(ffn: Ffn) -> None:
    """A slot is there nevertheless, for tokens that want more than others."""
    runtime = FfnRuntime(
        ffn.open(),
        mixed(ffn, (0.001, 0, 0), far_bytes=1 << 20),
        CpuDevice(),
        [Scripted(ffn.shape.neurons) for _ in range(ffn.shape.num_layers)],
    )
    assert runtime.layers[0].resources.buffers[Precision.FULL].capacity == 2
    assert torch.equal(runtime.layers[0].compute(torch.ones(2, 64), True), torch.zeros(2, 64))
    runtime.close()


def test_a_failed_read_leaves_nothing_behind(ffn: Ffn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails, and the next step loads the neurons that did not arrive."""
    shape, mix = ffn.shape, Mix.from_shares((0.3, 0, 0))
    plan = mixed(ffn, (0.3, 0, 0))
    predictors = [Scripted(shape.neurons) for _ in range(shape.num_layers)]
    runtime = FfnRuntime(ffn.open(), plan, CpuDevice(), predictors)
    rng = np.random.default_rng(0)
    x_BH = torch.ones(1, 64)

    def fails(arrivals: object) -> None:
        """Raise while the bundles are still being loaded."""
        raise IntegrityError("layer 0, neuron 3, full is damaged")

    for step in range(6):
        predictors[0].next_BN = torch.from_numpy(rng.random((1, shape.neurons))).float()
        if step % 2:
            with monkeypatch.context() as patched:
                patched.setattr(runtime.backend, "wait", fails)
                with pytest.raises(IntegrityError, match="neuron 3"):
                    runtime.layers[0].compute(x_BH, True)
        found = runtime.layers[0].compute(x_BH, True)
        chosen = select(predictors[0].next_BN, mix).full
        expected = ffn.output_of(0, x_BH, {Precision.FULL: torch.from_numpy(chosen)})
        assert close(found, expected)
        check_bytes(ffn, runtime, 0, Precision.FULL)
    runtime.close()


def test_prompts_take_every_neuron(ffn: Ffn) -> None:
    plan = mixed(ffn, (0.1, 0, 0))
    predictors = [Scripted(ffn.shape.neurons) for _ in range(ffn.shape.num_layers)]
    runtime = FfnRuntime(ffn.open(), plan, CpuDevice(), predictors)
    x_BH = torch.randn(5, 64)
    for layer in range(3):
        assert close(runtime.layers[layer].compute(x_BH, False), ffn.dense(layer, x_BH))
    runtime.close()


def test_a_layer_that_is_dense_for_now_does_not_score_neurons(
    ffn: Ffn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DenseSparseCostModel, "is_surely_dense", lambda *args: True)
    monkeypatch.setattr(Scripted, "scores", lambda *args: pytest.fail("neurons were scored"))
    of_layer = [Scripted(ffn.shape.neurons) for _ in range(ffn.shape.num_layers)]
    runtime = FfnRuntime(ffn.open(), mixed(ffn, (0.1, 0, 0)), CpuDevice(), of_layer)
    x_BH = torch.randn(1, 64)
    for layer in range(3):
        assert close(runtime.layers[layer].compute(x_BH, True), ffn.dense(layer, x_BH))
    assert (runtime.stats.sparse_steps, runtime.stats.dense_steps) == (0, 3)
    runtime.close()


def test_a_dense_step_between_makes_the_next_one_cold_and_scoring_is_part_of_sparse_ones(
    ffn: Ffn, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[float, bool]] = []
    is_dense = iter([False, False, True, False, False])

    def add_sparse(
        _: DenseSparseCostModel, layer: int, seconds: float, *rest: int, is_warm: bool
    ) -> None:
        measured.append((seconds, is_warm))

    def scores(predictor: Scripted, x_BH: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return predictor.next_BN

    monkeypatch.setattr(DenseSparseCostModel, "is_surely_dense", lambda *args: next(is_dense))
    monkeypatch.setattr(DenseSparseCostModel, "add_sparse", add_sparse)
    monkeypatch.setattr(Scripted, "scores", scores)
    predictors = [Scripted(ffn.shape.neurons) for _ in range(ffn.shape.num_layers)]
    runtime = FfnRuntime(ffn.open(), mixed(ffn, (0.1, 0, 0)), CpuDevice(), predictors)
    for _ in range(5):
        runtime.layers[0].compute(torch.randn(1, 64), True)
    assert [is_warm for _, is_warm in measured] == [False, True, False, True]
    assert all(seconds >= 0.02 for seconds, _ in measured)
    runtime.close()


def test_near_memory_below_a_tokens_neurons_is_refused(ffn: Ffn) -> None:
    ample = mixed(ffn, (0.5, 0, 0), table_bytes=1000)
    least = ample.staging_bytes + 1000 + 3 * 48 * bundle_stride(ffn.shape, Precision.FULL)
    exactly = mixed(ffn, (0.5, 0, 0), near_bytes=least, table_bytes=1000)
    assert exactly.most_slots[Precision.FULL] == 48 and exactly.near_bytes == least
    with pytest.raises(BudgetError, match=r"near_gib is .* one token wants.* raise"):
        mixed(ffn, (0.5, 0, 0), near_bytes=least - 1, table_bytes=1000)
    with pytest.raises(BudgetError, match="staging and tables alone take"):
        plan_exact(ffn.shape, near_bytes=5000, far_bytes=0, table_bytes=0)


@pytest.mark.parametrize("near_bytes", [100_000, 150_000, 250_000, 10_000_000])
def test_a_plan_takes_no_more_than_it_was_given(ffn: Ffn, near_bytes: int) -> None:
    plan = mixed(ffn, (0.1, 0.1, 0.2), near_bytes=near_bytes, far_bytes=200_000, table_bytes=1000)
    assert plan.near_bytes <= near_bytes and plan.far_bytes <= 200_000
    assert all(0 < slots <= ffn.shape.neurons for slots in plan.most_slots.values())


@pytest.mark.parametrize("gain", [1.2, 0.8])
def test_reading_ahead_is_tried_and_kept_if_it_is_faster(
    ffn: Ffn, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off, on and off again; a prompt between two steps is in neither's time."""
    now = [0.0]
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    plan = replace(mixed(ffn, (0.25, 0, 0)), prefetches=True)
    predictors = [Scripted(ffn.shape.neurons) for _ in range(ffn.shape.num_layers)]
    runtime = FfnRuntime(
        ffn.open(), plan, CpuDevice(), predictors, deterministic=True, tries_preload=True
    )
    assert runtime.preload is not None and runtime.dynamic is not None
    was_on = []
    for number in range(WARM_STEPS + 3 * LONG_PHASE_STEPS + 12):
        before = runtime.dynamic.read_bytes
        for predictor in predictors:
            predictor.next_BN = torch.rand(1, ffn.shape.neurons)
        for layer in range(3):
            if number % 50 == 3:
                runtime.layers[layer].compute(torch.randn(5, 64), False)
                now[0] += 100.0
            runtime.layers[layer].compute(torch.randn(1, 64), True)
        was_on.append(runtime.dynamic.read_bytes > before)
        assert was_on[-1] == runtime.preload.is_on
        now[0] += 1 / gain if was_on[-1] else 1.0
    (verdict,) = runtime.preload.verdicts
    assert verdict.ratio == pytest.approx(1 / gain) and verdict.is_kept == (gain > 1)
    assert sum(was_on[:-2]) >= LONG_PHASE_STEPS and was_on[-1] == (gain > 1)
    runtime.close()


def test_reading_ahead_is_paid_from_far_memory(ffn: Ffn) -> None:
    """Prefetch buffers come before far layers; if all layers are far, nothing is prefetched."""
    of_layer = 96 * bundle_stride(ffn.shape, Precision.FULL)
    mix = (0.1, 0, 0)
    ahead = mixed(ffn, mix, far_bytes=of_layer, prefetches=True)
    assert ahead.prefetches and 0 < ahead.far_bytes < of_layer and not ahead.num_far_layers
    both = mixed(ffn, mix, far_bytes=of_layer + ahead.far_bytes, prefetches=True)
    assert both.prefetches and both.num_far_layers == 1
    assert both.far_bytes == of_layer + ahead.far_bytes
    assert not mixed(ffn, mix, far_bytes=3 * of_layer, prefetches=True).prefetches
    assert not mixed(ffn, mix, far_bytes=ahead.far_bytes - 1, prefetches=True).prefetches
