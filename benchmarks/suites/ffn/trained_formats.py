# SPDX-License-Identifier: Apache-2.0
"""The formats in which a trained model's weights compete for memory (`ffn_trained`).

16bit          as it is, in vLLM
W4A16, W8A8    compressed-tensors, rounded without calibration, in vLLM
int4           16 bit, rounded when loaded (`weights.compress`), all near
Q8_0, Q4_K_M, ...   llama.cpp's
nested 15%     Q4_K_M's weights but for the FFN: 4 bit near, and four more bits read for each
               token's best 15 % of the neurons (nested.py). No engine has it: it has no speed
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness.runner import MeasurementError
from benchmarks.inputs.int4_checkpoint import dequantise, quantise
from benchmarks.inputs.model import convert_gguf
from benchmarks.inputs.quantized_checkpoint import FORMATS, quantized_model_dir
from benchmarks.peers import llama_formats
from benchmarks.suites.ffn.nested import PLANE_BITS, ZERO_BITS, rounded
from vllm_tiered.units import GIB

LLAMA = ("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_M")
NESTED = "nested "
_NEAR_GIB = 64.0  # all of these models
_INT4_BITS = 4 + ZERO_BITS
_CACHED_PLANES = 0.15
"""Share of the planes that nested rows keep near, beside those that a token reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A format of a model.

    Attributes:
        expanded: folder of its weights in 16 bit, whose quality is the format's.
        near_bytes: of its weights.
        served: folder that vLLM serves; None if another engine does, or none.
        tiered: the plugin's configuration for it.
        gguf: file that llama.cpp serves.
        nested: share of the neurons that a token promotes.
    """

    expanded: Path
    near_bytes: int
    served: Path | None = None
    tiered: Mapping[str, Any] = field(default_factory=dict)
    gguf: Path | None = None
    nested: float = 0.0


def prepare(name: str, folder: Path, scratch: Path, python: str, threads: int) -> Prepared:
    """Write a format of the model in `folder`; see the module's docstring.

    Args:
        scratch: existing, empty folder.
        python: interpreter with llama.cpp beside it ("": this one).

    Raises MeasurementError if llama.cpp is missing or fails.
    """
    if name == "16bit":
        return Prepared(expanded=folder, served=folder, near_bytes=_file_bytes(folder))
    if name in _VLLM:
        form, round_matrix = _VLLM[name]
        served, expanded = _folders(scratch, "packed", "expanded")
        quantized_model_dir(folder, form, served)
        write_rounded(folder, expanded, round_matrix)
        return Prepared(expanded=expanded, served=served, near_bytes=_file_bytes(served))
    if name == "int4":
        (expanded,) = _folders(scratch, "expanded")
        write_rounded(folder, expanded, rounded)
        weights = {"placement": "latency", "near_gib": _NEAR_GIB, "compress": "int4"}
        return Prepared(
            expanded=expanded,
            served=folder,
            near_bytes=_int4_bytes(folder),
            tiered={"weights": weights},
        )
    share = 0.0
    if name.startswith(NESTED):
        share = float(name.removeprefix(NESTED).removesuffix("%")) / 100
    file = _gguf("Q4_K_M" if share else name, folder, python or sys.executable, threads)
    (expanded,) = _folders(scratch, "expanded")
    convert_gguf(file, expanded, like=folder)
    if share:
        return Prepared(expanded=expanded, near_bytes=nested_bytes(file), nested=share)
    return Prepared(expanded=expanded, near_bytes=file.stat().st_size, gguf=file)


def write_rounded(
    folder: Path, out: Path, round_matrix: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Write the model with each of the layers' matrices rounded."""
    tensors = {
        name: (round_matrix(tensor) if is_matrix else tensor).to(tensor.dtype).contiguous()
        for name, tensor, is_matrix in _tensors(folder)
    }
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    for file in [folder / "config.json", *folder.glob("*token*"), *folder.glob("generation*")]:
        (out / file.name).write_bytes(file.read_bytes())


def nested_bytes(gguf: Path) -> int:
    """Return the near bytes of nested rows in place of a file's FFN."""
    from gguf import GGUFReader

    is_ffn = {True: 0, False: 0}
    num_weights = 0
    for tensor in GGUFReader(gguf).tensors:
        matches = any(part in tensor.name for part in ("ffn_gate.", "ffn_up.", "ffn_down."))
        is_ffn[matches] += int(tensor.n_bytes)
        num_weights += int(tensor.n_elements) if matches else 0
    bits = 4 + ZERO_BITS + _CACHED_PLANES * PLANE_BITS
    return is_ffn[False] + round(num_weights * bits / 8)


def _by_w4a16(weight_NK: torch.Tensor) -> torch.Tensor:
    return dequantise(quantise(weight_NK, 64, symmetric=True))


def _by_w8a8(weight_NK: torch.Tensor) -> torch.Tensor:
    made = FORMATS["compressed_int8"][0](weight_NK)
    return made["weight"].float() * made["weight_scale"]


_VLLM: Mapping[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "W4A16": ("compressed_int4", _by_w4a16),
    "W8A8": ("compressed_int8", _by_w8a8),
}


def _gguf(name: str, folder: Path, python: str, threads: int) -> Path:
    if lacking := llama_formats.missing(python):
        raise MeasurementError(f"{name} needs llama.cpp: {lacking}")
    work = folder / "llama.cpp"
    work.mkdir(exist_ok=True)
    return llama_formats.quantised(python, folder, work, name, threads)


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield each tensor's name, itself, and whether it is a matrix of a layer."""
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            is_matrix = ".layers." in name and tensor.ndim == 2 and name.endswith(".weight")
            yield name, tensor, is_matrix


def _int4_bytes(folder: Path) -> int:
    bits = sum(
        tensor.numel() * (_INT4_BITS if is_matrix else 8 * tensor.itemsize)
        for _, tensor, is_matrix in _tensors(folder)
    )
    return round(bits / 8)


def _folders(scratch: Path, *names: str) -> list[Path]:
    made = [scratch / name for name in names]
    for folder in made:
        folder.mkdir()
    return made


def _file_bytes(folder: Path) -> int:
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert total < _NEAR_GIB * GIB
    return total
