# SPDX-License-Identifier: Apache-2.0
"""The GPU's device under the layers, on a double: compute and copies run late, in any order.

What a layer gives is compared when everything has run: its steps overlap as far as they may.
"""

import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.cuda_double import SimulatedCudaDevice
from tests.ffn.late_gpu import LateGpu
from tests.ffn.late_torch import NEAR, LateTorch, now
from tests.ffn.models import Ffn, random_ffn
from tests.ffn.stores import flip
from tests.ffn.test_runtime import (
    Scripted,
    base_scores,
    check_bytes,
    check_precisions,
    close,
    exact,
    least,
    mixed,
)
from vllm_tiered.cost.ffn import Precision, bundle_bytes, bundle_stride
from vllm_tiered.errors import IntegrityError
from vllm_tiered.ffn import dynamic, host_link, step_clock
from vllm_tiered.ffn import layer as layers
from vllm_tiered.ffn import passage as passages
from vllm_tiered.ffn import plan as planning
from vllm_tiered.ffn import source as sources
from vllm_tiered.ffn.cache.base import NO_IDS, NeuronCache
from vllm_tiered.ffn.cache.window import WindowCache
from vllm_tiered.ffn.on_gpu import MOST_TOKENS
from vllm_tiered.ffn.runtime import FfnRuntime
from vllm_tiered.ffn.selection import Mix, select
from vllm_tiered.ffn.store_format import NEURONS
from vllm_tiered.ffn.switch_over import SwitchOver
from vllm_tiered.tiers.base import Direction, PageBuffer, Pages

Due = list[tuple[torch.Tensor, torch.Tensor]]
"""What was found, when it is computed, and what is expected."""


class ScriptedNear(Scripted):
    """Scores on the GPU."""

    def scores(self, x_BH: torch.Tensor) -> torch.Tensor:
        return self.next_BN.to(NEAR)


class Rig:
    """A runtime on the double."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ffn: Ffn, seed: int, haste: float) -> None:
        print(f"seed {seed}, haste {haste}")
        self.rng = random.Random(seed)
        self.ffn = ffn
        self.device = SimulatedCudaDevice(self.rng, haste=haste)
        self.torch = LateTorch(self.device)
        self.due: Due = []
        for name in ("activations", "add_down"):
            monkeypatch.setattr(layers, name, self.torch.late(getattr(layers, name)))

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


@pytest.fixture(scope="module", params=[True, False], ids=["gated", "plain"])
def ffn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ffn:
    return random_ffn(tmp_path_factory.mktemp("store") / "ffn", gated=request.param)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few neurons, and rooms of fewer: all are used again and again."""
    monkeypatch.setattr(planning, "_CHUNK_BYTES", 10 * 1024)
    monkeypatch.setattr(sources, "_ROOM_BYTES", 3 * 1024)
    monkeypatch.setattr(sources, "_NUM_ROOMS", 2)


HASTES = pytest.mark.parametrize("haste", [0.0, 0.6, 0.95])


@HASTES
@pytest.mark.parametrize("near_rows", [0, 50])
@pytest.mark.parametrize("far_layers", [0, 2])
@pytest.mark.parametrize("seed", range(2))
def test_every_neuron(monkeypatch, ffn, near_rows, far_layers, seed, haste):
    rig = Rig(monkeypatch, ffn, seed, haste)
    with rig.torch:
        runtime = rig.runtime(exact(ffn, near_rows=near_rows, far_layers=far_layers))
        for layer in (0, 1, 2, 0, 1, 2, 2, 1, 1, 0):
            with now():
                x_BH = torch.randn(3, 64)
                expected = ffn.dense(layer, x_BH)
            rig.due.append((runtime.layers[layer].compute(rig.near(x_BH), False), expected))
        rig.settle()
        runtime.close()
    assert rig.torch.num_late > 100


@HASTES
@pytest.mark.parametrize(
    ("policy", "mix"),
    [("atu", (0.1, 0.2, 0.3)), ("window", (0.1, 0.2, 0.3)), ("atu", (0.25, 0, 0))],
)
@pytest.mark.parametrize("seed", range(4))
def test_chosen_neurons(monkeypatch, ffn, policy, mix, seed, haste):
    rig = Rig(monkeypatch, ffn, seed, haste)
    chosen_neurons(rig, policy, mix, seed)


