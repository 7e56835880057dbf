# SPDX-License-Identifier: Apache-2.0
"""Far weights on a fake CUDA runtime: outputs are equal bit by bit, and faults are detected."""

import random
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fixtures.rounding import rounded
from vllm_tiered.devices.cuda import bounce_copy
from vllm_tiered.devices.cuda.device import CudaDevice
from vllm_tiered.devices.cuda.event import CudaEvent
from vllm_tiered.errors import BudgetError
from vllm_tiered.kernels.dequant_linear import reference
from vllm_tiered.weights import offloaded_weights
from vllm_tiered.weights.int4 import packing
from vllm_tiered.weights.int4.layout import compressed_bytes
from vllm_tiered.weights.layout import sublayers_of
from vllm_tiered.weights.offloaded_weights import (
    OffloadedParameter,
    OffloadedSublayer,
    OffloadedWeights,
)
from vllm_tiered.weights.placement import place, spill_to_storage
from vllm_tiered.weights.store import WeightStore

NUM_LAYERS, WIDTH = 3, 192
SHAPES = {
    "self_attn.qkv_proj.weight": (3 * WIDTH, WIDTH),
    "self_attn.qkv_proj.bias": (3 * WIDTH,),
    "self_attn.o_proj.weight": (WIDTH, WIDTH),
    "mlp.fc1.weight": (2 * WIDTH, WIDTH),
    "mlp.fc2.weight": (WIDTH, 2 * WIDTH),
}
HASTES = [0.0, 0.3, 0.9]


