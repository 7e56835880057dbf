# SPDX-License-Identifier: Apache-2.0
"""A trained ReLU model: what it costs in perplexity, and how little of it a token needs.

SmolLM2-135M that was fine-tuned from SiLU to ReLU (`inputs/relufied_model.py`) against the original
on ShareGPT's text that neither training nor predictors saw:

    curve        perplexity over the share of active neurons, by the threshold that the gate has to
                 exceed (FATReLU; 0 is the model as it is)
    predictors   of the gate's sign: the gate itself in 4 bit, and trained low-rank ones: recall,
                 size, and perplexity with the neurons left out that they find inactive
    mixes        perplexity with the neurons that the gate in 4 bit names, by their precisions
    reads        active neurons that a token reads, by what stays near, over all neurons

The model is smaller than vLLM itself, so that no memory limit says anything of it: its shares and
its locality are what other measurements replay at larger sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.harness.progress import Step
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.relufied_model import Relufying, relufied_model_dir
from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.predictor.gate import Gate
from vllm_tiered.ffn.predictor.low_rank import LowRank
from vllm_tiered.ffn.prepare.evaluate import Copies, Outcome, Scores, Variant, evaluate
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel, ffn_weights
from vllm_tiered.ffn.prepare.record import num_training_tokens, record, recorded_inputs
from vllm_tiered.ffn.prepare.statistics import layer_statistics
from vllm_tiered.ffn.prepare.texts import calibration_texts
from vllm_tiered.ffn.prepare.train import (
    TrainSettings,
    importance,
    measure,
    report_of,
    train_layer,
)
from vllm_tiered.ffn.selection import ALL, Mix

RESULT_KEYS = (
    "perplexity_original",
    "perplexity_ratio",
    "active_share",
    "curve",
    "predictors",
    "mixes",
    "reads",
    "training",
    "definitions",
)

DEFINITIONS = {
    "perplexity_original": "of the model with SiLU, on the measured text",
    "perplexity_ratio": "of the ReLU model, all active neurons computed, over the original's",
    "active_share": "of the neurons whose gate exceeds 0, over layers and tokens",
    "curve": "by threshold of the gate: active_share, and perplexity_ratio over the original's",
    "predictors": "by kind: means over layers on tokens not trained with; bytes of all layers, in"
    " bfloat16, over the FFN's bytes; perplexity_ratio with the predicted neurons alone, over the"
    " original's",
    "mixes": "shares of the named neurons in 16, 8 and 4 bit, most positive gate first; bits a"
    " weight over all neurons; perplexity_ratio over the original's",
    "reads": "neurons that a token reads, over all of the layer's: its active ones; those that were"
    " not active for the token before (`atu`); those that were not active for any of the last 5"
    " (`window`), and what that window holds near",
    "training": "of the model: steps, tokens, seconds, and the means of its last 50 steps",
}

_MEASURED_FROM, _RECORDED_FROM = 0, 1000
"""First conversations; the model trains on those from 2000 on."""
_WINDOW = 5

GROUP = 64
"""Weights that share a 4-bit scale, as `prepare` has for this model."""

MIXES = tuple(
    Mix.from_shares(shares)
    for shares in ((0.25, 0.25, 0.5), (0.25, 0.75, 0), (0, 1, 0), (0, 0.5, 0.5), (0, 0, 1))
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        steps: of the model's training.
        tokens: measured tokens.
        recorded_tokens: that train the predictors.
        epochs: most epochs of a predictor; 0 for the closed form.
        thresholds: of the gate.
    """

    steps: int = 600
    tokens: int = 2000
    recorded_tokens: int = 8000
    epochs: int = 8
    thresholds: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.4)
    threads: int = 0


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(tokens=400, recorded_tokens=1500, epochs=0, thresholds=(0.0, 0.1)),
    "full": Settings(),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    return 3


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises FileNotFoundError if a package is missing."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    original = demo_model_dir()
    folder = relufied_model_dir(Relufying(steps=settings.steps))
    step(f"{folder.name}")
    predictors, reports, reads = _predictors(folder, original, settings)
    recalls = [f"{kind} {_mean(of_kind, 'recall'):.1%}" for kind, of_kind in reports.items()]
    step(f"predictors: recall {', '.join(recalls)}")
    texts = calibration_texts(original, settings.tokens, skip=_MEASURED_FROM, tokens_per_text=256)
    dense = evaluate(LayerwiseModel(original), texts, {"SiLU": Variant(mix=ALL, group=None)})
    variants = {
        _name(threshold): Variant(mix=ALL, group=None, ranking=GateAbove(threshold))
        for threshold in settings.thresholds
    }
    for kind, of_kind in predictors.items():
        variants[kind] = Variant(mix=ALL, group=GROUP, ranking=ranked_by(of_kind))
    for mix in MIXES:
        ranking = ranked_by(predictors[Gate.name])
        variants[str(mix.shares)] = Variant(mix=mix, group=GROUP, ranking=ranking)
    outcomes = evaluate(LayerwiseModel(folder), texts, variants)
    result = summarise(dense["SiLU"], outcomes, settings, reports, reads)
    step(f"perplexity {result['perplexity_ratio']:.2f} times the original's")
    return {**result, "training": _training(folder), "definitions": DEFINITIONS}


