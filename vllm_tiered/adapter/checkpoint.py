# SPDX-License-Identifier: Apache-2.0
"""Fingerprints that identify a checkpoint without reading all of it."""

import json
from pathlib import Path
from typing import Any

import xxhash

from vllm_tiered.errors import UnsupportedError
from vllm_tiered.storage.checkpoint_fingerprint import fingerprint_of, fingerprint_of_folder
from vllm_tiered.weights import store


def describe_checkpoint(vllm_config: Any) -> dict[str, str]:
    """Describe the model's checkpoint: its name, its fingerprint, and when its files changed.

    Returns:
        `name`; `fingerprint`, a hash of the configuration, the files' sizes, and the ends and
        middle of every tensor; and `changed`, a hash of the files' modification times. Reading
        whole tensors would take as long as loading the model.

    Raises:
        UnsupportedError: the weights do not come from a checkpoint's files.
    """
    from vllm.model_executor.model_loader import get_model_cls, get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    config = json.loads(model_config.hf_config.to_json_string())
    changed = xxhash.xxh3_128()
    paths: list[Path] = []
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
        paths = [Path(file) for file in sorted(files)]
        for path in paths:
            changed.update(f"{path.name} {path.stat().st_mtime_ns}".encode())
    elif not isinstance(loader, DummyModelLoader):
        raise UnsupportedError(
            f"load_format={load_config.load_format}: {store.KNOB} needs a checkpoint's files; "
            f"leave load_format out, or {store.KNOB}"
        )
    return {
        "name": Path(model_config.model).name,
        "fingerprint": fingerprint_of(config, paths),
        "changed": changed.hexdigest(),
    }


def checkpoint_fingerprint(vllm_config: Any) -> str:
    """Return the fingerprint of the checkpoint's folder, which is equal in all engines and tools.

    Raises:
        UnsupportedError: the weights do not come from a checkpoint's files.
    """
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    loader = get_model_loader(load_config)
    if not isinstance(loader, DefaultModelLoader):
        raise UnsupportedError(
            f"load_format={load_config.load_format}: a neuron store belongs to a checkpoint's "
            "files; leave load_format out, or tiered.ffn.store"
        )
    folder, *_ = loader._prepare_weights(
        model_config.model, None, model_config.revision, True, None
    )
    return fingerprint_of_folder(Path(folder))


def check_single_checkpoint(model: Any) -> None:
    """Check that all weights of a loaded model come from the fingerprinted checkpoint.

    Raises:
        UnsupportedError: some come from a second checkpoint.
    """
    if getattr(model, "secondary_weights", ()):
        raise UnsupportedError(
            f"{type(model).__name__} loads a second checkpoint, and a file of weights belongs to "
            f"one: leave {store.KNOB} out"
        )
