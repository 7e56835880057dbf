# SPDX-License-Identifier: Apache-2.0
"""Activation statistics of a layer's neurons on calibration text.

    active share    share of the neurons that are active: positive (ReLU), or the fewest that carry
                    90 % of the energy (others)
    overlap         share of a token's active neurons that were active for the previous token
                    (M2Cache, figure 6; LLM in a flash, figure 4)
    window          neurons active for any of the last k tokens: how many a window cache holds, and
                    how many a token adds to it (LLM in a flash, 3.1)

T tokens, N neurons.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from vllm_tiered.ffn.prepare.checkpoint import FfnWeights
from vllm_tiered.ffn.prepare.train import importance

TOP_SHARE = 0.25
"""Share of the neurons that count as active in models other than ReLU: the most important."""

_ENERGY = 0.9
_WINDOWS = (2, 4, 5, 8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStatistics:
    """Statistics of one layer: shares of its neurons, averaged over tokens, unless stated.

    Attributes:
        active_share: neurons that are positive (ReLU), or that carry 90 % of the energy (others).
        top_energy: share of the energy that the top quarter of the neurons carries.
        followed_share: neurons that `overlap` and `window` count: the active ones
            (ReLU), or the top quarter (others).
        overlap: share of a token's followed neurons that the previous token followed too.
        overlap_by_chance: the overlap if tokens were independent, from how often each neuron is
            active.
        window: neurons in a window of k tokens, by k.
        window_new: neurons that a token adds to such a window, by k.
        never: neurons that are active for no token.
        num_tokens: number of tokens.
    """

    active_share: float
    top_energy: float
    followed_share: float
    overlap: float
    overlap_by_chance: float
    window: dict[int, float] = field(default_factory=dict)
    window_new: dict[int, float] = field(default_factory=dict)
    never: float
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-safe dictionary; window lengths become strings."""
        plain = asdict(self)
        for name in ("window", "window_new"):
            plain[name] = {str(k): share for k, share in plain[name].items()}
        return plain


def layer_statistics(
    x_TH: torch.Tensor, lengths: Sequence[int], weights: FfnWeights
) -> LayerStatistics:
    """Compute the statistics of a layer.

    Args:
        x_TH: recorded inputs of the texts, one after the other.
        lengths: tokens of each text.
    """
    importance_TN = torch.cat([importance(x, weights) for x in torch.split(x_TH, 512)])
    tokens, neurons = importance_TN.shape
    energy_TN = importance_TN.square()
    total = energy_TN.sum(1).clamp(min=1e-30)
    quarter = max(1, round(TOP_SHARE * neurons))
    top = importance_TN.topk(quarter, dim=1).indices
    top_energy = (energy_TN.gather(1, top).sum(1) / total).mean().item()
    if weights.is_relu:
        followed_TN = importance_TN > 0
        active_share = followed_TN.float().mean().item()
    else:
        followed_TN = torch.zeros_like(importance_TN, dtype=torch.bool).scatter_(1, top, True)
        carried = energy_TN.sort(1, descending=True).values.cumsum(1) / total[:, None]
        active_share = ((carried < _ENERGY).sum(1) + 1).float().mean().item() / neurons
    texts = list(torch.split(followed_TN, list(lengths)))
    counts = followed_TN.sum(1)
    return LayerStatistics(
        active_share=active_share,
        top_energy=top_energy,
        followed_share=counts.float().mean().item() / neurons,
        overlap=_overlap(texts),
        overlap_by_chance=_overlap_by_chance(followed_TN),
        window={k: _window(texts, k)[0] for k in _WINDOWS},
        window_new={k: _window(texts, k)[1] for k in _WINDOWS},
        never=(~followed_TN.any(0)).float().mean().item(),
        num_tokens=tokens,
    )


def _overlap(texts: Sequence[torch.Tensor]) -> float:
    """Return the overlap over adjacent tokens of the same text."""
    both = sum((text[1:] & text[:-1]).sum().item() for text in texts)
    return both / max(1, sum(text[1:].sum().item() for text in texts))


def _overlap_by_chance(active_TN: torch.Tensor) -> float:
    share_N = active_TN.float().mean(0)
    return (share_N.square().sum() / share_N.sum().clamp(min=1e-30)).item()


def _window(texts: Sequence[torch.Tensor], tokens: int) -> tuple[float, float]:
    """Return the shares of neurons that a full window holds and that each next token adds."""
    held = added = count = neurons = 0
    for text in texts:
        neurons = text.shape[1]
        # age: tokens since each neuron was last active.
        age = torch.full((neurons,), tokens + 1)
        for position, active_N in enumerate(text):
            age += 1
            if position >= tokens:
                inside = age <= tokens
                held += int(inside.sum())
                added += int((active_N & ~inside).sum())
                count += 1
            age[active_N] = 0
    return held / max(1, count * neurons), added / max(1, count * neurons)
