# SPDX-License-Identifier: Apache-2.0
"""A process with an FFN from a neuron store never holds the dense weights in memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.harness import prepared

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


NEURONS = 32768
FFN_BYTES = 4 * 2 * 256 * NEURONS * 4
"""FFN weights of a model of 4 layers; its other weights take a hundredth of these bytes."""


def wide_model(folder: Path) -> Path:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=1024,
        hidden_size=256,
        word_embed_proj_dim=256,
        num_attention_heads=4,
        num_hidden_layers=4,
        ffn_dim=NEURONS,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        init_std=0.05,
    )
    model = OPTForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def test_dense_weights_are_never_in_memory(tmp_path) -> None:
    """They are absent while the model is built, loaded and served."""
    model = wide_model(tmp_path / "model")
    prepared(model, tmp_path / "store").close()
    ffn = {"store": str(tmp_path / "store"), "exact": True, "far_gib": 0}
    kv_off = {"kv": {"enabled": False}}
    prompts = [[(7 * i + j) % 1000 + 10 for i in range(12)] for j in range(3)]
    finished = subprocess.run(
        [sys.executable, "-m", "tests.e2e.memory_script", str(model), json.dumps(prompts),
         json.dumps([kv_off | {"ffn": ffn}, kv_off])],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-4000:]
    (found,) = [line for line in finished.stdout.splitlines() if line.startswith('[{"tokens"')]
    sparse, dense = json.loads(found)
    assert sparse["tokens"] == dense["tokens"]
    saved_bytes = dense["rise_bytes"] - sparse["rise_bytes"]
    assert saved_bytes >= 0.8 * FFN_BYTES, f"{saved_bytes / FFN_BYTES:.2f} of the FFN"
