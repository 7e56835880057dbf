# SPDX-License-Identifier: Apache-2.0
"""Sizes of models that peers are compared on: OPT, OLMoE, Qwen3-MoE and Llama, the latter in 4 bit.

A shape knows its tensors, as safetensors name them, and its config.json.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from benchmarks.inputs.int4_settings import settings, w4a16_settings

_STD = 0.02
_ITEM_BYTES = 2
ITEM_BYTES: Mapping[str, int] = {"BF16": 2, "I32": 4, "I64": 8}
POSITION_OFFSET = 2  # the first two rows of OPT's position table are for padding


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
                    yield from _int4(matrix, rows, length, self.group)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab_size, hidden)

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor."""
        return _int4_dtype(name)

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


def _norm(name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def _linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _int4(name: str, rows: int, length: int, group: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of a matrix in 4 bit, as compressed-tensors names them."""
    yield f"{name}_packed", (rows, length // 8)
    yield f"{name}_scale", (rows, length // group)
    yield f"{name}_shape", (2,)


def _int4_dtype(name: str) -> str:
    return "I32" if name.endswith("_packed") else "I64" if name.endswith("_shape") else "BF16"


def num_bytes_of(shape: Shape, name: str, sizes: tuple[int, ...]) -> int:
    """Return the bytes of a tensor."""
    return int(np.prod(sizes)) * ITEM_BYTES[shape.dtype(name)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaInt4Shape:
    """The sizes of a Llama model whose layers' matrices are in 4 bit, in groups of `group`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int = 32000
    max_positions: int = 4096
    group: int = 32
    std: float = _STD

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of each stored tensor, in the order of use."""
        hidden, inner = self.hidden_size, self.intermediate_size
        kv = self.num_kv_heads * (hidden // self.num_heads)
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer_idx in range(self.num_layers):
            layer = f"model.layers.{layer_idx}."
            yield f"{layer}input_layernorm.weight", (hidden,)
            for which, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
                matrix = f"{layer}self_attn.{which}_proj.weight"
                yield from _int4(matrix, rows, hidden, self.group)
            yield f"{layer}post_attention_layernorm.weight", (hidden,)
            for which, rows, length in (
                ("gate", inner, hidden),
                ("up", inner, hidden),
                ("down", hidden, inner),
            ):
                yield from _int4(f"{layer}mlp.{which}_proj.weight", rows, length, self.group)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab_size, hidden)

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor."""
        return _int4_dtype(name)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights."""
        return sum(num_bytes_of(self, name, shape) for name, shape in self.tensors())

    @property
    def kv_token_bytes(self) -> int:
        """Return the bytes of a token's KV in 16 bit."""
        head_size = self.hidden_size // self.num_heads
        return 2 * self.num_layers * self.num_kv_heads * head_size * _ITEM_BYTES

    def exponent(self, name: str) -> int:
        """Return the power of two that a tensor's values are multiplied with."""
        return 0

    def config(self) -> dict[str, Any]:
        """Return what transformers expects in config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "quantization_config": w4a16_settings(self.group),
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

LLAMA_INT4_SHAPES: Mapping[str, LlamaInt4Shape] = {
    "llama-7b-w4a16": LlamaInt4Shape(
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
    ),
}
"""`llama-7b-w4a16` has the sizes of Llama-7B and Llama-2-7B."""

DENSE: Mapping[str, OptShape | LlamaInt4Shape] = {**OPT_SHAPES, **LLAMA_INT4_SHAPES}

SHAPES: Mapping[str, Shape] = {**DENSE, **MIXTURES}


def outside_layers_bytes(shape: Shape) -> int:
    """Return the bytes of embeddings, positions, last norm and head."""
    return sum(
        num_bytes_of(shape, name, sizes)
        for name, sizes in shape.tensors()
        if ".layers." not in name
    )
