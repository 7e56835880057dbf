# SPDX-License-Identifier: Apache-2.0
"""FFN layers on a fake CUDA runtime that defers compute and copies, and runs them in any order.

Outputs are compared after everything has run, so that steps overlap as far as events allow.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from tests.fakes.deferred_rig import (
    HASTES,
    DeferredRig,
    ScriptedNear,
    compute_is_not_held,
    done_event,
    resident_neurons,
    scores_are_read_early,
)
from tests.fakes.deferred_torch import NEAR, now
from tests.fixtures.ffn_models import Ffn, random_ffn
from tests.fixtures.ffn_runtimes import (
    check_bytes,
    check_precisions,
    exact,
    mixed,
)
from tests.fixtures.neuron_stores import flip
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.mailbox import Mailbox
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.errors import IntegrityError
from vllm_tiered.ffn import memory_plan
from vllm_tiered.ffn.layout import Precision, bundle_bytes, bundle_stride
from vllm_tiered.ffn.loader import backend, bounce_pipeline, dynamic
from vllm_tiered.ffn.selection import Mix, select
from vllm_tiered.ffn.store.format import NEURONS


@pytest.fixture(scope="module", params=[True, False], ids=["gated", "plain"])
def ffn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ffn:
    return random_ffn(tmp_path_factory.mktemp("store") / "ffn", gated=request.param)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks and bounce buffers so small that all of them are reused often."""
    monkeypatch.setattr(memory_plan, "_CHUNK_BYTES", 10 * 1024)
    monkeypatch.setattr(backend, "_BUFFER_BYTES", 3 * 1024)
    monkeypatch.setattr(backend, "_NUM_BUFFERS", 2)


@HASTES
@pytest.mark.parametrize("num_permanent", [0, 50])
@pytest.mark.parametrize("num_far_layers", [0, 2])
@pytest.mark.parametrize("seed", range(2))
def test_every_neuron(monkeypatch, ffn, num_permanent, num_far_layers, seed, haste):
    rig = DeferredRig(monkeypatch, ffn, seed, haste)
    with rig.torch:
        runtime = rig.runtime(
            exact(ffn, num_permanent=num_permanent, num_far_layers=num_far_layers)
        )
        for layer in (0, 1, 2, 0, 1, 2, 2, 1, 1, 0):
            with now():
                x_BH = torch.randn(3, 64)
                expected = ffn.dense(layer, x_BH)
            rig.due.append((runtime.layers[layer].compute(rig.near(x_BH), False), expected))
        rig.settle()
        runtime.close()
    assert rig.torch.num_deferred > 100


@HASTES
@pytest.mark.parametrize(
    ("policy", "mix"),
    [("atu", (0.1, 0.2, 0.3)), ("window", (0.1, 0.2, 0.3)), ("atu", (0.25, 0, 0))],
)
@pytest.mark.parametrize("seed", range(4))
def test_chosen_neurons(monkeypatch, ffn, policy, mix, seed, haste):
    rig = DeferredRig(monkeypatch, ffn, seed, haste)
    chosen_neurons(rig, policy, mix, seed)


