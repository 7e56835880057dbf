# SPDX-License-Identifier: Apache-2.0
"""A small ReLU model like OPT, trained on ShareGPT's text, as no package has a real one.

Its tokens are bytes. It is prepared once, in a few minutes, and kept in the cache folder. An L1
penalty on the activations makes neurons inactive, as long training does in large models; without it
a model trained for seconds would have half of them active. All measurements with it name it the
*small ReLU model*.

`python -m benchmarks.inputs.relu_model` trains it and prints the folder.
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
class ReluModel:
    """Shape and training of the model."""

    layers: int = 4
    hidden: int = 128
    neurons: int = 512
    steps: int = 600
    batch: int = 16
    tokens: int = 128
    learning_rate: float = 3e-3
    sparsity: float = 0.02
    seed: int = 0


def relu_model_dir(model: ReluModel, cache_dir: str | Path | None = None) -> Path:
    """Return the model's folder, trained if absent. Raises FileNotFoundError without ShareGPT."""
    name = "-".join(str(value) for value in asdict(model).values())
    target = cache_root(cache_dir) / f"relu-{name}"
    if not (target / "config.json").is_file():
        print(f"training the small ReLU model (once, minutes) in {target}", file=sys.stderr)
        with publish_dir(target) as staging:
            _train(model).save_pretrained(staging)
    return target


def _train(settings: ReluModel) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(settings.seed)
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=256,
            hidden_size=settings.hidden,
            word_embed_proj_dim=settings.hidden,
            ffn_dim=settings.neurons,
            num_hidden_layers=settings.layers,
            num_attention_heads=max(1, settings.hidden // 32),
            max_position_embeddings=512,
            dropout=0.0,
            dtype=torch.float32,
            # Bytes have no special tokens.
            pad_token_id=None,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    fired: list[torch.Tensor] = []
    for layer in model.model.decoder.layers:
        layer.fc2.register_forward_pre_hook(lambda _, args: fired.append(args[0].mean()))

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        fired.clear()
        loss: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss + settings.sparsity * torch.stack(fired).sum()

    train(
        model,
        loss_of,
        steps=settings.steps,
        batch=settings.batch,
        tokens=settings.tokens,
        learning_rate=settings.learning_rate,
    )
    return model.eval()


if __name__ == "__main__":
    print(relu_model_dir(ReluModel()))
