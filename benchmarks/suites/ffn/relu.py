# SPDX-License-Identifier: Apache-2.0
"""The small ReLU model, with and without the neurons that its predictor finds inactive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.inputs.byte_training import byte_text
from benchmarks.inputs.relu_model import ReluModel, relu_model_dir
from benchmarks.suites.ffn.quality_variants import by_low_rank
from vllm_tiered.ffn.prepare.evaluate import Outcome, Variant, evaluate
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel, ffn_weights
from vllm_tiered.ffn.prepare.record import num_training_tokens, record, recorded_inputs
from vllm_tiered.ffn.prepare.statistics import layer_statistics
from vllm_tiered.ffn.prepare.texts import Text
from vllm_tiered.ffn.prepare.train import train_layer
from vllm_tiered.ffn.selection import ALL

_TOKENS_PER_TEXT = 256
_MEASURED_FROM = 0
_RECORDED_FROM = 1000
"""First measured conversation; the model trains on those from 2000 on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReluSettings:
    """Training steps of the model, and tokens recorded; a quarter of the tokens is measured."""

    steps: int
    tokens: int


def relu_quality(settings: ReluSettings) -> dict[str, Any]:
    """Train the model if there is none yet, and measure. The result is JSON-safe."""
    folder = relu_model_dir(ReluModel(steps=settings.steps))
    model = LayerwiseModel(folder)
    trained, reports, overlaps = [], [], []
    with TemporaryDirectory() as scratch:
        record(model, _texts(_RECORDED_FROM, settings.tokens), Path(scratch))
        for layer in range(model.num_layers):
            with model.layer(layer) as module:
                weights = ffn_weights(module, model.activation)
            x_TH, lengths = recorded_inputs(Path(scratch), layer)
            predictor, report = train_layer(x_TH, num_training_tokens(lengths), weights)
            overlaps.append(layer_statistics(x_TH[-2048:], [256] * 8, weights).overlap)
            trained.append(predictor)
            reports.append(report)
    variants = {
        "full": Variant(mix=ALL, group=None),
        "predicted": Variant(mix=ALL, group=None, ranking=by_low_rank(trained)),
    }
    texts = [Text(tuple(text), 1) for text in _texts(_MEASURED_FROM, settings.tokens // 4)]
    return summarise(evaluate(LayerwiseModel(folder), texts, variants), reports, overlaps)


def summarise(
    outcomes: Mapping[str, Outcome], reports: list[dict[str, Any]], overlaps: list[float]
) -> dict[str, Any]:
    """Return means over layers, and what leaving neurons out costs."""

    def mean(key: str) -> float:
        return sum(float(report[key]) for report in reports) / len(reports)

    full, predicted = outcomes["full"], outcomes["predicted"]
    return {
        **{
            key: mean(key)
            for key in ("active_share", "predicted_share", "recall", "precision", "energy", "rank")
        },
        "overlap": sum(overlaps) / len(overlaps),
        "correct_full": full.correct,
        "correct": predicted.correct,
        "accuracy_loss": full.correct - predicted.correct,
        "perplexity_full": full.perplexity,
        "perplexity_ratio": predicted.perplexity / full.perplexity,
    }


def _texts(first: int, num_tokens: int) -> list[list[int]]:
    text = byte_text(first, num_tokens)
    ends = range(_TOKENS_PER_TEXT, num_tokens + 1, _TOKENS_PER_TEXT)
    return [list(text[end - _TOKENS_PER_TEXT : end]) for end in ends]
