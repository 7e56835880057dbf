# SPDX-License-Identifier: Apache-2.0
"""Synthetic routing with a given locality: an LRU cache has the hit ratios that are asked for.

A step draws each of its experts by its place in the order of last use. A place is drawn with the
probability that the hit curve gives it: with S slots, LRU finds what is among the S last used. So a
published curve is reproduced by construction, and says nothing beyond itself: results with it are
called *synthetic*.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

PUBLISHED: Mapping[str, Mapping[float, float]] = {
    # llama.cpp #27861: 512 experts, LRU with 64 and 128 slots.
    "llama.cpp #27861": {0.125: 0.67, 0.25: 0.81},
    # imp #2061: 512 experts, LRU with 186 and 372 slots.
    "imp #2061": {0.363: 0.62, 0.727: 0.79},
}
"""Hit ratio by the share of a layer's experts that have slots."""


def synthetic_routing(
    curve: Mapping[float, float],
    *,
    num_layers: int,
    num_steps: int,
    num_experts: int,
    top_k: int,
    seed: int = 0,
) -> list[list[list[int]]]:
    """Return experts [layers, steps, top_k]; between the curve's points it is linear."""
    shares = [0.0, *sorted(curve), 1.0]
    ratios = [0.0, *(curve[share] for share in sorted(curve)), 1.0]
    places = np.arange(num_experts + 1) / num_experts
    probabilities = np.diff(np.interp(places, shares, ratios))
    rng = np.random.default_rng(seed)
    layers = []
    for _ in range(num_layers):
        order = rng.permutation(num_experts)  # the last used first
        steps = []
        for _ in range(num_steps):
            at = rng.choice(num_experts, size=top_k, replace=False, p=probabilities)
            chosen = order[at]
            order = np.concatenate((chosen, np.delete(order, at)))
            steps.append(chosen.tolist())
        layers.append(steps)
    return layers
