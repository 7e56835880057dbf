# SPDX-License-Identifier: Apache-2.0
"""Neuron store of an OPT with synthetic sparsity, with its own predictor: needs no training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from benchmarks.inputs.synthetic_sparsity.model import PREDICTOR_FILE, Sparsity
from benchmarks.inputs.synthetic_sparsity.record import sparsity_of_model

_RECIPE = 3  # increases when the written files change


@dataclass(frozen=True, slots=True)
class FfnTensors:
    """One layer's tensors in bfloat16: fc1 [N, H], its bias [N], fc2 [H, N], its bias [H]."""

    fc1: Any
    fc1_bias: Any
    fc2: Any
    fc2_bias: Any


def ffn_tensors(model: Path) -> Iterator[FfnTensors]:
    """Yield each layer's FFN tensors, one layer at a time in memory."""
    from safetensors import safe_open

    index = json.loads((model / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    num_layers = json.loads((model / "config.json").read_text("utf-8"))["num_hidden_layers"]

    def tensor(name: str) -> Any:
        with safe_open(model / index[name], "pt") as file:
            return file.get_tensor(name)

    for layer_idx in range(num_layers):
        prefix = f"model.decoder.layers.{layer_idx}."
        parts = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
        yield FfnTensors(*(tensor(prefix + part) for part in parts))


def predicted_share(sparsity: Sparsity) -> float:
    """Return the mean share of a layer's neurons that the predictor selects for a token."""
    normal = NormalDist()
    threshold = normal.inv_cdf(1 - sparsity.active_share) * (1 + sparsity.noise**2) ** 0.5
    return 1 - normal.cdf(threshold + sparsity.predictor_threshold)


def synthetic_store(
    model: Path,
    folder: Path,
    *,
    precisions: Sequence[str] = ("full",),
    mix: Sequence[float] = (1.0, 0.0, 0.0),
) -> Path:
    """Return the store of a model with synthetic sparsity, inside `folder`; written on first use.

    Args:
        precisions: of "full", "int8" and "int4"; 8.6 GB, 4.3 GB and 2.1 GB for OPT-6.7B.
        mix: shares of the predicted neurons that `mix="auto"` uses.
    """
    from vllm_tiered.ffn.layout import FfnShape, Precision
    from vllm_tiered.ffn.predictor.files import predictor_name, save_predictor
    from vllm_tiered.ffn.store.format import MIX_FILE
    from vllm_tiered.ffn.store.writer import NeuronStoreWriter
    from vllm_tiered.storage.checkpoint_fingerprint import fingerprint_of_folder

    target = folder / f"{model.name}-store{_RECIPE}-{'-'.join(precisions)}"
    if target.is_dir():
        return target
    import torch

    config = json.loads((model / "config.json").read_text("utf-8"))
    sparsity = sparsity_of_model(model)
    fingerprint = fingerprint_of_folder(model)
    shape = FfnShape(
        num_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        neurons=config["ffn_dim"],
        gated=False,
        dtype_bytes=2,
    )
    groups = {Precision(name): None for name in precisions}
    writer = NeuronStoreWriter(
        target, shape, "relu", torch.bfloat16, fingerprint, groups, model=model.name
    )
    try:
        for layer_idx, layer in enumerate(ffn_tensors(model)):
            if layer_idx not in writer.finished_layers:
                weights_NMH = torch.stack((layer.fc1, layer.fc2.T), dim=1)
                writer.add_layer(layer_idx, weights_NMH, layer.fc1_bias, layer.fc2_bias)
        report = {
            "synthetic_sparsity": True,
            "active_share": sparsity.active_share,
            "predicted_share": predicted_share(sparsity),
        }
        for layer_idx, predictor in enumerate(synthetic_predictors(model)):
            path = writer.path_of(predictor_name(predictor.name, layer_idx))
            save_predictor(path, predictor, fingerprint, report)
        mix_file = {"synthetic_sparsity": True, "mix": list(mix), "candidates": []}
        writer.path_of(MIX_FILE).write_text(json.dumps(mix_file), encoding="utf-8")
        return writer.publish()
    finally:
        writer.close()


def synthetic_predictors(model: Path) -> Iterator[Any]:
    """Yield each layer's `LowRank` predictor."""
    from safetensors import safe_open

    from vllm_tiered.ffn.predictor.low_rank import LowRank

    threshold = sparsity_of_model(model).predictor_threshold
    num_layers = json.loads((model / "config.json").read_text("utf-8"))["num_hidden_layers"]
    with safe_open(model / PREDICTOR_FILE, "pt") as file:
        for layer_idx in range(num_layers):
            parts = (file.get_tensor(f"layers.{layer_idx}.{p}") for p in ("a", "b", "bias"))
            yield LowRank(*parts, threshold=threshold)
