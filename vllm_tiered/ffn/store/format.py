# SPDX-License-Identifier: Apache-2.0
"""Format of a neuron store's files, shared by the writer and the reader.

NAME/store.json           header: the model, offsets of the sections, checksums of the other files
NAME/neurons.bin          a section of bundles for each layer and precision; it begins at a multiple
                          of 4 KiB, and bundles are at the stride of ffn/layout.py
NAME/tables.safetensors   for each layer: scales and checksums of the bundles by precision, biases
NAME/...                  files of other steps of `prepare`; the header has their checksums
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_tiered.errors import ConfigError, IntegrityError
from vllm_tiered.ffn.layout import BLOCK_BYTES, FfnShape, Precision, bundle_bytes, bundle_stride
from vllm_tiered.ffn.matmul.quantise import num_groups
from vllm_tiered.storage.checksums import checksum
from vllm_tiered.units import MIB
from vllm_tiered.untrusted import parse_json

VERSION = 2
HEADER, NEURONS, TABLES = "store.json", "neurons.bin", "tables.safetensors"

MAX_HEADER_BYTES = 16 * MIB
"""Most bytes of a header. One of 128 layers in three precisions has 60 KB."""

_MAX_SIZE = 1 << 31
"""Largest number of layers, features or neurons of a shape."""

MIX_FILE = "mix.json"
"""File with the ratio search's best mix and all candidates; absent if the search did not run."""

ANEW = "remove the folder and run `vllm-tiered prepare` again"
"""Advice in messages about a store that cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFormat:
    """Format of one model's neuron store.

    Attributes:
        model: the model's name, for messages.
        fingerprint: hash of the model's configuration and weights.
        shape: shape of the model's FFN layers.
        activation: a name of ``ffn.activation``.
        dtype: dtype of the model's weights.
        groups: weights that share a scale (None for a row), by stored precision.

    Raises:
        ConfigError: there is no precision, the hidden size is odd, or a group does not divide it.
    """

    model: str
    fingerprint: str
    shape: FfnShape
    activation: str
    dtype: torch.dtype
    groups: Mapping[Precision, int | None]

    def __post_init__(self) -> None:
        assert self.dtype.itemsize == self.shape.dtype_bytes
        if not self.groups:
            raise ConfigError("a neuron store holds at least one precision: full, int8 or int4")
        if self.shape.hidden % 2:
            raise ConfigError(f"rows of {self.shape.hidden} weights cannot be halved for 4 bit")
        for precision in self.groups:
            self.num_groups(precision)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Stored precisions, in the order of their sections."""
        return tuple(precision for precision in Precision if precision in self.groups)

    def num_groups(self, precision: Precision) -> int:
        """Return the number of scales in a matrix's row; 0 for FULL."""
        return num_groups(self.shape.hidden, precision, self.groups[precision])

    def offset(self, layer: int, precision: Precision) -> int:
        """Return a section's offset in the neuron file, in bytes."""
        precisions = self.precisions
        before = precisions[: precisions.index(precision)]
        return layer * self._layer_bytes + sum(map(self._section_bytes, before))

    @property
    def neurons_bytes(self) -> int:
        """Size of the neuron file in bytes."""
        return self.shape.num_layers * self._layer_bytes

    @property
    def tables_bytes(self) -> int:
        """Estimated size of the tables in bytes."""
        shape = self.shape
        scales = sum(2 * shape.num_matrices * self.num_groups(p) for p in self.groups)
        of_neuron = scales + 8 * len(self.groups) + shape.dtype_bytes
        of_layer = shape.neurons * of_neuron + shape.hidden * shape.dtype_bytes
        return shape.num_layers * (of_layer + 1024)

    @property
    def _layer_bytes(self) -> int:
        return sum(map(self._section_bytes, self.precisions))

    def _section_bytes(self, precision: Precision) -> int:
        num_bytes = self.shape.neurons * bundle_stride(self.shape, precision)
        return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe description with the location of each bundle."""
        return {
            "version": VERSION,
            "model": {"name": self.model, "fingerprint": self.fingerprint},
            "shape": asdict(self.shape),
            "activation": self.activation,
            "dtype": str(self.dtype).removeprefix("torch."),
            "groups": {p.value: self.groups[p] for p in self.precisions},
            "sections": [
                {
                    "layer": layer,
                    "precision": p.value,
                    "offset": self.offset(layer, p),
                    "stride": bundle_stride(self.shape, p),
                    "bundle_bytes": bundle_bytes(self.shape, p),
                }
                for layer in range(self.shape.num_layers)
                for p in self.precisions
            ],
        }

    @classmethod
    def from_json(cls, contents: Mapping[str, Any]) -> "StoreFormat":
        """Parse the output of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: the contents are not such an output.
        """
        shape = _parse_shape(contents["shape"])
        groups = {Precision(name): group for name, group in contents["groups"].items()}
        # Before anything that takes time or memory for each layer.
        num_sections = len(contents["sections"])
        if num_sections != shape.num_layers * len(groups):
            raise ValueError(
                f"{num_sections} sections, and {shape.num_layers} layers in {len(groups)} "
                "precisions"
            )
        for name, value in _texts(contents).items():
            if not isinstance(value, str):
                raise ValueError(f"{name} is no text")
        for group in groups.values():
            if group is not None and type(group) is not int:
                raise ValueError("a group is no whole number")
        dtype = getattr(torch, contents["dtype"], None)
        if (
            not isinstance(dtype, torch.dtype)
            or not dtype.is_floating_point
            or dtype.itemsize != shape.dtype_bytes
        ):
            raise ValueError(f"dtype {contents['dtype']} of {shape.dtype_bytes} bytes")
        found = cls(
            model=contents["model"]["name"],
            fingerprint=contents["model"]["fingerprint"],
            shape=shape,
            activation=contents["activation"],
            dtype=dtype,
            groups=groups,
        )
        if found.to_json()["sections"] != contents["sections"]:
            raise ValueError("sections")
        return found


def _parse_shape(values: Mapping[str, Any]) -> FfnShape:
    shape = FfnShape(**values)
    for name, value in asdict(shape).items():
        expected = bool if name == "gated" else int
        if type(value) is not expected or (expected is int and not 0 < value <= _MAX_SIZE):
            raise ValueError(f"{name} is {value!r}, not from 1 to {_MAX_SIZE}")
    return shape


def _texts(contents: Mapping[str, Any]) -> dict[str, Any]:
    model = contents["model"]
    return {
        "model": model["name"],
        "fingerprint": model["fingerprint"],
        "activation": contents["activation"],
        "dtype": contents["dtype"],
    }


def check_files(contents: Mapping[str, Any]) -> None:
    """Check what a store's header has beside the format: its notes, and the other files.

    Raises:
        ValueError: they are not as the writer writes them.
    """
    for name in ("notes", "files"):
        if not isinstance(contents.get(name), Mapping):
            raise ValueError(f"{name} is no table")
    for name, entry in contents["files"].items():
        if not isinstance(entry, Mapping) or not isinstance(entry.get("xxh3"), str):
            raise ValueError(f"no checksum of {name}")
        if type(entry.get("bytes")) is not int or entry["bytes"] < 0:
            raise ValueError(f"bytes of {name} are {entry.get('bytes')!r}")


def seal(contents: Mapping[str, Any]) -> bytes:
    """Serialise a header's contents with their checksum."""
    return json.dumps({**contents, "xxh3": _digest(contents)}, indent=1).encode()


