# SPDX-License-Identifier: Apache-2.0
"""PowerInfer's file of a widened model: its tensors, and a predictor that makes no error."""

import json

import numpy as np
import pytest
from gguf import GGUFReader

from benchmarks.inputs.widened_model import widened_model_dir
from benchmarks.peers import powerinfer
from benchmarks.peers.checkpoint import Checkpoint, to_float32
from tests.fixtures.tiny_models import HIDDEN, LAYERS, NEURONS, tiny_model

COPIES = 3


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("powerinfer")
    tiny_model("llama", folder / "small").bfloat16().save_pretrained(folder / "small")
    model = widened_model_dir(folder / "small", COPIES, folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "rope_parameters": {"rope_theta": 10000.0}})
    )
    file = powerinfer.converted(model, folder, COPIES)
    assert file.read_bytes()[:4] == b"PWRI"
    readable = folder / "readable.gguf"
    readable.write_bytes(b"GGUF" + file.read_bytes()[4:])
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(readable).tensors}
    return Checkpoint(model), tensors


def test_matrices_are_the_models(written):
    checkpoint, tensors = written
    for layer in range(LAYERS):
        mlp = f"model.layers.{layer}.mlp."
        for theirs, ours in (("ffn_gate", "gate"), ("ffn_up", "up"), ("ffn_down_t", "down")):
            matrix = to_float32(checkpoint[f"{mlp}{ours}_proj.weight"])
            expected = matrix.T if ours == "down" else matrix
            found = tensors[f"blk.{layer}.{theirs}.weight"]
            np.testing.assert_allclose(found.astype(np.float32), expected, atol=2e-3)
    assert tensors["output_norm.weight"].dtype == np.float32
    np.testing.assert_array_equal(tensors["output.weight"], tensors["token_embd.weight"])


def test_its_predictor_names_the_active_neurons(written):
    checkpoint, tensors = written
    rng = np.random.default_rng(0)
    for layer in range(LAYERS):
        first, second = (tensors[f"blk.{layer}.fc{n}.weight"].astype(np.float32) for n in (1, 2))
        assert first.shape == (2 * HIDDEN, COPIES * HIDDEN)
        assert second.shape == (COPIES * NEURONS, 2 * HIDDEN)
        gate = to_float32(checkpoint[f"model.layers.{layer}.mlp.gate_proj.weight"])
        x = np.tile(rng.standard_normal((20, HIDDEN)).astype(np.float32), COPIES)
        predicted = np.maximum(x @ first.T, 0) @ second.T
        np.testing.assert_allclose(predicted, x @ gate.T, atol=0.02, rtol=0.01)


def test_what_is_missing_is_named(tmp_path):
    assert "build_powerinfer.sh" in str(powerinfer.missing(str(tmp_path / "bin" / "python")))
