# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a model folder and prompts that are small and need no package."""

import json

import pytest

from benchmarks.inputs import workload


@pytest.fixture
def fake_model(tmp_path, monkeypatch):
    """Make the folder of a small Llama's configuration; ShareGPT is 120 prompts of 300 tokens."""
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    pairs = [(list(range(1000 * i, 1000 * i + 300)), 40 + i) for i in range(120)]
    monkeypatch.setattr(workload, "_tokenised_sample", lambda *_: pairs)
    return tmp_path
