# SPDX-License-Identifier: Apache-2.0
"""OPT models with *synthetic* ReLU sparsity, at real sizes and with the papers' statistics.

No trained ReLU model is available offline, and random weights make half of the neurons active. So
the statistics that sparse inference depends on are built into the weights. About 3 % of each
layer's neurons are active for a token, about 80 % of these for the next token too, and a low-rank
predictor can tell which (LLM in a flash: OPT-6.7B is 97 % sparse). Measurements with such a model
show how I/O, caches and kernels behave with these statistics, and say nothing about quality.

    position ──► latent u [r], turning slowly ──► residual stream, coordinates 0 … 2r-1
    token    ──► random numbers              ──► residual stream, the other coordinates
    fc1 = B @ A + noise     A reads u through the layer norm, noise the rest; bias = -threshold

Coordinates 2j and 2j+1 hold u_j and -u_j, so the layer norm's mean does not change them. What
attention and FFN add grows the rest of the stream by half from the first layer to the last, so most
of its energy stays in the latent. The last norm drops the latent: the text depends on tokens,
attention and FFN. The embeddings are tied.

`synthetic.factors`, next to the weights, has each layer's factors, which are a predictor that needs
no training. The latent follows the *position* alone. Requests of a batch at the same positions have
almost the same active neurons, so give them prompts of different lengths.

    python -m benchmarks.inputs.synthetic_sparsity.model opt-1.3b FOLDER [--check]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.harness.cache import publish_dir
from benchmarks.inputs.model import demo_model_dir
from benchmarks.peers.model import TOKENIZER_FILES, write_tensors
from benchmarks.peers.shapes import OPT_SHAPES, OptShape

PREDICTOR_FILE = "synthetic.factors"
"""A safetensors file with another ending, since loaders take all `*.safetensors` for weights."""

STATISTICS_FILE = "synthetic.json"

_RECIPE = 1  # increases when the written bytes change
_ALIGNMENT = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparsity:
    """Statistics of the synthetic sparsity.

    Attributes:
        active_share: share of a layer's neurons that is active for a token.
        overlap: share of a token's active neurons that are active for the next one too.
        rank: size of the latent, even.
        noise: standard deviation of the part of a neuron's input that the latent does not explain,
            over that of the part it does. It is new for each token, so a predictor from the latent
            misses it.
    """

    active_share: float = 0.03
    overlap: float = 0.8
    rank: int = 64
    noise: float = 0.1

    @property
    def predictor_threshold(self) -> float:
        """Return the score from which a neuron is predicted active: one noise deviation below 0."""
        return -self.noise


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticShape:
    """Sizes and sparsity of a model to write."""

    sizes: OptShape
    sparsity: Sparsity = field(default_factory=Sparsity)


SYNTHETIC_SHAPES: Mapping[str, SyntheticShape] = {
    # For tests: 10 MB, with 32 active neurons of 1024.
    "opt-tiny": SyntheticShape(
        sizes=OptShape(
            hidden_size=256,
            ffn_dim=1024,
            num_layers=4,
            num_heads=4,
            vocab_size=512,
            max_positions=1024,
        ),
        sparsity=Sparsity(rank=32),
    ),
    **{name: SyntheticShape(sizes=sizes) for name, sizes in OPT_SHAPES.items()},
}


def synthetic_model_dir(
    shape: str,
    folder: Path,
    *,
    seed: int = 0,
    tokenizer_dir: str | Path | None = None,
    has_tokenizer: bool = True,
) -> Path:
    """Return the folder, inside `folder`, of an OPT with synthetic sparsity; written on first use.

    The same shape and seed give the same bytes on every machine. If the vocabulary is large enough
    for the demo tokenizer (or the one in `tokenizer_dir`), the tokenizer is added; set
    `has_tokenizer` to false where the demo model is not installed. OPT-6.7B takes 13.4 GB of disk,
    less than 1 GB of memory and a minute or two. Raises KeyError, naming the known shapes, for an
    unknown one.
    """
    if shape not in SYNTHETIC_SHAPES:
        raise KeyError(f"no shape {shape!r}; there are {', '.join(SYNTHETIC_SHAPES)}")
    synthetic = SYNTHETIC_SHAPES[shape]
    recipe = json.dumps([_RECIPE, asdict(synthetic)], sort_keys=True)
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:8]
    target = folder / f"synthetic-{shape}-seed{seed}-{digest}{'' if has_tokenizer else '-bare'}"
    if (target / "config.json").is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    size = synthetic.sizes.num_bytes / 1e9
    print(f"writing a synthetic {shape} of {size:.1f} GB in {target}", file=sys.stderr, flush=True)
    with publish_dir(target) as staging:
        write_synthetic_model(synthetic, staging, seed=seed)
        files = _tokenizer(synthetic.sizes.vocab_size, tokenizer_dir) if has_tokenizer else {}
        for name, text in files.items():
            (staging / name).write_bytes(text)
    return target


def write_synthetic_model(synthetic: SyntheticShape, out: Path, *, seed: int = 0) -> None:
    """Write the checkpoint, the predictor's factors and the sparsity record into `out`."""
    from benchmarks.inputs.synthetic_sparsity.values import SyntheticValues

    values = SyntheticValues(synthetic.sizes, synthetic.sparsity, seed)
    write_tensors(synthetic.sizes, out, values, alignment=_ALIGNMENT)
    values.write_predictor(out / PREDICTOR_FILE)
    text = json.dumps({"sparsity": asdict(synthetic.sparsity), "seed": seed}, indent=1)
    (out / STATISTICS_FILE).write_text(text, encoding="utf-8")


def _tokenizer(vocab_size: int, folder: str | Path | None) -> dict[str, bytes]:
    """Return the tokenizer's files, if the vocabulary has a row for each of its tokens."""
    source = Path(folder) if folder is not None else None
    if source is None and vocab_size < OPT_SHAPES["opt-1.3b"].vocab_size:
        return {}
    source = source or demo_model_dir()
    return {name: (source / name).read_bytes() for name in TOKENIZER_FILES}


def main() -> None:
    """Write a model, and check it with transformers if asked to."""
    parser = argparse.ArgumentParser(prog="benchmarks.inputs.synthetic_sparsity.model")
    parser.add_argument("shape", choices=list(SYNTHETIC_SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="measure the sparsity")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args()
    model = synthetic_model_dir(args.shape, args.folder)
    if not args.check:
        print(model)
        return
    from benchmarks.inputs.synthetic_sparsity import check as synthetic_check

    print(synthetic_check.table(synthetic_check.measure(model, dtype=args.dtype)))


if __name__ == "__main__":
    main()
