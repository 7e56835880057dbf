# SPDX-License-Identifier: Apache-2.0
"""Tests of layer-by-layer runs of a model, recordings, and FFNs of mixed precision."""

import gc
import json
import weakref

import pytest
import torch

from tests.fixtures.tiny_models import KINDS, LAYERS, NEURONS, tiny_model, tiny_texts
from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.predictor.gate import Gate
from vllm_tiered.ffn.prepare.checkpoint import Checkpoint, FfnWeights
from vllm_tiered.ffn.prepare.evaluate import Copies, MixedFfn
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel, ffn_weights, replace_ffn
from vllm_tiered.ffn.prepare.record import (
    num_recorded,
    num_training_tokens,
    record,
    recorded_inputs,
)
from vllm_tiered.ffn.selection import ALL, Mix, select

GROUPS = {Precision.INT8: None, Precision.INT4: 16}
TEXTS = tiny_texts(3, 17)


def run(model, replace=None):
    """Return the logits of each text; ``replace`` may replace every layer's FFN first."""
    hidden = model.embed(TEXTS)
    with torch.inference_mode():
        for layer in range(model.num_layers):
            with model.layer(layer) as module:
                if replace is not None:
                    weights = ffn_weights(module, model.activation)
                    replace_ffn(module, replace(weights))
                hidden = [model.run(module, text, x) for text, x in enumerate(hidden)]
    return [model.logits(text, x) for text, x in enumerate(hidden)]


