# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning from SiLU to ReLU: what is learned, what stays, and a run that goes on."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.inputs import relufied_model
from benchmarks.inputs.relufied_model import Relufying, Student, relufied_model_dir
from tests.fixtures.tiny_models import VOCABULARY, tiny_model

SMALL = Relufying(steps=40, batch=2, tokens=24, learning_rate=3e-3)


@pytest.fixture
def original(tmp_path, monkeypatch):
    folder = tmp_path / "original"
    tiny_model("llama", folder, hidden_act="silu")
    generator = torch.Generator().manual_seed(3)
    shape = (SMALL.steps * SMALL.batch, SMALL.tokens)
    pieces = torch.randint(VOCABULARY, shape, generator=generator)
    monkeypatch.setattr(relufied_model, "demo_model_dir", lambda: folder)
    monkeypatch.setattr(relufied_model, "_pieces", lambda *_: pieces)
    return folder


def test_it_learns_and_its_embeddings_stay(original, tmp_path):
    folder = relufied_model_dir(SMALL, tmp_path / "cache")
    assert json.loads((folder / "config.json").read_text())["hidden_act"] == "relu"
    steps = json.loads((folder / "training.json").read_text())["steps"]
    assert len(steps) == SMALL.steps
    assert sum(one["kl"] for one in steps[-5:]) < 0.7 * sum(one["kl"] for one in steps[:5])
    before = load_file(original / "model.safetensors")
    after = load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name].bfloat16(), after[name])}
    assert {name for name in before if ".mlp." in name} <= changed
    assert not any("embed_tokens" in name for name in changed)


def test_a_stopped_run_goes_on(original, tmp_path, monkeypatch):
    whole = relufied_model_dir(SMALL, tmp_path / "whole")
    loss_of, calls = Student.loss_of, []

    def stop(*arguments):
        calls.append(1)
        if len(calls) == 31:
            raise KeyboardInterrupt
        return loss_of(*arguments)

    monkeypatch.setattr(Student, "loss_of", stop)
    with pytest.raises(KeyboardInterrupt):
        relufied_model_dir(SMALL, tmp_path / "stopped")
    assert not list((tmp_path / "stopped").glob("*/config.json"))
    folder = relufied_model_dir(SMALL, tmp_path / "stopped")
    assert len(calls) == 31 + SMALL.steps - 20, "it went on from the last 20"
    expected, found = (load_file(at / "model.safetensors") for at in (whole, folder))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    assert [one.name for one in (tmp_path / "stopped").iterdir()] == [folder.name]


def test_the_penalty_makes_fewer_neurons_active(original, tmp_path):
    shares = []
    for penalty in (0.0, 2.0):
        of = replace(SMALL, penalty=penalty, penalty_share=1 / 40)
        folder = relufied_model_dir(of, tmp_path / "cache")
        steps = json.loads((folder / "training.json").read_text())["steps"]
        shares.append(sum(one["active_share"] for one in steps[-5:]) / 5)
    assert shares[1] < shares[0] - 0.02