def chosen_neurons(rig: Rig, policy: str, mix: tuple[float, float, float], seed: int) -> None:
    """Nothing far, what is read ahead, and a layer too; prompts between them."""
    ffn, shape = rig.ffn, rig.ffn.shape
    plan = replace(mixed(ffn, mix), reads_ahead=seed > 0, far_layers=seed // 2)
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
            before = runtime.use.sparse_steps
            found = runtime.layers[layer].compute(rig.near(x_BH), not is_prompt)
            runtime.layers[layer].check_integrity()
            with now():
                near = residents(runtime, layer)
                if runtime.use.sparse_steps == before:
                    rig.due.append((found, ffn.dense(layer, x_BH)))
                    continue
                check_precisions(select(scores_BN, Mix.of(mix)), near)
                rig.due.append((found, ffn.product(layer, x_BH, near)))
            if rig.rng.random() < 0.2:
                rig.settle()
        rig.settle()
        with now():
            for layer in range(3):
                for precision in residents(runtime, layer):
                    check_bytes(ffn, runtime, layer, precision)
        assert runtime.use.sparse_steps >= 6 and runtime.use.misses > 60
        assert runtime.dynamic is None or runtime.dynamic.hits > 0
        assert runtime.source.use.wait_seconds > 0
        runtime.close()


@HASTES
@pytest.mark.parametrize("mix", [(0.1, 0.2, 0.3), (0.25, 0.25, 0.5)])
@pytest.mark.parametrize("seed", range(3))
def test_top_ranks_over_a_base_in_4_bit(monkeypatch, ffn, mix, seed, haste):
    rig = Rig(monkeypatch, ffn, seed, haste)
    ranks_over_a_base(rig, mix, seed)


def ranks_over_a_base(rig: Rig, mix: tuple[float, float, float], seed: int) -> None:
    ffn, everyone = rig.ffn, torch.arange(rig.ffn.shape.neurons)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(64)
    with rig.torch:
        runtime = rig.runtime(replace(mixed(ffn, mix, has_base=True), far_layers=seed))
        for step in range(24):
            layer = step % 3
            x = 0.7 * x + 0.5 * rng.standard_normal(64)
            with now():
                x_BH = torch.from_numpy(x[None]).float()
                scores_BN, lowest = base_scores(ffn, layer, x_BH), least(ffn)
                wanted = select(scores_BN, Mix.of(mix), lowest)
            found = runtime.layers[layer].compute(rig.near(x_BH), True)
            with now():
                near = residents(runtime, layer)
                better = torch.cat(list(near.values()))
                is_all = sum(mix) == 1 and ffn.shape.gated
                rest = everyone if is_all else torch.from_numpy(wanted.int4)
                chosen = near | {Precision.INT4: rest[~torch.isin(rest, better)]}
                rig.due.append((found, ffn.product(layer, x_BH, chosen)))
        rig.settle()
        assert runtime.use.sparse_steps == 24
        runtime.close()


def residents(runtime: FfnRuntime, layer: int) -> dict[Precision, torch.Tensor]:
    rows = runtime.layers[layer].residents()
    return {p: torch.from_numpy(neurons[neurons >= 0]) for p, neurons in rows.items()}


@HASTES
def test_a_damaged_bundle_takes_no_room_with_it(monkeypatch, tmp_path, haste):
    """The step fails as often as it wants it; what others want comes through the same rooms."""
    ffn = random_ffn(tmp_path / "ffn", gated=True)
    with ffn.open() as store:
        offset = store._form.offset(0, Precision.FULL) + 5 * bundle_stride(
            ffn.shape, Precision.FULL
        )
    flip(tmp_path / "ffn" / NEURONS, offset)
    rig = Rig(monkeypatch, ffn, 0, haste)
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
                assert not len(residents(runtime, 0)[Precision.FULL])
                continue
            found = runtime.layers[0].compute(rig.near(x_BH), True)
            with now():
                rig.due.append((found, ffn.product(0, x_BH, residents(runtime, 0))))
        assert runtime.use.sparse_steps == 8
        rig.settle()
        runtime.close()


# Far layers, whose steps of a few tokens are the GPU's -------------------------------------------

POLICIES = [("atu", (0.1, 0.2, 0.3)), ("window", (0.1, 0.2, 0.3)), ("atu", (0.25, 0, 0))]


@HASTES
@pytest.mark.parametrize(("policy", "mix"), POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_steps_without_the_host(monkeypatch, ffn, policy, mix, seed, haste):
    rig = Rig(monkeypatch, ffn, seed, haste)
    steps_without_the_host(rig, LateGpu(monkeypatch, rig.torch), policy, mix, seed)


def steps_without_the_host(rig: Rig, gpu: LateGpu, policy: str, mix: Any, seed: int) -> None:
    """The books change hands with batches of more tokens than the GPU plans for, and prompts come
    between them; what there is no room for is multiplied all the same."""
    ffn, shape = rig.ffn, rig.ffn.shape
    plan = replace(mixed(ffn, mix), far_layers=shape.num_layers)
    predictors = [ScriptedNear(shape.neurons) for _ in range(shape.num_layers)]
    rng = np.random.default_rng(seed)
    scores = {layer: rng.random(shape.neurons) for layer in range(shape.num_layers)}
    led = 0
    with rig.torch:
        runtime = rig.runtime(plan, predictors, policy=policy, window=3)
        for step in range(36):
            layer, batch = step % 3, int(rng.choice([1, 2, 3, 5, MOST_TOKENS + 1]))
            is_prompt = step % 7 == 6
            with now():
                scores[layer] = 0.7 * scores[layer] + 0.3 * rng.random(shape.neurons)
                drawn = scores[layer] + 0.02 * rng.random((batch, shape.neurons))
                scores_BN = torch.from_numpy(drawn).float()
                predictors[layer].next_BN = scores_BN
                x_BH = torch.from_numpy(rng.standard_normal((batch, 64))).float()
            before = runtime.use.sparse_steps
            with nobody_waits() if batch <= MOST_TOKENS else nullcontext():
                found = runtime.layers[layer].compute(rig.near(x_BH), not is_prompt)
            if runtime.use.sparse_steps == before:
                with now():
                    rig.due.append((found, ffn.dense(layer, x_BH)))
                continue
            led += batch <= MOST_TOKENS
            # Of most steps nobody waits to know what is near.
            if rig.rng.random() < 0.3:
                runtime.layers[layer].check_integrity()
                with now():
                    near = residents(runtime, layer)
                    check_precisions(select(scores_BN, Mix.of(mix)), near)
                    rig.due.append((found, ffn.product(layer, x_BH, near)))
            if rig.rng.random() < 0.2:
                rig.settle()
        rig.settle()
        # Reports are heard of in later steps.
        runtime.layers[0].compute(rig.near(torch.zeros(1, 64)), False)
        rig.settle()
        runtime.layers[0].compute(rig.near(torch.zeros(1, 64)), False)
        with now():
            for layer in range(3):
                for precision in residents(runtime, layer):
                    check_bytes(ffn, runtime, layer, precision)
            counts = [one.tolist() for one in gpu.counts]
        assert len(counts) == led >= 10 and gpu.heard == counts
        assert sum(brought for step in counts for brought, *_ in step) > 60
        runtime.close()


def nobody_waits():
    """Not even the host's books are asked for."""
    return patch.object(host_link.HostLink, "fetch", side_effect=AssertionError("the host waits"))


@pytest.mark.parametrize("num_tokens", [1, 6])
def test_what_the_host_is_told_of_steps_without_it(monkeypatch, ffn, num_tokens):
    """Counts and bytes, and what the next step is judged by."""
    rig = Rig(monkeypatch, ffn, 0, 0.6)
    gpu, shape = LateGpu(monkeypatch, rig.torch), ffn.shape
    told, asked = [], []
    monkeypatch.setattr(SwitchOver, "add_sparse", lambda *args, **kinds: told.append((args, kinds)))

    def prefers_dense(switch: SwitchOver, *args: int) -> bool:
        asked.append(args)
        return len(asked) > 8

    monkeypatch.setattr(SwitchOver, "prefers_dense", prefers_dense)
    # Room for half of what is wanted in full precision.
    plan = replace(mixed(ffn, (0.25, 0.25, 0)), far_layers=shape.num_layers)
    plan = replace(plan, rows={Precision.FULL: 12, Precision.INT8: 48})
    predictors = [ScriptedNear(shape.neurons) for _ in range(shape.num_layers)]
    with rig.torch:
        runtime = rig.runtime(plan, predictors)
        far_bytes = runtime.source.use.far_bytes
        for step in range(8):
            with now():
                predictors[step % 2].next_BN = torch.rand(num_tokens, shape.neurons)
            runtime.layers[step % 2].compute(rig.near(torch.randn(num_tokens, 64)), True)
            rig.settle()
            assert runtime.use.sparse_steps == step + 1 == len(told)
        strides = np.array([bundle_stride(shape, p) for p in Precision])
        counts = np.array(gpu.heard)
        brought, stayed, wanted, without_row = counts.transpose(2, 0, 1)
        assert without_row[:, 0].all() and not without_row[:, 1].any()
        read_again = without_row * (-(-num_tokens // 4) - 1)
        missing = (brought + read_again) @ strides
        multiplied = (brought + stayed) @ strides
        for step, (args, kinds) in enumerate(told):
            _, layer, seconds, *numbers = args
            assert layer == step % 2 and seconds > 0 and kinds == {"is_warm": step > 1}
            assert numbers == [missing[step], multiplied[step], num_tokens]
            usual = multiplied[step - 2] if step > 1 else 0
            assert asked[step] == (layer, usual, usual, num_tokens)
        use = runtime.use
        assert use.misses == brought.sum() and use.hits == (wanted - brought).sum() > 0
        assert runtime.source.use.far_bytes - far_bytes == missing.sum()
        # What the host prefers to be dense is.
        with now():
            x_BH = torch.randn(num_tokens, 64)
        found = runtime.layers[0].compute(rig.near(x_BH), True)
        rig.due.append((found, ffn.dense(0, x_BH)))
        rig.settle()
        assert runtime.use.dense_steps == 1 and len(gpu.counts) == 8
        runtime.close()


def test_neurons_are_of_the_last_token_when_their_books_change_hands(monkeypatch, ffn):
    """A window begins anew with all that was near; none stays beyond it."""
    rig = Rig(monkeypatch, ffn, 0, 1.0)
    LateGpu(monkeypatch, rig.torch)
    shape, mix = ffn.shape, (0.15, 0, 0)
    plan = replace(mixed(ffn, mix), far_layers=shape.num_layers)
    plan = replace(plan, rows={Precision.FULL: 80})
    predictors = [ScriptedNear(shape.neurons) for _ in range(shape.num_layers)]
    expected = WindowCache(80, shape.neurons, 3)
    led_before = False
    with rig.torch:
        runtime = rig.runtime(plan, predictors, policy="window", window=3)
        for num_tokens in (1, 1, 1, 1, 17, 17, 1, 1, 1, 17, 1, 17, 17, 17, 1, 1, 1):
            with now():
                scores_BN = torch.rand(1, shape.neurons).repeat(num_tokens, 1)
                predictors[0].next_BN = scores_BN
            runtime.layers[0].compute(rig.near(torch.randn(num_tokens, 64)), True)
            led = num_tokens <= MOST_TOKENS
            if led != led_before:
                expected._last_token[expected.resident()] = expected._token
            led_before = led
            expected.commit(expected.plan(select(scores_BN, Mix.of(mix)).full))
            with now():
                found = residents(runtime, 0)[Precision.FULL]
                assert set(found.tolist()) == set(expected.resident().tolist())
        assert runtime.use.dense_steps == 0
        runtime.close()


def rows_are_not_waited_for(monkeypatch):
    """Copies overwrite rows that compute still reads."""
    bring = sources.NeuronSource._copy

    def careless(self, far, ids, into, rows, after):
        return bring(self, far, ids, into, rows, at_once(self._device))

    monkeypatch.setattr(sources.NeuronSource, "_copy", careless)
    passing = passages.Passage.bring

    def hasty(self, layer, neurons, into, rows, after):
        return passing(self, layer, neurons, into, rows, at_once(self.device))

    monkeypatch.setattr(passages.Passage, "bring", hasty)


def at_once(device):
    """An event of which nothing was recorded: a stream does not wait for it."""
    event = device._new_event()
    event.is_recorded = event._is_done = True
    return event


def compute_is_not_held(monkeypatch):
    monkeypatch.setattr(SimulatedCudaDevice, "wait", lambda self, event: 0.0)


def rooms_are_read_to_at_once(monkeypatch):
    """A disk writes to memory that is still being copied."""
    read_on = passages.Passing._read_on

    def careless(self):
        free = self._passage.free
        for index, (room, _) in enumerate(free):
            free[index] = (room, None)
        read_on(self)

    monkeypatch.setattr(passages.Passing, "_read_on", careless)


def scores_are_read_early(monkeypatch):
    fetch = host_link.HostLink.fetch

    def hasty(self, tensors):
        with monkeypatch.context() as patched:
            patched.setattr(self._device, "compute_event", lambda: at_once(self._device))
            return fetch(self, tensors)

    monkeypatch.setattr(host_link.HostLink, "fetch", hasty)


@pytest.mark.parametrize(
    "mutate",
    [
        rows_are_not_waited_for,
        compute_is_not_held,
        rooms_are_read_to_at_once,
        scores_are_read_early,
    ],
)
def test_what_is_broken_on_purpose_is_found(monkeypatch, ffn, mutate):
    """At the latest in one of a few runs."""
    mutate(monkeypatch)
    for seed, haste in product((1, 2, 3, 4), (0.0, 0.6, 0.9)):
        try:
            with monkeypatch.context() as patched:
                rig = Rig(patched, ffn, seed, haste)
                chosen_neurons(rig, "atu", (0.1, 0.2, 0.3), seed % 4)
                ranks_over_a_base(Rig(patched, ffn, seed, haste), (0.1, 0.2, 0.3), seed % 3)
        except (AssertionError, IntegrityError, IndexError):
            return
    pytest.fail(f"{mutate.__name__} was not noticed")


def reports_are_read_early(monkeypatch):
    monkeypatch.setattr(step_clock.StepClock, "tell", lambda self, begin, told: told(1.0))


def reports_share_a_place(monkeypatch):
    """The next one is written over what nobody has read yet."""
    report = host_link.HostLink.report

    def careless(self, tensor):
        host = report(self, tensor)
        self.heard(host)
        return host

    monkeypatch.setattr(host_link.HostLink, "report", careless)


def holes_are_not_filled(monkeypatch):
    adopt = NeuronCache.adopt

    def careless(self, neuron_at):
        adopt(self, neuron_at)
        return NO_IDS, NO_IDS

    monkeypatch.setattr(NeuronCache, "adopt", careless)


@pytest.mark.parametrize(
    "mutate",
    [
        reports_are_read_early,
        reports_share_a_place,
        holes_are_not_filled,
        scores_are_read_early,
        compute_is_not_held,
    ],
)
def test_what_is_broken_without_the_host_is_found(monkeypatch, ffn, mutate):
    mutate(monkeypatch)
    for seed, haste in product(range(4), (0.0, 0.6, 0.9)):
        try:
            with monkeypatch.context() as patched:
                rig = Rig(patched, ffn, seed, haste)
                gpu = LateGpu(patched, rig.torch)
                steps_without_the_host(rig, gpu, *POLICIES[seed % 3], seed)
        except (AssertionError, IntegrityError, IndexError):
            return
    pytest.fail(f"{mutate.__name__} was not noticed")


# What steps alone do not show, as each waits for the scores of the one before -------------------


def test_lists_are_not_changed_while_they_are_on_their_way(monkeypatch, ffn):
    """More of them than there are places."""
    rig = Rig(monkeypatch, ffn, seed=0, haste=0.0)
    link = host_link.HostLink(rig.device, NEAR)
    with rig.torch:
        sent = [link.send([np.full(n, n), np.full(3, n % 2 == 0)]) for n in range(1, 20)]
        with now():
            rig.device.cuda.run_all()
            for n, (numbers, flags) in enumerate(sent, 1):
                assert numbers.tolist() == [n] * n and flags.tolist() == [n % 2 == 0] * 3


def test_what_was_read_ahead_is_not_written_over_before_it_is_copied(monkeypatch, ffn):
    rig = Rig(monkeypatch, ffn, seed=0, haste=0.0)
    neurons = np.arange(4)
    with ffn.open() as store, rig.torch:
        area = dynamic.DynamicArea(store, {Precision.FULL: 4}, rig.device)
        area.expect(0, {Precision.FULL: neurons})
        held, found, rows = area.find(0, Precision.FULL, neurons)
        assert len(found) == 4
        with now():
            near = PageBuffer(torch.zeros(4, held.page_bytes, dtype=torch.uint8))
            pages = Pages(rows)
            copied = rig.device.copy(Direction.READ, held, pages, near, Pages(neurons))
        area.is_copied(0, Precision.FULL, copied)
        area.expect(0, {Precision.FULL: neurons + 20})
        area.find(0, Precision.FULL, neurons + 20)
        copied.wait()
        num_bytes = bundle_bytes(ffn.shape, Precision.FULL)
        for row, neuron in enumerate(neurons.tolist()):
            found_bytes = near.data[row, :num_bytes].numpy().tobytes()
            assert found_bytes == ffn.bundle(0, Precision.FULL, neuron)
        rig.device.close()
