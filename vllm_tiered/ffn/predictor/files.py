# SPDX-License-Identifier: Apache-2.0
"""Files of predictors, one for each layer, so that `prepare` can resume.

FOLDER/gate-0000.safetensors        tensors; metadata: version, kind, fingerprint, threshold,
                                    activation, report
FOLDER/low_rank-0000.safetensors    the same
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_tiered.errors import ConfigError, IntegrityError
from vllm_tiered.ffn.predictor.base import Predictor
from vllm_tiered.ffn.predictor.gate import Gate
from vllm_tiered.ffn.predictor.low_rank import LowRank
from vllm_tiered.untrusted import parse_json

VERSION = 2

KINDS = (Gate.name, LowRank.name)

_KEY = "vllm_tiered"  # key in the metadata, whose values safetensors stores as strings


def predictor_name(kind: str, layer: int) -> str:
    """Return the file name of a layer's predictor of one of ``KINDS``."""
    return f"{kind}-{layer:04d}.safetensors"


def save_predictor(
    path: Path, predictor: Predictor, fingerprint: str, report: Mapping[str, Any]
) -> None:
    """Write a layer's predictor atomically.

    Args:
        fingerprint: fingerprint of the layer's model.
        report: JSON-safe figures of the predictor's quality; empty if it was not measured.
    """
    draft = path.with_suffix(".new")  # a neuron store's writer does not publish this suffix
    header = {
        "version": VERSION,
        "kind": predictor.name,
        "fingerprint": fingerprint,
        "threshold": predictor.threshold,
        "activation": predictor.activation if isinstance(predictor, Gate) else None,
        "report": dict(report),
    }
    tensors = {name: tensor.contiguous() for name, tensor in predictor.tensors().items()}
    try:
        save_file(tensors, draft, metadata={_KEY: json.dumps(header)})
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def load_predictor(
    path: Path,
    fingerprint: str | None = None,
    first_neuron: int = 0,
    num_neurons: int | None = None,
) -> Predictor:
    """Read a layer's predictor, or its part for a shard of the neurons.

    Raises:
        ConfigError: the file is missing, or is of another model or version.
        IntegrityError: the file is damaged.
    """
    header = read_header(path, fingerprint)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        predictor = _made(header, tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, AssertionError) as error:
        raise IntegrityError(f"{path} is damaged ({error}): run prepare again") from error
    if first_neuron == 0 and num_neurons in (None, predictor.num_neurons):
        return _in_memory(header, predictor)
    end = predictor.num_neurons if num_neurons is None else first_neuron + num_neurons
    if not 0 <= first_neuron < end <= predictor.num_neurons:
        raise ConfigError(
            f"neurons {first_neuron} to {end} are wanted, but {path} is of"
            f" {predictor.num_neurons}: it is another model's"
        )
    return _in_memory(header, predictor.shard(first_neuron, end - first_neuron))


def _made(header: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Predictor:
    if header["kind"] == Gate.name:
        return Gate.from_tensors(tensors, str(header["activation"]))
    return LowRank.from_tensors(tensors, float(header["threshold"]))


def _in_memory(header: Mapping[str, Any], predictor: Predictor) -> Predictor:
    """Return the predictor in memory of its own: what is read are pages of the file, mapped."""
    return _made(header, {name: one.clone() for name, one in predictor.tensors().items()})


def read_header(path: Path, fingerprint: str | None = None) -> dict[str, Any]:
    """Return a file's metadata, including ``report``; raise errors like :func:`load_predictor`."""
    if not path.is_file():
        raise ConfigError(f"no predictor: {path} does not exist; run prepare again")
    try:
        with safe_open(path, framework="pt") as file:
            header: dict[str, Any] = parse_json((file.metadata() or {})[_KEY], any_number=True)
    except (SafetensorError, KeyError, ValueError) as error:
        raise IntegrityError(f"{path} is damaged ({error}): run prepare again") from error
    if header["version"] != VERSION or header["kind"] not in KINDS:
        raise ConfigError(
            f"{path} holds a {header['kind']} of version {header['version']}; expected"
            f" {' or '.join(KINDS)} of version {VERSION}: run prepare again"
        )
    if fingerprint is not None and header["fingerprint"] != fingerprint:
        raise ConfigError(
            f"{path} is of model {header['fingerprint']}, not of {fingerprint}: run prepare again"
        )
    return header
