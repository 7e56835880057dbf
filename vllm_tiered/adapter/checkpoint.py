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

_SAMPLES = 16
_SAMPLE_BYTES = 64 * KIB


def describe_checkpoint(vllm_config: Any) -> dict[str, str]:
    """A model's name, and a fingerprint of its configuration and of its checkpoint's files.

    Of each file counts its name, size, time of change, and a few samples: reading all of it would
    take as long as loading it.

    Raises:
        UnsupportedError: weights that come from elsewhere.
    """
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    config = json.loads(model_config.hf_config.to_json_string())
    config.pop("_name_or_path", None)  # a model that was moved is the same
    digest = xxhash.xxh3_128(json.dumps(config, sort_keys=True).encode())
    loader = get_model_loader(load_config)
    if isinstance(loader, DefaultModelLoader):
        _, files, *_ = loader._prepare_weights(
            model_config.model, None, model_config.revision, True, None
        )
        for path in sorted(files):
            for data in _samples(Path(path)):
                digest.update(data)
    elif not isinstance(loader, DummyModelLoader):
        raise UnsupportedError(
            f"load_format={load_config.load_format}: {store.KNOB} takes weights of a checkpoint's "
            f"files; leave load_format out, or {store.KNOB}"
        )
    return {"name": Path(model_config.model).name, "fingerprint": digest.hexdigest()}


def _samples(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        yield f"{path.name} {status.st_size} {status.st_mtime_ns}".encode()
        for index in range(_SAMPLES):
            file.seek(status.st_size * index // _SAMPLES)
            yield file.read(_SAMPLE_BYTES)
