# SPDX-License-Identifier: Apache-2.0
"""A widened model computes what the small one does, with the same neurons active."""

import json

import pytest
import torch
from safetensors import safe_open

from benchmarks.inputs.widened_model import widened_model_dir
from tests.fixtures.tiny_models import NEURONS, tiny_model, tiny_texts

COPIES = 3


@pytest.fixture
def folders(tmp_path):
    tiny_model("llama", tmp_path / "small")
    return tmp_path / "small", widened_model_dir(tmp_path / "small", COPIES, tmp_path / "wide")


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def gates_of(model, token_ids):
    found = []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda *call: found.append(call[-1][0]))
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0]
    return logits, torch.stack(found)


def test_logits_and_active_neurons_are_the_small_models(folders):
    small, wide = map(loaded, folders)
    assert sum(p.numel() for p in wide.model.layers.parameters()) > 8 * sum(
        p.numel() for p in small.model.layers.parameters()
    )
    for token_ids in tiny_texts(3, 40):
        logits, gates = gates_of(small, token_ids)
        of_wide, gates_of_wide = gates_of(wide, token_ids)
        torch.testing.assert_close(of_wide, logits, atol=2e-3, rtol=1e-3)
        for copy in range(COPIES):
            part = gates_of_wide[..., copy * NEURONS : (copy + 1) * NEURONS]
            is_clear = gates.abs() > 1e-3
            assert torch.equal((part > 0)[is_clear], (gates > 0)[is_clear])


def test_no_two_blocks_are_the_same_bytes(folders):
    _, wide = folders
    name = "model.layers.1.mlp.up_proj.weight"
    index = json.loads((wide / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(wide / index[name], "pt") as file:
        matrix = file.get_tensor(name)
    blocks = [b for row in matrix.chunk(COPIES) for b in row.chunk(COPIES, dim=1)]
    assert len({block.contiguous().numpy().tobytes() for block in blocks}) == COPIES**2


def test_another_kind_of_model_is_refused(tmp_path):
    tiny_model("qwen2", tmp_path / "small")
    with pytest.raises(ValueError, match="expected a Llama"):
        widened_model_dir(tmp_path / "small", 2, tmp_path)
    assert not list(tmp_path.glob("*-x2-*"))