class Model:
    """Model whose GEMMs are submitted like GPU kernels, and read weight buffers when they run.

    Args:
        compressed: whether matrices are in 4 bit, in the order of our kernels.
        store: file of the second half of the sublayers; None for none.
    """

    def __init__(
        self,
        seed,
        haste,
        *,
        compressed=False,
        store=None,
        engine_run_bytes=1 << 60,
        is_loaded=False,
    ):
        self.device = SimulatedCudaDevice(
            random.Random(seed), haste=haste, engine_run_bytes=engine_run_bytes
        )
        generator = torch.Generator().manual_seed(0)  # the same model every time
        self.weights = [
            {name: torch.randn(shape, generator=generator) / 12 for name, shape in SHAPES.items()}
            for _ in range(NUM_LAYERS)
        ]
        self.compressed = compressed
        self.parameters = [
            {name: torch.nn.Parameter(torch.empty(shape), False) for name, shape in SHAPES.items()}
            for _ in range(NUM_LAYERS)
        ]
        self.x_BK = torch.randn((3, WIDTH), generator=generator)
        sizes = {name: self.num_bytes(name) for name in SHAPES}
        sublayers = [one for layer in range(NUM_LAYERS) for one in sublayers_of(layer, sizes)]
        placement = place("all_far", sublayers)
        if store is not None:
            placement = spill_to_storage(placement, placement.far_bytes // 2)
            assert placement.stored and placement.far_bytes
            store.record_placement(placement)
        groups = [
            OffloadedSublayer(
                *([self.offloaded(one.layer, p.name) for p in part] for part in parts)
            )
            for one, parts in zip(sublayers, placement.offloaded, strict=True)
        ]
        self.sublayers = [
            (one.layer, [p.name for part in parts for p in part])
            for one, parts in zip(sublayers, placement.offloaded, strict=True)
        ]
        self.store = store
        self.far = OffloadedWeights(
            self.device, groups, torch.device("cpu"), store, is_loaded=is_loaded
        )

    def is_packed(self, name):
        return self.compressed and name.endswith("weight")

    def num_bytes(self, name):
        shape = SHAPES[name]
        return compressed_bytes(shape[0], shape[-1], 4) if self.is_packed(name) else 4 * prod(shape)

    def offloaded(self, layer, name):
        return OffloadedParameter(
            self.parameters[layer][name], self.num_bytes(name), self.is_packed(name)
        )

    def load(self):
        for parameters, weights in zip(self.parameters, self.weights, strict=True):
            for name, parameter in parameters.items():
                parameter.data.copy_(weights[name])

    def product(self, layer, module, x_BK, parameters):
        weight = parameters[layer][f"{module}.weight"]
        bias = parameters[layer].get(f"{module}.bias")
        rows = SHAPES[f"{module}.weight"][0]
        if not self.compressed:
            return linear(x_BK, weight, bias)
        packed = weight if parameters is self.parameters else packing.compress_for_kernels(weight)
        return reference.linear(x_BK, packed, rows, bias)

    def step(self, buffer_pool):
        """Submit all layers once; the output is complete when compute is done."""
        activations = {"x": self.x_BK}
        for position, (layer, names) in enumerate(self.sublayers):
            for module in dict.fromkeys(name.rpartition(".")[0] for name in names):
                buffer_pool.acquire(position)
                self.device.compute(self.kernel(layer, module, activations))
                buffer_pool.release(position)
                buffer_pool.check_integrity()
        return activations

    def kernel(self, layer, module, activations):
        def run():
            activations["x"] = self.follow(layer, module, activations["x"], self.parameters)

        return run

    def follow(self, layer, module, x_BK, parameters):
        out_BN = self.product(layer, module, x_BK, parameters)
        return out_BN[:, :WIDTH] if module.endswith("qkv_proj") else out_BN

    def run(self, num_steps=3):
        buffer_pool = self.far.start_streaming()
        outputs = [self.step(buffer_pool) for _ in range(num_steps)]
        self.device.cuda.run_all()
        self.device.close()
        if self.store is not None:
            self.store.close()
        return [activations["x"] for activations in outputs]

    def expected(self):
        x_BK = self.x_BK
        for layer, names in self.sublayers:
            for module in dict.fromkeys(name.rpartition(".")[0] for name in names):
                x_BK = self.follow(layer, module, x_BK, self.weights)
        return x_BK


def wrong_steps(model):
    return sum(not torch.equal(found, model.expected()) for found in model.run())


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(offloaded_weights, "packing_for", lambda device: packing.ON_GPU)


@pytest.mark.parametrize("haste", HASTES)
@pytest.mark.parametrize("engine_run_bytes", [1, 1 << 60], ids=["engines", "kernel"])
def test_outputs_are_equal(haste, engine_run_bytes):
    for seed in range(4):
        model = Model(seed, haste, engine_run_bytes=engine_run_bytes)
        model.load()
        assert not wrong_steps(model), seed


def test_far_memory_takes_nothing_before_weights_are_in_it():
    """Loaded layers may fill host memory; pinning would take as much again at once."""
    early, late = Model(0, 0.3), Model(0, 0.3, is_loaded=True)
    for model in (early, late):
        runtime: Any = model.device._runtime
        far = model.far._far.data
        assert runtime._is_pinned(far) == (model is early)
        model.load()
        model.far.start_streaming()
        assert runtime._is_pinned(far)
        model.device.close()
        assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_an_error_and_is_freed():
    model = Model(0, 0.3, is_loaded=True)
    runtime: Any = model.device._runtime
    model.load()
    runtime.refuses_to_pin = True
    with pytest.raises(BudgetError, match="could not pin"):
        model.far.start_streaming()
    assert model.device._unpinned
    model.device.close()
    assert not runtime.pinned and not model.device._unpinned


@pytest.mark.parametrize("haste", HASTES)
def test_outputs_are_equal_in_four_bit(haste, kernels):
    for seed in range(2):
        model = Model(seed, haste, compressed=True)
        model.load()
        assert not wrong_steps(model), seed


def test_parameters_moved_during_loading_are_read_from_their_new_place():
    """vLLM moves weights that it processes to the GPU, and back to other memory."""
    model = Model(0, 0.3)
    model.load()
    for parameters in model.parameters:
        for parameter in parameters.values():
            home, parameter.data = parameter.data, parameter.data.clone()
            home.fill_(torch.nan)
    assert not wrong_steps(model)


@pytest.mark.parametrize("haste", HASTES)
def test_stored_weights_with_the_first_start_and_the_second(haste, tmp_path, monkeypatch):
    monkeypatch.setattr(bounce_copy, "BOUNCE_BYTES", 3 << 16)  # several pieces per sublayer
    about = {"name": "model", "fingerprint": "0", "changed": "0"}
    for is_filled in (False, True):
        store = WeightStore(tmp_path, rank=0, num_ranks=1, model=about, settings={})
        assert store.is_filled == is_filled
        model = Model(1, haste, store=store)
        if is_filled:  # stored parameters are not loaded
            for (layer, names), group in zip(model.sublayers, model.far._sublayers, strict=True):
                for name in names[: len(group.far)]:
                    model.parameters[layer][name].data.copy_(model.weights[layer][name])
        else:
            model.load()
        assert not wrong_steps(model)


def long_over(device):
    """Return an event that does not cover the model's compute."""
    with device._changed:
        event = CudaEvent(device.cuda, device._changed)
        event.record(device.cuda.new_stream())
        return event


@pytest.mark.parametrize("broken", ["does not wait", "fills a buffer in use"])
def test_a_ring_that_does_not_keep_the_order_is_found(broken, monkeypatch):
    """The fake model detects a wrong order, on which the other tests rely."""
    if broken == "does not wait":
        monkeypatch.setattr(CudaDevice, "wait", lambda self, event: 0.0)
    else:
        monkeypatch.setattr(CudaDevice, "compute_event", long_over)
    wrong = 0
    for seed in range(6):
        model = Model(seed, 0.3)
        model.load()
        wrong += wrong_steps(model)
    assert wrong


def test_a_buffer_waits_for_modules_that_compute_in_streams_of_their_own():
    """A module's last kernel may run after another module's, in another stream."""
    for seed in range(4):
        model = Model(seed, 0.6)
        model.load()
        cuda, device = model.device.cuda, model.device
        buffer_pool = model.far.start_streaming()
        main, second_stream = cuda.compute_stream(), cuda.new_stream()
        seen: list[bool] = []

        def look(layer, name, seen=seen, model=model):
            seen.append(torch.equal(model.parameters[layer][name], model.weights[layer][name]))

        for position, (layer, names) in enumerate(model.sublayers * 2):
            position %= len(model.sublayers)
            for stream, name in ((second_stream, names[0]), (main, names[-1])):
                cuda._compute = stream
                buffer_pool.acquire(position)
                for _ in range(12 if stream is main else 0):  # other work keeps the stream busy
                    device.compute(lambda: None)
                device.compute(partial(look, layer, name))
                buffer_pool.release(position)
        cuda.run_all()
        device.close()
        assert len(seen) == 4 * len(model.sublayers) and all(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matrices_are_packed_for_the_kernel(dtype, monkeypatch):
    weight = torch.randn((64, 128)).to(dtype)
    whole = packing.compress_for_kernels(weight)
    monkeypatch.setattr(packing, "_CHUNK_WEIGHTS", 5 * 128)  # chunks of five rows, and a rest
    assert torch.equal(packing.compress_for_kernels(weight), whole)
    assert len(whole) == compressed_bytes(64, 128, dtype.itemsize)
    torch.testing.assert_close(reference.unpack(whole, 64, dtype), rounded(weight))
    assert packing.packing_for(torch.device("cuda", 0)).layout() == "dequant_linear, 32 a group"
