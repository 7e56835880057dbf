# SPDX-License-Identifier: Apache-2.0
"""Experts on a fake CUDA runtime, with the real engine on vLLM's CPU backend.

Copies are as late as the fake device allows. Tensors are built and loaded as on a GPU, whose loader
moves them to the GPU while a layer is processed, and back.
"""

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.model_loader import utils as loader_utils

from tests.e2e.harness import engine, generate, random_prompts, run, vllm_tokens
from tests.e2e.test_experts import counters, slots, stored
from tests.fakes.cuda import HeldCompute, SimulatedCudaDevice
from vllm_tiered.adapter.experts import engine as experts_engine
from vllm_tiered.adapter.experts.engine import ExpertsEngine
from vllm_tiered.errors import UnsupportedError

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


@pytest.fixture(params=[0.0, 0.5], ids=["delayed", "eager"])
def on_fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        experts_engine, "make_device", lambda: HeldCompute(random.Random(1), haste=request.param)
    )
    monkeypatch.setattr(loader_utils, "device_loading_context", moving)


@pytest.mark.parametrize("tier", ["far", "stored"])
@pytest.mark.parametrize(
    ("model", "count"),
    [("qwen3_moe", 5), ("olmoe", 20), ("gpt_oss", 4), ("mixtral", 3)],
)
def test_tokens_equal(on_fake: None, tmp_path: Path, model: str, count: int, tier: str) -> None:
    experts = slots(model, count, **(stored(tmp_path) if tier == "stored" else {}))
    expected = vllm_tokens(model, PROMPTS, MAX_TOKENS)
    for _ in range(2 if tier == "stored" else 1):  # the second start reads the file
        with engine(model, KV_OFF, experts=experts) as llm:
            assert generate(llm, PROMPTS, MAX_TOKENS) == expected
            used = counters(llm)
    assert used["experts_hits"] > 0 and used["experts_misses"] > 0
    assert used["experts_ahead"] == 0


def test_a_slot_for_each_expert(on_fake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    monkeypatch.setattr(ExpertsEngine, "_move_rest", lambda experts, layer: moved.append(layer))
    result = run("qwen3_moe", PROMPTS, KV_OFF, experts=slots("qwen3_moe", 16))
    assert result.tokens == vllm_tokens("qwen3_moe", PROMPTS) and len(moved) == 3


def test_it_fails_without_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        experts_engine, "make_device", lambda: SimulatedCudaDevice(random.Random(1), haste=0.3)
    )
    result = run("qwen3_moe", PROMPTS, KV_OFF, experts=slots("qwen3_moe", 5), max_tokens=MAX_TOKENS)
    assert result.tokens != vllm_tokens("qwen3_moe", PROMPTS, MAX_TOKENS)


def test_what_does_not_work_on_a_gpu_is_refused(on_fake: None) -> None:
    with pytest.raises(UnsupportedError, match="prefetch does not work on a GPU"):
        run("qwen3_moe", PROMPTS, KV_OFF, experts=slots("qwen3_moe", 5, prefetch="on"))
