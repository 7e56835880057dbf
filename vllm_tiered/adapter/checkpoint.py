# SPDX-License-Identifier: Apache-2.0
"""Which weights a model has: what tells one checkpoint from another, without reading it all."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from vllm_tiered.errors import UnsupportedError
from vllm_tiered.units import KIB
from vllm_tiered.weights import store

_SAMPLE_BYTES = 4 * KIB
_SAMPLES = 997
"""Of a file whose tensors cannot be told: a prime, so that they do not fall in step with layers."""

_NOT_THE_MODELS = ("_name_or_path", "transformers_version")
"""Of its configuration: a model that was moved, or read by another version, is the same."""


def describe_checkpoint(vllm_config: Any) -> dict[str, str]:
    """A model's name, what it is, and when its files changed.

    Returns:
        name; fingerprint, of the configuration, the files' sizes and the ends and middle of every
        tensor; and changed, of the files' times: reading all would take as long as loading it.

    Raises:
        UnsupportedError: weights that come from elsewhere.
    """
    from vllm.model_executor.model_loader import get_model_cls, get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    config = json.loads(model_config.hf_config.to_json_string())
    content = xxhash.xxh3_128(json.dumps(_without_origin(config), sort_keys=True).encode())
    changed = xxhash.xxh3_128()
    loader = get_model_loader(load_config)
    if isinstance(loader, DefaultModelLoader):
        model_class = get_model_cls(model_config)
        _, files, *_ = loader._prepare_weights(
            model_config.model,
            None,
            model_config.revision,
            getattr(model_class, "fall_back_to_pt_during_load", True),
            getattr(model_class, "allow_patterns_overrides", None),
        )
        for path in map(Path, sorted(files)):
            for data in _samples(path):
                content.update(data)
            changed.update(f"{path.name} {path.stat().st_mtime_ns}".encode())
    elif not isinstance(loader, DummyModelLoader):
        raise UnsupportedError(
            f"load_format={load_config.load_format}: {store.KNOB} takes weights of a checkpoint's "
            f"files; leave load_format out, or {store.KNOB}"
        )
    return {
        "name": Path(model_config.model).name,
        "fingerprint": content.hexdigest(),
        "changed": changed.hexdigest(),
    }


def check_stored(model: Any) -> None:
    """Whether the fingerprint told all about a loaded model's weights.

    Raises:
        UnsupportedError: some are of another checkpoint.
    """
    if getattr(model, "secondary_weights", ()):
        raise UnsupportedError(
            f"{type(model).__name__} loads a second checkpoint, and a file of weights belongs to "
            f"one: leave {store.KNOB} out"
        )


def _without_origin(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_origin(v) for k, v in value.items() if k not in _NOT_THE_MODELS}
    return value


def _samples(path: Path) -> Iterator[bytes]:
    """What a file's fingerprint is made of."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        yield f"{path.name} {size}".encode()
        if path.suffix == ".safetensors":
            header_bytes = int.from_bytes(file.read(8), "little")
            header = file.read(min(header_bytes, size))
            yield header
            try:
                tensors = [
                    v["data_offsets"] for k, v in json.loads(header).items() if k[:2] != "__"
                ]
            except (ValueError, KeyError, TypeError, AttributeError):
                return  # the loader will say what is wrong with it
            for begin, end in tensors:
                last = max(begin, end - _SAMPLE_BYTES)
                for offset in sorted({begin, (begin + last) // 2, last}):
                    file.seek(8 + header_bytes + offset)
                    yield file.read(min(_SAMPLE_BYTES, end - offset))
            return
        for index in range(_SAMPLES):
            file.seek(size * index // _SAMPLES)
            yield file.read(_SAMPLE_BYTES)
