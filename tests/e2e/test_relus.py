# SPDX-License-Identifier: Apache-2.0
"""Gated FFNs with a ReLU in vLLM's classes that know SiLU alone, on the real engine."""

import json
import shutil
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from vllm.model_executor.custom_op import op_registry_oot

from tests.e2e import harness
from tests.e2e.harness import engine, generate, metric, model_path, random_prompts, run
from tests.fixtures.four_bit_grid import put_ffns_on_grid
from vllm_tiered.adapter.ffn import relus
from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.prepare.pipeline import prepare
from vllm_tiered.planner.built_model import built_shape

PROMPTS = random_prompts(6, seed=5)
MAX_TOKENS = 12
KV_OFF = {"enabled": False}
THRESHOLD = 4.0
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "relu": {"hidden_act": "relu"},
    "fatrelu": {"hidden_act": "fatrelu", "hidden_act_param": THRESHOLD},
    "drelu": {"hidden_act": "drelu"},
}


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory):
    """Make each body with each activation, and with FFNs large enough to show in the tokens.

    Gate and up lie on the 4-bit grid, so that a predictor in 4 bit names exactly the active ones.
    """
    for body in ("llama3", "mistral"):
        for name, changed in ACTIVATIONS.items():
            folder = tmp_path_factory.mktemp(f"{body}-{name}") / "model"
            shutil.copytree(model_path(body), folder)
            put_ffns_on_grid(folder)
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changed))
            harness.PATHS[f"{body}-{name}"] = str(folder)
    yield
    for name in [name for name in harness.PATHS if name.partition("-")[2] in ACTIVATIONS]:
        del harness.PATHS[name]


@cache
def expected(body: str, activation: str) -> list[list[int]]:
    """Return the greedy tokens of transformers, whose FFNs get the activation by hand."""
    from transformers import AutoModelForCausalLM

    folder = model_path(f"{body}-relu")  # all have the same weights
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    threshold = THRESHOLD if activation == "fatrelu" else 0.0
    for layer in model.model.layers:
        mlp = layer.mlp
        if activation != "silu":
            mlp.act_fn = torch.nn.Threshold(threshold, 0.0)
        else:
            mlp.act_fn = torch.nn.SiLU()
        if activation == "drelu":
            mlp.up_proj.register_forward_hook(lambda module, x, out: F.relu(out))
    tokens = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                min_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


@pytest.mark.parametrize("body", ["llama3", "mistral"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_tokens_are_those_of_transformers(body, activation):
    with engine(f"{body}-{activation}", KV_OFF) as llm:
        config = llm.llm_engine.vllm_config.model_config.hf_config
        assert generate(llm, PROMPTS, MAX_TOKENS) == expected(body, activation)
    assert config.hidden_act == activation, "it is as it was"
    assert "SiluAndMul" not in op_registry_oot


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["fatrelu", "drelu"])
def test_compiled(activation):
    """One after the other: code that was compiled for another activation is not taken."""
    with engine(f"llama3-{activation}", KV_OFF, enforce_eager=False) as llm:
        assert generate(llm, PROMPTS, MAX_TOKENS) == expected("llama3", activation)


def test_the_activations_have_tokens_of_their_own():
    """Or the test above would show nothing."""
    found = {name: expected("llama3", name) for name in (*ACTIVATIONS, "silu")}
    equal = [pair for pair in combinations(found, 2) if found[pair[0]] == found[pair[1]]]
    assert not equal


def test_without_the_plugin_vllm_refuses():
    with pytest.raises(ValueError, match="Only silu is supported"), engine("llama3-relu"):
        pass


def test_another_refusal_is_vllms_own():
    def refuse(vllm_config, *args, **kwargs):
        raise ValueError("head size 7 is not supported")

    with engine("llama3-relu", KV_OFF) as llm:
        vllm_config = llm.llm_engine.vllm_config
    with pytest.raises(ValueError, match="head size 7"):
        relus.build(refuse, vllm_config)
    assert vllm_config.model_config.hf_config.hidden_act == "relu"


def test_its_weights_can_be_placed():
    """Both take part in building the model."""
    weights = {"placement": "all_far"}
    found = run("llama3-drelu", PROMPTS, KV_OFF, weights=weights, max_tokens=MAX_TOKENS)
    assert found.tokens == expected("llama3", "drelu")
    assert found.manifest["weights"]["far_bytes"] > 0


def test_the_planner_knows_its_shape(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = built_shape(model_path("llama3-relu"))
    assert found.sublayers == built_shape(model_path("llama3")).sublayers


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_neurons_from_a_store_give_the_same_tokens(tmp_path, activation):
    model, store = f"llama3-{activation}", tmp_path / "store"
    prepare(Path(model_path(model)), store, dtype=torch.float32)
    ffn = {"store": str(store), "exact": True, "far_gib": 0}
    found = run(model, PROMPTS, KV_OFF, ffn=ffn, max_tokens=MAX_TOKENS)
    assert found.tokens == expected("llama3", activation)
    assert found.manifest["ffn"]["cache_rows"] == {"full": [0] * 3}, "all are streamed"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_sparse_steps_give_the_same_tokens(tmp_path, activation):
    model, store = f"llama3-{activation}", tmp_path / "store"
    prepare(Path(model_path(model)), store, dtype=torch.float32)
    ffn = {"store": str(store), "mix": [1, 0, 0], "deterministic": True, "far_gib": 0}
    with engine(model, {"expansion": 1.0}, ffn=ffn) as llm:
        assert [generate(llm, [one], MAX_TOKENS)[0] for one in PROMPTS] == expected(
            "llama3", activation
        )
        steps = metric("tiered_ffn_sparse_steps")
        assert steps == len(PROMPTS) * 3 * (MAX_TOKENS - 1), "all but the prompts, in 3 layers"
        named = (metric("tiered_ffn_hits") + metric("tiered_ffn_misses")) / steps
        (state,) = llm.collective_rpc("tiered_state")
    assert 0 < named < 0.7 * state["ffn"]["neurons"], "the rest is inactive"


def test_a_store_with_another_activation_than_the_models_is_refused(tmp_path):
    """The fingerprint knows the folder's config.json, and not what is served in its place."""
    store = tmp_path / "store"
    prepare(Path(model_path("llama3-relu")), store, dtype=torch.float32)
    ffn, overrides = {"store": str(store), "exact": True}, {"hidden_act": "drelu"}
    with (
        pytest.raises(ConfigError, match="prepared with relu, and the model is served with drelu"),
        engine("llama3-relu", KV_OFF, ffn=ffn, hf_overrides=overrides),
    ):
        pytest.fail("the engine started")
