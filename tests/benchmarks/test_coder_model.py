# SPDX-License-Identifier: Apache-2.0
"""A model off its 4-bit grid computes what it did."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.inputs.coder_model import coder_model_dir, off_grid_dir, rotated

CONFIGS = {
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": False},
}


def small_model(kind):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 128,
    }
    config = AutoConfig.for_model(**{**CONFIGS[kind], **sizes})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms' scales and biases too
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def logits(model):
    with torch.inference_mode():
        return model(torch.arange(40)[None] % 128).logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_stay_and_weights_do_not(tmp_path, kind):
    model = small_model(kind)
    source = tmp_path / "source"
    source.mkdir()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(source)
    folder = off_grid_dir(source, cache_dir=tmp_path)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before, after = logits(model), logits(other)
    assert torch.allclose(before, after, atol=1e-3 * float(before.abs().max()))
    assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    ours, theirs = dict(other.named_parameters()), dict(model.named_parameters())
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        path = f"model.layers.1.{name}.weight"
        assert not torch.allclose(ours[path], theirs[path], atol=0.1)
    assert torch.equal(ours["model.norm.weight"], torch.ones(64))
    assert off_grid_dir(source, cache_dir=tmp_path) == folder


def test_the_rotation_is_that_of_its_seed():
    state = small_model("qwen2").state_dict()
    once, again, other = (rotated(state, seed)["lm_head.weight"] for seed in (1, 1, 2))
    assert torch.equal(once, again)
    assert not torch.allclose(once, other, atol=0.1)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.inputs.coder_model._PACKAGE", "no-such-package-")
    with pytest.raises(FileNotFoundError, match="no-such-package-1 is not installed: pip install"):
        coder_model_dir(tmp_path)
