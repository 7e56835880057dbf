# SPDX-License-Identifier: Apache-2.0
"""With default settings every engine starts: what cannot be swapped is left to vLLM, with a reason.

What the user set by hand is refused before the weights are loaded.
"""

from typing import Any

import pytest

from tests.e2e.faults import fused_kv_updates
from tests.e2e.harness import engine, generate, metric, random_prompts, run, vllm_tokens
from tests.fakes.kv import block_store_connector
from vllm_tiered.adapter.kv import adaptive, obstacles
from vllm_tiered.errors import UnsupportedError
from vllm_tiered.kv.controller import Decision

MIB = 1 << 20
PROMPTS = random_prompts(10, longest=100)
BY_HAND = {"expansion": 1.5}
TIGHT: dict[str, Any] = {"kv_cache_memory_bytes": 40 * MIB, "max_model_len": 256}


@pytest.fixture
def other_backend(monkeypatch) -> str:
    """An attention backend whose block tables could not be translated."""
    monkeypatch.setattr(obstacles, "ATTENTION_BACKENDS", ("TRITON_ATTN",))
    return "qwen2"


# By name: the model or the fixture that makes it, and a part of the reason.
MODELS = {
    "windows": ("windowed", "no layer has full attention"),
    "other_backend": ("other_backend", "attention backend CPU_ATTN"),
}


@pytest.fixture(params=MODELS)
def case(request) -> tuple[str, str]:
    """Return the model and a part of the reason."""
    model, reason = MODELS[request.param]
    is_made_here = model in ("windowed", "other_backend")
    return (request.getfixturevalue(model) if is_made_here else model), reason


def kv_state(llm: Any) -> dict[str, Any]:
    state: dict[str, Any] = llm.collective_rpc("tiered_state")[0]["kv"]
    return state


def test_a_model_is_served_as_by_vllm_alone(case, caplog_vllm) -> None:
    model, reason = case
    expected = run(model, PROMPTS)
    caplog_vllm.clear()
    with engine(model, {}) as llm:
        assert generate(llm, PROMPTS) == expected.tokens
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == expected.num_blocks
        kv = kv_state(llm)
    assert kv["state"] == "stepped aside" and not kv["is_supported"]
    assert reason in kv["reason"]
    lines = [r.getMessage() for r in caplog_vllm.records if "steps aside" in r.getMessage()]
    assert len(lines) == 1 and reason in lines[0]


def test_what_is_set_by_hand_is_refused_before_weights_are_loaded(case, monkeypatch) -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    model, reason = case
    monkeypatch.setattr(
        DefaultModelLoader, "load_weights", lambda *_: pytest.fail("weights were loaded")
    )
    with pytest.raises(UnsupportedError) as refused, engine(model, BY_HAND):
        pass
    for part in (reason, "What to do:", "tiered.kv.enabled to false"):
        assert part in str(refused.value)


def test_what_only_the_plan_shows_is_left_to_vllm(caplog_vllm) -> None:
    """Twice as many layers of full attention as of windows: vLLM makes two groups of them."""
    kinds = ["sliding_attention", "full_attention", "full_attention"] * 3
    options: dict[str, Any] = {"hf_overrides": {"layer_types": kinds}}
    expected = run("gemma3", PROMPTS, **options)
    caplog_vllm.clear()
    with engine("gemma3", {}, **options) as llm:
        assert generate(llm, PROMPTS) == expected.tokens
        assert "in 2 groups, not in one" in kv_state(llm)["reason"]
    assert caplog_vllm.text.count("in 2 groups, not in one") == 1


def test_a_kv_cache_that_is_read_after_later_ones(share_caches) -> None:
    """Layer 3 reads that of layer 1, and layer 2 would need the staging buffer before."""
    share_caches({3: 1})
    expected = run("qwen2", PROMPTS)
    with engine("qwen2", {}) as llm:
        assert generate(llm, PROMPTS) == expected.tokens
        assert "has read the KV cache of model.layers.1" in kv_state(llm)["reason"]


