# SPDX-License-Identifier: Apache-2.0
"""Activation statistics of a layer's neurons on calibration text.

    active share    share of the neurons that are active
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

_WINDOWS = (2, 4, 5, 8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStatistics:
    """Statistics of one layer: shares of its neurons, averaged over tokens, unless stated.

    Attributes:
        active_share: active neurons.
        overlap: share of a token's active neurons that were active for the previous token too.
        overlap_by_chance: the overlap if tokens were independent, from how often each neuron is
            active.
        window: neurons in a window of k tokens, by k.
        window_new: neurons that a token adds to such a window, by k.
        never: neurons that are active for no token.
        num_tokens: number of tokens.
    """

    active_share: float
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
    active_TN = torch.cat([importance(x, weights) > 0 for x in torch.split(x_TH, 512)])
    texts = list(torch.split(active_TN, list(lengths)))
    return LayerStatistics(
        active_share=active_TN.float().mean().item(),
        overlap=_overlap(texts),
        overlap_by_chance=_overlap_by_chance(active_TN),
        window={k: _window(texts, k)[0] for k in _WINDOWS},
        window_new={k: _window(texts, k)[1] for k in _WINDOWS},
        never=(~active_TN.any(0)).float().mean().item(),
        num_tokens=len(active_TN),
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
