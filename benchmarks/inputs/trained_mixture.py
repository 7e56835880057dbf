# SPDX-License-Identifier: Apache-2.0
"""A small mixture of experts, trained on ShareGPT's text, as no package has a real one.

It has Qwen3-MoE's form: 6 layers of 64 experts, 4 a token, 39 million parameters, and bytes for
tokens. Its router is trained with the usual loss that spreads the load. It is prepared once, in
some 20 minutes, and kept in the cache folder. What it shows is a trained router's *locality*; a
model of this size says nothing about the hits of a larger one.

`python -m benchmarks.inputs.trained_mixture` trains it and prints the folder.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.cache import cache_root, publish_dir
from benchmarks.inputs.byte_training import train


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Shape and training of the model."""

    layers: int = 6
    hidden: int = 256
    inner: int = 128
    experts: int = 64
    top_k: int = 4
    steps: int = 800
    batch: int = 16
    tokens: int = 256
    learning_rate: float = 2e-3
    balance: float = 0.003
    seed: int = 0


def trained_mixture_dir(of: Mixture | None = None, cache_dir: str | Path | None = None) -> Path:
    """Return the model's folder, trained if absent. Raises FileNotFoundError without ShareGPT."""
    mixture = of or Mixture()
    name = "-".join(str(value) for value in asdict(mixture).values())
    target = cache_root(cache_dir) / f"mixture-{name}"
    if not (target / "config.json").is_file():
        print(f"training the small mixture (once, some 20 minutes) in {target}", file=sys.stderr)
        with publish_dir(target) as staging:
            _train(mixture).save_pretrained(staging)
    return target


def _train(settings: Mixture) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(settings.seed)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=256,
            hidden_size=settings.hidden,
            intermediate_size=settings.hidden,
            moe_intermediate_size=settings.inner,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.hidden // 64,
            num_key_value_heads=max(1, settings.hidden // 128),
            head_dim=64,
            num_experts=settings.experts,
            num_experts_per_tok=settings.top_k,
            norm_topk_prob=True,
            output_router_logits=True,
            router_aux_loss_coef=settings.balance,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            dtype=torch.float32,
            # Bytes have no special tokens.
            pad_token_id=None,
            bos_token_id=0,
            eos_token_id=0,
        )
    )

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    train(
        model,
        loss_of,
        steps=settings.steps,
        batch=settings.batch,
        tokens=settings.tokens,
        learning_rate=settings.learning_rate,
    )
    return model.to(torch.bfloat16).eval()


if __name__ == "__main__":
    print(trained_mixture_dir())
