# SPDX-License-Identifier: Apache-2.0
"""The selection of a step's neurons and their precisions (M2Cache, 5.2).

Neurons are ranked by a predictor's scores. The first share of the ranks is computed in full
precision, the next in 8 bit, the next in 4 bit; the rest is left out:

    rank   0 ─────────── full ─────────── int8 ─────────── int4 ─────────── left out ── N

B tokens, N neurons of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.layout import Precision

Neurons = npt.NDArray[np.int64]
"""Neuron ids of a layer, ascending."""

_Scores = npt.NDArray[np.float32]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """Shares of the neurons by precision; the rest, up to 1, is left out.

    Raises:
        ConfigError: a share is not between 0 and 1, or all are 0, or they exceed 1 together.
    """

    full: float
    int8: float
    int4: float

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in self.shares) or not 0 < sum(self.shares) < 1.0001:
            raise ConfigError(
                f"tiered.ffn.mix={list(self.shares)}: expected the shares of neurons in full"
                " precision, 8 bit and 4 bit, each from 0 to 1, and together above 0 and at most 1"
            )

    @classmethod
    def from_shares(cls, shares: Sequence[float]) -> "Mix":
        """Return the mix of [full, int8, int4].

        Raises:
            ConfigError: as above, or there are not three shares.
        """
        if len(shares) != 3:
            raise ConfigError(
                f"tiered.ffn.mix={list(shares)}: expected 3 shares (full precision, 8 bit, 4 bit)"
            )
        return cls(full=shares[0], int8=shares[1], int4=shares[2])

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares in the order of :class:`Precision`."""
        return self.full, self.int8, self.int4

    def bits(self, full_bits: int = 16) -> float:
        """Return the average bits of a weight, without scales: 8 for [.25, .25, .5]."""
        return self.full * full_bits + self.int8 * 8 + self.int4 * 4

    def counts(self, num_neurons: int) -> tuple[int, int, int]:
        """Return how many neurons each precision gets; all of them if the shares sum to 1."""
        edges = [round(sum(self.shares[: i + 1]) * num_neurons) for i in range(3)]
        return edges[0], edges[1] - edges[0], edges[2] - edges[1]


ALL = Mix(full=1, int8=0, int4=0)
"""Every neuron in full precision."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Neurons to compute with; none is in two of the arrays.

    Attributes:
        num_demoted: neurons that got a lower precision than their rank asks for, or none, because
            of ``limits``.
        scores_N: best scores of the batch, float32; None where they are not on the host.
    """

    full: Neurons
    int8: Neurons
    int4: Neurons
    num_demoted: int = 0
    scores_N: _Scores | None = None

    @property
    def num_neurons(self) -> int:
        """The number of neurons in all precisions."""
        return len(self.full) + len(self.int8) + len(self.int4)

    def neurons_in(self, precision: Precision) -> Neurons:
        """Return the neurons in one precision."""
        match precision:
            case Precision.FULL:
                return self.full
            case Precision.INT8:
                return self.int8
            case Precision.INT4:
                return self.int4


def select(
    scores_BN: torch.Tensor,
    mix: Mix | Sequence[float],
    threshold: float | None = None,
    limits: tuple[int, int, int] | None = None,
) -> Selection:
    """Select a step's neurons.

    Each token ranks them for itself; the step takes the union, and a neuron that several tokens
    chose gets the best precision that one of them gave it. Of equal scores the lower neuron id
    comes first. NaN is never chosen. Ranks are cut, not sorted: 16,384 neurons and one token take
    116 us, or 52 where all active ones are in full (an EPYC core with AVX2, best of 500,
    2026-11-22).

    Args:
        scores_BN: float32 on the CPU, larger = matters more.
        threshold: neurons with lower scores are predicted inactive and left out; the shares are
            then shares of a token's active neurons (ReLU models). None: there are no inactive ones.
        limits: how many each precision has room for. Those in excess with the lowest best scores
            in the batch fall to the next precision, and from the last one out.
    """
    scores: _Scores = scores_BN.detach().numpy()
    mix = mix if isinstance(mix, Mix) else Mix.from_shares(mix)
    reached = np.zeros((3, scores.shape[1]), dtype=np.bool_)
    for scores_N in scores:
        _add_reached(scores_N, mix, threshold, reached)
    chosen = _without_better(reached)
    num_demoted = 0 if limits is None else _demote(chosen, scores, limits)
    full, int8, int4 = (np.flatnonzero(chosen_N) for chosen_N in chosen)
    return Selection(full, int8, int4, num_demoted, _best(scores))


def select_each(
    scores_BN: torch.Tensor, mix: Mix, threshold: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what :func:`select` chooses for each token alone: bool [B, N] by precision."""
    scores: _Scores = scores_BN.detach().numpy()
    reached = np.zeros((3, *scores.shape), dtype=np.bool_)
    for token, scores_N in enumerate(scores):
        _add_reached(scores_N, mix, threshold, reached[:, token])
    full, int8, int4 = map(torch.from_numpy, _without_better(reached))
    return full, int8, int4


def _add_reached(scores_N: _Scores, mix: Mix, threshold: float | None, reached: _Mask) -> None:
    """Set the neurons that reach full, at least 8 and at least 4 bit: [3, N], each in the next."""
    is_active = None if threshold is None else scores_N >= threshold
    num_ranked = len(scores_N) if is_active is None else int(np.count_nonzero(is_active))
    top = 0
    for reached_N, count in zip(reached, mix.counts(num_ranked), strict=True):
        top += count
        if is_active is not None and top == num_ranked:
            reached_N |= is_active
        else:
            _add_top(scores_N, top, reached_N)


def _without_better(reached: _Mask) -> _Mask:
    """Return the neurons that reached a precision but not the one before."""
    chosen = np.empty_like(reached)
    chosen[0] = reached[0]
    np.greater(reached[1:], reached[:-1], out=chosen[1:])
    return chosen


def _add_top(scores_N: _Scores, count: int, chosen_N: _Mask) -> None:
    """Set ``chosen_N`` for exactly the ``count`` highest scores."""
    if count <= 0:
        return
    if count >= len(scores_N):
        chosen_N |= scores_N == scores_N
        return
    # One cut at a time: numpy vectorises a partition about one place only (25 us against 210 for
    # two places at once).
    lowest = np.partition(scores_N, len(scores_N) - count)[len(scores_N) - count]
    top_N = scores_N >= lowest
    surplus = int(np.count_nonzero(top_N)) - count
    if surplus > 0:
        top_N[np.flatnonzero(scores_N == lowest)[-surplus:]] = False
    chosen_N |= top_N


def _best(scores_BN: _Scores) -> _Scores:
    """Return the best of the tokens' scores, [N]."""
    best_N: _Scores = scores_BN.max(axis=0, initial=-np.inf)
    return best_N


def _demote(chosen: _Mask, scores_BN: _Scores, limits: tuple[int, int, int]) -> int:
    """Move what exceeds the limits down, in place; return how many neurons moved."""
    best_N = _best(scores_BN)
    moved_N = np.zeros(len(best_N), dtype=np.bool_)
    for index, limit in enumerate(limits):
        if np.count_nonzero(chosen[index]) <= limit:
            continue
        kept_N = np.zeros_like(moved_N)
        _add_top(np.where(chosen[index], best_N, -np.inf).astype(np.float32), limit, kept_N)
        kept_N &= chosen[index]
        surplus_N = chosen[index] & ~kept_N
        moved_N |= surplus_N
        chosen[index] = kept_N
        if index + 1 < len(limits):
            chosen[index + 1] |= surplus_N
    return int(np.count_nonzero(moved_N))
