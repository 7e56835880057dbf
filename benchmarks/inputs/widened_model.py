# SPDX-License-Identifier: Apache-2.0
"""A trained Llama, made several times as wide without changing what it computes.

A memory limit says nothing of a model that is smaller than vLLM itself. So every feature, head and
neuron of a small trained model is there `copies` times (Net2Net's widening): its text, the neurons
that are active and what consecutive tokens have in common are the trained model's, and its bytes
are `copies` squared times as many in each matrix.

    hidden state   x ─► [x, x, ...]            embeddings and norms repeat
    matrix         W ─► blocks r[j, b] W       rows of r are random, and sum to 1, so that each copy
                                               gets W x, and no two blocks have the same bytes
    head           the last norm is divided by the number of copies, as they add up in the logits

Where it differs from a model that was trained at this size: copies of a neuron become active
together. Its precision is bfloat16's, so a long text departs from the small model's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.harness.cache import publish_dir
from benchmarks.peers.model import TOKENIZER_FILES

_SPREAD = 0.5
"""Blocks' factors are up to this share above and below their mean, before they are normed."""

_WIDER = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_LAST_NORM = "model.norm.weight"
_EMBEDDING = "model.embed_tokens.weight"


def widened_model_dir(source: Path, copies: int, folder: Path, *, seed: int = 0) -> Path:
    """Return the folder, inside `folder`, of the widened model; written on first use.

    Args:
        source: folder of a Llama with tied embeddings and no biases, in one safetensors file.

    Raises ValueError for another kind of model.
    """
    target = folder / f"{source.name}-x{copies}-seed{seed}"
    if (target / "config.json").is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    print(f"writing {source.name}, {copies} times as wide, in {target}", file=sys.stderr)
    config = json.loads((source / "config.json").read_text("utf-8"))
    if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
        raise ValueError(f"{source}: expected a Llama with tied embeddings")
    with publish_dir(target) as staging:
        _write_tensors(source, copies, staging, config["num_hidden_layers"], seed)
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        wider = {name: copies * config[name] for name in _WIDER}
        text = json.dumps({**config, "head_dim": head_dim, **wider}, indent=1)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                (staging / name).write_bytes((source / name).read_bytes())
        (staging / "config.json").write_text(text, encoding="utf-8")
    return target


def _write_tensors(source: Path, copies: int, out: Path, num_layers: int, seed: int) -> None:
    """Write one file for each layer, one for the rest, and their index."""
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    with safe_open(source / "model.safetensors", "pt") as file:
        names = sorted(set(file.keys()) - {"lm_head.weight"})
        groups = [[name for name in names if f".layers.{n}." in name] for n in range(num_layers)]
        groups.append([name for name in names if ".layers." not in name])
        if groups[-1] != [_EMBEDDING, _LAST_NORM]:
            raise ValueError(f"{source}: expected no more than {_EMBEDDING} and {_LAST_NORM}")
        for number, group in enumerate(groups, start=1):
            file_name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            tensors = {
                name: _widened(name, file.get_tensor(name), copies, generator) for name in group
            }
            save_file(tensors, out / file_name, {"format": "pt"})
            weight_map.update(dict.fromkeys(group, file_name))
    index: dict[str, Any] = {"metadata": {}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), "utf-8")


def _widened(
    name: str, tensor: torch.Tensor, copies: int, generator: torch.Generator
) -> torch.Tensor:
    if name == _EMBEDDING:
        return tensor.repeat(1, copies)
    if tensor.ndim == 1:
        scale = 1 / copies if name == _LAST_NORM else 1.0
        return (tensor.float() * scale).to(tensor.dtype).repeat(copies)
    factors = 1 - _SPREAD + 2 * _SPREAD * torch.rand(copies, copies, generator=generator)
    factors /= factors.sum(1, keepdim=True)
    return torch.kron(factors, tensor.float()).to(tensor.dtype)
