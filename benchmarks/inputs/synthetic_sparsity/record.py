# SPDX-License-Identifier: Apache-2.0
"""Records the active and the predicted neurons of an OPT with synthetic sparsity, for a text.

transformers' own layers compute, one layer's weights in memory at a time, so OPT-6.7B takes 1 GB.
T tokens, H hidden, N neurons of a layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.inputs.synthetic_sparsity.model import PREDICTOR_FILE, STATISTICS_FILE, Sparsity
from benchmarks.peers.shapes import POSITION_OFFSET

Masks = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerRecord:
    """One layer's neurons over a text.

    Attributes:
        activation: float32 [T, N].
        scores: the predictor's, float32 [T, N].
        threshold: the score from which a neuron is predicted active.
    """

    activation: Floats
    scores: Floats
    threshold: float

    @property
    def active(self) -> Masks:
        """Return [T, N]: whether the neuron's activation is above 0."""
        return self.activation > 0

    @property
    def predicted(self) -> Masks:
        """Return [T, N]: whether the neuron is predicted active."""
        return self.scores >= self.threshold


def sparsity_of_model(model: Path) -> Sparsity:
    """Return the record of a model folder's synthetic sparsity.

    Raises FileNotFoundError if the folder has none.
    """
    return Sparsity(**json.loads((model / STATISTICS_FILE).read_text("utf-8"))["sparsity"])


def record(
    model: Path, token_ids: Sequence[int], *, dtype: str = "bfloat16"
) -> Iterator[LayerRecord]:
    """Yield each layer's record, in order, for one text. Raises as `sparsity_of_model` does."""
    import torch

    threshold = sparsity_of_model(model).predictor_threshold
    tensors = _Tensors(model, getattr(torch, dtype))
    predictor = _Tensors(model, getattr(torch, dtype), PREDICTOR_FILE)
    for layer_idx, (x_TH, pre_TN) in enumerate(_ffn_inputs(tensors, list(token_ids))):
        reduced = x_TH @ predictor(f"layers.{layer_idx}.a").T
        bias = predictor(f"layers.{layer_idx}.bias").float()
        scores_TN = (reduced @ predictor(f"layers.{layer_idx}.b").T).float() + bias
        yield LayerRecord(
            activation=pre_TN.relu().float().numpy(),
            scores=scores_TN.numpy(),
            threshold=threshold,
        )


class _Tensors:
    """Reads tensors by name from the shards of a folder, or from one file of it."""

    def __init__(self, folder: Path, dtype: Any, file: str | None = None) -> None:
        self.config = json.loads((folder / "config.json").read_text("utf-8"))
        self.dtype = dtype
        self._folder, self._file = folder, file
        index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
        self._file_of: dict[str, str] = index["weight_map"]

    def __call__(self, name: str) -> Any:
        from safetensors import safe_open

        with safe_open(self._folder / (self._file or self._file_of[name]), "pt") as file:
            return file.get_tensor(name).to(self.dtype)


def _ffn_inputs(tensors: _Tensors, token_ids: list[int]) -> Iterator[tuple[Any, Any]]:
    """Yield each layer's input of fc1 [T, H] and output of fc1 [T, N]."""
    import torch
    from transformers import OPTConfig
    from transformers.models.opt.modeling_opt import OPTDecoderLayer

    config = OPTConfig(**tensors.config)
    config._attn_implementation = "sdpa"  # as from_pretrained would choose
    layer = OPTDecoderLayer(config, layer_idx=0).to(tensors.dtype).eval()
    seen: list[tuple[Any, Any]] = []
    layer.fc1.register_forward_hook(lambda _, given, result: seen.append((given[0], result)))
    ids = torch.tensor(token_ids)
    positions = torch.arange(len(token_ids)) + POSITION_OFFSET
    stream = tensors("model.decoder.embed_tokens.weight")[ids]
    stream = (stream + tensors("model.decoder.embed_positions.weight")[positions])[None]
    hidden = torch.full((len(token_ids), len(token_ids)), float("-inf"), dtype=tensors.dtype)
    mask = hidden.triu(1)[None, None]
    names = list(layer.state_dict())
    for layer_idx in range(config.num_hidden_layers):
        prefix = f"model.decoder.layers.{layer_idx}."
        layer.load_state_dict({name: tensors(prefix + name) for name in names})
        with torch.no_grad():
            stream = layer(stream, attention_mask=mask)
        yield seen.pop()
