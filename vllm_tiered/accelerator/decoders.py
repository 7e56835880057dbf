# SPDX-License-Identifier: Apache-2.0
"""The decoders of PRESERVE's section 5, and the share of a layer on one device of a cluster.

Sizes are from the models' config.json files. All weights are int8 (one byte per element).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tiered.errors import ConfigError, UnsupportedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """Decoder with gated FFNs; each token uses `experts_per_token` of the experts."""

    name: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    head_size: int = 128
    num_experts: int = 1
    experts_per_token: int = 1

    def heads_of(self, num_devices: int) -> int:
        """Return the number of query heads on the device that has most; at least one."""
        return math.ceil(self.heads / num_devices)

    def kv_heads_of(self, num_devices: int) -> int:
        """Return the number of KV heads on it; more devices than heads repeat heads (section 4)."""
        return math.ceil(self.kv_heads / num_devices)

    def projection_bytes(self, num_devices: int) -> dict[str, float]:
        """Return the bytes of the attention matrices on a device: q, k, v and out."""
        query = self.hidden * self.heads_of(num_devices) * self.head_size
        key = self.hidden * self.kv_heads_of(num_devices) * self.head_size
        return {"q": query, "k": key, "v": key, "out": query}

    def kv_bytes(self, num_devices: int, num_tokens: float) -> float:
        """Return the bytes of a layer's keys and values on a device."""
        return 2.0 * num_tokens * self.kv_heads_of(num_devices) * self.head_size

    def ffn_bytes(self, num_devices: int) -> dict[str, float]:
        """Return the bytes of the gate, up and down matrices of all experts on a device."""
        size = self.hidden * self.inner / num_devices * self.num_experts
        return {"gate": size, "up": size, "down": size}

    def experts_read(self, num_tokens: int) -> float:
        """Return the expected number of experts that a step uses if routing is uniform."""
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)

    def held_bytes(self, num_devices: int, num_tokens: int) -> float:
        """Return the bytes of weights and KV cache on a device, embeddings and head included."""
        layer = (
            sum(self.projection_bytes(num_devices).values())
            + sum(self.ffn_bytes(num_devices).values())
            + self.kv_bytes(num_devices, num_tokens)
        )
        return self.num_layers * layer + 2 * self.vocabulary * self.hidden / num_devices


def decoder_of(config: Mapping[str, Any], name: str) -> Decoder:
    """Return the decoder that a Hugging Face config.json describes, assuming gated FFNs.

    Raises:
        ConfigError: a size is missing.
        UnsupportedError: the model has shared experts, or is no decoder.
    """
    for key in ("n_routed_experts", "shared_expert_intermediate_size", "is_encoder_decoder"):
        if config.get(key):
            raise UnsupportedError(
                f"{name}: {key}={config[key]}: only decoders, dense or with routed experts alone, "
                "can be explored"
            )

    def size(*keys: str) -> int:
        for key in keys:
            value = config.get(key)
            if isinstance(value, int) and value > 0:
                return value
        raise ConfigError(f"{name}: config.json has no {keys[0]}, or it is not a number above 0")

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    has_experts = any(config.get(key) for key in ("num_local_experts", "num_experts"))
    return Decoder(
        name=name,
        num_layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        inner=size("moe_intermediate_size", "intermediate_size")
        if has_experts
        else size("intermediate_size"),
        vocabulary=size("vocab_size"),
        head_size=int(config.get("head_dim") or hidden // heads),
        num_experts=size("num_local_experts", "num_experts") if has_experts else 1,
        experts_per_token=size("num_experts_per_tok") if has_experts else 1,
    )


def _decoder(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int
) -> Decoder:
    return Decoder(
        name=name,
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        inner=inner,
        vocabulary=vocabulary,
    )


def _mixture(
    name: str, layers: int, hidden: int, heads: int, inner: int, vocabulary: int, experts: int
) -> Decoder:
    return Decoder(
        name=name,
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        inner=inner,
        vocabulary=vocabulary,
        num_experts=experts,
        experts_per_token=2,
    )


DECODERS: Mapping[str, Decoder] = {
    decoder.name: decoder
    for decoder in (
        _decoder("Llama3-8B", 32, 4096, 32, 8, 14336, 128256),
        _decoder("Llama3-70B", 80, 8192, 64, 8, 28672, 128256),
        _decoder("Llama3-405B", 126, 16384, 128, 8, 53248, 128256),
        _decoder("Qwen2-7B", 28, 3584, 28, 4, 18944, 152064),
        _decoder("Qwen2-72B", 80, 8192, 64, 8, 29568, 152064),
        _decoder("Qwen1.5-110B", 80, 8192, 64, 8, 49152, 152064),
        _decoder("Phi3-small", 32, 4096, 32, 8, 14336, 100352),
        _decoder("Phi3-medium", 40, 5120, 40, 10, 17920, 32064),
        _mixture("Phi3.5-MoE", 32, 4096, 32, 6400, 32064, experts=16),
        _decoder("Mistral-7B", 32, 4096, 32, 8, 14336, 32768),
        _mixture("Mixtral-8x7B", 32, 4096, 32, 14336, 32000, experts=8),
        _mixture("Mixtral-8x22B", 56, 6144, 48, 16384, 32768, experts=8),
    )
}
