# SPDX-License-Identifier: Apache-2.0
"""Models of random weights at real sizes, written without holding a whole model in memory.

`model_dir("opt-6.7b", folder)` writes a folder that vLLM, transformers and the peers load: bfloat16
safetensors of at most 1 GB, config and the demo tokenizer. Biases are 0, norms 1, matrices are
N(0, 0.02), OPT's embeddings tied. One block of seeded random numbers is repeated end to end, and
every matrix is a cut from it at its own offset, so 13 GB are written as fast as the disk takes
them. OLMoE's matrices are N(0, 0.04), its embeddings 32 times that and the output of its attention
an eighth, so that a token's experts depend on the token more than on the context. The block's
length is a prime, so that rows of a matrix never repeat. Qwen3-MoE's experts and Llama's matrices
are written in 4 bit at once, as compressed-tensors has them: uniform codes around 8, in groups of
32 with one scale.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.harness.cache import publish_dir
from benchmarks.inputs.model import demo_model_dir
from benchmarks.peers.shapes import SHAPES, Shape, num_bytes_of

Bits: TypeAlias = npt.NDArray[np.uint16]
"""Tensor values as bfloat16 bits."""

Values: TypeAlias = Callable[[str, tuple[int, ...]], Iterator[Bits]]
"""Function that yields a tensor's values, by name and shape, in pieces of any size."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SHARD_BYTES = 10**9
_BLOCK_LENGTH = 8_388_593  # a prime
_BF16_ONE = 0x3F80
_RECIPE = 1  # increases when the written bytes change


def model_dir(
    shape: str, folder: Path, *, seed: int = 0, tokenizer_dir: str | Path | None = None
) -> Path:
    """Return the folder, inside `folder`, of a random model of this shape; written on first use.

    The same shape and seed give the same bytes on every machine. The tokenizer is the demo model's
    unless `tokenizer_dir` names a folder with another. Raises KeyError, naming the known shapes,
    for an unknown one.
    """
    if shape not in SHAPES:
        raise KeyError(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
    sizes: Any = SHAPES[shape]
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
        write_model(sizes, staging, seed=seed)
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                (staging / name).write_bytes((tokenizer / name).read_bytes())
    return target


def write_model(shape: Shape, out: Path, *, seed: int = 0, shard_bytes: int = _SHARD_BYTES) -> None:
    """Write config.json, the index and the shards of a model into the folder `out`.

    A shard takes at most `shard_bytes`, unless one tensor alone is larger. It needs one block of 17
    MB of memory, and three times as much while the block is drawn.
    """
    rng = np.random.default_rng(seed)
    block = _random_block(rng, shape.std)
    codes = np.random.default_rng([seed, 1]).integers(1 << 16, size=_BLOCK_LENGTH, dtype=np.uint16)
    # Codes are uniform from 0 to 15.
    scale = to_bfloat16(np.array([shape.std / np.sqrt((16**2 - 1) / 12)], dtype=np.float32))

    shapes = dict(shape.tensors())

    def values(name: str, sizes: tuple[int, ...]) -> Iterator[Bits]:
        if name.endswith("_packed"):
            yield from _cut(codes, 2 * int(np.prod(sizes)), rng)
        elif name.endswith("_scale"):
            yield np.full(int(np.prod(sizes)), scale[0], dtype="<u2")
        elif name.endswith("_shape"):
            rows, words = shapes[name.removesuffix("_shape") + "_packed"]
            yield np.array([rows, 8 * words], dtype="<i8").view("<u2")
        else:
            yield from _values(name, sizes, block, rng, shape.exponent(name))

    write_tensors(shape, out, values, shard_bytes=shard_bytes)


def write_tensors(
    shape: Shape,
    out: Path,
    values: Values,
    *,
    shard_bytes: int = _SHARD_BYTES,
    alignment: int = 8,
) -> None:
    """Write the files that `write_model` writes, with the values from `values`.

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
            _write_header(file, shape, tensors, alignment)
            for name, tensor_shape in tensors.items():
                for piece in values(name, tensor_shape):
                    file.write(piece.data)
    index = {"metadata": {"total_size": shape.num_bytes}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), "utf-8")
    (out / "config.json").write_text(json.dumps(shape.config(), indent=1), "utf-8")


def _shards(shape: Shape, shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Return the tensors of each shard, filled in order."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, tensor_shape in shape.tensors():
        size = num_bytes_of(shape, name, tensor_shape)
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


def _random_block(rng: np.random.Generator, std: float) -> Bits:
    """Return N(0, std) numbers."""
    values = rng.standard_normal(_BLOCK_LENGTH, dtype=np.float32)
    values *= np.float32(std)
    return to_bfloat16(values)


def _write_header(
    file: BinaryIO, shape: Shape, tensors: Mapping[str, tuple[int, ...]], alignment: int
) -> None:
    """Write the header of a safetensors file: 8 bytes of length, then JSON; the data follow."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, sizes in tensors.items():
        end = offset + num_bytes_of(shape, name, sizes)
        dtype = shape.dtype(name)
        header[name] = {"dtype": dtype, "shape": list(sizes), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % alignment)  # aligns the data
    file.write(len(text).to_bytes(8, "little") + text)


def _values(
    name: str, shape: tuple[int, ...], block: Bits, rng: np.random.Generator, exponent: int
) -> Iterator[Bits]:
    remaining = int(np.prod(shape))
    if len(shape) == 1:
        value = 0 if name.endswith("bias") else _BF16_ONE
        yield np.full(remaining, value, dtype="<u2")
        return
    for piece in _cut(block, remaining, rng):
        yield _scaled(piece, exponent)


def _cut(block: Bits, remaining: int, rng: np.random.Generator) -> Iterator[Bits]:
    """Yield values of a block that is repeated end to end, from a random place on."""
    start = int(rng.integers(block.size))
    while remaining:
        piece = block[start : start + remaining]
        yield piece
        remaining -= piece.size
        start = 0


def _scaled(bits: Bits, exponent: int) -> Bits:
    """Multiply with a power of two; zeros, and what would be too small, become zeros."""
    if not exponent:
        return bits
    is_kept = (bits & 0x7F80) > max(0, -exponent) << 7
    return np.where(is_kept, bits + np.uint16((exponent << 7) & 0xFFFF), 0).astype("<u2")
