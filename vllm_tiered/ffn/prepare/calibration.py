# SPDX-License-Identifier: Apache-2.0
"""Steps of `prepare` that run the model on calibration text.

1  recording     record the input of each layer's FFN (record.py) in a folder next to the draft
2  gate          report how well each layer's predictor predicts (predictor/gate.py)
   low_rank      or train one (train.py)
3  statistics    compute each layer's activation statistics (statistics.py)
4  mix           run the ratio search (ratio_search.py)

Steps 2 to 4 write their files to the store's draft, so that the next call can resume there.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm_tiered.errors import ConfigError, IntegrityError
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.predictor.files import (
    load_predictor,
    predictor_name,
    read_header,
    save_predictor,
)
from vllm_tiered.ffn.predictor.gate import Gate
from vllm_tiered.ffn.predictor.low_rank import LowRank
from vllm_tiered.ffn.prepare.checkpoint import Checkpoint
from vllm_tiered.ffn.prepare.evaluate import Copies, Scores, Variant, evaluate
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel
from vllm_tiered.ffn.prepare.ratio_search import Candidate, SearchResult, Uncertainty, search
from vllm_tiered.ffn.prepare.record import (
    num_recorded,
    num_training_tokens,
    record,
    recorded_inputs,
)
from vllm_tiered.ffn.prepare.statistics import layer_statistics
from vllm_tiered.ffn.prepare.steps import Step
from vllm_tiered.ffn.prepare.texts import calibration_texts
from vllm_tiered.ffn.prepare.train import (
    TrainSettings,
    importance,
    measure,
    report_of,
    train_layer,
)
from vllm_tiered.ffn.selection import PLAIN, Mix
from vllm_tiered.ffn.store.format import MIX_FILE, statistics_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Settings of the calibration.

    Attributes:
        text: a text file; None for ShareGPT's conversations (texts.py).
        num_tokens: number of tokens to record; a quarter of them is held out.
        search_tokens: number of tokens for the ratio search, which runs each of them through every
            candidate.
        budget_bits: largest average number of bits of a weight in a searched mix; None for half the
            bits of full precision.
    """

    text: Path | None = None
    num_tokens: int = 8192
    search_tokens: int = 1024
    budget_bits: float | None = None
    train: TrainSettings = field(default_factory=TrainSettings)


@dataclass(frozen=True, slots=True)
class Watched:
    """Inputs and folders that each step's work needs; picklable.

    Attributes:
        out: folder for files that are published.
        scratch: folder for files that are not published; used by this model and calibration only.
    """

    checkpoint: Checkpoint
    calibration: Calibration
    out: Path
    scratch: Path

    @classmethod
    def begin(cls, checkpoint: Checkpoint, calibration: Calibration, draft: Path) -> "Watched":
        """Keep an earlier call's recordings of the same model and calibration; remove others."""
        scratch = draft.with_name(f"{draft.name}-recorded")
        key = json.dumps([checkpoint.fingerprint, asdict(calibration)], default=str)
        key_path = scratch / "key.json"
        if scratch.exists() and not (key_path.is_file() and key_path.read_text() == key):
            shutil.rmtree(scratch)
        scratch.mkdir(parents=True, exist_ok=True)
        key_path.write_text(key)
        return cls(checkpoint, calibration, draft, scratch)

    def forget(self) -> None:
        """Remove the recordings, which are not needed once the store is published."""
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
        predictor: kind of the predictor, which ranks neurons in the search.
        groups: weights that share a scale, by precision of the store. The ratio search runs only
            with all three precisions.

    Raises:
        ConfigError: files of an earlier call cannot be removed.
    """
    watched = Watched.begin(checkpoint, calibration, draft)
    steps = [predicting(watched, predictor), statistics(watched)]
    if set(groups) == set(Precision):
        steps.append(mixing(watched, predictor, groups[Precision.INT4]))
    if not any(step.pending for step in steps):
        watched.forget()
        return steps
    return [recording(watched), *steps[:-1], replace(steps[-1], finish=watched.forget)]


def recording(watched: Watched) -> Step:
    """Return the recording step.

    It is one unit of work, because each layer needs the previous layer's output. It resumes at the
    layer where it was interrupted.
    """
    layers = watched.checkpoint.shape.num_layers
    done = num_recorded(watched.scratch, layers) == layers
    return Step(
        name="recording",
        num_layers=1,
        pending=[] if done else [0],
        work=partial(_record, watched),
    )


def predicting(watched: Watched, predictor: str) -> Step:
    """Return the step that makes predictors of a kind, and measures them on the recordings."""
    work = _measure_gate if predictor == Gate.name else _train
    name = partial(predictor_name, predictor)
    for layer in range(watched.checkpoint.shape.num_layers):
        path = watched.out / name(layer)
        if not _is_measured(path, watched.checkpoint.fingerprint):
            path.unlink(missing_ok=True)
    return _per_layer(watched, predictor, name, work)


def _is_measured(path: Path, fingerprint: str) -> bool:
    """Return whether a file is a predictor of this version, with a report."""
    try:
        return bool(read_header(path, fingerprint)["report"])
    except (ConfigError, IntegrityError):
        return False


def statistics(watched: Watched) -> Step:
    """Return the step that computes statistics from the recordings."""
    return _per_layer(watched, "statistics", statistics_name, _look)


def mixing(watched: Watched, predictor: str, group: int | None) -> Step:
    """Return the step that runs the ratio search with a predictor's ranking.

    Args:
        group: weights that share a 4-bit scale; None for a row.
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
        x_TH,
        num_training_tokens(lengths),
        watched.checkpoint.layer(layer),
        watched.calibration.train,
    )
    path = watched.out / predictor_name(LowRank.name, layer)
    save_predictor(path, predictor, watched.checkpoint.fingerprint, report)


