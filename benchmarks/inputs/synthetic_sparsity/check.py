# SPDX-License-Identifier: Apache-2.0
"""Measured sparsity of an OPT with synthetic sparsity, on real prompts, layer by layer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.synthetic_sparsity.record import LayerRecord, Masks, record

DEFINITIONS = {
    "active_share": "of a layer's neurons, whose activation is above 0, mean over tokens",
    "overlap": "of a token's active neurons, those active for the next token too",
    "recall": "of the active neurons, those the synthetic predictor names",
    "weighted_recall": "the same by the sum of their activations",
    "predicted_share": "of a layer's neurons, that the predictor names",
    "new_share": "of a layer's neurons, predicted and not among the last 5 tokens' predicted ones",
    "window_share": "of a layer's neurons, predicted for any of the last 5 tokens",
}

WINDOW_TOKENS = 5
"""Window of tokens that LLM in a flash uses for OPT-6.7B (4.1)."""


def measure(
    model: Path, *, dtype: str = "bfloat16", prompts: Sequence[Sequence[int]] = ()
) -> dict[str, Any]:
    """Return the figures of `DEFINITIONS`, as means over layers and by layer.

    Args:
        prompts: token ids; if empty, two ShareGPT prompts of 256 tokens.
    """
    texts = prompts or _sharegpt(model)
    by_text = [[_figures(layer) for layer in record(model, text, dtype=dtype)] for text in texts]
    layers = [
        {key: statistics.fmean(figures[key] for figures in of_layer) for key in DEFINITIONS}
        for of_layer in zip(*by_text, strict=True)
    ]
    means = {key: statistics.fmean(layer[key] for layer in layers) for key in DEFINITIONS}
    return {**means, "dtype": dtype, "num_tokens": sum(map(len, texts)), "by_layer": layers}


def table(result: Mapping[str, Any]) -> str:
    """Return Markdown: a row for each layer and one of the means, in percent."""
    rows = [
        [str(name), *(number(100 * figures[key], 1) for key in DEFINITIONS)]
        for name, figures in [*enumerate(result["by_layer"]), ("mean", result)]
    ]
    heading = f"layer ({result['dtype']}, synthetic, %)"
    return markdown([heading, *(key.replace("_", " ") for key in DEFINITIONS)], rows)


def _figures(layer: LayerRecord) -> dict[str, float]:
    active, predicted = layer.active, layer.predicted
    found = active & predicted
    return {
        "active_share": float(active.mean()),
        "overlap": float((active[1:] & active[:-1]).sum() / max(1, active[:-1].sum())),
        "recall": float(found.sum() / max(1, active.sum())),
        "weighted_recall": float(layer.activation[found].sum() / max(1e-9, layer.activation.sum())),
        "predicted_share": float(predicted.mean()),
        "new_share": float((predicted[1:] & ~_window(predicted)[:-1])[WINDOW_TOKENS:].mean()),
        "window_share": float(_window(predicted)[WINDOW_TOKENS:].mean()),
    }


def _window(masks: Masks) -> Masks:
    """Return the union of each token's mask with the earlier ones in the window."""
    union = masks.copy()
    for age in range(1, WINDOW_TOKENS):
        union[age:] |= masks[:-age]
    return union


def _sharegpt(model: Path) -> list[tuple[int, ...]]:
    from benchmarks.inputs.workload import sharegpt_requests

    requests = sharegpt_requests(64, 0, model, max_prompt_tokens=256)
    long = [request.prompt_token_ids for request in requests if request.num_tokens > 256]
    whole = [ids for ids in long if len(ids) == 256][:2]
    if len(whole) < 2:
        raise ValueError(f"{len(whole)} of 64 ShareGPT prompts have 256 tokens, expected 2")
    return whole
