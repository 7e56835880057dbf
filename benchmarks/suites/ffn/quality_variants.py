# SPDX-License-Identifier: Apache-2.0
"""Mixes and rankings that `ffn_quality` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.suites.ffn.cached_ffn import CachedMixedFfn
from benchmarks.suites.ffn.rankings import at_random, by_oracle
from vllm_tiered.ffn.predictor.low_rank import LowRank
from vllm_tiered.ffn.prepare.evaluate import Copies, Scores, Variant, by_base4
from vllm_tiered.ffn.selection import ALL, Mix

GROUP = 64
"""Number of weights per 4-bit scale; `prepare` uses the same for the demo model."""

HELD_OUT = 2000
"""Conversations skipped before the first measured one; calibration uses the skipped ones."""

PAPERS = Mix(full=0.25, int8=0.25, int4=0.5)
"""M2Cache's mix: half the bytes, with no neuron left out."""

_HALF = Mix(full=0.5, int8=0, int4=0)
_EIGHT = Mix(full=0, int8=1, int4=0)
_FOUR = Mix(full=0, int8=0, int4=1)

SEARCHED = "searched, base4"
NEAR = "25/25/50, base4, what is near stays"
"""As the engine computes: a neuron may keep the precision of its cached near copy."""


class LowRankRanking:
    """Ranking by trained predictors, one a layer."""

    def __init__(self, predictors: Sequence[LowRank]) -> None:
        self._predictors = predictors

    def __call__(self, layer: int, _: Copies) -> tuple[Scores, float | None]:
        predictor = self._predictors[layer]
        return predictor.scores, predictor.threshold


def by_low_rank(predictors: Sequence[LowRank]) -> LowRankRanking:
    """Make a ranking for :class:`Variant`."""
    return LowRankRanking(predictors)


def variants_of(searched: Mix, group: int, low_rank: LowRankRanking) -> dict[str, Variant]:
    """Return all variants by name, with grouped scales and, to compare, one scale per row."""
    variants = {
        "full": Variant(mix=ALL, group=group),
        "8 bit": Variant(mix=_EIGHT, group=group),
        "4 bit": Variant(mix=_FOUR, group=group),
        "4 bit, scale per row": Variant(mix=_FOUR, group=None),
    }
    rankings: Mapping[str, Callable[[int, Copies], tuple[Scores, float | None]]] = {
        "oracle": by_oracle,
        "base4": by_base4,
        "low_rank": low_rank,
        "random": at_random,
    }
    for title, mix in {"searched": searched, "25/25/50": PAPERS, "50/0/0": _HALF}.items():
        for name, ranking in rankings.items():
            is_same = title == "searched" and mix in (PAPERS, _HALF)
            if is_same and name != "base4":
                continue  # another row already has it
            ranked = None if 1 in mix.shares else ranking
            variants[f"{title}, {name}"] = Variant(mix=mix, group=group, ranking=ranked)
    variants[NEAR] = Variant(mix=PAPERS, group=group, ranking=by_base4, ffn=CachedMixedFfn)
    variants["25/25/50, base4, scale per row"] = Variant(mix=PAPERS, group=None, ranking=by_base4)
    return variants