class GateAbove:
    """Ranking by the gate itself: neurons whose gate does not exceed a threshold are left out."""

    def __init__(self, threshold: float) -> None:
        # The least number above it, as what equals the threshold is left out.
        self._least = torch.nextafter(torch.tensor(threshold), torch.tensor(float("inf"))).item()

    def __call__(self, layer: int, copies: Copies) -> tuple[Scores, float | None]:
        gate_NH = copies.weights.rows_NMH[:, 0]
        return lambda x_TH: x_TH @ gate_NH.T, self._least


def ranked_by(
    predictors: Sequence[Predictor],
) -> Callable[[int, Copies], tuple[Scores, float | None]]:
    """Return the ranking by predictors, one a layer."""

    def ranking(layer: int, _: Copies) -> tuple[Scores, float | None]:
        return predictors[layer].scores, predictors[layer].threshold

    return ranking


def summarise(
    dense: Outcome,
    outcomes: Mapping[str, Outcome],
    settings: Settings,
    reports: Mapping[str, Sequence[Mapping[str, Any]]],
    reads: Mapping[str, float],
) -> dict[str, Any]:
    """Return the figures from outcomes, and from the predictors' reports by kind and layer."""
    curve = [
        {
            "threshold": threshold,
            "active_share": outcomes[_name(threshold)].bits / 16,
            "perplexity_ratio": outcomes[_name(threshold)].perplexity / dense.perplexity,
        }
        for threshold in settings.thresholds
    ]
    as_it_is = min(curve, key=lambda point: point["threshold"])
    predictors = {
        kind: {key: _mean(of_kind, key) for key in ("recall", "precision", "energy")}
        | {
            "predicted_share": outcomes[kind].bits / 16,
            "bytes": sum(float(report["bytes"]) for report in of_kind) / reads["ffn_bytes"],
            "perplexity_ratio": outcomes[kind].perplexity / dense.perplexity,
        }
        for kind, of_kind in reports.items()
    }
    mixes = [
        {
            "mix": list(mix.shares),
            "bits": outcomes[str(mix.shares)].bits,
            "perplexity_ratio": outcomes[str(mix.shares)].perplexity / dense.perplexity,
        }
        for mix in MIXES
    ]
    return {
        "perplexity_original": dense.perplexity,
        "perplexity_ratio": as_it_is["perplexity_ratio"],
        "active_share": as_it_is["active_share"],
        "curve": curve,
        "predictors": predictors,
        "mixes": mixes,
        "reads": {key: value for key, value in reads.items() if key != "ffn_bytes"},
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the curve, the predictors, the mixes and the reads."""
    curve = [
        [
            number(point["threshold"], 2),
            f"{point['active_share']:.1%}",
            number(point["perplexity_ratio"], 3),
        ]
        for point in result["curve"]
    ]
    predictors = [
        [
            kind,
            f"{of['bytes']:.1%}",
            *(f"{of[key]:.1%}" for key in ("recall", "precision", "energy", "predicted_share")),
            number(of["perplexity_ratio"], 3),
        ]
        for kind, of in result["predictors"].items()
    ]
    mixes = [
        [
            "/".join(f"{100 * share:.0f}" for share in of["mix"]),
            number(of["bits"], 2),
            number(of["perplexity_ratio"], 3),
        ]
        for of in result["mixes"]
    ]
    reads = result["reads"]
    over = "perplexity over the original"
    of_predictors = ["predictor", "size", "recall", "precision", "energy", "named", over]
    return (
        f"{markdown(['gate above', 'active', over], curve)}\n\n"
        f"{markdown(of_predictors, predictors)}\n\n"
        f"{markdown(['16/8/4 bit', 'bits', over], mixes)}\n\n"
        f"A token's active neurons: {reads['active']:.1%} of all, {reads['atu']:.1%} beside the "
        f"last token's, {reads['window']:.1%} beside the last {_WINDOW} tokens', which are "
        f"{reads['window_holds']:.1%}."
    )


def _predictors(
    folder: Path, tokenizer_dir: Path, settings: Settings
) -> tuple[dict[str, list[Predictor]], dict[str, list[dict[str, Any]]], dict[str, float]]:
    """Make predictors of each kind; return them and their reports by kind, and what a token needs.

    Both kinds are reported on the same tokens, with which none was trained.
    """
    model = LayerwiseModel(folder)
    texts = calibration_texts(
        tokenizer_dir, settings.recorded_tokens, skip=_RECORDED_FROM, tokens_per_text=256
    )
    train = TrainSettings(max_epochs=settings.epochs)
    made: dict[str, list[Predictor]] = {Gate.name: [], LowRank.name: []}
    reports: dict[str, list[dict[str, Any]]] = {Gate.name: [], LowRank.name: []}
    sums = dict.fromkeys(("active", "atu", "window", "window_holds", "ffn_bytes"), 0.0)
    with TemporaryDirectory() as scratch:
        record(model, [text.token_ids for text in texts], Path(scratch))
        for layer in range(model.num_layers):
            with model.layer(layer) as module:
                weights = ffn_weights(module, model.activation)
                x_TH, lengths = recorded_inputs(Path(scratch), layer)
                num_training = num_training_tokens(lengths)
                low_rank, report = train_layer(x_TH, num_training, weights, train)
                gate = Gate.of(weights.rows_NMH)
                x_report = x_TH[-report["report_tokens"] :].float()
                quality = measure(gate, x_report, importance(x_report, weights))
                found = layer_statistics(x_TH, lengths, weights)
                sums["ffn_bytes"] += weights.rows_NMH.numel() * 2
            made[Gate.name].append(gate)
            reports[Gate.name].append(report_of(gate, quality, len(x_report)))
            made[LowRank.name].append(low_rank)
            num_bytes = 2 * sum(tensor.numel() for tensor in (low_rank.a_RH, low_rank.b_NR))
            reports[LowRank.name].append({**report, "bytes": num_bytes})
            sums["active"] += found.active_share / model.num_layers
            sums["atu"] += found.active_share * (1 - found.overlap) / model.num_layers
            sums["window"] += found.window_new[_WINDOW] / model.num_layers
            sums["window_holds"] += found.window[_WINDOW] / model.num_layers
    return made, reports, sums


def _training(folder: Path) -> dict[str, Any]:
    of = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    last = of["steps"][-50:]
    settings = of["settings"]
    return {
        "steps": len(of["steps"]),
        "tokens": len(of["steps"]) * settings["batch"] * settings["tokens"],
        "seconds": of["seconds"],
        **{key: sum(one[key] for one in last) / len(last) for key in last[0]},
    }


def _name(threshold: float) -> str:
    return f"gate above {threshold:g}"


def _mean(reports: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(float(report[key]) for report in reports) / len(reports)
