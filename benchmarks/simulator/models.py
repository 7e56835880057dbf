# SPDX-License-Identifier: Apache-2.0
"""Models that the simulator serves, as shapes of the planner.

Machines are in `planner/profiles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_tiered.planner.model_shape import ModelShape, model_shape


def page_bytes(shape: ModelShape, block_tokens: int) -> int:
    """Return the KV bytes of one block in one layer."""
    return shape.kv_bytes_per_token // shape.num_layers * block_tokens


def _opt(num_layers: int, hidden: int, heads: int) -> Mapping[str, Any]:
    return {
        "model_type": "opt",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "llama-13b": {
        "model_type": "llama",
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "intermediate_size": 13824,
        "vocab_size": 32000,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
}
"""Sizes from the models' config.json, by model name."""

MODELS: Mapping[str, ModelShape] = {name: model_shape(config) for name, config in CONFIGS.items()}