def _measure_gate(watched: Watched, layer: int) -> None:
    x_TH, _ = recorded_inputs(watched.scratch, layer)
    weights = watched.checkpoint.layer(layer)
    gate = Gate.of(weights.rows_NMH, weights.up_bias_N, weights.activation)
    x_TH = x_TH.float()
    quality = measure(
        gate, x_TH, torch.cat([importance(x, weights) for x in torch.split(x_TH, 512)])
    )
    path = watched.out / predictor_name(Gate.name, layer)
    save_predictor(path, gate, watched.checkpoint.fingerprint, report_of(gate, quality, len(x_TH)))


def _look(watched: Watched, layer: int) -> None:
    x_TH, lengths = recorded_inputs(watched.scratch, layer)
    found = layer_statistics(x_TH, lengths, watched.checkpoint.layer(layer))
    _put(found.to_json(), watched.out / statistics_name(layer))


def _search(watched: Watched, predictor: str, group: int | None, _: int) -> None:
    calibration, checkpoint = watched.calibration, watched.checkpoint
    full_bits = 8 * checkpoint.shape.dtype_bytes
    texts = calibration_texts(
        checkpoint.folder, calibration.search_tokens, calibration.text, tokens_per_text=256
    )

    def by_files(layer: int, copies: Copies) -> tuple[Scores, float | None]:
        path = watched.out / predictor_name(predictor, layer)
        loaded = load_predictor(path, checkpoint.fingerprint)
        return loaded.scores, loaded.threshold

    def uncertainties(mixes: Sequence[Mix], *, is_ranked: bool = True) -> list[Uncertainty]:
        # Inactive neurons are left out with any mix, also if all have the same precision.
        ranking = by_files if is_ranked else None
        variants = {
            str(mix.shares): Variant(mix=mix, group=group, ranking=ranking) for mix in mixes
        }
        outcomes = evaluate(LayerwiseModel(checkpoint.folder), texts, variants, full_bits=full_bits)
        return [outcomes[str(mix.shares)].uncertainty for mix in mixes]

    found = search(uncertainties, calibration.budget_bits or full_bits / 2, full_bits=full_bits)
    plain = tuple(map(Candidate, PLAIN, uncertainties(PLAIN, is_ranked=False)))
    _put(mix_json(found, plain, predictor, full_bits), watched.out / MIX_FILE)


def mix_json(
    found: SearchResult, plain: Sequence[Candidate], predictor: str, full_bits: int
) -> dict[str, Any]:
    """Return the contents of the mix file.

    Args:
        plain: all neurons in one precision, for comparison.
        predictor: what ranked the neurons.
        full_bits: bits of a weight in full precision.
    """
    return {
        "mix": list(found.best.mix.shares),
        "ranked_by": predictor,
        "candidates": [candidate.to_json(full_bits) for candidate in found.candidates],
        "plain": [candidate.to_json(full_bits) for candidate in plain],
    }


def _put(content: dict[str, Any], path: Path) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)