def chosen_neurons(
    rig: DeferredRig, policy: str, mix: tuple[float, float, float], seed: int
) -> None:
    """Run random sparse steps with prompts between them, and compare the outputs.

    From seed 1 on neurons are prefetched; from seed 2 on a layer is far.
    """
    ffn, shape = rig.ffn, rig.ffn.shape
    plan = replace(mixed(ffn, mix), prefetches=seed > 0, num_far_layers=seed // 2)
    predictors = [ScriptedNear(shape.neurons) for _ in range(shape.num_layers)]
    rng = np.random.default_rng(seed)
    scores = {layer: rng.random((3, shape.neurons)) for layer in range(shape.num_layers)}
    with rig.torch:
        runtime = rig.runtime(plan, predictors, policy=policy, window=3)
        for step in range(24):
            layer, batch = step % 3, int(rng.integers(1, 4))
            is_prompt = step % 7 == 6
            with now():
                scores[layer] = 0.8 * scores[layer] + 0.2 * rng.random((3, shape.neurons))
                scores_BN = torch.from_numpy(scores[layer][:batch]).float()
                predictors[layer].next_BN = scores_BN
                x_BH = torch.from_numpy(rng.standard_normal((batch, 64))).float()
            before = runtime.stats.sparse_steps
            found = runtime.layers[layer].compute(rig.near(x_BH), not is_prompt)
            runtime.layers[layer].check_integrity()
            with now():
                near = resident_neurons(runtime, layer)
                if runtime.stats.sparse_steps == before:
                    rig.due.append((found, ffn.dense(layer, x_BH)))
                    continue
                check_precisions(select(scores_BN, Mix.from_shares(mix)), near)
                rig.due.append((found, ffn.output_of(layer, x_BH, near)))
            if rig.rng.random() < 0.2:
                rig.settle()
        rig.settle()
        with now():
            for layer in range(3):
                for precision in resident_neurons(runtime, layer):
                    check_bytes(ffn, runtime, layer, precision)
        assert runtime.stats.sparse_steps >= 6 and runtime.stats.misses > 60
        assert runtime.dynamic is None or runtime.dynamic.hits > 0
        assert runtime.backend.stats.wait_seconds > 0
        runtime.close()


@HASTES
def test_a_damaged_bundle_frees_its_bounce_buffer(monkeypatch, tmp_path, haste):
    """Steps that want the bundle always fail; other steps load through the same buffers."""
    ffn = random_ffn(tmp_path / "ffn", gated=True)
    with ffn.open() as store:
        offset = store._form.offset(0, Precision.FULL) + 5 * bundle_stride(
            ffn.shape, Precision.FULL
        )
    flip(tmp_path / "ffn" / NEURONS, offset)
    rig = DeferredRig(monkeypatch, ffn, 0, haste)
    predictors = [ScriptedNear(ffn.shape.neurons) for _ in range(ffn.shape.num_layers)]
    with rig.torch:
        runtime = rig.runtime(mixed(ffn, (0.25, 0, 0)), predictors)
        for step in range(8):
            with now():
                first = 0 if step % 2 else 40 + step
                chosen = torch.arange(first, first + 24)
                predictors[0].next_BN = torch.zeros(1, ffn.shape.neurons)
                predictors[0].next_BN[:, chosen] = 1.0
                x_BH = torch.randn(1, 64)
            if step % 2:
                with pytest.raises(IntegrityError, match="neuron 5, full is damaged"):
                    runtime.layers[0].compute(rig.near(x_BH), True)
                assert not len(resident_neurons(runtime, 0)[Precision.FULL])
                continue
            found = runtime.layers[0].compute(rig.near(x_BH), True)
            with now():
                rig.due.append((found, ffn.output_of(0, x_BH, resident_neurons(runtime, 0))))
        assert runtime.stats.sparse_steps == 8
        rig.settle()
        runtime.close()


def slots_are_not_waited_for(monkeypatch):
    """Let copies overwrite slots that compute still reads."""
    load = backend.NeuronBackend._copy

    def careless(self, far, ids, into, slots, after):
        return load(self, far, ids, into, slots, done_event(self._device))

    monkeypatch.setattr(backend.NeuronBackend, "_copy", careless)
    bounce_load = bounce_pipeline.BouncePipeline.load

    def hasty(self, layer, neurons, into, slots, after):
        return bounce_load(self, layer, neurons, into, slots, done_event(self.device))

    monkeypatch.setattr(bounce_pipeline.BouncePipeline, "load", hasty)


def bounce_buffers_are_reused_early(monkeypatch):
    """Let the disk write to bounce buffers that are still being copied."""
    submit_reads = bounce_pipeline.BounceLoad._submit_reads

    def careless(self):
        free = self._pipeline.free
        for index, (buffer, _) in enumerate(free):
            free[index] = (buffer, None)
        submit_reads(self)

    monkeypatch.setattr(bounce_pipeline.BounceLoad, "_submit_reads", careless)


@pytest.mark.parametrize(
    "mutate",
    [
        slots_are_not_waited_for,
        compute_is_not_held,
        bounce_buffers_are_reused_early,
        scores_are_read_early,
    ],
)
def test_injected_faults_are_found(monkeypatch, ffn, mutate):
    """At least one of a few runs finds the fault."""
    mutate(monkeypatch)
    for seed, haste in product((1, 2, 3, 4), (0.0, 0.6, 0.9)):
        try:
            with monkeypatch.context() as patched:
                rig = DeferredRig(patched, ffn, seed, haste)
                chosen_neurons(rig, "atu", (0.1, 0.2, 0.3), seed % 4)
        except (AssertionError, IntegrityError, IndexError):
            return
    pytest.fail(f"{mutate.__name__} was not noticed")


# Faults that steps do not show, because each step waits for the scores of the one before ---------


def test_lists_are_not_changed_while_they_are_copied(monkeypatch, ffn):
    """More lists are sent than there are host buffers."""
    rig = DeferredRig(monkeypatch, ffn, seed=0, haste=0.0)
    mailbox = Mailbox(rig.device, NEAR)
    with rig.torch:
        sent = [mailbox.h2d([np.full(n, n), np.full(3, n % 2 == 0)]) for n in range(1, 20)]
        with now():
            rig.device.cuda.run_all()
            for n, (numbers, flags) in enumerate(sent, 1):
                assert numbers.tolist() == [n] * n and flags.tolist() == [n % 2 == 0] * 3


def test_prefetched_neurons_are_not_overwritten_before_they_are_copied(monkeypatch, ffn):
    rig = DeferredRig(monkeypatch, ffn, seed=0, haste=0.0)
    neurons = np.arange(4)
    with ffn.open() as store, rig.torch:
        area = dynamic.DynamicArea(store, {Precision.FULL: 4}, rig.device)
        area.prefetch(0, {Precision.FULL: neurons})
        held, found, rows = area.find(0, Precision.FULL, neurons)
        assert len(found) == 4
        with now():
            near = PageBuffer(torch.zeros(4, held.page_bytes, dtype=torch.uint8))
            pages = Pages(rows)
            copied = rig.device.copy(Direction.READ, held, pages, near, Pages(neurons))
        area.set_copied(0, Precision.FULL, copied)
        area.prefetch(0, {Precision.FULL: neurons + 20})
        area.find(0, Precision.FULL, neurons + 20)
        copied.wait()
        num_bytes = bundle_bytes(ffn.shape, Precision.FULL)
        for row, neuron in enumerate(neurons.tolist()):
            found_bytes = near.data[row, :num_bytes].numpy().tobytes()
            assert found_bytes == ffn.bundle(0, Precision.FULL, neuron)
        rig.device.close()
