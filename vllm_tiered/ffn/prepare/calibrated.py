# SPDX-License-Identifier: Apache-2.0
"""The steps of `prepare` for which a model is watched on calibration text.

1  recording     what each layer's FFN is given (record.py), into a folder beside the draft
2  low_rank      a predictor a layer (train.py)
3  statistics    how a layer's neurons behave (statistics.py)
4  mix           the ratio search (ratio_search.py)

Each leaves its files in the draft of the store, where an interrupted call finds them.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.predictor.files import load_predictor, predictor_name, save_predictor
from vllm_tiered.ffn.predictor.low_rank import LowRank
from vllm_tiered.ffn.prepare.calibration import calibration_texts
from vllm_tiered.ffn.prepare.checkpoint import Checkpoint
from vllm_tiered.ffn.prepare.evaluate import Scores, Variant, by_base4, evaluate
from vllm_tiered.ffn.prepare.ffn_modules import FfnWeights
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel
from vllm_tiered.ffn.prepare.mixed_ffn import Copies
from vllm_tiered.ffn.prepare.ratio_search import SearchResult, Uncertainty, search
from vllm_tiered.ffn.prepare.record import (
    num_recorded,
    num_training_tokens,
    record,
    recorded_inputs,
)
from vllm_tiered.ffn.prepare.statistics import layer_statistics
from vllm_tiered.ffn.prepare.steps import Step
from vllm_tiered.ffn.prepare.train import TrainSettings, train_layer
from vllm_tiered.ffn.selection import Mix
from vllm_tiered.ffn.store.format import MIX_FILE, statistics_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What the model is watched on, and for.

    Attributes:
        text: a text file; None for ShareGPT's conversations (calibration.py).
        num_tokens: to record; a quarter of them is held out.
        search_tokens: for the ratio search, which runs each of them through every candidate.
        budget_bits: of a weight, on average, that a searched mix may have; None for half of those
            of full precision.
    """

    text: Path | None = None
    num_tokens: int = 8192
    search_tokens: int = 1024
    budget_bits: float | None = None
    train: TrainSettings = field(default_factory=TrainSettings)


@dataclass(frozen=True, slots=True)
class Watched:
    """Where everything of one model is, as each step's work needs it; it pickles.

    Attributes:
        out: for files that are published.
        scratch: for those that are not; of this model and calibration alone.
    """

    checkpoint: Checkpoint
    calibration: Calibration
    out: Path
    scratch: Path

    @classmethod
    def begin(cls, checkpoint: Checkpoint, calibration: Calibration, draft: Path) -> "Watched":
        """Go on with what an earlier call recorded, if it was of the same."""
        scratch = draft.with_name(f"{draft.name}-recorded")
        key = json.dumps([checkpoint.fingerprint, asdict(calibration)], default=str)
        key_path = scratch / "key.json"
        if scratch.exists() and not (key_path.is_file() and key_path.read_text() == key):
            shutil.rmtree(scratch)
        scratch.mkdir(parents=True, exist_ok=True)
        key_path.write_text(key)
        return cls(checkpoint, calibration, draft, scratch)

    def weights(self, layer: int) -> FfnWeights:
        """Of a layer's FFN."""
        return FfnWeights(*self.checkpoint.layer(layer), self.checkpoint.activation)

    def forget(self) -> None:
        """Remove what is not needed any more once the store is published."""
        shutil.rmtree(self.scratch, ignore_errors=True)


def calibrated_steps(
    checkpoint: Checkpoint,
    calibration: Calibration,
    draft: Path,
    predictor: str,
    groups: Mapping[Precision, int | None],
) -> list[Step]:
    """Return the steps that no earlier call has finished.

    Args:
        predictor: "low_rank" is trained, and ranks for the search; "base4" only does that.
        groups: precisions of the store, and weights that share a scale; with all three precisions
            there is a mix to search for.

    Raises:
        ConfigError: files of an earlier call cannot be removed.
    """
    watched = Watched.begin(checkpoint, calibration, draft)
    steps = [statistics(watched)]
    if predictor == LowRank.name:
        steps.insert(0, training(watched))
    if set(groups) == set(Precision):
        steps.append(mixing(watched, predictor, groups[Precision.INT4]))
    if not any(step.pending for step in steps):
        watched.forget()
        return steps
    return [recording(watched), *steps[:-1], replace(steps[-1], finish=watched.forget)]


