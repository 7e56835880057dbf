# SPDX-License-Identifier: Apache-2.0
"""Experts on a fake CUDA runtime, with the real engine on vLLM's CPU backend.

Copies are as late as the fake device allows. Tensors are built and loaded as on a GPU, whose loader
moves them to the GPU while a layer is processed, and back.
"""

import contextlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.model_loader import utils as loader_utils

from tests.e2e.harness import engine, generate, random_prompts, run, vllm_tokens
from tests.e2e.test_experts import counters, slots, stored
from tests.fakes.cuda import HeldCompute, SimulatedCudaDevice
from tests.fakes.graph_pieces import ReplayedPiece, compile_as_on_a_gpu
from vllm_tiered.adapter.experts import engine as experts_engine
from vllm_tiered.adapter.experts import graphs as experts_graphs
from vllm_tiered.adapter.experts.engine import ExpertsEngine
from vllm_tiered.adapter.experts.graphs import split_at_experts
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.experts import on_device
from vllm_tiered.experts.layer import ExpertLayer
from vllm_tiered.kernels.expert_slots import reference

PROMPTS = random_prompts(4, seed=7, longest=40)
MAX_TOKENS = 12
KV_OFF = {"enabled": False}


@contextlib.contextmanager
def moving(module: torch.nn.Module, target_device: torch.device) -> Any:
    """Do what vLLM's loader does for parameters that are not on its device."""
    before = dict(module.named_parameters())
    for parameter in before.values():
        parameter.data = parameter.data.clone()
    yield module
    for name, parameter in module.named_parameters():
        if name in before:
            parameter.data = parameter.data.clone()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the kernels by their references; `steps` counts those of the GPU alone."""
    counted = SimpleNamespace(steps=0)

    def resolve(index: Any, ids: Any, device_name: Any) -> Any:
        counted.steps += bool(ids.numel())
        return reference.resolve(index, ids)

    counted.resolve = resolve
    counted.fill = lambda plan, rows, slots, device_name: reference.fill(plan, rows, slots)
    monkeypatch.setattr(on_device, "gpu_kernels", lambda: counted)
    return counted


@pytest.fixture(params=[0.0, 0.5], ids=["delayed", "eager"])
def on_fake(
    kernels: SimpleNamespace, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        experts_engine, "make_device", lambda: HeldCompute(random.Random(1), haste=request.param)
    )
    monkeypatch.setattr(loader_utils, "device_loading_context", moving)


@pytest.mark.parametrize("tier", ["far", "stored"])
@pytest.mark.parametrize(
    ("model", "count"),
    [("qwen3_moe", 5), ("olmoe", 20), ("gpt_oss", 4), ("mixtral", 3)],
)
def test_tokens_equal(
    on_fake: None, kernels: SimpleNamespace, tmp_path: Path, model: str, count: int, tier: str
) -> None:
    experts = slots(model, count, **(stored(tmp_path) if tier == "stored" else {}))
    expected = vllm_tokens(model, PROMPTS, MAX_TOKENS)
    for _ in range(2 if tier == "stored" else 1):  # the second start reads the file
        with engine(model, KV_OFF, experts=experts) as llm:
            assert generate(llm, PROMPTS, MAX_TOKENS) == expected
            assert generate(llm, PROMPTS[:1], MAX_TOKENS) == expected[:1]
            assert generate(llm, PROMPTS, MAX_TOKENS) == expected
            used = counters(llm)
    assert used["experts_hits"] > 0 and used["experts_misses"] > 0
    assert used["experts_ahead"] == 0
    assert bool(kernels.steps) == (tier == "far")


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_the_host_plans_only_what_may_not_fit(
    on_fake: None, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """A decode step of few tokens is the GPU's alone, and prompts between them are the host's."""
    planned: list[int] = []
    compute = ExpertLayer._compute

    def on_host(layer: ExpertLayer, x: Any, weights: Any, ids_MK: Any, ids: Any, run: Any) -> Any:
        planned.append(ids.size)
        layer.table.check_integrity()
        return compute(layer, x, weights, ids_MK, ids, run)

    monkeypatch.setattr(ExpertLayer, "_compute", on_host)
    count, expected = 20, vllm_tokens("olmoe", PROMPTS, MAX_TOKENS)
    with engine("olmoe", KV_OFF, experts=slots("olmoe", count, policy=policy)) as llm:
        assert generate(llm, PROMPTS[:1], MAX_TOKENS) == expected[:1]
        assert generate(llm, PROMPTS[1:3], MAX_TOKENS) == expected[1:3]
        assert generate(llm, PROMPTS, MAX_TOKENS) == expected
        used = counters(llm)
    assert planned and min(planned) > count
    assert used["experts_layer_steps"] > len(planned) > 0
    assert used["experts_pairs"] > sum(planned)


def test_a_slot_for_each_expert(on_fake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    monkeypatch.setattr(ExpertsEngine, "_move_rest", lambda experts, layer: moved.append(layer))
    result = run("qwen3_moe", PROMPTS, KV_OFF, experts=slots("qwen3_moe", 16))
    assert result.tokens == vllm_tokens("qwen3_moe", PROMPTS) and len(moved) == 3


def test_it_fails_without_the_wait(
    kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        experts_engine, "make_device", lambda: SimulatedCudaDevice(random.Random(1), haste=0.3)
    )
    result = run("qwen3_moe", PROMPTS, KV_OFF, experts=slots("qwen3_moe", 5), max_tokens=MAX_TOKENS)
    assert result.tokens != vllm_tokens("qwen3_moe", PROMPTS, MAX_TOKENS)


def test_what_does_not_work_on_a_gpu_is_refused(on_fake: None) -> None:
    with pytest.raises(UnsupportedError, match="prefetch does not work on a GPU"):
        run("qwen3_moe", PROMPTS, KV_OFF, experts=slots("qwen3_moe", 5, prefetch="on"))


@pytest.fixture
def replayed_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make vLLM compile and split as on a GPU; after its capture a piece is replayed."""
    compile_as_on_a_gpu(
        monkeypatch, tmp_path, lambda _, vllm_config: split_at_experts(vllm_config), ReplayedPiece
    )
    monkeypatch.setattr(
        experts_engine, "make_device", lambda: HeldCompute(random.Random(1), haste=1.0)
    )
    monkeypatch.setattr(loader_utils, "device_loading_context", moving)


