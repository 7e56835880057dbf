# SPDX-License-Identifier: Apache-2.0
"""Models as the simulator sees them. Machines are in `vllm_tiered/planner/machine.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A dense transformer with uniform full attention, in 16 bit."""

    num_layers: int
    num_parameters: float
    kv_heads: int
    head_size: int

    @property
    def weight_bytes(self) -> float:
        return 2 * self.num_parameters

    def page_bytes(self, block_tokens: int) -> int:
        """KV bytes of one block in one layer."""
        return 2 * 2 * self.kv_heads * self.head_size * block_tokens


MODELS: Mapping[str, ModelShape] = {
    "smollm2-135m": ModelShape(num_layers=30, num_parameters=134.5e6, kv_heads=3, head_size=64),
    "opt-13b": ModelShape(num_layers=40, num_parameters=12.85e9, kv_heads=40, head_size=128),
    "opt-30b": ModelShape(num_layers=48, num_parameters=29.97e9, kv_heads=56, head_size=128),
    "llama-13b": ModelShape(num_layers=40, num_parameters=13.02e9, kv_heads=40, head_size=128),
    "llama-3-8b": ModelShape(num_layers=32, num_parameters=8.03e9, kv_heads=8, head_size=128),
}
