# SPDX-License-Identifier: Apache-2.0
"""FFNs from a neuron store in processes of their own: scripts, ranks, and what they never load."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.engine.harness import model_path, vllm_tokens
from tests.engine.test_processes import OWN_PROCESS, PROMPTS, run_script
from vllm_tiered.cost.ffn import Precision
from vllm_tiered.ffn.prepare.pipeline import prepare
from vllm_tiered.ffn.store import NeuronStore

MEMORY_SCRIPT = Path(__file__).with_name("memory_script.py")


def prepared(model: Path, folder: Path) -> NeuronStore:
    precisions = (Precision.FULL,)
    prepare(model, folder, dtype=torch.float32, precisions=precisions, predictor="none")
    return NeuronStore.open(folder)


def variables(folder: Path, **sections: Any) -> dict[str, str]:
    config = folder / "tiered.json"
    config.write_text(json.dumps(sections))
    return OWN_PROCESS | {"VLLM_PLUGINS": "tiered", "VLLM_TIERED_CONFIG": str(config)}


def test_an_unchanged_script(tmp_path) -> None:
    """With the KV cache swapped as the load asks for it."""
    prepared(Path(model_path("opt")), tmp_path / "store").close()
    ffn = {"store": str(tmp_path / "store"), "exact": True, "near_gib": 0.01, "far_gib": 0.003}
    result = run_script(variables(tmp_path, ffn=ffn), model="opt")
    assert result["tokens"] == vllm_tokens("opt", PROMPTS, max_tokens=24)
    assert result["metrics"]["vllm:tiered_ffn_dense_steps"] > 0
    assert result["metrics"]["vllm:tiered_ffn_storage_bytes"] > 0
    assert result["metrics"]["vllm:tiered_ffn_far_bytes"] > 0


# What is never in memory ----------------------------------------------------------------

NEURONS = 32768
FFN_BYTES = 4 * 2 * 256 * NEURONS * 4
"""Of a model of 4 layers, whose other weights take a hundredth of it."""


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


def served(model: Path, **sections: Any) -> dict[str, Any]:
    prompts = [[(7 * i + j) % 1000 + 10 for i in range(12)] for j in range(3)]
    arguments = {"additional_config": {"tiered": sections}} if sections else {}
    finished = subprocess.run(
        [sys.executable, str(MEMORY_SCRIPT), str(model), json.dumps(prompts),
         json.dumps(arguments)],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-4000:]
    (found,) = [line for line in finished.stdout.splitlines() if line.startswith('{"tokens"')]
    return json.loads(found)  # type: ignore[no-any-return]


def test_dense_weights_are_never_in_memory(tmp_path) -> None:
    """Not while the model is built, nor loaded, nor served."""
    model = wide_model(tmp_path / "model")
    prepared(model, tmp_path / "store").close()
    ffn = {"store": str(tmp_path / "store"), "exact": True, "far_gib": 0}
    sparse = served(model, kv={"enabled": False}, ffn=ffn)
    dense = served(model)
    assert sparse["tokens"] == dense["tokens"]
    saved_bytes = dense["peak_bytes"] - sparse["peak_bytes"]
    assert saved_bytes >= 0.8 * FFN_BYTES, f"{saved_bytes / FFN_BYTES:.2f} of the FFN"
