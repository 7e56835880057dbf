# SPDX-License-Identifier: Apache-2.0
"""Recordings of each layer's FFN inputs on calibration text, one file for each layer.

    FOLDER/hidden-0008.safetensors    input of the next layer, where an interrupted call resumes
    FOLDER/inputs-0007.safetensors    x [T, H] in the checkpoint's dtype, and T of each text

T tokens, H features of the hidden state.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm_tiered.ffn.prepare.layerwise import LayerwiseModel, first_linear

_HELD_OUT = 0.25
"""Share of the tokens that training does not use."""


def inputs_path(folder: Path, layer: int) -> Path:
    """Return the path of a layer's recorded inputs."""
    return folder / f"inputs-{layer:04d}.safetensors"


def record(
    model: LayerwiseModel,
    texts: Sequence[Sequence[int]],
    folder: Path,
) -> None:
    """Run the texts through the model and record each FFN's inputs; resume an earlier call.

    Args:
        folder: folder for these texts and this model only; created if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hidden = model.embed(texts)
    first = num_recorded(folder, model.num_layers)
    if 0 < first < model.num_layers:
        saved = load_file(_hidden_path(folder, first))
        hidden = [saved[str(text)].to(model.dtype) for text in range(len(texts))]
    for layer in range(first, model.num_layers):
        inputs: list[torch.Tensor] = []
        with model.layer(layer) as module:
            hook = first_linear(module).register_forward_pre_hook(
                lambda _, args, inputs=inputs: inputs.append(args[0].flatten(0, -2))
            )
            hidden = [model.run(module, text, x) for text, x in enumerate(hidden)]
            hook.remove()
        kept = {"x": torch.cat(inputs).to(model.config.dtype or model.dtype)}
        kept["lengths"] = torch.tensor([len(x) for x in inputs])
        # In this order: if a hidden state exists, so do the inputs of the layer before it.
        _save(kept, inputs_path(folder, layer))
        if layer + 1 < model.num_layers:
            _save({str(text): x for text, x in enumerate(hidden)}, _hidden_path(folder, layer + 1))
        _hidden_path(folder, layer).unlink(missing_ok=True)


def num_recorded(folder: Path, num_layers: int) -> int:
    """Return how many layers, from the first on, are recorded."""
    if inputs_path(folder, num_layers - 1).is_file():
        return num_layers
    found = [layer for layer in range(1, num_layers) if _hidden_path(folder, layer).is_file()]
    return max(found, default=0)


def recorded_inputs(folder: Path, layer: int) -> tuple[torch.Tensor, list[int]]:
    """Return x [T, H] of all texts, one after the other, and each text's number of tokens."""
    with safe_open(inputs_path(folder, layer), framework="pt") as file:
        return file.get_tensor("x"), file.get_tensor("lengths").tolist()


def num_training_tokens(lengths: Sequence[int]) -> int:
    """Return the number of tokens in the training texts.

    The last texts are held out: at least one, and about a quarter of the tokens. Of a single text
    the end is held out.
    """
    total, taken = sum(lengths), 0
    for length in lengths[:-1]:
        if taken + length > (1 - _HELD_OUT) * total and taken:
            break
        taken += length
    return taken or max(1, int((1 - _HELD_OUT) * total))


def _hidden_path(folder: Path, layer: int) -> Path:
    return folder / f"hidden-{layer:04d}.safetensors"


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    draft = path.with_suffix(f".{os.getpid()}.draft")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
