# SPDX-License-Identifier: Apache-2.0
"""Models with synthetic sparsity load, have the intended statistics, and a predictor for them."""

import json

import numpy as np
import pytest
import torch

from benchmarks.inputs.synthetic_sparsity import model as synthetic
from benchmarks.inputs.synthetic_sparsity.check import DEFINITIONS, measure, table
from benchmarks.inputs.synthetic_sparsity.model import (
    PREDICTOR_FILE,
    SYNTHETIC_SHAPES,
    Sparsity,
    synthetic_model_dir,
)
from benchmarks.inputs.synthetic_sparsity.record import record, sparsity_of_model
from benchmarks.inputs.synthetic_sparsity.values import GROWTH, LATENT_ENERGY, SyntheticValues
from benchmarks.peers.checkpoint import Checkpoint, to_float32
from benchmarks.peers.model import to_bfloat16
from benchmarks.peers.shapes import OPT_SHAPES

TINY = SYNTHETIC_SHAPES["opt-tiny"]
NUM_LATENT = 2 * TINY.sparsity.rank


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return synthetic_model_dir("opt-tiny", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(1)
    return [rng.integers(3, TINY.sizes.vocab_size, 300).tolist() for _ in range(2)]


def whole_model(folder):
    from transformers import AutoModelForCausalLM

    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return loaded.eval()


def test_the_model_has_its_sparsity(model, prompts):
    for dtype in ("float32", "bfloat16"):
        result = measure(model, dtype=dtype, prompts=prompts)
        for layer in [result, *result["by_layer"]]:
            assert layer["active_share"] == pytest.approx(0.03, abs=0.006)
            assert layer["overlap"] == pytest.approx(0.8, abs=0.04)
            assert layer["recall"] >= 0.95
            assert layer["predicted_share"] < 0.05
        assert len(result["by_layer"]) == TINY.sizes.num_layers
        assert set(DEFINITIONS) <= result.keys()
        assert table(result).count("\n") == 2 + TINY.sizes.num_layers


def test_every_neuron_has_its_time(model, prompts):
    for layer in record(model, prompts[0] + prompts[1]):
        assert (layer.active.any(axis=0)).mean() > 0.6


def test_the_record_matches_transformers(model, prompts):
    loaded = whole_model(model)
    seen: list[torch.Tensor] = []
    for layer in loaded.model.decoder.layers:
        layer.fc1.register_forward_hook(lambda _, given, result: seen.append(result))
    with torch.no_grad():
        loaded(torch.tensor([prompts[0]]))
    layers = list(record(model, prompts[0], dtype="float32"))
    assert len(seen) == len(layers) == TINY.sizes.num_layers
    for expected, layer in zip(seen, layers, strict=True):
        np.testing.assert_allclose(layer.activation, expected.relu().numpy(), atol=1e-4)


def test_the_stream_grows_as_the_thresholds_were_set_for(model, prompts):
    with torch.no_grad():
        out = whole_model(model)(torch.tensor([prompts[0]]), output_hidden_states=True)
    first = out.hidden_states[0][0]
    rest = TINY.sizes.hidden_size - NUM_LATENT
    assert first[:, NUM_LATENT:].square().mean() == pytest.approx(1, rel=0.05)
    latent = first[:, :NUM_LATENT].square().sum(1).mean() / rest
    assert latent == pytest.approx(LATENT_ENERGY, rel=0.02)
    # transformers' last hidden state has passed the last norm.
    before_last = out.hidden_states[-2][0, :, NUM_LATENT:].square().mean()
    expected = 1 + GROWTH * (TINY.sizes.num_layers - 1) / TINY.sizes.num_layers
    assert before_last == pytest.approx(expected, rel=0.15)


def test_the_text_depends_on_attention_and_ffn(model, prompts):
    def text(loaded):
        ids = torch.tensor([prompts[0][:40]])
        out = loaded.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
        return out[0, 40:].tolist()

    loaded = whole_model(model)
    whole = text(loaded)
    assert len(set(whole)) > 6
    for silenced in ("fc2", "self_attn.out_proj"):
        changed = whole_model(model)
        for layer in changed.model.decoder.layers:
            layer.get_submodule(silenced).weight.data.zero_()
        assert text(changed) != whole, silenced


def test_the_predictor_holds_the_factors_of_fc1(model):
    from safetensors.torch import load_file

    stored = Checkpoint(model)
    tensors = load_file(model / PREDICTOR_FILE)
    for layer_idx in range(TINY.sizes.num_layers):
        a_rH, b_Nr, bias = (tensors[f"layers.{layer_idx}.{p}"].float() for p in ("a", "b", "bias"))
        fc1 = to_float32(stored[f"model.decoder.layers.{layer_idx}.fc1.weight"])
        product = (b_Nr @ a_rH).numpy()
        scale = np.abs(product).max()
        np.testing.assert_allclose(fc1[:, :NUM_LATENT], product[:, :NUM_LATENT], atol=scale * 2**-7)
        assert not product[:, NUM_LATENT:].any()
        noise = to_float32(stored[f"model.decoder.layers.{layer_idx}.fc1.bias"])
        np.testing.assert_allclose(noise, bias.numpy(), rtol=2**-8)


def test_tensors_begin_at_blocks_of_the_disk(model):
    for path in model.glob("model-*.safetensors"):
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        assert (8 + header_bytes) % 4096 == 0


def test_the_seed_decides_the_numbers_not_the_order():
    name, shape = "model.decoder.layers.1.fc2.weight", (256, 1024)
    values = [SyntheticValues(TINY.sizes, TINY.sparsity, seed) for seed in (0, 0, 1)]
    list(values[1]("model.decoder.layers.0.fc1.weight", (1024, 256)))
    first, same, other = (np.concatenate([p.ravel() for p in v(name, shape)]) for v in values)
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


def test_the_latent_turns_as_the_overlap_asks_for():
    values = SyntheticValues(TINY.sizes, TINY.sparsity, 0)
    u = values.latent()
    np.testing.assert_allclose(np.square(u).mean(axis=1), 1, rtol=1e-4)
    adjacent = (u[1:] * u[:-1]).mean(axis=1)
    far = (u[20:] * u[:-20]).mean(axis=1)
    assert adjacent.mean() == pytest.approx(0.985, abs=0.004)
    assert np.abs(far).mean() < 0.3


def test_without_a_tokenizer_the_demo_model_is_not_needed(tmp_path, monkeypatch):
    def lacking():
        raise FileNotFoundError

    monkeypatch.setattr(synthetic, "write_synthetic_model", lambda *arguments, **options: None)
    monkeypatch.setattr(synthetic, "demo_model_dir", lacking)
    with pytest.raises(FileNotFoundError):
        synthetic_model_dir("opt-1.3b", tmp_path)
    bare = synthetic_model_dir("opt-1.3b", tmp_path, has_tokenizer=False)
    assert bare.is_dir() and bare.name.endswith("-bare")


def test_a_folder_is_made_once(model, monkeypatch):
    monkeypatch.setattr(synthetic, "write_synthetic_model", None)  # a second writing would fail
    assert synthetic_model_dir("opt-tiny", model.parent) == model
    assert sparsity_of_model(model) == TINY.sparsity
    assert json.loads((model / "synthetic.json").read_text())["sparsity"]["rank"] == 32
    with pytest.raises(KeyError, match=r"opt-tiny, opt-1.3b, opt-6.7b"):
        synthetic_model_dir("opt-66b", model.parent)
    assert {SYNTHETIC_SHAPES[name].sizes for name in OPT_SHAPES} == set(OPT_SHAPES.values())


@pytest.mark.parametrize("rank", [7, 66])
def test_ranks_that_do_not_fit_are_refused(rank):
    with pytest.raises(ValueError, match=f"rank {rank}: expected an even number of at most a"):
        SyntheticValues(TINY.sizes, Sparsity(rank=rank), 0)


def test_rounding_is_to_the_nearest():
    values = np.random.default_rng(2).standard_normal(5000, dtype=np.float32)
    expected = torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(to_bfloat16(values.copy()), expected)
