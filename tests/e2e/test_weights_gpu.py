# SPDX-License-Identifier: Apache-2.0
"""Far weights on a GPU: tokens equal vLLM's in float32, eager and with piecewise graphs."""

from typing import Any

import pytest
import torch
from vllm.model_executor.offloader import get_offloader

from tests.e2e.harness import engine, generate, random_prompts, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = random_prompts(6, seed=5)
KV_OFF = {"enabled": False}
FLOAT32: dict[str, Any] = {"attention_backend": "TRITON_ATTN"}  # supports float32
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all_far": {"placement": "all_far"},
    "helm": {"placement": "helm"},
    "latency": {"placement": "latency", "near_gib": 0.004},
}


@pytest.fixture(scope="module")
def alone():
    """Return a function for vLLM's tokens, by model and whether it is eager."""
    found: dict[tuple[str, bool], Any] = {}

    def tokens(model: str, eager: bool) -> Any:
        if (model, eager) not in found:
            found[model, eager] = run(model, PROMPTS, enforce_eager=eager, **FLOAT32).tokens
        return found[model, eager]

    return tokens


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("model", ["opt", "llama3"])
def test_tokens_equal(model, placement, eager, alone) -> None:
    expected = alone(model, eager)
    weights = PLACEMENTS[placement]
    with engine(model, KV_OFF, weights=weights, enforce_eager=eager, **FLOAT32) as llm:
        assert generate(llm, PROMPTS) == expected
        check_on_gpu(get_offloader())
        graphs = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        assert graphs.name == ("NONE" if eager else "PIECEWISE")


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_four_bit_far_and_near_give_the_same(eager) -> None:
    """Far weights in 4 bit give the same tokens as near weights in 4 bit."""
    found = []
    for placement in ({"placement": "flexgen", "percents": [100, 0, 0]}, {"placement": "all_far"}):
        weights = {**placement, "compress": "int4"}
        with engine("opt", KV_OFF, weights=weights, enforce_eager=eager, **FLOAT32) as llm:
            found.append(generate(llm, PROMPTS))
    assert found[0] == found[1]


def test_stored_weights_with_the_first_start_and_the_second(alone, tmp_path) -> None:
    """Stored weights turn CUDA graphs off, and tokens are equal."""
    weights = {"placement": "flexgen", "percents": [20, 40, 40], "storage_path": str(tmp_path)}
    for _ in range(2):
        with engine("opt", KV_OFF, weights=weights, enforce_eager=False, **FLOAT32) as llm:
            assert generate(llm, PROMPTS) == alone("opt", True)
            assert not llm.llm_engine.vllm_config.compilation_config.cudagraph_mode


def check_on_gpu(tiered: Any) -> None:
    """Check that parameters are on the GPU, and that loads came from host memory."""
    for _, _, parameter in tiered._far:
        assert parameter.device.type == "cuda"
    assert tiered._is_on_gpu and tiered.buffer_pool.num_misses < 10
    assert tiered.take_use()["weights_read_bytes"] > tiered.placement.far_bytes
    tiered.buffer_pool.check_integrity()
