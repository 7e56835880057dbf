# SPDX-License-Identifier: Apache-2.0
"""Far weights on a fake CUDA runtime, with the real engine on vLLM's CPU backend.

Compute on the CPU runs when it is submitted, so the calling thread waits until the fake compute
stream reaches that point. Copies are as late as the fake device allows. The behavior of CUDA's
model runners is imitated as far as a CPU can.
"""

import contextlib
import random
from functools import partial
from typing import Any

import pytest
import torch
from vllm.model_executor.model_loader import utils as loader_utils
from vllm.model_executor.offloader import get_offloader

from tests.e2e.harness import engine, generate, random_prompts, run, vllm_tokens
from tests.fakes.cuda import HeldCompute, SimulatedCudaDevice
from tests.fakes.graph_pieces import CapturedPiece, compile_as_on_a_gpu
from vllm_tiered.adapter.weights import choosing, int4_layers, measurements, offloader
from vllm_tiered.adapter.weights import graphs as weights_graphs
from vllm_tiered.config import WeightsConfig
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cuda.device import CudaDevice
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kernels.dequant_linear import reference
from vllm_tiered.probe.links import stored_reads
from vllm_tiered.weights import offloaded_weights
from vllm_tiered.weights.int4 import packing

PROMPTS = random_prompts(4, seed=6, longest=40)
MAX_TOKENS = 12
KV_OFF = {"enabled": False}


@pytest.fixture(params=[0.0, 0.5], ids=["delayed", "eager"])
def on_fake(request, monkeypatch):
    monkeypatch.setattr(
        offloader, "make_device", lambda: HeldCompute(random.Random(1), haste=request.param)
    )


@pytest.mark.parametrize("placement", ["all_far", "helm"])
@pytest.mark.parametrize("model", ["opt", "llama3"])
def test_tokens_equal(model, placement, on_fake) -> None:
    expected = vllm_tokens(model, PROMPTS, MAX_TOKENS)
    with engine(model, KV_OFF, weights={"placement": placement}) as llm:
        assert generate(llm, PROMPTS, MAX_TOKENS) == expected
        tiered = get_offloader()
        assert isinstance(tiered._device, CudaDevice)
        assert tiered.buffer_pool.num_misses == 0
        assert tiered._device.use(Direction.READ).num_bytes > 10 * tiered.placement.far_bytes
        tiered.buffer_pool.check_integrity()


def test_it_fails_without_the_wait(monkeypatch) -> None:
    monkeypatch.setattr(
        offloader, "make_device", lambda: SimulatedCudaDevice(random.Random(1), haste=0.3)
    )
    result = run("opt", PROMPTS, KV_OFF, weights={"placement": "all_far"}, max_tokens=MAX_TOKENS)
    assert result.tokens != vllm_tokens("opt", PROMPTS, MAX_TOKENS)


def test_stored_weights_with_the_first_start_and_the_second(on_fake, tmp_path) -> None:
    expected = vllm_tokens("opt", PROMPTS, MAX_TOKENS)
    weights = {"placement": "flexgen", "percents": [20, 40, 40], "storage_path": str(tmp_path)}
    for _ in range(2):
        result = run("opt", PROMPTS, KV_OFF, weights=weights, max_tokens=MAX_TOKENS)
        assert result.tokens == expected
        assert result.manifest["weights"]["storage_bytes"]


def test_four_bit_in_the_kernels_layout(on_fake, monkeypatch) -> None:
    """The reference of the GPU kernel gives the same tokens as the CPU's order of the codes."""
    weights = {"placement": "helm", "compress": "int4"}
    expected = run("opt", PROMPTS, KV_OFF, weights=weights, max_tokens=MAX_TOKENS).tokens
    assert expected != vllm_tokens("opt", PROMPTS, MAX_TOKENS)
    seen: set[int] = set()

    def product(x, compressed, rows, bias_N=None):
        seen.add(rows)
        return reference.linear(x, compressed, rows, bias_N)

    as_on_gpu = packing.ON_GPU._replace(linear=product)
    for module in (offloaded_weights, int4_layers, choosing):
        monkeypatch.setattr(module, "packing_for", lambda device: as_on_gpu)
    found = run("opt", PROMPTS, KV_OFF, weights=weights, max_tokens=MAX_TOKENS)
    assert found.tokens == expected
    assert len(seen) == 3  # of qkv, of the first FFN matrix, and of the others


