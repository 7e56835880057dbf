# SPDX-License-Identifier: Apache-2.0
"""Random OPT folders load, have the stated size, and are the same in llama.cpp's format."""

import json

import numpy as np
import pytest

from benchmarks.peers import checkpoint, llama_cpp, model, shapes
from benchmarks.peers.model import model_dir, to_bfloat16, write_model
from benchmarks.peers.shapes import INT4_SHAPES, OLMOE_SHAPES, SHAPES, OptShape

TINY = OptShape(
    hidden_size=64, ffn_dim=160, num_layers=3, num_heads=4, vocab_size=80, max_positions=126
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_model(TINY, folder, shard_bytes=TINY.num_bytes // 3)
    return folder


def test_transformers_loads_exactly_these_weights(folder):
    import torch
    from transformers import AutoModelForCausalLM

    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    parameters = dict(loaded.named_parameters())  # has the tied embedding once
    assert sum(p.numel() for p in parameters.values()) * 2 == TINY.num_bytes
    stored = checkpoint.Checkpoint(folder)
    for name, parameter in parameters.items():
        bits = parameter.detach().view(torch.uint16).numpy()
        np.testing.assert_array_equal(bits, stored[name], err_msg=name)
    assert loaded.lm_head.weight is loaded.model.decoder.embed_tokens.weight
    with torch.no_grad():
        assert torch.isfinite(loaded(torch.tensor([[5, 6, 7]])).logits).all()


def test_the_files_have_the_stated_bytes_in_shards_of_bounded_size(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) >= 3
    assert {path.name for path in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == TINY.num_bytes
    stored = checkpoint.Checkpoint(folder)
    assert stored.num_bytes == TINY.num_bytes
    assert set(stored) == set(index["weight_map"]) == {name for name, _ in TINY.tensors()}
    for path in files:
        assert path.stat().st_size <= TINY.num_bytes // 3 + 16384  # the limit and its header


def test_matrices_are_random_and_differ_norms_are_one_biases_zero(folder):
    stored = checkpoint.Checkpoint(folder)
    seen = set()
    for name in stored:
        values = checkpoint.to_float32(stored[name])
        if values.ndim == 2:
            # Four standard errors of the deviation of n normal numbers.
            assert values.std() == pytest.approx(0.02, rel=4 / np.sqrt(2 * values.size)), name
            seen.add(values.tobytes())
        else:
            assert np.all(values == (0 if name.endswith("bias") else 1)), name
    assert len(seen) == 2 + 6 * TINY.num_layers


def test_numbers_are_rounded_as_torch_rounds():
    import torch

    block = model._random_block(np.random.default_rng(7), 0.02)
    drawn = np.random.default_rng(7).standard_normal(block.size, dtype=np.float32)
    expected = torch.from_numpy(drawn * np.float32(0.02)).bfloat16().view(torch.uint16)
    np.testing.assert_array_equal(block, expected.numpy())


def test_a_matrix_longer_than_the_block_does_not_repeat_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "_BLOCK_LENGTH", 1009)
    write_model(TINY, tmp_path)
    rows = checkpoint.Checkpoint(tmp_path)["model.decoder.layers.0.fc1.weight"]
    assert rows.size > 5 * 1009
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_the_seed_decides_the_bytes(folder, tmp_path):
    name = "model.decoder.layers.2.fc2.weight"
    for seed in (0, 1):
        out = tmp_path / str(seed)
        out.mkdir()
        write_model(TINY, out, seed=seed)
    first, second = (checkpoint.Checkpoint(tmp_path / str(seed))[name] for seed in (0, 1))
    np.testing.assert_array_equal(first, checkpoint.Checkpoint(folder)[name])
    assert not np.array_equal(first, second)


def test_the_real_shapes_have_their_models_sizes():
    assert SHAPES["opt-1.3b"].num_bytes == 2 * 1_315_758_080
    assert SHAPES["opt-6.7b"].num_bytes == 2 * 6_658_473_984
    assert SHAPES["olmoe-7b"].num_bytes == 2 * 6_919_161_856  # allenai/OLMoE-1B-7B-0924
    assert OLMOE_SHAPES["olmoe-7b"].expert_bytes == 3 * 2048 * 1024 * 2
    qwen = INT4_SHAPES["qwen3-30b-int4"]  # Qwen/Qwen3-30B-A3B has 30,532,122,624 parameters
    in_4_bit = 48 * 128 * 3 * 2048 * 768
    others = 2 * (30_532_122_624 - in_4_bit)
    shapes_of_matrices = 48 * 128 * 3 * 2 * 8
    assert qwen.num_bytes == others + in_4_bit // 2 + in_4_bit // 32 * 2 + shapes_of_matrices
    assert 48 * 128 * qwen.expert_bytes == in_4_bit // 2 + in_4_bit // 16


def test_a_power_of_two_scales_exactly():
    values = np.array([0.04, -1.5, 0.0, 1e-38], dtype=np.float32)
    bits = to_bfloat16(values.copy())
    for exponent in (5, 0, -3):
        scaled = checkpoint.to_float32(model._scaled(bits, exponent))
        expected = checkpoint.to_float32(bits) * 2.0**exponent
        np.testing.assert_array_equal(scaled[:3], expected[:3].astype(np.float32))
    assert checkpoint.to_float32(model._scaled(bits, -3))[3] == 0  # and not a huge number


def test_a_folder_is_made_once_with_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "opt-tiny", TINY)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    made = model_dir("opt-tiny", tmp_path / "models", tokenizer_dir=tokenizer)
    assert (made / "tokenizer.json").read_text() == "{}"
    assert json.loads((made / "config.json").read_text())["hidden_size"] == 64
    monkeypatch.setattr(model, "write_model", None)  # a second writing would fail
    assert model_dir("opt-tiny", tmp_path / "models", tokenizer_dir=tokenizer) == made
    with pytest.raises(KeyError, match=r"opt-1.3b, opt-6.7b, .*olmoe-0.9b, .*opt-tiny"):
        model_dir("opt-66b", tmp_path)


def test_other_types_than_bfloat16_are_refused(tmp_path):
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text("{}")
    save_file({"w": np.zeros(3, dtype=np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors: w is F32, expected BF16"):
        checkpoint.Checkpoint(tmp_path)


def test_gguf_holds_the_same_matrices(folder, tmp_path):
    gguf = pytest.importorskip("gguf", reason="the converter needs the package gguf")
    target = tmp_path / "model.gguf"
    llama_cpp.convert(folder, target)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    stored = checkpoint.Checkpoint(folder)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    layer = "model.decoder.layers.1."
    for name, sources in {
        "token_embd.weight": ["model.decoder.embed_tokens.weight"],
        "blk.1.attn_qkv.weight": [f"{layer}self_attn.{which}_proj.weight" for which in "qkv"],
        "blk.1.attn_output.weight": [f"{layer}self_attn.out_proj.weight"],
        "blk.1.ffn_up.weight": [f"{layer}fc1.weight"],
        "blk.1.ffn_down.weight": [f"{layer}fc2.weight"],
    }.items():
        bits = np.concatenate([stored[source] for source in sources])
        assert tensors[name].tensor_type == gguf.GGMLQuantizationType.BF16
        assert list(tensors[name].shape) == list(bits.shape[::-1]), name
        assert tensors[name].data.tobytes() == bits.tobytes(), name
    positions = checkpoint.to_float32(stored["model.decoder.embed_positions.weight"])[2:]
    np.testing.assert_array_equal(tensors["position_embd.weight"].data, positions)
    np.testing.assert_array_equal(tensors["blk.1.attn_norm.weight"].data, np.ones(64, np.float32))
    # Every element of the model once, except the two unused positions.
    elements = sum(int(tensor.n_elements) for tensor in tensors.values())
    assert elements == TINY.num_bytes // 2 - 2 * TINY.hidden_size


def test_other_models_are_refused(tmp_path):
    pytest.importorskip("gguf", reason="the converter needs the package gguf")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    with pytest.raises(ValueError, match="expected an OPT"):
        llama_cpp.convert(tmp_path, tmp_path / "model.gguf")