def unseal(text: bytes, path: Path) -> dict[str, Any]:
    """Parse a header and verify its checksum.

    Args:
        path: path of the header, for messages.

    Raises:
        ConfigError: the header has another version.
        IntegrityError: the header is damaged.
    """
    try:
        contents = dict(parse_json(text))
        version = contents["version"]
        expected = contents.pop("xxh3")
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"{path} is damaged ({_reason(error)}): {ANEW}") from error
    if version != VERSION:
        raise ConfigError(
            f"{path} has version {str(version)[:20]}, and this vllm-tiered reads version "
            f"{VERSION}: {ANEW}"
        )
    if _digest(contents) != expected:
        raise IntegrityError(f"{path} is damaged (checksum): {ANEW}")
    return contents


def statistics_name(layer: int) -> str:
    """Return the name of the file with a layer's calibration statistics."""
    return f"statistics-{layer:04d}.json"


def scales_name(layer: int, precision: Precision) -> str:
    """Return the tables' key of a layer's scales, float16 [N, M, G]."""
    return f"layer.{layer}.{precision.value}.scales"


def checksums_name(layer: int, precision: Precision) -> str:
    """Return the tables' key of the bundles' checksums, uint64 [N]."""
    return f"layer.{layer}.{precision.value}.xxh3"


def up_bias_name(layer: int) -> str:
    """Return the tables' key of the up bias, [N]; absent if the model has none."""
    return f"layer.{layer}.up_bias"


def down_bias_name(layer: int) -> str:
    """Return the tables' key of the down bias, [H]; absent if the model has none."""
    return f"layer.{layer}.down_bias"


def _digest(contents: Mapping[str, Any]) -> str:
    return f"{checksum(json.dumps(contents, sort_keys=True).encode()):016x}"


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
