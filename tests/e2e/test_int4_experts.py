# SPDX-License-Identifier: Apache-2.0
"""Experts in 4 bit run on any x86 processor, and pass through slots as others do."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.inputs.int4_checkpoint import int4_model_dir
from tests.e2e import harness
from tests.e2e.harness import engine, generate, random_prompts, run
from tests.e2e.test_experts import damage_slots
from vllm_tiered.adapter.experts.int4 import compute
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.experts.int4.packing import quantise

pytestmark = pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="vLLM's own kernel computes them on AMX"
)

PROMPTS = random_prompts(6, longest=60)
KV_OFF = {"enabled": False}
# Bytes of an expert: codes, scales in 16 bit, and zeros in a byte.
EXPERT_BYTES = 3 * 256 * 256 * (1 / 2 + 2 / 32 + 1 / 32)


@pytest.fixture(params=["gptq", "awq", "awq_sym", "compressed", "compressed_asym"])
def form(request) -> str:
    for name, folder in zip(
        ("int4", "expanded"), int4_model_dir("mixtral", request.param, group=32), strict=True
    ):
        harness.PATHS[f"{name}-{request.param}"] = str(folder)
    return str(request.param)


def dtype_of(form: str) -> str:
    """The widest that vLLM takes for the format."""
    return "float32" if form.startswith("compressed") else "float16"


def slots(count: int, **values: Any) -> dict[str, Any]:
    return {"near_gib": (count + 0.1) * 3 * EXPERT_BYTES / 2**30, **values}


def test_tokens_with_slots(tmp_path: Path, form: str) -> None:
    """Far and stored, and once more from the file, they are those of all experts in memory."""
    dtype = dtype_of(form)
    in_memory = run(f"int4-{form}", PROMPTS, KV_OFF, dtype=dtype)
    for experts in (
        slots(3),
        slots(3, storage_path=str(tmp_path), far_gib=0),
        slots(3, storage_path=str(tmp_path), far_gib=0),
    ):
        with engine(f"int4-{form}", KV_OFF, dtype=dtype, experts=experts) as llm:
            assert generate(llm, PROMPTS) == in_memory.tokens
            (state,) = llm.collective_rpc("tiered_state")
            assert state["experts"]["counters"]["experts_misses"] > 0
    if dtype == "float32":  # vLLM's kernel on the same weights, in float32
        assert in_memory.tokens == run(f"expanded-{form}", PROMPTS).tokens


def test_one_wrong_byte_of_a_slot_changes_the_tokens(monkeypatch) -> None:
    """The control of the test above."""
    harness.PATHS["int4"] = str(int4_model_dir("mixtral", "compressed", group=32)[0])
    damage_slots(monkeypatch, 0x77)
    found = run("int4", PROMPTS, KV_OFF, experts=slots(3))
    assert found.tokens != run("int4", PROMPTS, KV_OFF).tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_alone_and_together(dtype) -> None:
    """Waves compute each pair of a token and an expert as a row; more rows than a chunk has."""
    torch.manual_seed(0)
    up, down = quantise(torch.randn(4, 64, 64), 32), quantise(torch.randn(4, 64, 32), 32)
    parts = (*up, None, *down, None)
    x, ids = torch.randn(600, 64).to(dtype), torch.randint(0, 4, (600, 2))
    weights = torch.rand(600, 2)
    alone = [
        compute(x.float(), weights[:, k : k + 1], ids[:, k : k + 1], parts, "silu", None)
        for k in range(2)
    ]
    together = compute(x, weights, ids, parts, "silu", None)
    expected = (alone[0].double() + alone[1].double()).to(dtype)
    assert torch.equal(together, expected)


@pytest.mark.parametrize("experts", [{}, slots(3)], ids=["in memory", "slots"])
def test_compiled(experts) -> None:
    harness.PATHS["int4"] = str(int4_model_dir("mixtral", "compressed", group=32)[0])
    compiled = run("int4", PROMPTS, KV_OFF, experts=experts, enforce_eager=False)
    assert compiled.tokens == run("int4", PROMPTS, KV_OFF).tokens


def test_a_group_that_two_ranks_would_share_is_refused() -> None:
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig

    from vllm_tiered.adapter.experts.int4 import process_weights

    config = AutoAWQConfig(4, 128, True, False, [], {})
    w13, w2 = torch.zeros(2, 256, 8, dtype=torch.int32), torch.zeros(2, 192, 32, dtype=torch.int32)
    scales = torch.ones(2, 2, 64), torch.ones(2, 1, 256)
    zeros = torch.zeros(2, 2, 8, dtype=torch.int32), torch.zeros(2, 1, 32, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="rows of 192 weights are not whole groups of 128"):
        process_weights(config, w13, w2, *scales, *zeros)


def test_other_quantisations_are_refused() -> None:
    from vllm_tiered.adapter.experts.int4 import process_weights

    with pytest.raises(UnsupportedError, match="GPTQ, AWQ or compressed-tensors"):
        process_weights(object(), *[torch.zeros(1)] * 4)


REFUSED = """
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm_tiered.adapter.experts import int4
theirs = cpu_moe.CPUExpertsInt4
assert not theirs._supports_current_device()
assert int4.install() and int4.install()
assert cpu_moe.CPUExpertsInt4 is int4.TieredInt4Experts is not theirs
assert cpu_moe.CPUExpertsInt4._supports_current_device()
"""


def test_vllm_has_no_kernel_for_them_here() -> None:
    """The day it has, its own is the better choice."""
    subprocess.run([sys.executable, "-c", REFUSED], check=True)
