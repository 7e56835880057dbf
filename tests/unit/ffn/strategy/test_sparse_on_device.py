# SPDX-License-Identifier: Apache-2.0
"""Far layers whose steps of a few tokens run on the GPU alone: deferred, on the fake."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.fakes.deferred_gpu import DeferredGpu
from tests.fakes.deferred_rig import (
    HASTES,
    DeferredRig,
    ScriptedNear,
    compute_is_not_held,
    resident_neurons,
    scores_are_read_early,
)
from tests.fakes.deferred_torch import now
from tests.fixtures.ffn_models import Ffn, random_ffn
from tests.fixtures.ffn_runtimes import check_bytes, check_precisions, mixed
from vllm_tiered.devices.mailbox import Mailbox
from vllm_tiered.errors import IntegrityError
from vllm_tiered.ffn import memory_plan, step_clock
from vllm_tiered.ffn.cache.base import NO_IDS, NeuronCache
from vllm_tiered.ffn.cache.window import WindowCache
from vllm_tiered.ffn.cost_model import DenseSparseCostModel
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.selection import Mix, select
from vllm_tiered.ffn.strategy.sparse_on_device import MAX_DEVICE_TOKENS


@pytest.fixture(scope="module", params=[True, False], ids=["gated", "plain"])
def ffn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ffn:
    return random_ffn(tmp_path_factory.mktemp("store") / "ffn", gated=request.param)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few neurons: all are used again and again."""
    monkeypatch.setattr(memory_plan, "_CHUNK_BYTES", 10 * 1024)


POLICIES = [("atu", (0.1, 0.2, 0.3)), ("window", (0.1, 0.2, 0.3)), ("atu", (0.25, 0, 0))]