@pytest.mark.parametrize(("model", "count"), [("qwen3_moe", 5), ("glm4_moe", 6)])
def test_graphs_read_what_the_experts_wrote(
    kernels: SimpleNamespace, replayed_pieces: None, model: str, count: int
) -> None:
    experts = slots(model, count)
    expected = vllm_tokens(model, PROMPTS, MAX_TOKENS)
    with engine(model, KV_OFF, experts=experts, enforce_eager=False) as llm:
        for _ in range(2):
            assert generate(llm, PROMPTS, MAX_TOKENS) == expected
            assert generate(llm, PROMPTS[:1], MAX_TOKENS) == expected[:1]
    assert kernels.steps


def test_they_do_not_read_what_vllms_op_returns(
    kernels: SimpleNamespace, replayed_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above can fail: vLLM's op allocates its result between the graphs."""
    monkeypatch.setattr(experts_graphs, "OP", "vllm::moe_forward")
    monkeypatch.setattr(
        experts_graphs,
        "write_to_fixed_memory",
        lambda runner: setattr(runner, "_forward_entry", torch.ops.vllm.moe_forward),
    )
    with engine("qwen3_moe", KV_OFF, experts=slots("qwen3_moe", 5), enforce_eager=False) as llm:
        found = generate(llm, PROMPTS, MAX_TOKENS)
    assert found != vllm_tokens("qwen3_moe", PROMPTS, MAX_TOKENS)
