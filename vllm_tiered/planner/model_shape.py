# SPDX-License-Identifier: Apache-2.0
"""Shapes of a model's tensors, computed from its config.json, with vLLM's names and fusions.

    attention   qkv_proj [(heads + 2 kv heads) head size, hidden]   o_proj [hidden, heads head size]
    FFN         gate_up_proj [2 inner, hidden], fc1 [inner, hidden]   down_proj, fc2 [hidden, inner]

A rank of tensor parallelism holds its share of each matrix, all norms, and its share of the KV
heads, but at least one KV head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_tiered.errors import ConfigError, UnsupportedError
from vllm_tiered.weights.int4.layout import COMPRESS, can_compress, compressed_bytes
from vllm_tiered.weights.layout import Kind, Parameter, Role, Sublayer, sublayers_of

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Family of architectures with the same layer structure.

    Attributes:
        gated: whether gate and up, fused into one matrix, replace fc1.
        names: names of the qkv, out, first and second FFN matrix in the layer.
        norms: names of the norms in the layer.
        norm_bias: whether norms have biases.
        qkv_bias, bias: defaults for configs without these keys.
        inner: key of the FFN's size in the config.
    """

    gated: bool
    names: tuple[str, str, str, str]
    norms: tuple[str, ...]
    norm_bias: bool = False
    qkv_bias: bool = False
    bias: bool = False
    inner: str = "intermediate_size"


