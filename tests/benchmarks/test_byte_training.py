# SPDX-License-Identifier: Apache-2.0
"""Training on bytes: the bytes of conversations, and a small model that learns them."""

import json

import pytest
import torch

from benchmarks.inputs import byte_training


def test_bytes_of_conversations(tmp_path, monkeypatch):
    turns = [{"from": "human", "value": "äb"}, {"from": "gpt", "value": "c"}]
    path = tmp_path / "split.json"
    path.write_text(json.dumps([{"conversations": turns}] * 3), encoding="utf-8")
    monkeypatch.setattr(byte_training, "package_file", lambda *_: path)
    one = "äb\n\nc\n\n\n".encode()
    assert byte_training.byte_text(1, 5) == one
    assert byte_training.byte_text(1, len(one) + 1) == one * 2
    with pytest.raises(ValueError, match="has 9 bytes from conversation 2 on"):
        byte_training.byte_text(2, 100)


def test_a_model_learns_which_byte_follows(monkeypatch):
    monkeypatch.setattr(byte_training, "byte_text", lambda first, num_bytes: b"ab" * 400)
    model = torch.nn.Embedding(256, 256)  # of each byte the logits of the next

    def loss_of(batch):
        logits = model(batch[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    byte_training.train(model, loss_of, steps=60, batch=4, tokens=16, learning_rate=0.3)
    assert model(torch.tensor(list(b"ab"))).argmax(dim=1).tolist() == list(b"ba")
