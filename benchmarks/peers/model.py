# SPDX-License-Identifier: Apache-2.0
"""Models of random weights at real sizes, written without holding a whole model in memory.

`model_dir("opt-6.7b", folder)` writes a folder that vLLM, transformers and the peers load: bfloat16
safetensors of at most 1 GB, config and the demo tokenizer. Biases are 0, norms 1, matrices are
N(0, 0.02), OPT's embeddings tied. One block of seeded random numbers is repeated end to end, and
every matrix is a cut from it at its own offset, so 13 GB are written as fast as the disk takes
them. OLMoE's matrices are N(0, 0.04), its embeddings 32 times that and the output of its attention
an eighth, so that a token's experts depend on the token more than on the context. The block's
length is a prime, so that rows of a matrix never repeat. Qwen3-MoE's experts are written in 4 bit
at once, as compressed-tensors has them: uniform codes around 8, in groups of 32 with one scale.
"""

from __future__ import annotations

import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.harness.cache import publish_dir
from benchmarks.inputs.int4_settings import settings
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
ITEM_BYTES: Mapping[str, int] = {"BF16": 2, "I32": 4, "I64": 8}
POSITION_OFFSET = 2  # the first two rows of OPT's position table are for padding
_RECIPE = 1  # increases when the written bytes change


