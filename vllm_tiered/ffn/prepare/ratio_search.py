# SPDX-License-Identifier: Apache-2.0
"""Search for the shares of neurons in each precision at a byte budget (M2Cache, algorithm 1).

The paper moves from low to high precision at equal bytes, step by step, and keeps the ratio with
the least uncertainty of the model about its tokens. With three precisions there are two ways to
spend the bytes that full precision leaves: on 8 bit alone, which leaves neurons out, or on all
remaining neurons in 8 and 4 bit:

    full  ├──── f ────┤
          ├──── f ────┼── 8 bit ──┤                          rest left out
          ├──── f ────┼─ 8 bit ─┼──── 4 bit ────┤            all computed

Uncertainty (equation 2) is the entropy of the distribution of each token after the prompt. The
paper generates these tokens. Here the text's own tokens follow the prompt, so that all candidates
are compared on the same tokens, and their perplexity costs nothing extra. On SmolLM2-135M both
criteria picked the same of 8 mixes (256 tokens, 2026-11-22).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_tiered.errors import ConfigError
from vllm_tiered.ffn.selection import Mix

FULL_BITS = 16

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """Uncertainty of a model with a mix.

    Attributes:
        entropy: mean over the tokens after the prompts, in nats.
        perplexity: over the same tokens.
    """

    entropy: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """Mix that was evaluated, and its uncertainty."""

    mix: Mix
    uncertainty: Uncertainty

    def to_json(self, full_bits: int = FULL_BITS) -> dict[str, Any]:
        """Return a JSON-safe description, with the average bits of a weight."""
        return {
            "mix": list(self.mix.shares),
            "bits": self.mix.bits(full_bits),
            "entropy": self.uncertainty.entropy,
            "perplexity": self.uncertainty.perplexity,
        }


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Best mix, and all mixes in the order in which they were evaluated."""

    best: Candidate
    candidates: tuple[Candidate, ...]


def search(
    evaluate: Callable[[Sequence[Mix]], Sequence[Uncertainty]],
    budget_bits: float,
    step: float = 0.125,
    rounds: int = 2,
    full_bits: int = FULL_BITS,
) -> SearchResult:
    """Evaluate mixes of equal bytes, then halve the step around the one of least entropy.

    Args:
        evaluate: runs the model with each mix.
        budget_bits: bits of a weight, averaged over all neurons; 8 is half the bytes of 16 bit.
        step: first step of the share in full precision; halved after each round.
        rounds: number of rounds.
        full_bits: bits of a weight in full precision.

    Raises:
        ConfigError: no mix fits the budget.
    """
    tried: dict[tuple[float, float, float], Candidate] = {}
    shares = [i * step for i in range(math.floor(1 / step + _EPSILON) + 1)]
    for _ in range(rounds):
        mixes = [m for m in mixes_of(budget_bits, shares, full_bits) if m.shares not in tried]
        for mix, uncertainty in zip(mixes, evaluate(mixes) if mixes else (), strict=True):
            tried[mix.shares] = Candidate(mix, uncertainty)
        if not tried:
            raise ConfigError(
                f"no mix fits {budget_bits} bits a weight: give the ratio search a larger budget"
            )
        best = min(tried.values(), key=lambda tried: tried.uncertainty.entropy)
        step /= 2
        shares = [
            share for share in (best.mix.full - step, best.mix.full + step) if 0 <= share <= 1
        ]
    return SearchResult(best, tuple(tried.values()))


def mixes_of(
    budget_bits: float, full_shares: Sequence[float], full_bits: int = FULL_BITS
) -> list[Mix]:
    """Return the mixes for the given shares in full precision.

    A mix spends the whole budget, unless all remaining neurons fit in 8 bit.
    """
    found: dict[tuple[float, float, float], Mix] = {}
    for full in full_shares:
        bits = budget_bits - full * full_bits
        left = 1 - full
        if bits < -_EPSILON:
            continue
        # All remaining neurons in 4 bit, and as many as possible of them in 8 bit.
        if bits >= 4 * left - _EPSILON:
            int8 = min(left, (bits - 4 * left) / 4)
            options = [(int8, left - int8)]
        else:
            options = [(0.0, bits / 4)]
        options.append((min(left, bits / 8), 0.0))
        for int8, int4 in options:
            shares = tuple(round(max(0.0, share), 6) for share in (full, int8, int4))
            if sum(shares) > 0:
                mix = Mix.from_shares(shares)
                found.setdefault(mix.shares, mix)
    return list(found.values())
