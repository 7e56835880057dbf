# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's formats of a model: what its programs get, and what is made of their answers."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.runner import MeasurementError
from benchmarks.peers import LLAMA_BENCH, PREFIX, checkpoint, llama_cpp, llama_formats

FORMATS = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
[ "$4" = BAD ] && { echo "no such format" >&2; exit 1; }
case $1 in
    quantise) cp "$2" "$3" ;;
    score) printf 'SCORES {"logprobs": ['; tr ' \\n' ',' | sed 's/,$//'; echo ']}' ;;
esac
"""
CONVERTER = """#!/bin/sh
while [ "$1" != --work ]; do shift; done
echo converted > "$2/model.gguf"
"""


@pytest.fixture
def python(tmp_path):
    """Return the interpreter of an environment whose programs are shell scripts."""
    folder = tmp_path / "bin"
    folder.mkdir()
    steps = json.dumps({"seconds_per_token": [0.25, 0.75]})
    bench = f"#!/bin/sh\necho '{PREFIX}{steps}'\n"
    for name, text in (
        ("python", CONVERTER),
        (llama_formats.PROGRAM, FORMATS),
        (LLAMA_BENCH, bench),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return str(folder / "python")


def test_a_file_is_made_once(python, tmp_path):
    for _ in range(2):
        file = llama_formats.quantised(python, tmp_path, tmp_path, "Q4_K_M", 2)
    assert file == tmp_path / "Q4_K_M.gguf" and file.read_text() == "converted\n"
    calls = (Path(python).parent / "calls").read_text().splitlines()
    assert calls == [f"quantise {tmp_path}/model.gguf {tmp_path}/Q4_K_M.part Q4_K_M 2"]


def test_a_format_that_fails_leaves_no_file(python, tmp_path):
    with pytest.raises(MeasurementError, match="no such format"):
        llama_formats.quantised(python, tmp_path, tmp_path, "BAD", 2)
    assert not (tmp_path / "BAD.gguf").exists()


def test_texts_are_given_as_lines_of_ids(python, tmp_path):
    assert llama_formats.score(python, tmp_path / "x.gguf", [[1, 2], [3]], 2) == [1, 2, 3]


def test_the_rate_is_that_of_the_decode_steps(python, tmp_path):
    assert llama_formats.decode_rate(python, tmp_path / "x.gguf", 12, 3, 2) == 2.0


def test_what_is_lacking_is_named(python, monkeypatch):
    monkeypatch.setattr(llama_formats, "available", lambda python: {"llama_cpp": None})
    assert llama_formats.missing(python) is None
    program = Path(python).parent / llama_formats.PROGRAM
    program.unlink()
    folder = program.parent.parent
    expected = f"program llama_formats: benchmarks/peers/build_llama_cpp.sh {folder}"
    assert llama_formats.missing(python) == expected
    monkeypatch.setattr(llama_formats, "available", lambda python: {"llama_cpp": "no gguf"})
    assert llama_formats.missing(python) == "no gguf"


def test_a_qwen2_keeps_its_tensors(tmp_path):
    import torch
    from gguf import GGUFReader
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=80,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.gguf"
    llama_cpp.convert(tmp_path, file)
    found = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    stored = checkpoint.Checkpoint(tmp_path)
    assert len(found) == len(list(stored))
    down = stored["model.layers.1.mlp.down_proj.weight"]
    ours = found["blk.1.ffn_down.weight"].data.view("<u2").reshape(down.shape)
    np.testing.assert_array_equal(ours, down)
    bias = checkpoint.to_float32(stored["model.layers.1.self_attn.k_proj.bias"])
    np.testing.assert_array_equal(found["blk.1.attn_k.bias"].data, bias)
    layers = sum(t.n_bytes for name, t in found.items() if name.startswith("blk."))
    assert llama_formats.layer_bytes(file) == layers > 0