def recording(watched: Watched) -> Step:
    """One piece of work, as each layer needs what the one before gave; resumable within."""
    layers = watched.checkpoint.shape.num_layers
    done = num_recorded(watched.scratch, layers) == layers
    return Step(
        name="recording",
        num_layers=1,
        pending=[] if done else [0],
        work=partial(_record, watched),
    )


def training(watched: Watched) -> Step:
    """Low-rank predictors, from what was recorded."""
    return _per_layer(watched, "low_rank", predictor_name, _train)


def statistics(watched: Watched) -> Step:
    """From what was recorded."""
    return _per_layer(watched, "statistics", statistics_name, _look)


def mixing(watched: Watched, predictor: str, group: int | None) -> Step:
    """Run the ratio search with a predictor's ranking.

    Args:
        group: of the 4-bit scales.
    """
    return Step(
        name="mix",
        num_layers=1,
        pending=[] if (watched.out / MIX_FILE).is_file() else [0],
        work=partial(_search, watched, predictor, group),
    )


def _per_layer(
    watched: Watched,
    name: str,
    file_name: Callable[[int], str],
    work: Callable[[Watched, int], None],
) -> Step:
    layers = range(watched.checkpoint.shape.num_layers)
    return Step(
        name=name,
        num_layers=len(layers),
        pending=[layer for layer in layers if not (watched.out / file_name(layer)).is_file()],
        work=partial(work, watched),
    )


def _record(watched: Watched, _: int) -> None:
    calibration = watched.calibration
    folder = watched.checkpoint.folder
    texts = calibration_texts(folder, calibration.num_tokens, calibration.text)
    record(LayerwiseModel(folder), [text.token_ids for text in texts], watched.scratch)


def _train(watched: Watched, layer: int) -> None:
    x_TH, lengths = recorded_inputs(watched.scratch, layer)
    predictor, report = train_layer(
        x_TH, num_training_tokens(lengths), watched.weights(layer), watched.calibration.train
    )
    path = watched.out / predictor_name(layer)
    save_predictor(path, predictor, watched.checkpoint.fingerprint, report)


def _look(watched: Watched, layer: int) -> None:
    x_TH, lengths = recorded_inputs(watched.scratch, layer)
    found = layer_statistics(x_TH, lengths, watched.weights(layer))
    _put(found.to_json(), watched.out / statistics_name(layer))


def _search(watched: Watched, predictor: str, group: int | None, _: int) -> None:
    calibration, checkpoint = watched.calibration, watched.checkpoint
    full_bits = 8 * checkpoint.shape.dtype_bytes
    texts = calibration_texts(
        checkpoint.folder, calibration.search_tokens, calibration.text, tokens_per_text=256
    )

    def by_files(layer: int, copies: Copies) -> tuple[Scores, float | None]:
        loaded = load_predictor(watched.out / predictor_name(layer), checkpoint.fingerprint)
        return loaded.scores, loaded.threshold

    ranking = by_base4 if predictor == "base4" else by_files

    def uncertainties(mixes: Sequence[Mix]) -> list[Uncertainty]:
        # ReLU models leave inactive neurons out with any mix, so that even one precision is ranked.
        is_relu = checkpoint.activation == "relu"
        variants = {
            str(mix.shares): Variant(
                mix=mix,
                group=group,
                ranking=None if 1 in mix.shares and not is_relu else ranking,
            )
            for mix in mixes
        }
        outcomes = evaluate(LayerwiseModel(checkpoint.folder), texts, variants, full_bits=full_bits)
        return [outcomes[str(mix.shares)].uncertainty for mix in mixes]

    found = search(uncertainties, calibration.budget_bits or full_bits / 2, full_bits=full_bits)
    _put(mix_json(found, predictor, full_bits), watched.out / MIX_FILE)


def mix_json(found: SearchResult, predictor: str, full_bits: int) -> dict[str, Any]:
    """Return the contents of the mix file."""
    return {
        "mix": list(found.best.mix.shares),
        "ranked_by": predictor,
        "candidates": [candidate.to_json(full_bits) for candidate in found.candidates],
    }


def _put(content: dict[str, Any], path: Path) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)
