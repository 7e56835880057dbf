# SPDX-License-Identifier: Apache-2.0
"""Near memory that a card leaves to weights and KV cache.

vLLM uses a share of the card's memory (`--gpu-memory-utilization`), and takes from it what CUDA and
the activations of its largest step need. These two are estimates: vLLM measures them as it starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tiered.errors import ConfigError
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.serving import Workload
from vllm_tiered.units import GIB, format_bytes

UTILIZATION = 0.92
"""Default of vLLM's `--gpu-memory-utilization`."""

CUDA_BYTES = int(0.75 * GIB)
"""Assumed for the CUDA context, its libraries' workspaces and CUDA graphs."""

_LOGIT_COPIES = 2
"""Float32 copies of the logits that the sampler makes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardMemory:
    """Division of a card's memory.

    Attributes:
        card_bytes: all of it.
        activation_bytes: estimate for the largest step.
        near_bytes: what is left for weights and KV cache.
    """

    card_bytes: int
    activation_bytes: int
    near_bytes: int

    def describe(self) -> str:
        """Return a line about the division."""
        return (
            f"Of {format_bytes(self.card_bytes)}, {UTILIZATION:.0%} is vLLM's "
            f"(--gpu-memory-utilization), of which CUDA takes {format_bytes(CUDA_BYTES)} (assumed) "
            f"and activations {format_bytes(self.activation_bytes)} (estimated): "
            f"{format_bytes(self.near_bytes)} near"
        )


def near_memory(card_bytes: int, shape: ModelShape, load: Workload) -> CardMemory:
    """Return the division of a card's memory.

    Raises:
        ConfigError: nothing is left.
    """
    activations = activation_bytes(shape, load)
    near = int(UTILIZATION * card_bytes) - CUDA_BYTES - activations
    if near <= 0:
        raise ConfigError(
            f"{format_bytes(card_bytes)} of card memory leave nothing near beside "
            f"{format_bytes(CUDA_BYTES)} for CUDA and {format_bytes(activations)} for activations"
        )
    return CardMemory(card_bytes=card_bytes, activation_bytes=activations, near_bytes=near)


def activation_bytes(shape: ModelShape, load: Workload) -> int:
    """Return an estimate of the activations of the largest step.

    The largest are the first FFN matrix's output and its activated half beside the residual, for
    each token of a full step; and the logits, for one token of each request.
    """
    widest = max((rows for rows, _ in shape.matrices.values()), default=4 * shape.hidden_size)
    per_token = (2 * shape.hidden_size + 1.5 * widest) * shape.dtype_bytes
    logits = 0.0
    if shape.hidden_size:
        vocabulary = shape.head_bytes / (shape.hidden_size * shape.dtype_bytes)
        logits = 4 * _LOGIT_COPIES * load.max_requests * vocabulary
    return round(load.max_batched_tokens * per_token + logits)
