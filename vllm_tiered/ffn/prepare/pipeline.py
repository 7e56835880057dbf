# SPDX-License-Identifier: Apache-2.0
"""Pipeline from a checkpoint to a published neuron store.

1  neurons       quantise and write each layer (store/layer.py)
2  ...           run the predictor's steps, from PREDICTORS
3                publish the draft under the store's name
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vllm_tiered.errors import IntegrityError
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.matmul.quantise import default_group
from vllm_tiered.ffn.predictor.files import KINDS, predictor_name, save_predictor
from vllm_tiered.ffn.predictor.gate import Gate
from vllm_tiered.ffn.predictor.low_rank import LowRank
from vllm_tiered.ffn.prepare.calibration import Calibration, calibrated_steps
from vllm_tiered.ffn.prepare.checkpoint import Checkpoint
from vllm_tiered.ffn.prepare.steps import Here, Progress, Runner, Step, run_steps
from vllm_tiered.ffn.store import format as fmt
from vllm_tiered.ffn.store.format import HEADER, StoreFormat
from vllm_tiered.ffn.store.layer import write_layer
from vllm_tiered.ffn.store.writer import NeuronStoreWriter
from vllm_tiered.untrusted import read_regular_file


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparation:
    """Inputs of a predictor's steps.

    Attributes:
        checkpoint: the model's checkpoint.
        writer: its ``path_of`` returns where to write files that are to be published.
        calibration: calibration settings; None to run only what the predictor requires.
    """

    checkpoint: Checkpoint
    writer: NeuronStoreWriter
    calibration: Calibration | None = None


def _gate(preparation: Preparation) -> list[Step]:
    """Return the steps for gates in 4 bit, which need a calibration only to be measured."""
    if preparation.calibration is not None:
        return _calibrated(preparation, Gate.name)
    checkpoint, draft = preparation.checkpoint, preparation.writer.draft
    layers = range(checkpoint.shape.num_layers)
    return [
        Step(
            name=Gate.name,
            num_layers=len(layers),
            pending=[n for n in layers if not (draft / predictor_name(Gate.name, n)).is_file()],
            work=partial(_write_gate, checkpoint, draft),
        )
    ]


def _write_gate(checkpoint: Checkpoint, draft: Path, layer: int) -> None:
    weights = checkpoint.layer(layer)
    gate = Gate.of(weights.rows_NMH, weights.up_bias_N, weights.activation)
    save_predictor(draft / predictor_name(Gate.name, layer), gate, checkpoint.fingerprint, {})


def _low_rank(preparation: Preparation) -> list[Step]:
    return _calibrated(preparation, LowRank.name)


def _calibrated(preparation: Preparation, predictor: str) -> list[Step]:
    return calibrated_steps(
        preparation.checkpoint,
        preparation.calibration or Calibration(),
        preparation.writer.draft,
        predictor,
        preparation.writer.form.groups,
    )


def _none(preparation: Preparation) -> list[Step]:
    return []


PREDICTORS: Mapping[str, Callable[[Preparation], list[Step]]] = {
    Gate.name: _gate,
    LowRank.name: _low_rank,
    "none": _none,
}
"""Functions that return a predictor's steps, by the predictor's name on the command line."""


def prepare(
    model: Path,
    out: Path,
    *,
    precisions: Sequence[Precision] = tuple(Precision),
    group: int | None = None,
    dtype: torch.dtype | None = None,
    predictor: str = Gate.name,
    calibration: Calibration | None = None,
    runner: Runner | None = None,
    progress: Progress | None = None,
) -> bool:
    """Write a model's neuron store, or resume an interrupted call.

    Args:
        model: folder with a Hugging Face checkpoint.
        out: the store's folder.
        group: weights that share a scale; None for the default, 0 for a row.
        dtype: dtype of full precision; None for the checkpoint's.
        predictor: a key of ``PREDICTORS``.
        calibration: settings for statistics and the ratio search; None to run only what the
            predictor requires.
        runner: runs the layers of each step; None for one after the other in this process.

    Returns:
        False if the same store was already published, True otherwise.

    Raises:
        ConfigError: an argument is wrong, there is no checkpoint, or ``out`` is another store.
        UnsupportedError: the model cannot be prepared.
        BudgetError: the disk does not have the space.
    """
    checkpoint = Checkpoint(model, dtype)
    hidden = checkpoint.shape.hidden
    given = default_group(hidden) if group is None else group or None
    groups = {p: None if p is Precision.FULL else given for p in precisions}
    form = StoreFormat(
        model=checkpoint.name,
        fingerprint=checkpoint.fingerprint,
        shape=checkpoint.shape,
        activation=checkpoint.activation,
        dtype=checkpoint.dtype,
        groups=groups,
    )
    notes = {"predictor": predictor}
    if calibration is not None:
        notes["calibration"] = str(calibration)
    if _is_there(out, form, notes):
        return False
    writer = NeuronStoreWriter(
        out,
        form.shape,
        form.activation,
        form.dtype,
        form.fingerprint,
        form.groups,
        model=form.model,
    )
    try:
        for kind in {*KINDS} - {predictor}:  # of an interrupted call with other settings
            for path in writer.draft.glob(f"{kind}-*"):
                path.unlink()
        others = PREDICTORS[predictor](
            Preparation(checkpoint=checkpoint, writer=writer, calibration=calibration)
        )
        with writer.said("cannot be written"):
            run_steps([_neurons(checkpoint, writer), *others], runner or Here(), progress)
        writer.publish(notes)
    finally:
        writer.close()
    return True


def _neurons(checkpoint: Checkpoint, writer: NeuronStoreWriter) -> Step:
    num_layers = checkpoint.shape.num_layers
    return Step(
        name="neurons",
        num_layers=num_layers,
        pending=[n for n in range(num_layers) if n not in writer.finished_layers],
        work=partial(_do_layer, checkpoint, writer.draft, writer.form),
        note=writer.note_layer,
    )


def _do_layer(checkpoint: Checkpoint, draft: Path, form: StoreFormat, layer: int) -> None:
    weights = checkpoint.layer(layer)
    write_layer(draft, form, layer, weights.rows_NMH, weights.up_bias_N, weights.down_bias_H)


def _is_there(out: Path, form: StoreFormat, notes: Mapping[str, str]) -> bool:
    """Return whether a store with the same format and notes is already published."""
    header = out / HEADER
    try:
        text = read_regular_file(header, max_bytes=fmt.MAX_HEADER_BYTES)
        found = fmt.unseal(text, header)
    except (OSError, ValueError, IntegrityError):
        return False
    mine = {**form.to_json(), "notes": dict(notes)}
    return {key: found.get(key) for key in mine} == mine