@pytest.mark.parametrize("kind", KINDS)
def test_layer_by_layer_equals_the_whole_model(tmp_path, kind):
    whole = tiny_model(kind, tmp_path)
    model = LayerwiseModel(tmp_path)
    assert model.num_layers == LAYERS
    with torch.inference_mode():
        expected = [whole(torch.tensor([text])).logits[0] for text in TEXTS]
    for found, wanted in zip(run(model), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert all(p.is_meta for layer in model._layers for p in layer.parameters())


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"hidden_act": "fatrelu", "hidden_act_param": 0.25}, "fatrelu:0.25"),
        ({"hidden_act": "drelu"}, "drelu"),
    ],
    ids=["fatrelu", "drelu"],
)
def test_activations_that_transformers_lacks(tmp_path, changes, activation):
    """Layers compute them as the neurons do, each text on its own and all again."""
    tiny_model("llama", tmp_path)
    relu = run(LayerwiseModel(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    model = LayerwiseModel(tmp_path)
    assert model.activation == activation == Checkpoint(tmp_path).activation
    found = run(model)
    neurons = run(model, lambda weights: MixedFfn(Copies.of(weights, GROUPS), ALL))
    for one, other, plain in zip(found, neurons, relu, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(one, plain, rtol=1e-2, atol=1e-2)
    for one, again in zip(found, run(model), strict=True):
        assert torch.equal(one, again)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replaced_ffn_is_gone_with_its_layer(tmp_path, kind):
    """Its weights are as large as the layer's, and a model may be larger than memory."""
    tiny_model(kind, tmp_path)
    model = LayerwiseModel(tmp_path)
    expected = run(model)
    seen: list[weakref.ref[MixedFfn]] = []

    def replace(weights):
        gc.collect()
        assert [one for one in seen if one() is not None] == []
        ffn = MixedFfn(Copies.of(weights, GROUPS), ALL)
        seen.append(weakref.ref(ffn))
        return ffn

    run(model, replace)
    assert len(seen) == LAYERS
    for found, wanted in zip(run(model), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_all_neurons_in_full_equal_the_model(tmp_path, kind):
    whole = tiny_model(kind, tmp_path)
    with torch.inference_mode():
        expected = [whole(torch.tensor([text])).logits[0] for text in TEXTS]

    def ranked(weights):
        # Full precision through ranks: with a threshold, [1, 0, 0] is computed as a mix.
        def scores(x):
            return torch.rand(len(x), NEURONS)

        return MixedFfn(Copies.of(weights, GROUPS), ALL, scores, threshold=-1.0)

    for found, wanted in zip(run(LayerwiseModel(tmp_path), ranked), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_a_mix_by_definition(tmp_path, kind):
    tiny_model(kind, tmp_path)
    model = LayerwiseModel(tmp_path)
    mix = Mix(full=0.25, int8=0.25, int4=0.25)
    x = torch.randn(5, 32)
    order = torch.rand(5, NEURONS)
    with model.layer(1) as module, torch.inference_mode():
        weights = ffn_weights(module, model.activation)
        copies = Copies.of(weights, GROUPS)
        ffn = MixedFfn(copies, mix, lambda _: order)
        found = ffn(x)
        expected = torch.zeros_like(x)
        for token in range(5):
            ranked = order[token].argsort(descending=True)
            for index, precision in enumerate(Precision):
                for n in ranked[index * 16 : (index + 1) * 16].tolist():
                    rows = copies.rows_NMH[precision][n]
                    if kind == "llama":
                        a = torch.relu(rows[0] @ x[token]) * (rows[1] @ x[token])
                    else:
                        assert weights.up_bias_N is not None
                        a = torch.relu(rows[0] @ x[token] + weights.up_bias_N[n])
                    expected[token] += a * rows[-1]
        if weights.down_bias_H is not None:
            expected += weights.down_bias_H
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ffn.num_computed == [5 * 16] * 3


def test_a_gate_leaves_out_neurons_that_are_inactive_in_4_bit():
    torch.manual_seed(0)
    copies = Copies.of(FfnWeights(torch.randn(64, 2, 32), None, None, "relu"), GROUPS)
    x = torch.randn(1, 32)
    gate = Gate.of(copies.weights.rows_NMH)
    chosen = select(gate.scores(x), ALL, gate.threshold).full
    active_N = copies.activations(x, Precision.FULL)[0] > 0
    assert 0 < len(chosen) < 64
    # Signs that differ are those of neurons near 0.
    is_chosen_N = torch.zeros(64, dtype=torch.bool)
    is_chosen_N[torch.from_numpy(chosen)] = True
    wrong_N = is_chosen_N != active_N
    first_N = (x @ copies.weights.rows_NMH[:, 0].T)[0].abs()
    assert wrong_N.sum() <= 6
    assert (first_N[wrong_N] < 0.25 * first_N.mean()).all()


def test_recorded_inputs_reproduce_the_ffns_outputs(tmp_path):
    tiny_model("opt", tmp_path / "model")
    model = LayerwiseModel(tmp_path / "model")
    record(model, TEXTS, tmp_path / "run")
    x, lengths = recorded_inputs(tmp_path / "run", 1)
    assert lengths == [17] * 3
    seen = []
    hidden = model.embed(TEXTS)
    with torch.inference_mode():
        for layer in range(2):
            with model.layer(layer) as module:
                module.get_submodule("final_layer_norm").register_forward_hook(
                    lambda _, a, out: seen.append(out)
                )
                hidden = [model.run(module, text, x) for text, x in enumerate(hidden)]
    assert torch.equal(x, torch.cat([x.flatten(0, -2) for x in seen[3:]]))


def test_an_interrupted_recording_goes_on(tmp_path):
    tiny_model("llama", tmp_path / "model")

    class Killed(Exception):
        pass

    class Model(LayerwiseModel):
        """Model that records which layers are loaded, and can be killed before one."""

        def __init__(self, killed_at=None):
            super().__init__(tmp_path / "model")
            self.loaded, self.killed_at = [], killed_at

        def layer(self, layer):
            if layer == self.killed_at:
                raise Killed
            self.loaded.append(layer)
            return super().layer(layer)

    record(Model(), TEXTS, tmp_path / "whole")
    with pytest.raises(Killed):
        record(Model(killed_at=2), TEXTS, tmp_path / "run")
    assert num_recorded(tmp_path / "run", LAYERS) == 2
    resumed = Model()
    record(resumed, TEXTS, tmp_path / "run")
    assert resumed.loaded == [2]
    assert num_recorded(tmp_path / "run", LAYERS) == LAYERS
    for layer in range(LAYERS):
        found, wanted = (recorded_inputs(tmp_path / d, layer)[0] for d in ("run", "whole"))
        assert torch.equal(found, wanted)
    assert not list((tmp_path / "run").glob("hidden-*"))


def test_tokens_to_train_with():
    assert num_training_tokens([10, 10, 10, 10]) == 30
    assert num_training_tokens([10, 30]) == 10
    assert num_training_tokens([100]) == 75


def test_a_checkpoint_that_lacks_a_tensor(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny_model("opt", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("layers.1.fc1.weight"))
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    model = LayerwiseModel(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks .*layers\.1\.fc1\.weight"), model.layer(1):
        pass
