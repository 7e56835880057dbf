# SPDX-License-Identifier: Apache-2.0
"""How a layer's neurons behave on calibration text: how many matter, how long, and which together.

    active share    of the neurons: those that fire (ReLU), or the fewest that carry 90 % of the
                    energy (others)
    overlap         of a token's active neurons, those that the token before it had too (M2Cache,
                    figure 6; LLM in a flash, figure 4)
    window          neurons that any of the last k tokens had: what a window cache holds, and what
                    a token adds to it (LLM in a flash, 3.1)
    friends         how often a neuron's closest friend is active when the neuron is (LLM in a
                    flash, 3.2)

T tokens, N neurons.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from vllm_tiered.ffn.prepare.ffn_modules import FfnWeights
from vllm_tiered.ffn.prepare.train import importance

TOP_SHARE = 0.25
"""Of the neurons of a model without inactive ones: those that are followed from token to token."""

_ENERGY = 0.9
_WINDOWS = (2, 4, 5, 8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStatistics:
    """Of one layer; shares of its neurons, averaged over tokens, unless said.

    Attributes:
        active_share: that fire (ReLU), or carry 90 % of the energy.
        top_energy: share of the energy that the top quarter carries.
        followed_share: of those that `overlap`, `window` and `friends` are about: the active ones
            (ReLU), the top quarter (others).
        overlap: share of a token's that the token before had.
        overlap_by_chance: what it would be if tokens had nothing to do with each other, by how
            often each neuron is active.
        window: held by windows of so many tokens.
        window_new: of the neurons, what a token adds to such a window.
        friends: see the module; mean over neurons that are active at all.
        never: share that no token had.
        num_tokens: that were looked at.
    """

    active_share: float
    top_energy: float
    followed_share: float
    overlap: float
    overlap_by_chance: float
    window: dict[int, float] = field(default_factory=dict)
    window_new: dict[int, float] = field(default_factory=dict)
    friends: float
    never: float
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        """With windows as strings, as JSON has them."""
        plain = asdict(self)
        for name in ("window", "window_new"):
            plain[name] = {str(k): share for k, share in plain[name].items()}
        return plain


def layer_statistics(
    x_TH: torch.Tensor, lengths: Sequence[int], weights: FfnWeights
) -> LayerStatistics:
    """Look at a layer.

    Args:
        x_TH: recorded inputs of texts of these lengths, one after the other.
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
        friends=_friends(followed_TN),
        never=(~followed_TN.any(0)).float().mean().item(),
        num_tokens=tokens,
    )


def _overlap(texts: Sequence[torch.Tensor]) -> float:
    """Over adjacent tokens of the same text."""
    both = sum((text[1:] & text[:-1]).sum().item() for text in texts)
    return both / max(1, sum(text[1:].sum().item() for text in texts))


def _overlap_by_chance(active_TN: torch.Tensor) -> float:
    share_N = active_TN.float().mean(0)
    return (share_N.square().sum() / share_N.sum().clamp(min=1e-30)).item()


def _window(texts: Sequence[torch.Tensor], tokens: int) -> tuple[float, float]:
    """Return how much windows of so many tokens hold once full, and what each next token adds."""
    held = added = count = neurons = 0
    for text in texts:
        neurons = text.shape[1]
        # age_N: tokens since a neuron was active last.
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


def _friends(active_TN: torch.Tensor) -> float:
    """Mean over neurons of the largest P(other active | neuron active)."""
    active = active_TN[:, active_TN.any(0)].float()
    if active.shape[1] < 2:
        return 0.0
    together_NN = active.T @ active
    times_N = together_NN.diagonal().clone()
    together_NN.fill_diagonal_(0)
    return (together_NN.amax(1) / times_N).mean().item()
