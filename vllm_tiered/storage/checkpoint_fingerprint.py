# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of a checkpoint, computed from samples of its files."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from vllm_tiered.units import KIB
from vllm_tiered.untrusted import parse_json, read_checkpoint_json

_SAMPLE_BYTES = 4 * KIB
_SAMPLES = 997
"""Samples of a file in an unknown format: a prime, so that they do not align with layers."""

_ORIGIN_KEYS = ("_name_or_path", "transformers_version")
"""Keys of the configuration that are ignored: where the model is and who read it do not matter."""


def fingerprint_of(config: Mapping[str, Any], files: Iterable[Path]) -> str:
    """Return the hash of a configuration, of file sizes, and of samples of every tensor.

    The samples are 4 KiB each, at a tensor's beginning, middle and end.

    Args:
        config: the model's configuration, JSON-safe.
        files: the files of its weights, always in the same order.

    Raises:
        OSError: a file cannot be read.
    """
    content = xxhash.xxh3_128(json.dumps(_without_origin(config), sort_keys=True).encode())
    for path in files:
        for data in _samples(path):
            content.update(data)
    return content.hexdigest()


def fingerprint_of_folder(folder: Path) -> str:
    """Return the fingerprint of a checkpoint's folder: its config.json and safetensors files.

    The fingerprint does not depend on the engine that reads the folder.

    Raises:
        OSError: a file cannot be read.
        ValueError: config.json is not JSON.
    """
    config = read_checkpoint_json(folder / "config.json")
    return fingerprint_of(config, sorted(folder.glob("*.safetensors")))


def _without_origin(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_origin(v) for k, v in value.items() if k not in _ORIGIN_KEYS}
    return value


def _samples(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file that its fingerprint covers."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        yield f"{path.name} {size}".encode()
        if path.suffix == ".safetensors":
            header_bytes = int.from_bytes(file.read(8), "little")
            header = file.read(min(header_bytes, size))
            yield header
            for begin, end in _offsets(header):
                last = max(begin, end - _SAMPLE_BYTES)
                for offset in sorted({begin, (begin + last) // 2, last}):
                    file.seek(8 + header_bytes + offset)
                    yield file.read(min(_SAMPLE_BYTES, end - offset))
            return
        for index in range(_SAMPLES):
            file.seek(size * index // _SAMPLES)
            yield file.read(_SAMPLE_BYTES)


def _offsets(header: bytes) -> list[tuple[int, int]]:
    """Return where tensors begin and end; none if the loader will find the header damaged."""
    try:
        table = parse_json(header, any_number=True, allow_repeats=True)
        found = [tuple(v["data_offsets"]) for k, v in table.items() if k[:2] != "__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    is_whole = all(len(one) == 2 and {*map(type, one)} == {int} for one in found)
    return found if is_whole and all(0 <= begin <= end for begin, end in found) else []
