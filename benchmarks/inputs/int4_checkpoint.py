# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in 4 bit, as GPTQ, AWQ and compressed-tensors write them, of random experts.

    w_NK  ≈  (code_NK - zero_NG) * scale_NG,    codes from 0 to 15,    G groups along K

Beside each goes the same model with those weights in float32, which is what the 4-bit one computes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.harness.cache import cache_root, publish_dir
from benchmarks.inputs.int4_settings import Format, settings
from benchmarks.inputs.shapes import random_model_dir

if TYPE_CHECKING:
    import torch

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each of the 8 nibbles of an AWQ word."""


class Codes(NamedTuple):
    """A matrix in 4 bit: codes uint8 [N, K], scales [N, G] and zeros uint8 [N, G]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


def int4_model_dir(shape: str, form: Format, *, group: int = 64) -> tuple[Path, Path]:
    """Return the folders of a random model with experts in 4 bit, and of the same in float32.

    Args:
        shape: one of `inputs.shapes.SHAPES` whose checkpoint has a tensor for each expert's matrix.
        group: number of weights along a row that share a scale.
    """
    source = random_model_dir(shape)
    text = Path(__file__).read_text(encoding="utf-8")
    digest = hashlib.sha256(f"{source.name} {group} {text}".encode()).hexdigest()[:8]
    target = cache_root(None) / f"int4-{shape}-{form}-{digest}"
    if not (target / "int4" / "config.json").is_file():
        print(f"preparing a 4-bit {shape} model in {target}", file=sys.stderr, flush=True)
        with publish_dir(target) as staging:
            _write(source, form, group, staging / "int4", staging / "float32")
    return target / "int4", target / "float32"


def quantise(weight_NK: torch.Tensor, group: int, *, symmetric: bool) -> Codes:
    """Round each weight to the nearest of 16 values of its group."""
    import torch

    groups = weight_NK.float().view(len(weight_NK), -1, group)
    if symmetric:
        scales = (groups.abs().amax(2) / 7.5).to(torch.bfloat16)
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / 15).to(torch.bfloat16)
        zeros = (-low / scales.float()).round().clamp(0, 15).to(torch.uint8)
    codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return Codes(codes.clamp(0, 15).to(torch.uint8).flatten(1), scales, zeros)


def dequantise(of: Codes) -> torch.Tensor:
    """Return the weights, float32 [N, K]."""
    codes = of.codes.float().view(*of.scales.shape, -1)
    return ((codes - of.zeros[..., None]) * of.scales.float()[..., None]).flatten(1)


def pack(of: Codes, form: Format) -> dict[str, torch.Tensor]:
    """Return the tensors of a linear module in a checkpoint, by their names' ends."""
    import torch

    codes, scales, zeros = of
    if form.startswith("compressed"):
        tensors = {
            "weight_packed": _words(codes),
            "weight_scale": scales,
            "weight_shape": torch.tensor(codes.shape),
        }
        if form == "compressed_asym":
            tensors["weight_zero_point"] = _words(zeros.T).T.contiguous()
        return tensors
    if form == "gptq":
        return {
            "qweight": _words(codes).T.contiguous(),
            "scales": scales.T.to(torch.float16).contiguous(),
            "qzeros": _words(zeros.T - 1),
            "g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // _group(of),
        }
    return {
        "qweight": _words(codes.T, _AWQ_COLUMNS),
        "scales": scales.T.to(torch.float16).contiguous(),
        "qzeros": _words(zeros.T, _AWQ_COLUMNS),
    }


def _words(codes: torch.Tensor, columns: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack 8 codes of the last dimension into an int32."""
    import torch

    by_word = codes.to(torch.int64).reshape(*codes.shape[:-1], -1, 8)
    words = sum(by_word[..., column] << 4 * nibble for nibble, column in enumerate(columns))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def _group(of: Codes) -> int:
    return of.codes.shape[1] // of.scales.shape[1]


def _write(source: Path, form: Format, group: int, packed: Path, expanded: Path) -> None:
    from safetensors.torch import load_file, save_file

    packed.mkdir(parents=True)
    expanded.mkdir()
    tensors_packed: dict[str, torch.Tensor] = {}
    tensors_expanded: dict[str, torch.Tensor] = {}
    symmetric = form not in ("awq", "compressed_asym")
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if ".experts." not in name or not name.endswith(".weight"):
                tensors_packed[name] = tensor
                tensors_expanded[name] = tensor.float()
                continue
            made = quantise(tensor, group, symmetric=symmetric)
            tensors_expanded[name] = dequantise(made)
            module = name.removesuffix("weight")
            tensors_packed |= {module + end: value for end, value in pack(made, form).items()}
    if len(tensors_packed) == len(tensors_expanded):
        raise ValueError(f"{source}: its checkpoint has no tensor for each expert's matrix")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for folder, tensors, more in (
        (packed, tensors_packed, {"quantization_config": settings(form, group)}),
        (expanded, tensors_expanded, {"dtype": "float32"}),
    ):
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | more), encoding="utf-8")
        for path in source.glob("*token*"):
            (folder / path.name).write_bytes(path.read_bytes())