@pytest.mark.parametrize("compress", ["none", "int4"])
def test_vllm_moves_no_far_layer_to_the_gpu_and_back(compress, monkeypatch) -> None:
    moved: set[int] = set()

    @contextlib.contextmanager
    def moving(module, target_device):
        moved.update(map(id, module.parameters(recurse=False)))
        yield module

    monkeypatch.setattr(loader_utils, "device_loading_context", moving)
    weights = {"placement": "helm", "compress": compress}
    with engine("opt", KV_OFF, weights=weights):
        tiered = get_offloader()
        far = {id(parameter) for *_, parameter in tiered._far}
        compressed = {id(linear.weight) for linear in tiered._compressed}
    assert far and moved and not moved & (far | compressed)


def test_memory_is_where_it_belongs_while_torch_builds_on_the_gpu(monkeypatch, tmp_path) -> None:
    """Tensors are on the CPU although the default device, as in vLLM, is another ("meta" here)."""
    monkeypatch.setattr(
        offloader, "make_device", lambda: SimulatedCudaDevice(random.Random(1), haste=1.0)
    )
    monkeypatch.setattr(measurements, "stored_reads", partial(stored_reads, sizes=[1 << 20]))
    built = [torch.nn.Module() for _ in range(4)]
    for layer in built:
        layer.fc1, layer.fc2 = torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)
    expected = [p.detach().clone() for layer in built for p in layer.parameters()]
    config = WeightsConfig(
        placement="latency", near_gib=3e-3, far_gib=1e-3, storage_path=str(tmp_path)
    )
    about = {"name": "model", "fingerprint": "0", "changed": "0"}
    with torch.device("meta"):
        tiered = offloader.TieredOffloader(config, model=lambda: about)
        tiered.wrap_modules(one for one in built)
        assert tiered.placement is not None and tiered.placement.stored
        parameters = [p for layer in built for p in layer.parameters()]
        assert {parameter.device.type for parameter in parameters} == {"cpu"}
        with torch.no_grad():
            for parameter, value in zip(parameters, expected, strict=True):
                parameter.copy_(value)
        tiered.post_init()
        assert tiered.buffer_pool is not None
    for position in range(len(tiered.buffer_pool._buffer_of)):
        tiered.buffer_pool.acquire(position)
        tiered.buffer_pool.release(position)
    tiered.close()


# Graphs ---------------------------------------------------------------------------------


@pytest.fixture
def captured_pieces(monkeypatch, tmp_path):
    """Make vLLM compile and split as on a GPU; each piece runs as if it were captured."""

    def split(config: Any, vllm_config: Any) -> None:
        weights_graphs.partition_graphs(config.weights, vllm_config)

    compile_as_on_a_gpu(monkeypatch, tmp_path, split, CapturedPiece)


@pytest.mark.parametrize("compress", ["none", "int4"])
def test_no_piece_that_is_captured_waits_for_weights(compress, captured_pieces) -> None:
    weights = {"placement": "helm", "compress": compress}
    expected = run("opt", PROMPTS, KV_OFF, weights=weights, max_tokens=MAX_TOKENS).tokens
    with engine("opt", KV_OFF, weights=weights, enforce_eager=False) as llm:
        get_offloader()._is_on_gpu = True
        assert generate(llm, PROMPTS, MAX_TOKENS) == expected
        assert get_offloader().buffer_pool.num_misses < 10


def test_a_piece_that_waits_is_an_error(captured_pieces, monkeypatch) -> None:
    """A wait in a captured piece is detected, on which the previous test relies."""
    monkeypatch.setattr(weights_graphs, "SPLITTING_OPS", ())
    with engine("opt", KV_OFF, weights={"placement": "helm"}, enforce_eager=False) as llm:
        get_offloader()._is_on_gpu = True
        with pytest.raises(IntegrityError, match="a CUDA graph is captured around a wait"):
            generate(llm, PROMPTS, MAX_TOKENS)
