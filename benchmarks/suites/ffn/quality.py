# SPDX-License-Identifier: Apache-2.0
"""Quality cost of the sparse mixed-precision FFN: perplexity by mix and by ranking.

The demo model (SwiGLU) reads ShareGPT conversations and HumanEval solutions that were not used for
training or search. The engine's own code quantises and selects the neurons of each FFN, in 16, 8
and 4 bit. Attention is unchanged, and matmuls are in float32.

The small ReLU model drops the neurons that its trained predictor finds inactive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.harness.progress import Step
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.human_eval import problems
from benchmarks.inputs.model import demo_model_dir
from benchmarks.suites.ffn.quality_variants import (
    GROUP,
    HELD_OUT,
    SEARCHED,
    by_low_rank,
    variants_of,
)
from benchmarks.suites.ffn.relu import ReluSettings, relu_quality
from vllm_tiered.ffn.predictor.low_rank import LowRank
from vllm_tiered.ffn.prepare.evaluate import Outcome, Variant, by_base4, evaluate
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel, ffn_weights
from vllm_tiered.ffn.prepare.ratio_search import SearchResult, Uncertainty, search
from vllm_tiered.ffn.prepare.record import num_training_tokens, record, recorded_inputs
from vllm_tiered.ffn.prepare.texts import Text, calibration_texts
from vllm_tiered.ffn.prepare.train import TrainSettings, train_layer
from vllm_tiered.ffn.selection import Mix

RESULT_KEYS = (
    "perplexity_full",
    "perplexity_searched",
    "ratio_searched",
    "mix_searched",
    "perplexity",
    "bits",
    "search",
    "predictors",
    "relu",
    "definitions",
)

DEFINITIONS = {
    "perplexity": "by text and variant: exp of the mean negative log-probability of a token given"
    " those before it in its text; matmuls in float32",
    "perplexity_full": "on ShareGPT, all neurons in 16 bit",
    "perplexity_searched": "on ShareGPT, with the searched mix, ranked by base4, groups of 64",
    "ratio_searched": "perplexity_searched over perplexity_full",
    "mix_searched": "shares of the neurons in 16, 8 and 4 bit, searched on other conversations",
    "bits": "of a neuron's weight as computed, on average, without scales; left out neurons have 0",
    "search": "mixes that the search tried, with the entropy that it minimises and the perplexity"
    " of the same tokens",
    "predictors": "of the low-rank predictors, means over layers, on tokens not trained with",
    "relu": "the small ReLU model with the neurons left out that its predictor finds inactive",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile, in numbers of tokens.

    Attributes:
        epochs: most epochs that the low-rank predictors train for; 0 uses the closed form.
    """

    sharegpt_tokens: int
    humaneval_tokens: int
    calibration_tokens: int
    search_tokens: int
    search_step: float
    search_rounds: int
    epochs: int
    relu_steps: int
    relu_tokens: int
    budget_bits: float = 8.0
    threads: int = 0


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        sharegpt_tokens=400,
        humaneval_tokens=200,
        calibration_tokens=1500,
        search_tokens=256,
        search_step=0.25,
        search_rounds=1,
        epochs=0,
        relu_steps=200,
        relu_tokens=8000,
    ),
    "full": Settings(
        sharegpt_tokens=6000,
        humaneval_tokens=3000,
        calibration_tokens=8000,
        search_tokens=1000,
        search_step=0.125,
        search_rounds=2,
        epochs=8,
        relu_steps=600,
        relu_tokens=40000,
    ),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    return 6


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring.

    Raises FileNotFoundError, with the command that installs it, if a package of texts is missing.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    folder = demo_model_dir()
    texts = {
        "sharegpt": calibration_texts(folder, settings.sharegpt_tokens, skip=HELD_OUT),
        "humaneval": humaneval_texts(folder, settings.humaneval_tokens),
    }
    model = LayerwiseModel(folder)
    found = _search(model, folder, settings)
    step(f"searched mix: {list(found.best.mix.shares)}")
    predictors, reports = _low_rank(model, folder, settings)
    step(f"low-rank predictors: {_mean(reports, 'energy'):.0%} of the energy in their best half")
    variants = variants_of(found.best.mix, GROUP, by_low_rank(predictors))
    outcomes = {}
    for name, of in texts.items():
        outcomes[name] = evaluate(LayerwiseModel(folder), of, variants)
        step(f"{name}: {len(variants)} variants")
    relu = relu_quality(ReluSettings(steps=settings.relu_steps, tokens=settings.relu_tokens))
    step(f"small ReLU model: recall {relu['recall']:.1%}")
    result = summarise(outcomes, found, reports, relu)
    step(f"searched mix: perplexity {result['ratio_searched']:.4f} of full precision's")
    return result


