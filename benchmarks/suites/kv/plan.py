# SPDX-License-Identifier: Apache-2.0
"""KV sizes of a workload, and the engine specifications of a comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.jobs import EngineSpec
from benchmarks.inputs.workload import Request

Auto = Literal["auto", "auto by layers", "auto by blocks"]
"""A plugin that follows the load, with its default policy or with one that is asked for."""

Expansion = float | Auto
"""The plugin's `kv.expansion`: a fixed number, or "auto" to follow the load."""

POLICY_OF: Mapping[Expansion, str] = {"auto by layers": "interleave", "auto by blocks": "blocks"}
"""Keys are expansions that ask for a policy, values are words of `kv.policy`."""

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPlan:
    """Settings common to all engines of a comparison: model, requests, block size, prefix caching.

    At most `max_num_seqs` requests run at once, or all of them if it is None. `random_weights` and
    `engine_args` are as in EngineSpec. `dtype` is that of engines which ask for no other.
    """

    model_dir: Path
    requests: Sequence[Request]
    block_size: int
    prefix_caching: bool
    dtype: str = "bfloat16"
    max_num_seqs: int | None = None
    random_weights: bool = False
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    def block_bytes(self, dtype: str | None = None) -> int:
        """Return the KV bytes of one block in all layers."""
        config = json.loads((self.model_dir / "config.json").read_text(encoding="utf-8"))
        return kv_bytes_per_token(config, dtype or self.dtype) * self.block_size

    def enough_blocks(self) -> int:
        """Return the blocks for all requests at their full length at once, and the null block."""
        return 1 + sum(math.ceil(request.num_tokens / self.block_size) for request in self.requests)

    def budget_blocks(self, budget: float, demand_blocks: int) -> int:
        """Return the blocks of a share of the demand.

        Raises ValueError, naming the settings to change, if the longest request does not fit.
        """
        num_blocks = math.ceil(budget * demand_blocks)
        longest = self.max_model_len() // self.block_size
        if num_blocks < longest + 1:
            raise ValueError(
                f"budget {budget} of {demand_blocks} blocks is {num_blocks} blocks, but the longest"
                f" request takes {longest} and vLLM keeps 1; raise the budget or num_requests, or"
                " lower max_prompt_tokens or max_output_tokens"
            )
        return num_blocks

    def max_model_len(self) -> int:
        """Return the longest request in tokens, rounded up to whole blocks."""
        longest = max(request.num_tokens for request in self.requests)
        return self.block_size * math.ceil(longest / self.block_size)

    def spec(
        self,
        label: str,
        num_blocks: int,
        *,
        dtype: str | None = None,
        expansion: Expansion | None = None,
        kv: Mapping[str, Any] | None = None,
        pinned_expansion: float = 0.0,
        link_bytes_per_s: float = 0.0,
    ) -> EngineSpec:
        """Return a specification with near-tier KV for `num_blocks`; an expansion means plugin.

        `kv` has further keys of the plugin's section `kv`, and needs an expansion.
        `pinned_expansion` is as in EngineSpec. `link_bytes_per_s` holds the link of KV pages to a
        bandwidth in each direction (0: the memory's own).
        """
        section = {"expansion": expansion, **(kv or {})}
        if expansion is not None and expansion in POLICY_OF:
            section |= {"expansion": "auto", "policy": POLICY_OF[expansion]}
        return EngineSpec(
            label=label,
            model_dir=str(self.model_dir),
            dtype=dtype or self.dtype,
            block_size=self.block_size,
            kv_cache_memory_bytes=num_blocks * self.block_bytes(dtype),
            max_num_seqs=self.max_num_seqs or len(self.requests),
            max_model_len=self.max_model_len(),
            enable_prefix_caching=self.prefix_caching,
            tiered=None if expansion is None else {"kv": section},
            random_weights=self.random_weights,
            engine_args=self.engine_args,
            pinned_expansion=pinned_expansion,
            kv_link_bytes_per_s=link_bytes_per_s,
        )


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str) -> int:
    """Return the KV bytes of one token in all layers, from a Hugging Face model config."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * head_size * _ELEMENT_BYTES[dtype])
