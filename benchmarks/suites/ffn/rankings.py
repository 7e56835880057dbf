# SPDX-License-Identifier: Apache-2.0
"""Neuron rankings as bounds for predictors: an oracle and a random order."""

from __future__ import annotations

import torch

from vllm_tiered.ffn.layout import Precision
from vllm_tiered.ffn.prepare.evaluate import Copies, Scores


def by_oracle(_: int, copies: Copies) -> tuple[Scores, float | None]:
    """Return each neuron's real share of the output, from its weights in full precision."""
    norms = copies.weights.down_norms_N
    threshold = torch.finfo(torch.float32).tiny if copies.weights.is_relu else None
    return lambda x: copies.activations(x, Precision.FULL).abs() * norms, threshold


def at_random(layer: int, copies: Copies) -> tuple[Scores, float | None]:
    """Return a random order, different for each token."""
    generator = torch.Generator().manual_seed(layer)
    neurons = len(copies.weights.rows_NMH)
    return lambda x: torch.rand(len(x), neurons, generator=generator), None