class Shape(Protocol):
    """The sizes of a model."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]: ...

    def config(self) -> dict[str, Any]: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def kv_token_bytes(self) -> int: ...

    @property
    def std(self) -> float: ...

    def dtype(self, name: str) -> str: ...

    def exponent(self, name: str) -> int: ...


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
        return sum(num_bytes_of(self, name, shape) for name, shape in self.tensors())

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor."""
        return "BF16"

    @property
    def kv_token_bytes(self) -> int:
        """Return the bytes of a token's KV in 16 bit."""
        return 2 * self.num_layers * self.hidden_size * 2

    @property
    def std(self) -> float:
        """Return the standard deviation of the weights."""
        return _STD

    def exponent(self, name: str) -> int:
        """Return the power of two that a tensor's values are multiplied with."""
        return 0

    def config(self) -> dict[str, Any]:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureShape(ABC):
    """What the mixtures here have in common."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_experts: int
    top_k: int
    vocab_size: int
    max_positions: int = 4096
    std: float = 0.04

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each stored tensor, in the order of use."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return what transformers expects in config.json."""

    @property
    @abstractmethod
    def kv_token_bytes(self) -> int:
        """Return the bytes of a token's KV in 16 bit."""

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor."""
        return "BF16"

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(num_bytes_of(self, name, shape) for name, shape in self.tensors())

    def exponent(self, name: str) -> int:
        """Return the power of two that a tensor's values are multiplied with."""
        return 5 if "embed_tokens" in name else -3 if "o_proj" in name else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OlmoeShape(MixtureShape):
    """The sizes of an OLMoE model: each layer has a router and experts of three matrices.

    `intermediate_size` is an expert's.
    """

    num_experts: int = 64
    top_k: int = 8
    vocab_size: int = 50304

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each stored tensor, in the order of use."""
        hidden, inner = self.hidden_size, self.intermediate_size
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer_idx in range(self.num_layers):
            layer = f"model.layers.{layer_idx}."
            yield f"{layer}input_layernorm.weight", (hidden,)
            for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield f"{layer}self_attn.{projection}.weight", (hidden, hidden)
            for norm in ("q_norm", "k_norm"):
                yield f"{layer}self_attn.{norm}.weight", (hidden,)
            yield f"{layer}post_attention_layernorm.weight", (hidden,)
            yield f"{layer}mlp.gate.weight", (self.num_experts, hidden)
            for expert in range(self.num_experts):
                yield f"{layer}mlp.experts.{expert}.gate_proj.weight", (inner, hidden)
                yield f"{layer}mlp.experts.{expert}.up_proj.weight", (inner, hidden)
                yield f"{layer}mlp.experts.{expert}.down_proj.weight", (hidden, inner)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab_size, hidden)

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of an expert in 16 bit."""
        return 3 * self.hidden_size * self.intermediate_size * _ITEM_BYTES

    @property
    def kv_token_bytes(self) -> int:
        """Return the bytes of a token's KV in 16 bit."""
        return 2 * self.num_layers * self.hidden_size * 2

    def config(self) -> dict[str, Any]:
        """Return what transformers expects in config.json."""
        return {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": False,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "clip_qkv": None,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3MoeShape(MixtureShape):
    """The sizes of a Qwen3-MoE model whose experts alone are in 4 bit, in groups of `group`."""

    num_kv_heads: int
    head_dim: int = 128
    group: int = 32

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each stored tensor, in the order of use."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer_idx in range(self.num_layers):
            layer = f"model.layers.{layer_idx}."
            yield f"{layer}input_layernorm.weight", (hidden,)
            yield f"{layer}self_attn.q_proj.weight", (query, hidden)
            yield f"{layer}self_attn.k_proj.weight", (kv, hidden)
            yield f"{layer}self_attn.v_proj.weight", (kv, hidden)
            yield f"{layer}self_attn.o_proj.weight", (hidden, query)
            for norm in ("q_norm", "k_norm"):
                yield f"{layer}self_attn.{norm}.weight", (self.head_dim,)
            yield f"{layer}post_attention_layernorm.weight", (hidden,)
            yield f"{layer}mlp.gate.weight", (self.num_experts, hidden)
            for expert in range(self.num_experts):
                for which, rows, length in (
                    ("gate", inner, hidden),
                    ("up", inner, hidden),
                    ("down", hidden, inner),
                ):
                    matrix = f"{layer}mlp.experts.{expert}.{which}_proj.weight"
                    yield f"{matrix}_packed", (rows, length // 8)
                    yield f"{matrix}_scale", (rows, length // self.group)
                    yield f"{matrix}_shape", (2,)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab_size, hidden)

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor."""
        return "I32" if name.endswith("_packed") else "I64" if name.endswith("_shape") else "BF16"

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of an expert in 4 bit, with its scales."""
        weights = 3 * self.hidden_size * self.intermediate_size
        return weights // 2 + weights // self.group * _ITEM_BYTES

    @property
    def kv_token_bytes(self) -> int:
        """Return the bytes of a token's KV in 16 bit."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2

    def config(self) -> dict[str, Any]:
        """Return what transformers expects in config.json."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": 3 * self.hidden_size,  # of dense layers: there are none
            "moe_intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "quantization_config": settings("compressed", self.group),
        }


OPT_SHAPES: Mapping[str, OptShape] = {
    "opt-1.3b": OptShape(hidden_size=2048, ffn_dim=8192, num_layers=24, num_heads=32),
    "opt-6.7b": OptShape(hidden_size=4096, ffn_dim=16384, num_layers=32, num_heads=32),
}
OLMOE_SHAPES: Mapping[str, OlmoeShape] = {
    "olmoe-0.9b": OlmoeShape(
        hidden_size=1024, intermediate_size=512, num_layers=8, num_heads=8, vocab_size=50304
    ),
    "olmoe-7b": OlmoeShape(hidden_size=2048, intermediate_size=1024, num_layers=16, num_heads=16),
}
"""`olmoe-7b` has the sizes of OLMoE-1B-7B."""

INT4_SHAPES: Mapping[str, Qwen3MoeShape] = {
    "qwen3-30b-int4": Qwen3MoeShape(
        hidden_size=2048,
        intermediate_size=768,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        num_experts=128,
        top_k=8,
        vocab_size=151936,
    ),
    "qwen3-small-int4": Qwen3MoeShape(
        hidden_size=256,
        intermediate_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        num_experts=16,
        top_k=4,
        vocab_size=50304,
    ),
}
"""`qwen3-30b-int4` has the sizes of Qwen3-30B-A3B."""

MIXTURES: Mapping[str, OlmoeShape | Qwen3MoeShape] = {**OLMOE_SHAPES, **INT4_SHAPES}

SHAPES: Mapping[str, Shape] = {**OPT_SHAPES, **MIXTURES}


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


def _norm(name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def _linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def num_bytes_of(shape: Shape, name: str, sizes: tuple[int, ...]) -> int:
    """Return the bytes of a tensor."""
    return int(np.prod(sizes)) * ITEM_BYTES[shape.dtype(name)]


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