_LLAMA_NAMES = (
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
)
_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_LLAMA = Family(gated=True, names=_LLAMA_NAMES, norms=_LLAMA_NORMS)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "phi3": _LLAMA,
    "qwen2": Family(gated=True, names=_LLAMA_NAMES, norms=_LLAMA_NORMS, qkv_bias=True),
    "opt": Family(
        gated=False,
        names=("self_attn.qkv_proj", "self_attn.out_proj", "fc1", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        norm_bias=True,
        qkv_bias=True,
        bias=True,
        inner="ffn_dim",
    ),
    "falcon": Family(
        gated=False,
        names=(
            "self_attention.query_key_value",
            "self_attention.dense",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        ),
        norms=("input_layernorm",),
        norm_bias=True,
        inner="ffn_hidden_size",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedKv:
    """KV caches of layers that keep a window, a chunk or a recurrent state of each request.

    Attributes:
        num_layers: layers of this kind.
        page_bytes: bytes of a block in one layer.
        block_tokens: tokens of a block.
        max_tokens: the most tokens of a request whose KV is kept; None for a recurrent state, which
            takes one block.
        pair_operations: as in :class:`ModelShape`.
    """

    num_layers: int
    page_bytes: int
    block_tokens: int
    max_tokens: int | None = None
    pair_operations: int = 0

    def request_bytes(self, tokens: int) -> int:
        """Return the bytes of a request of so many tokens, in all of these layers."""
        return self.num_layers * self.page_bytes * self._blocks(tokens)

    def read_bytes(self, tokens: int) -> float:
        """Return the bytes that a step reads for a request with so many earlier tokens."""
        if self.max_tokens is None:
            return float(self.num_layers * self.page_bytes)
        kept = min(tokens, self.max_tokens)
        return self.num_layers * self.page_bytes * kept / self.block_tokens

    def _blocks(self, tokens: int) -> int:
        if self.max_tokens is None:
            return 1
        # A window begins anywhere in its first block.
        most = -(-self.max_tokens // self.block_tokens) + 1
        return min(most, -(-tokens // self.block_tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExperts:
    """Experts of which a step needs those that its tokens are routed to.

    Attributes:
        names: names of the experts' parameters in a layer.
        num_experts: experts of a layer.
        per_token: experts that one token is routed to.
    """

    names: frozenset[str]
    num_experts: int
    per_token: int

    def share_read(self, tokens: float) -> float:
        """Return the expected share of a layer's experts that a step reads, if all are as likely.

        Real routing is uneven, so this is the most.
        """
        return 1.0 - float((1.0 - self.share_computed) ** tokens)

    @property
    def share_computed(self) -> float:
        """Share of a layer's experts that one token is multiplied with."""
        return self.per_token / self.num_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a model for planning, in bytes of one rank.

    Attributes:
        family: the model type, or "unknown" if Llama's shapes were assumed.
        num_layers: number of decoder layers.
        sublayers: sublayers of all layers, in the order of computation.
        other_bytes: bytes of embeddings, head and last norm, which stay near.
        head_bytes: the part of ``other_bytes`` that each step reads.
        kv_bytes_per_token: KV bytes of a token in all layers that keep every token's.
        dtype_bytes: bytes of an uncompressed weight, and of an element of the KV cache.
        matrices: (out, in) of each matrix of a layer by its name, if known.
        pair_operations: arithmetic operations of attention for a pair of tokens, in the layers that
            keep every token's KV.
        bounded_kv: the other layers' KV caches.
        attention_layers: number of sublayers of attention; None if each layer has one.
        full_attention_layers: layers that keep every token's KV; None if each layer does.
        experts: the routed experts of a mixture.
        quantization: the checkpoint's format; None for weights of ``dtype_bytes``.
        quantized_bits: bits of a quantised weight, without scales; None for no format, or several.
        may_be_far: whether the engine places weights in the checkpoint's format.
        max_model_len: the most tokens of a request, if known.
        hidden_size: width of what a layer passes on; 0 if unknown.
        num_ranks: ranks of tensor parallelism.
    """

    family: str
    num_layers: int
    sublayers: tuple[Sublayer, ...]
    other_bytes: int
    head_bytes: int
    kv_bytes_per_token: int
    dtype_bytes: int
    matrices: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    pair_operations: int = 0
    bounded_kv: tuple[BoundedKv, ...] = ()
    attention_layers: int | None = None
    full_attention_layers: int | None = None
    experts: RoutedExperts | None = None
    quantization: str | None = None
    quantized_bits: float | None = None
    may_be_far: bool = True
    max_model_len: int | None = None
    hidden_size: int = 0
    num_ranks: int = 1

    @property
    def num_attention(self) -> int:
        """Sublayers of attention."""
        return self.num_layers if self.attention_layers is None else self.attention_layers

    @property
    def num_full_attention(self) -> int:
        """Layers that keep every token's KV, in a cache of their own."""
        known = self.full_attention_layers
        return self.num_layers if known is None else known

    @property
    def may_share_with_kv(self) -> bool:
        """Whether the engine lets layers and KV cache share near memory by a plan of its own.

        It does not with quantised layers, which are known when they are loaded, nor with recurrent
        states, as it counts the cache by tokens.
        """
        has_states = any(kv.max_tokens is None for kv in self.bounded_kv)
        return self.quantization is None and not has_states

    def request_kv_bytes(self, tokens: int, block_tokens: int) -> int:
        """Return the KV bytes of a request of so many tokens, in whole blocks."""
        blocks = -(-tokens // block_tokens)
        bounded = sum(kv.request_bytes(tokens) for kv in self.bounded_kv)
        return blocks * block_tokens * self.kv_bytes_per_token + bounded

    def read_kv_bytes(self, tokens: int) -> float:
        """Return the KV bytes that a step reads for a request with so many earlier tokens."""
        bounded = sum(kv.read_bytes(tokens) for kv in self.bounded_kv)
        return tokens * self.kv_bytes_per_token + bounded

    def attention_operations(self, new_tokens: int, earlier_tokens: int) -> float:
        """Return the arithmetic operations of attention for new tokens of one request."""
        pairs = new_tokens * (earlier_tokens + (new_tokens + 1) / 2)
        total = self.pair_operations * pairs
        for kv in self.bounded_kv:
            if kv.max_tokens is not None:
                total += kv.pair_operations * min(pairs, new_tokens * kv.max_tokens)
        return total

    def share_read(self, parameter: Parameter, tokens: float) -> float:
        """Return the expected share of a parameter that a step of so many tokens reads."""
        is_routed = self.experts is not None and parameter.name in self.experts.names
        return self.experts.share_read(tokens) if self.experts and is_routed else 1.0

    def share_computed(self, parameter: Parameter) -> float:
        """Return the share of a parameter that each token is multiplied with."""
        is_routed = self.experts is not None and parameter.name in self.experts.names
        return self.experts.share_computed if self.experts and is_routed else 1.0

    @property
    def layer_bytes(self) -> int:
        """Bytes of all layers' parameters."""
        return sum(sublayer.num_bytes for sublayer in self.sublayers)

    def weights_in(self, parameter: Parameter) -> float:
        """Return the number of weights in a parameter, compressed or not."""
        if parameter.num_weights is not None:
            return parameter.num_weights
        matrix = self.matrices.get(parameter.name)
        return parameter.num_bytes / self.dtype_bytes if matrix is None else math.prod(matrix)

    def is_compressed(self, parameter: Parameter) -> bool:
        """Return whether a parameter takes fewer bytes than its weights would in the dtype."""
        return parameter.num_bytes < self.weights_in(parameter) * self.dtype_bytes

    def features_of(self, sublayer: Sublayer) -> int:
        """Return the in and out features of a sublayer's GEMMs, of those that are known."""
        matrices = (self.matrices.get(parameter.name) for parameter in sublayer.parameters)
        return sum(sum(matrix) for matrix in matrices if matrix)

    def is_int4(self, parameter: Parameter) -> bool:
        """Return whether a parameter is in our own 4 bit, not in a checkpoint's format."""
        return self.quantization is None and self.is_compressed(parameter)

    def is_w4a16(self, parameter: Parameter) -> bool:
        """Return whether a parameter is a checkpoint's matrix in 4 bit, and not a routed expert."""
        is_routed = self.experts is not None and parameter.name in self.experts.names
        return self.quantized_bits == 4 and self.is_compressed(parameter) and not is_routed


def bytes_by_class(shape: ModelShape) -> dict[str, int]:
    """Return the bytes of each class of tensors in all layers, and of embeddings and head."""
    classes = {Role.FFN_FIRST: "first FFN matrix", Role.NORM: "norms", Role.BIAS: "biases"}
    routed = shape.experts.names if shape.experts else frozenset()
    matrices = {Kind.ATTENTION: "attention matrices", Kind.FFN: "second FFN matrix"}
    found: dict[str, int] = {}
    for sublayer in shape.sublayers:
        for parameter in sublayer.parameters:
            name = classes.get(parameter.role, matrices[sublayer.kind])
            if parameter.name in routed:
                name = "routed experts"
            found[name] = found.get(name, 0) + parameter.num_bytes
    return found | {"embeddings and head": shape.other_bytes}


def model_shape(
    config: Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
    tensor_parallel: int = 1,
    compress: str = "none",
) -> ModelShape:
    """Return the shape of a model from its Hugging Face config.

    A model type that is not in ``FAMILIES`` is assumed to have Llama's shapes. For a plain decoder
    the sizes are then correct to a few percent.

    Args:
        config: contents of config.json.
        dtype: dtype of weights and KV cache.
        tensor_parallel: number of ranks.
        compress: "none", or "int4" for matrices in 4 bit.

    Raises:
        ConfigError: a size is missing or not divisible by ``tensor_parallel``, or there is no such
            dtype or compression.
        UnsupportedError: the model is a mixture of experts, quantized, or not a plain decoder.
    """
    known = str(config.get("model_type", ""))
    _check_kind(config)
    family = FAMILIES.get(known, _LLAMA)
    sizes = _Sizes.of(config, family)
    width = DTYPE_BYTES.get(dtype)
    if width is None:
        raise ConfigError(f"no dtype {dtype!r}: there are {', '.join(DTYPE_BYTES)}")
    if compress not in COMPRESS:
        raise ConfigError(f"no compress {compress!r}: there are {', '.join(COMPRESS)}")
    shapes = _layer_shapes(family, sizes, tensor_parallel)
    layer = {name: math.prod(shape) * width for name, shape in shapes.items()}
    if compress == "int4":
        for name, shape in shapes.items():
            if len(shape) == 2 and can_compress(*shape):
                layer[name] = compressed_bytes(*shape, width)
    kv_heads = max(1, sizes.kv_heads // tensor_parallel)
    vocabulary = math.ceil(sizes.vocabulary / tensor_parallel) * sizes.hidden
    heads = 1 if config.get("tie_word_embeddings", known in ("opt", "falcon")) else 2
    positions = (sizes.positions + 2) * sizes.hidden if known == "opt" else 0
    return ModelShape(
        family=known if known in FAMILIES else "unknown",
        num_layers=sizes.layers,
        sublayers=tuple(
            part for index in range(sizes.layers) for part in sublayers_of(index, layer)
        ),
        other_bytes=(heads * vocabulary + positions + sizes.hidden) * width,
        head_bytes=vocabulary * width,
        kv_bytes_per_token=2 * kv_heads * sizes.head_size * sizes.layers * width,
        dtype_bytes=width,
        hidden_size=sizes.hidden,
        num_ranks=tensor_parallel,
        pair_operations=4 * sizes.heads * sizes.head_size * sizes.layers // tensor_parallel,
        matrices={name: (out[0], out[1]) for name, out in shapes.items() if len(out) == 2},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int
    qkv_bias: bool
    bias: bool
    norms: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any], family: Family) -> _Sizes:
        hidden = _size(config, "hidden_size")
        heads = _size(config, "num_attention_heads")
        return cls(
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            inner=int(config.get(family.inner) or config.get("intermediate_size") or 4 * hidden),
            heads=heads,
            kv_heads=_kv_heads(config, heads),
            head_size=int(config.get("head_dim") or hidden // heads),
            vocabulary=_size(config, "vocab_size"),
            positions=int(config.get("max_position_embeddings") or 0),
            qkv_bias=bool(config.get("attention_bias", config.get("enable_bias", family.qkv_bias))),
            bias=bool(config.get("bias", config.get("enable_bias", family.bias))),
            norms=_norms(config, family),
        )


def _layer_shapes(
    family: Family, sizes: _Sizes, tensor_parallel: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's parameters: [out, in] for matrices, [out] for others."""
    for what, size in (("attention heads", sizes.heads), ("FFN neurons", sizes.inner)):
        if size % tensor_parallel:
            raise ConfigError(f"{size} {what} do not divide by {tensor_parallel} ranks")
    heads = sizes.heads // tensor_parallel
    kv_heads = max(1, sizes.kv_heads // tensor_parallel)
    inner = sizes.inner // tensor_parallel
    qkv, out, first, second = family.names
    rows = (heads + 2 * kv_heads) * sizes.head_size
    first_rows = inner * (2 if family.gated else 1)
    shapes: dict[str, tuple[int, ...]] = {f"{qkv}.weight": (rows, sizes.hidden)}
    if sizes.qkv_bias:
        shapes[f"{qkv}.bias"] = (rows,)
    shapes[f"{out}.weight"] = (sizes.hidden, heads * sizes.head_size)
    if sizes.bias:
        shapes[f"{out}.bias"] = (sizes.hidden,)
    shapes[f"{first}.weight"] = (first_rows, sizes.hidden)
    if sizes.bias:
        shapes[f"{first}.bias"] = (first_rows,)
    shapes[f"{second}.weight"] = (sizes.hidden, inner)
    if sizes.bias:
        shapes[f"{second}.bias"] = (sizes.hidden,)
    for norm in sizes.norms:
        shapes[f"{norm}.weight"] = (sizes.hidden,)
        if family.norm_bias:
            shapes[f"{norm}.bias"] = (sizes.hidden,)
    return shapes


def _norms(config: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    if config.get("new_decoder_architecture"):  # Falcon's 40B and later
        return ("ln_attn", "ln_mlp")
    if config.get("model_type") == "falcon" and not config.get("parallel_attn", True):
        return ("input_layernorm", "post_attention_layernorm")
    return family.norms


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("model_type") == "falcon":
        if config.get("new_decoder_architecture"):
            return int(config.get("num_kv_heads") or heads)
        return 1 if config.get("multi_query", True) else heads
    return int(config.get("num_key_value_heads") or heads)


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json has {key}={value!r}: it must be a number above 0")
    return value


def _check_kind(config: Mapping[str, Any]) -> None:
    experts = next(
        (k for k in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(k)), None
    )
    if experts is not None:
        raise UnsupportedError(
            f"{experts}={config[experts]}: mixtures of experts cannot be planned yet"
        )
    if config.get("quantization_config"):
        raise UnsupportedError(
            "quantized checkpoints cannot be planned, and their weights not be placed, yet: give "
            "the 16-bit model"
        )
    if config.get("is_encoder_decoder"):
        raise UnsupportedError("encoder-decoder models cannot be planned: only decoders are served")
