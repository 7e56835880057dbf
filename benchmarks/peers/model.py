# SPDX-License-Identifier: Apache-2.0
"""OPT models of random weights at real sizes, written without holding a whole model in memory.

`opt_dir("opt-6.7b", folder)` writes a folder that vLLM, transformers and the peers load: bfloat16
safetensors of at most 1 GB, config and the demo tokenizer. Biases are 0, norms 1, matrices are
N(0, 0.02), embeddings tied. One block of seeded random numbers is repeated end to end, and every
matrix is a cut from it at its own offset, so 13 GB are written as fast as the disk takes them. The
block's length is a prime, so that rows of a matrix never repeat.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.harness.cache import publish_dir
from benchmarks.inputs.model import demo_model_dir

Bits: TypeAlias = npt.NDArray[np.uint16]
"""Tensor values as bfloat16 bits."""

Values: TypeAlias = Callable[[str, tuple[int, ...]], Iterator[Bits]]
"""Function that yields a tensor's values, by name and shape, in pieces of any size."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SHARD_BYTES = 10**9
_BLOCK_LENGTH = 8_388_593  # a prime
_STD = 0.02
_BF16_ONE = 0x3F80
_ITEM_BYTES = 2
POSITION_OFFSET = 2  # the first two rows of OPT's position table are for padding
_RECIPE = 1  # increases when the written bytes change


@dataclass(frozen=True, kw_only=True, slots=True)
class OptShape:
    """The sizes of an OPT model with layer norms before the sublayers and tied embeddings."""

    hidden_size: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    vocab_size: int = 50272
    max_positions: int = 2048

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each stored tensor, in the order of use."""
        hidden, ffn = self.hidden_size, self.ffn_dim
        prefix = "model.decoder."
        yield f"{prefix}embed_tokens.weight", (self.vocab_size, hidden)
        yield f"{prefix}embed_positions.weight", (self.max_positions + POSITION_OFFSET, hidden)
        for layer_idx in range(self.num_layers):
            layer = f"{prefix}layers.{layer_idx}."
            yield from _norm(f"{layer}self_attn_layer_norm", hidden)
            for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from _linear(f"{layer}self_attn.{projection}", hidden, hidden)
            yield from _norm(f"{layer}final_layer_norm", hidden)
            yield from _linear(f"{layer}fc1", ffn, hidden)
            yield from _linear(f"{layer}fc2", hidden, ffn)
        yield from _norm(f"{prefix}final_layer_norm", hidden)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights in 16 bit."""
        return sum(_num_bytes(shape) for _, shape in self.tensors())

    def config(self) -> dict[str, object]:
        """Return what transformers expects in config.json."""
        return {
            "architectures": ["OPTForCausalLM"],
            "model_type": "opt",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "word_embed_proj_dim": self.hidden_size,
            "ffn_dim": self.ffn_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "max_position_embeddings": self.max_positions,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": True,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


SHAPES: Mapping[str, OptShape] = {
    "opt-1.3b": OptShape(hidden_size=2048, ffn_dim=8192, num_layers=24, num_heads=32),
    "opt-6.7b": OptShape(hidden_size=4096, ffn_dim=16384, num_layers=32, num_heads=32),
}


def opt_dir(
    shape: str, folder: Path, *, seed: int = 0, tokenizer_dir: str | Path | None = None
) -> Path:
    """Return the folder, inside `folder`, of a random OPT of this shape; written on first use.

    The same shape and seed give the same bytes on every machine. The tokenizer is the demo model's
    unless `tokenizer_dir` names a folder with another. Raises KeyError, naming the known shapes,
    for an unknown one.
    """
    if shape not in SHAPES:
        raise KeyError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
    sizes = SHAPES[shape]
    recipe = json.dumps([_RECIPE, asdict(sizes)], sort_keys=True)
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:8]
    target = folder / f"{shape}-seed{seed}-{digest}"
    if (target / "config.json").is_file():
        return target
    tokenizer = Path(tokenizer_dir) if tokenizer_dir is not None else demo_model_dir()
    folder.mkdir(parents=True, exist_ok=True)
    print(
        f"writing a random {shape} of {sizes.num_bytes / 1e9:.1f} GB in {target}",
        file=sys.stderr,
        flush=True,
    )
    with publish_dir(target) as staging:
        write_opt(sizes, staging, seed=seed)
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                (staging / name).write_bytes((tokenizer / name).read_bytes())
    return target


def write_opt(
    shape: OptShape, out: Path, *, seed: int = 0, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write config.json, the index and the shards of a model into the folder `out`.

    A shard takes at most `shard_bytes`, unless one tensor alone is larger. It needs one block of 17
    MB of memory, and three times as much while the block is drawn.
    """
    rng = np.random.default_rng(seed)
    block = _random_block(rng)
    write_tensors(
        shape, out, lambda name, sizes: _values(name, sizes, block, rng), shard_bytes=shard_bytes
    )


def write_tensors(
    shape: OptShape,
    out: Path,
    values: Values,
    *,
    shard_bytes: int = _SHARD_BYTES,
    alignment: int = 8,
) -> None:
    """Write the files that `write_opt` writes, with the values from `values`.

    Args:
        alignment: of the data in a shard, bytes. With 4096 every tensor of the real shapes begins
            at a disk block, so O_DIRECT can read its rows directly.
    """
    shards = _shards(shape, shard_bytes)
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys(tensors, file_name))
        with (out / file_name).open("wb") as file:
            _write_header(file, tensors, alignment)
            for name, tensor_shape in tensors.items():
                for piece in values(name, tensor_shape):
                    file.write(piece.data)
    index = {"metadata": {"total_size": shape.num_bytes}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), "utf-8")
    (out / "config.json").write_text(json.dumps(shape.config(), indent=1), "utf-8")


def _norm(name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def _linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _num_bytes(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * _ITEM_BYTES


def _shards(shape: OptShape, shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Return the tensors of each shard, filled in order."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, tensor_shape in shape.tensors():
        size = _num_bytes(tensor_shape)
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor_shape
        filled += size
    return shards


def to_bfloat16(values: npt.NDArray[np.float32]) -> Bits:
    """Round to nearest, ties to even; `values` is overwritten."""
    bits = values.view(np.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16).astype("<u2")


def _random_block(rng: np.random.Generator) -> Bits:
    """Return N(0, 0.02) numbers."""
    values = rng.standard_normal(_BLOCK_LENGTH, dtype=np.float32)
    values *= np.float32(_STD)
    return to_bfloat16(values)


def _write_header(file: BinaryIO, tensors: Mapping[str, tuple[int, ...]], alignment: int) -> None:
    """Write the header of a safetensors file: 8 bytes of length, then JSON; the data follow."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        end = offset + _num_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % alignment)  # aligns the data
    file.write(len(text).to_bytes(8, "little") + text)


def _values(
    name: str, shape: tuple[int, ...], block: Bits, rng: np.random.Generator
) -> Iterator[Bits]:
    remaining = int(np.prod(shape))
    if len(shape) == 1:
        value = 0 if name.endswith("bias") else _BF16_ONE
        yield np.full(remaining, value, dtype="<u2")
        return
    start = int(rng.integers(block.size))
    while remaining:
        piece = block[start : start + remaining]
        yield piece
        remaining -= piece.size
        start = 0