@pytest.mark.slow
@HASTES
@pytest.mark.parametrize(("policy", "mix"), POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_steps_without_the_host(monkeypatch, ffn, policy, mix, seed, haste):
    rig = DeferredRig(monkeypatch, ffn, seed, haste)
    steps_without_the_host(rig, DeferredGpu(monkeypatch, rig.torch), policy, mix, seed)


def steps_without_the_host(
    rig: DeferredRig, gpu: DeferredGpu, policy: str, mix: Any, seed: int
) -> None:
    """The cache index migrates with batches of more tokens than the GPU plans for; prompts come
    between them. Neurons without a slot are multiplied all the same."""
    ffn, shape = rig.ffn, rig.ffn.shape
    plan = replace(mixed(ffn, mix), num_far_layers=shape.num_layers)
    predictors = [ScriptedNear(shape.neurons) for _ in range(shape.num_layers)]
    rng = np.random.default_rng(seed)
    scores = {layer: rng.random(shape.neurons) for layer in range(shape.num_layers)}
    owned = 0
    with rig.torch:
        runtime = rig.runtime(plan, predictors, policy=policy, window=3)
        for step in range(36):
            layer, batch = step % 3, int(rng.choice([1, 2, 3, 5, MAX_DEVICE_TOKENS + 1]))
            is_prompt = step % 7 == 6
            with now():
                scores[layer] = 0.7 * scores[layer] + 0.3 * rng.random(shape.neurons)
                drawn = scores[layer] + 0.02 * rng.random((batch, shape.neurons))
                scores_BN = torch.from_numpy(drawn).float()
                predictors[layer].next_BN = scores_BN
                x_BH = torch.from_numpy(rng.standard_normal((batch, 64))).float()
            before = runtime.stats.sparse_steps
            with host_never_waits() if batch <= MAX_DEVICE_TOKENS else nullcontext():
                found = runtime.layers[layer].compute(rig.near(x_BH), not is_prompt)
            if runtime.stats.sparse_steps == before:
                with now():
                    rig.due.append((found, ffn.dense(layer, x_BH)))
                continue
            owned += batch <= MAX_DEVICE_TOKENS
            # After most steps nothing waits for the list of cached neurons.
            if rig.rng.random() < 0.3:
                runtime.layers[layer].check_integrity()
                with now():
                    near = resident_neurons(runtime, layer)
                    check_precisions(select(scores_BN, Mix.from_shares(mix)), near)
                    rig.due.append((found, ffn.output_of(layer, x_BH, near)))
            if rig.rng.random() < 0.2:
                rig.settle()
        rig.settle()
        # Statistics are read in later steps.
        runtime.layers[0].compute(rig.near(torch.zeros(1, 64)), False)
        rig.settle()
        runtime.layers[0].compute(rig.near(torch.zeros(1, 64)), False)
        with now():
            for layer in range(3):
                for precision in resident_neurons(runtime, layer):
                    check_bytes(ffn, runtime, layer, precision)
            counts = [one.tolist() for one in gpu.counts]
        assert len(counts) == owned >= 10 and gpu.received == counts
        assert sum(loaded for step in counts for loaded, *_ in step) > 60
        runtime.close()


def host_never_waits():
    """The host copies nothing from the GPU that it would wait for."""
    return patch.object(Mailbox, "d2h", side_effect=AssertionError("the host waits"))


@pytest.mark.parametrize("num_tokens", [1, 6])
def test_statistics_of_steps_without_the_host(monkeypatch, ffn, num_tokens):
    """Counts and bytes, which the cost model uses for the next step."""
    rig = DeferredRig(monkeypatch, ffn, 0, 0.6)
    gpu, shape = DeferredGpu(monkeypatch, rig.torch), ffn.shape
    reported, asked = [], []
    monkeypatch.setattr(
        DenseSparseCostModel, "add_sparse", lambda *args, **kinds: reported.append((args, kinds))
    )

    def prefers_dense(cost_model: DenseSparseCostModel, *args: int) -> bool:
        asked.append(args)
        return len(asked) > 8

    monkeypatch.setattr(DenseSparseCostModel, "prefers_dense", prefers_dense)
    # Slots for half of the neurons that are wanted in full precision.
    plan = replace(mixed(ffn, (0.25, 0.25, 0)), num_far_layers=shape.num_layers)
    slots = {Precision.FULL: 12, Precision.INT8: 48}
    plan = replace(plan, cache_slots=[slots] * shape.num_layers)
    predictors = [ScriptedNear(shape.neurons) for _ in range(shape.num_layers)]
    with rig.torch:
        runtime = rig.runtime(plan, predictors)
        far_bytes = runtime.backend.stats.far_bytes
        for step in range(8):
            with now():
                predictors[step % 2].next_BN = torch.rand(num_tokens, shape.neurons)
            runtime.layers[step % 2].compute(rig.near(torch.randn(num_tokens, 64)), True)
            rig.settle()
            assert runtime.stats.sparse_steps == step + 1 == len(reported)
        strides = np.array([bundle_stride(shape, p) for p in Precision])
        counts = np.array(gpu.received)
        loaded, stayed, wanted, without_slot = counts.transpose(2, 0, 1)
        assert without_slot[:, 0].all() and not without_slot[:, 1].any()
        read_again = without_slot * (-(-num_tokens // 4) - 1)
        missing = (loaded + read_again) @ strides
        multiplied = (loaded + stayed) @ strides
        for step, (args, kinds) in enumerate(reported):
            _, layer, seconds, *numbers = args
            assert layer == step % 2 and seconds > 0 and kinds == {"is_warm": step > 1}
            assert numbers == [missing[step], multiplied[step], num_tokens]
            usual = multiplied[step - 2] if step > 1 else 0
            assert asked[step] == (layer, usual, usual, num_tokens)
        stats = runtime.stats
        assert stats.misses == loaded.sum() and stats.hits == (wanted - loaded).sum() > 0
        assert runtime.backend.stats.far_bytes - far_bytes == missing.sum()
        # A step that the cost model prefers dense is dense.
        with now():
            x_BH = torch.randn(num_tokens, 64)
        found = runtime.layers[0].compute(rig.near(x_BH), True)
        rig.due.append((found, ffn.dense(0, x_BH)))
        rig.settle()
        assert runtime.stats.dense_steps == 1 and len(gpu.counts) == 8
        runtime.close()


def test_neurons_count_as_the_last_tokens_after_their_index_migrated(monkeypatch, ffn):
    """A window starts with all cached neurons; none stays beyond the window."""
    rig = DeferredRig(monkeypatch, ffn, 0, 1.0)
    DeferredGpu(monkeypatch, rig.torch)
    shape, mix = ffn.shape, (0.15, 0, 0)
    plan = replace(mixed(ffn, mix), num_far_layers=shape.num_layers)
    plan = replace(plan, cache_slots=[{Precision.FULL: 80}] * shape.num_layers)
    predictors = [ScriptedNear(shape.neurons) for _ in range(shape.num_layers)]
    expected = WindowCache(80, shape.neurons, 3)
    owned_before = False
    with rig.torch:
        runtime = rig.runtime(plan, predictors, policy="window", window=3)
        for num_tokens in (1, 1, 1, 1, 17, 17, 1, 1, 1, 17, 1, 17, 17, 17, 1, 1, 1):
            with now():
                scores_BN = torch.rand(1, shape.neurons).repeat(num_tokens, 1)
                predictors[0].next_BN = scores_BN
            runtime.layers[0].compute(rig.near(torch.randn(num_tokens, 64)), True)
            owned = num_tokens <= MAX_DEVICE_TOKENS
            if owned != owned_before:
                expected._last_token[expected.resident()] = expected._token
            owned_before = owned
            expected.commit(expected.plan(select(scores_BN, Mix.from_shares(mix)).full))
            with now():
                found = resident_neurons(runtime, 0)[Precision.FULL]
                assert set(found.tolist()) == set(expected.resident().tolist())
        assert runtime.stats.dense_steps == 0
        runtime.close()


def stats_are_read_early(monkeypatch):
    monkeypatch.setattr(
        step_clock.StepClock, "measure", lambda self, begin, reported: reported(1.0)
    )


def stats_share_a_place(monkeypatch):
    """The next statistics overwrite some that have not been read yet."""
    async_stats = Mailbox.async_stats

    def careless(self, tensor):
        host = async_stats(self, tensor)
        self.recycle(host)
        return host

    monkeypatch.setattr(Mailbox, "async_stats", careless)


def holes_are_not_filled(monkeypatch):
    adopt = NeuronCache.adopt

    def careless(self, neuron_at):
        adopt(self, neuron_at)
        return NO_IDS, NO_IDS

    monkeypatch.setattr(NeuronCache, "adopt", careless)


@pytest.mark.parametrize(
    "mutate",
    [
        stats_are_read_early,
        stats_share_a_place,
        holes_are_not_filled,
        scores_are_read_early,
        compute_is_not_held,
    ],
)
def test_injected_faults_without_the_host_are_found(monkeypatch, ffn, mutate):
    mutate(monkeypatch)
    for seed, haste in product(range(4), (0.0, 0.6, 0.9)):
        try:
            with monkeypatch.context() as patched:
                rig = DeferredRig(patched, ffn, seed, haste)
                gpu = DeferredGpu(patched, rig.torch)
                steps_without_the_host(rig, gpu, *POLICIES[seed % 3], seed)
        except (AssertionError, IntegrityError, IndexError):
            return
    pytest.fail(f"{mutate.__name__} was not noticed")
