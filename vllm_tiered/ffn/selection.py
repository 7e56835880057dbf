# SPDX-License-Identifier: Apache-2.0
"""Selection of a step's neurons and their precisions (M2Cache, 5.2).

Neurons are ranked by their scores. The first share of the ranks is computed in full precision, the
next in 8 bit, the next in 4 bit. The rest is left out:

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
    """Shares of the neurons by precision; neurons beyond their sum are left out.

    Raises:
        ConfigError: a share is not between 0 and 1, all shares are 0, or their sum exceeds 1.
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
        """Return the mix with the shares [full, int8, int4].

        Raises:
            ConfigError: there are not three shares, or they are not valid.
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
        """Return the average bits of a weight, without scales: 8 for [0.25, 0.25, 0.5]."""
        return self.full * full_bits + self.int8 * 8 + self.int4 * 4

    def counts(self, num_neurons: int) -> tuple[int, int, int]:
        """Return the number of neurons by precision; their sum is all if the shares sum to 1."""
        edges = [round(sum(self.shares[: i + 1]) * num_neurons) for i in range(3)]
        return edges[0], edges[1] - edges[0], edges[2] - edges[1]


ALL = Mix(full=1, int8=0, int4=0)
"""Every neuron in full precision."""

PLAIN = (ALL, Mix(full=0, int8=1, int4=0), Mix(full=0, int8=0, int4=1))
"""Every neuron in one precision: what a checkpoint in 16, 8 or 4 bit computes."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected neurons by precision; no neuron is in two of the arrays.

    Attributes:
        scores_N: float32, the best score of each neuron in the batch; None if the scores are not
            on the host.
    """

    full: Neurons
    int8: Neurons
    int4: Neurons
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
) -> Selection:
    """Select a step's neurons.

    Each token ranks the neurons for itself, and the step selects the union. A neuron that several
    tokens selected gets the best of its precisions. Of equal scores the lower neuron id ranks
    first. NaN is never selected. Ranks come from partitions, not from a sort: 16,384 neurons and
    one token take 116 us, or 52 if all active neurons are in full precision (an EPYC core with
    AVX2, best of 500, 2026-11-22).

    Args:
        scores_BN: float32 on the CPU; a higher score means a more important neuron.
        threshold: neurons with lower scores are predicted inactive and left out. The shares are
            then shares of a token's active neurons (ReLU models). None: every neuron is active.
    """
    scores: _Scores = scores_BN.detach().numpy()
    mix = mix if isinstance(mix, Mix) else Mix.from_shares(mix)
    reached = np.zeros((3, scores.shape[1]), dtype=np.bool_)
    for scores_N in scores:
        _add_reached(scores_N, mix, threshold, reached)
    chosen = _without_better(reached)
    full, int8, int4 = (np.flatnonzero(chosen_N) for chosen_N in chosen)
    return Selection(full, int8, int4, _best(scores))


def select_each(
    scores_BN: torch.Tensor, mix: Mix, threshold: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select neurons as :func:`select`, for each token alone; return bool [B, N] by precision."""
    scores: _Scores = scores_BN.detach().numpy()
    reached = np.zeros((3, *scores.shape), dtype=np.bool_)
    for token, scores_N in enumerate(scores):
        _add_reached(scores_N, mix, threshold, reached[:, token])
    full, int8, int4 = map(torch.from_numpy, _without_better(reached))
    return full, int8, int4


def _add_reached(scores_N: _Scores, mix: Mix, threshold: float | None, reached: _Mask) -> None:
    """Set in ``reached`` [3, N] the neurons that get full, at least 8 bit, and at least 4 bit.

    Each row is a subset of the next.
    """
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
    """Return the neurons whose best precision is each one: the difference of adjacent rows."""
    chosen = np.empty_like(reached)
    chosen[0] = reached[0]
    np.greater(reached[1:], reached[:-1], out=chosen[1:])
    return chosen


def _add_top(scores_N: _Scores, count: int, chosen_N: _Mask) -> None:
    """Set ``chosen_N`` for exactly the ``count`` highest scores; NaN is never among them."""
    if count <= 0:
        return
    if count >= len(scores_N):
        chosen_N |= scores_N == scores_N
        return
    # Partition about one rank at a time: numpy vectorises only that (25 us, 210 for two at once).
    lowest = np.partition(scores_N, len(scores_N) - count)[len(scores_N) - count]
    top_N = scores_N >= lowest
    surplus = int(np.count_nonzero(top_N)) - count
    if surplus > 0:
        top_N[np.flatnonzero(scores_N == lowest)[-surplus:]] = False
    chosen_N |= top_N


def _best(scores_BN: _Scores) -> _Scores:
    """Return the highest score of each neuron over the tokens, [N]."""
    best_N: _Scores = scores_BN.max(axis=0, initial=-np.inf)
    return best_N