def test_the_longest_request_is_fitted_to_what_near_and_far_memory_hold() -> None:
    fitted: dict[str, Any] = {"kv_cache_memory_bytes": 20 * MIB, "max_model_len": -1}
    with engine("deep", **fitted) as llm:
        alone = llm.llm_engine.vllm_config.model_config.max_model_len
    with engine("deep", {}, **fitted) as llm:
        longest = llm.llm_engine.vllm_config.model_config.max_model_len
        assert alone < longest < 2048  # the model's own context would not fit either way
        assert kv_state(llm)["state"] == "on"


def test_the_longest_request_is_fitted_beside_its_windows() -> None:
    """As memory is short, a request holds less of a window, too."""
    fitted: dict[str, Any] = {"max_model_len": -1, "max_num_batched_tokens": 512}
    for near in (2 * MIB, 9 * MIB):
        with engine("gemma3", **fitted, kv_cache_memory_bytes=near) as llm:
            alone = llm.llm_engine.vllm_config.model_config.max_model_len
        with engine("gemma3", {}, **fitted, kv_cache_memory_bytes=near) as llm:
            longest = llm.llm_engine.vllm_config.model_config.max_model_len
            assert kv_state(llm)["state"] == "on"
        assert 32 <= alone <= longest <= 2048
        assert alone < longest or near < 9 * MIB


def test_recurrent_states_under_speculation_are_vllms_own() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with engine("granite_hybrid", {}, speculative_config=ngram) as llm:
        assert "for each draft" in kv_state(llm)["reason"]


def test_another_connector_that_keeps_addresses_keeps_its_place() -> None:
    from vllm.config import KVTransferConfig

    expected = vllm_tokens("qwen2", PROMPTS)
    transfer = KVTransferConfig(
        kv_connector="AddressKeepingConnector",
        kv_connector_module_path=block_store_connector.__name__,
        kv_role="kv_both",
    )
    with engine("qwen2", {}, kv_transfer_config=transfer) as llm:
        assert generate(llm, PROMPTS) == expected
        assert "AddressKeepingConnector, whose register_kv_caches" in kv_state(llm)["reason"]
    assert block_store_connector.STORE, "it has stored something"
    block_store_connector.STORE.clear()


def test_an_expansion_of_one_asks_for_nothing() -> None:
    expected = run("gpt_oss", PROMPTS).tokens
    with engine("gpt_oss", {"expansion": 1}) as llm:
        assert generate(llm, PROMPTS) == expected
        assert kv_state(llm)["state"] == "stepped aside"


@pytest.fixture
def fused_while_it_grows(monkeypatch) -> None:
    """A model with fused KV updates, and a controller that wants as many far layers as can be."""

    def climb(signals, state, levels, tuning):
        return Decision(level_idx=len(levels.ladder) - 1, reason="as high as can be"), state

    monkeypatch.setattr(adaptive.controller, "step", climb)
    fused_kv_updates(monkeypatch)


@pytest.mark.usefixtures("fused_while_it_grows")
def test_a_model_that_writes_kv_in_a_fused_operation_stays_near(caplog_vllm) -> None:
    """The first step shows it, when no layer is far yet."""
    with engine("deep", {}, **TIGHT) as llm:
        tokens = generate(llm, PROMPTS)
        kv = kv_state(llm)
        assert metric("tiered_kv_read_bytes") == 0 and metric("tiered_kv_expansion") == 1
    assert kv["state"] == "stepped aside" and kv["far_layers"] == 0
    assert "writes its KV by other means" in kv["reason"]
    assert caplog_vllm.text.count("writes its KV by other means") == 1
    assert tokens == vllm_tokens("deep", PROMPTS)


@pytest.mark.usefixtures("fused_while_it_grows")
def test_what_only_far_layers_could_hold_ends_with_an_error(caplog_vllm) -> None:
    """vLLM took a context that fits with far layers, and then there are none."""
    from vllm import SamplingParams

    longest = [token for prompt in random_prompts(12, seed=3) for token in prompt][:230]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in (PROMPTS[0], longest, PROMPTS[1])]
    with engine("deep", {}, **TIGHT | {"kv_cache_memory_bytes": 11 * MIB}) as llm:
        generate(llm, PROMPTS[:1], 4)
        outputs = llm.generate(requests, sampling, use_tqdm=False)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "length"]
    assert "230 tokens, and model.layers" in caplog_vllm.text
    assert "one request can have 192" in caplog_vllm.text
