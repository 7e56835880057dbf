# SPDX-License-Identifier: Apache-2.0
"""Which neurons the trained ReLU model's tokens need, repeated to the size of a larger model.

SmolLM2-135M's layers have 1,536 neurons. A larger layer is made of as many copies as it takes, each
with the activity of the same layer in another answer, at another place in it, so that its share of
active neurons and what consecutive tokens have in common are those of the trained model.
Layer `l` of the larger model takes layer `l` of the 30, and begins anew with other texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.relufied_model import Relufying, relufied_model_dir
from vllm_tiered.ffn.predictor.gate import Gate
from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel, ffn_weights
from vllm_tiered.ffn.prepare.record import record, recorded_inputs
from vllm_tiered.ffn.prepare.texts import calibration_texts

Masks = npt.NDArray[np.bool_]

_MEASURED_FROM, _ORDERED_FROM = 0, 1000
"""First conversations; the model trains on those from 2000 on."""

_TEXT = 256
"""Tokens of a text that is recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """Active neurons of consecutive tokens in each layer, bool [T, N], and an order of neurons.

    Attributes:
        active: by layer.
        places: by layer, int64 [N]: each neuron's place in an order in which neurons that become
            active together are neighbours. It is made from other texts.
    """

    active: Sequence[Masks]
    places: Sequence[npt.NDArray[np.int64]]


def relufied_activity(
    num_layers: int,
    num_neurons: int,
    num_tokens: int,
    *,
    training_steps: int = 600,
    ordering_tokens: int = 2000,
    is_predicted: bool = False,
) -> Activity:
    """Return the activity of so many tokens at a size; see the module's docstring.

    Args:
        is_predicted: as the gate in 4 bit names neurons, instead of those whose gate exceeds 0.
    """
    folder, tokenizer_dir = relufied_model_dir(Relufying(steps=training_steps)), demo_model_dir()
    model = LayerwiseModel(folder)
    width = model.config.intermediate_size
    copies = -(-num_neurons // width)
    num_texts = copies * -(-num_layers // model.num_layers)
    texts, starts = _texts(tokenizer_dir, num_texts, num_tokens, _MEASURED_FROM)
    others, _ = _texts(tokenizer_dir, -(-ordering_tokens // _TEXT), num_tokens, _ORDERED_FROM)
    active: list[Masks] = []
    places: list[npt.NDArray[np.int64]] = []
    with TemporaryDirectory() as scratch:
        record(model, [*texts, *others], Path(scratch))
        by_layer = [
            _masks(model, Path(scratch), layer, is_predicted=is_predicted)
            for layer in range(model.num_layers)
        ]
    for index in range(num_layers):
        masks_TN = by_layer[index % model.num_layers]
        first = index // model.num_layers * copies
        parts = [masks_TN[at : at + num_tokens] for at in starts[first : first + copies]]
        active.append(np.concatenate(parts, axis=1)[:, :num_neurons])
        order = places_by_co_activity(masks_TN[num_texts * _TEXT :])
        repeated = np.concatenate([copy * width + order for copy in range(copies)])
        # The last copy may be cut: its neurons move up.
        places.append(np.argsort(np.argsort(repeated[:num_neurons])))
    return Activity(active=active, places=places)


def places_by_co_activity(masks_TN: Masks) -> npt.NDArray[np.int64]:
    """Return each neuron's place in the order of the Fiedler vector of joint arrivals.

    A neuron arrives at a token for which it is active, and was not for the token before.
    """
    arrives = (masks_TN[1:] & ~masks_TN[:-1]).astype(np.float64)
    together = arrives.T @ arrives
    np.fill_diagonal(together, 0.0)
    degree = np.maximum(together.sum(1), 1e-9)
    scaled = together / np.sqrt(degree[:, None] * degree[None])
    _, vectors = np.linalg.eigh(scaled)
    fiedler = vectors[:, -2] / np.sqrt(degree)
    return np.argsort(np.argsort(fiedler, kind="stable")).astype(np.int64)


def _texts(
    folder: Path, count: int, num_tokens: int, skip: int
) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """Return texts of `_TEXT` tokens, and where so many tokens of each's answer begin in them all.

    The places are spread over the answers, as a text's beginning is not like its rest.
    """
    found = calibration_texts(folder, 4 * count * _TEXT, skip=skip, tokens_per_text=_TEXT)
    texts = [
        text
        for text in found
        if len(text.token_ids) == _TEXT and _TEXT - text.num_given >= 2 * num_tokens
    ][:count]
    assert len(texts) == count, f"{len(texts)} of {count} texts are long enough"
    starts = []
    for index, text in enumerate(texts):
        room = _TEXT - num_tokens - text.num_given
        starts.append(index * _TEXT + text.num_given + index * room // count)
    return [text.token_ids for text in texts], starts


def _masks(model: LayerwiseModel, folder: Path, layer: int, *, is_predicted: bool) -> Masks:
    """Return whether each neuron's gate exceeds 0, bool [T, N] over all texts."""
    x_TH, _ = recorded_inputs(folder, layer)
    with model.layer(layer) as module:
        gate_NH = ffn_weights(module, model.activation).rows_NMH[:, 0].float()
    if is_predicted:
        gate = Gate.of(gate_NH[:, None])
        is_named: torch.Tensor = gate.scores(x_TH.float()) >= gate.threshold
        return is_named.numpy()
    is_active: torch.Tensor = x_TH.float() @ gate_NH.T > 0
    return is_active.numpy()