def summarise(
    outcomes: Mapping[str, Mapping[str, Outcome]],
    found: SearchResult,
    reports: Sequence[Mapping[str, Any]],
    relu: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the figures from each variant's outcome on each text."""
    sharegpt = outcomes["sharegpt"]
    full, searched = sharegpt["full"].perplexity, sharegpt[SEARCHED].perplexity
    return {
        "perplexity_full": full,
        "perplexity_searched": searched,
        "ratio_searched": searched / full,
        "mix_searched": list(found.best.mix.shares),
        "perplexity": {
            text: {name: outcome.perplexity for name, outcome in of.items()}
            for text, of in outcomes.items()
        },
        "bits": {name: outcome.bits for name, outcome in sharegpt.items()},
        "search": [candidate.to_json() for candidate in found.candidates],
        "predictors": {
            key: _mean(reports, key) for key in ("rank", "bytes", "recall", "precision", "energy")
        },
        "relu": dict(relu),
        "model": demo_model_dir().name,
        "definitions": DEFINITIONS,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return one row per variant, and the cost of the small ReLU model's predictor."""
    texts = list(result["perplexity"])
    rows = []
    for name, bits in result["bits"].items():
        cells = [name, number(bits, 2)]
        for text in texts:
            of = result["perplexity"][text]
            cells += [number(of[name], 3), f"{of[name] / of['full'] - 1:+.1%}"]
        rows.append(cells)
    headings = ["neurons", "bits"]
    for text in texts:
        headings += [f"{text}, perplexity", "over full"]
    relu = result["relu"]
    return (
        f"{markdown(headings, rows)}\n\nSmall ReLU model: {relu['active_share']:.1%} of the neurons"
        f" fire, {relu['predicted_share']:.1%} are computed, recall {relu['recall']:.1%}; tokens"
        f" predicted right {relu['correct']:.2%} instead of {relu['correct_full']:.2%}, perplexity"
        f" x {relu['perplexity_ratio']:.4f}."
    )


def humaneval_texts(tokenizer_dir: Path, num_tokens: int) -> list[Text]:
    """Return HumanEval's prompts with their solutions, up to `num_tokens` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
    texts = []
    missing = num_tokens
    for problem in problems():
        prompt = tokenizer(problem.prompt)["input_ids"]
        solution = tokenizer(problem.solution)["input_ids"]
        token_ids = tuple([*prompt, *solution][:missing])
        if len(token_ids) < 2:
            break
        texts.append(Text(token_ids, min(len(prompt), len(token_ids) - 1)))
        missing -= len(token_ids)
    return texts


def _search(model: LayerwiseModel, folder: Path, settings: Settings) -> SearchResult:
    texts = calibration_texts(folder, settings.search_tokens, tokens_per_text=256)

    def uncertainties(mixes: Sequence[Mix]) -> list[Uncertainty]:
        variants = {
            str(mix.shares): Variant(
                mix=mix, group=GROUP, ranking=None if 1 in mix.shares else by_base4
            )
            for mix in mixes
        }
        outcomes = evaluate(LayerwiseModel(folder), texts, variants)
        return [outcomes[str(mix.shares)].uncertainty for mix in mixes]

    return search(uncertainties, settings.budget_bits, settings.search_step, settings.search_rounds)


def _low_rank(
    model: LayerwiseModel, folder: Path, settings: Settings
) -> tuple[list[LowRank], list[dict[str, Any]]]:
    """Train a predictor for each layer; return the predictors and their reports."""
    texts = calibration_texts(folder, settings.calibration_tokens)
    train = TrainSettings(max_epochs=settings.epochs)
    trained = []
    with TemporaryDirectory() as scratch:
        record(model, [text.token_ids for text in texts], Path(scratch))
        for layer in range(model.num_layers):
            with model.layer(layer) as module:
                weights = ffn_weights(module, model.activation)
            x_TH, lengths = recorded_inputs(Path(scratch), layer)
            trained.append(train_layer(x_TH, num_training_tokens(lengths), weights, train))
    return [predictor for predictor, _ in trained], [report for _, report in trained]


def _mean(reports: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(float(report[key]) for report in reports) / len(reports)
