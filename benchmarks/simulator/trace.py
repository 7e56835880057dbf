# SPDX-License-Identifier: Apache-2.0
"""Loads: the arrival times and lengths of requests, and the link use of other processes."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """Arrival time of a request, and its numbers of tokens.

    The KV of the first `hit_tokens` of the prompt was computed for an earlier request.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Log-normal token counts: published means, assumed spread (sigma of the logarithm).

    Of each prompt, the share `hit_share` was computed before.
    """

    prompt_mean: float
    output_mean: float
    prompt_sigma: float
    output_sigma: float
    max_tokens: int = 1024
    hit_share: float = 0.0

    def draw(self, rng: random.Random, arrival_s: float) -> Arrival:
        """Return one request."""
        prompt_tokens = self._one(rng, self.prompt_mean, self.prompt_sigma)
        return Arrival(
            arrival_s=arrival_s,
            prompt_tokens=prompt_tokens,
            output_tokens=self._one(rng, self.output_mean, self.output_sigma),
            hit_tokens=int(self.hit_share * prompt_tokens),
        )

    def _one(self, rng: random.Random, mean: float, sigma: float) -> int:
        tokens = rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
        return max(1, min(self.max_tokens, round(tokens)))


LENGTHS: Mapping[str, Lengths] = {
    # Means: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    # PagedAttention", figure 11.
    "sharegpt": Lengths(prompt_mean=161, output_mean=338, prompt_sigma=1.0, output_sigma=0.8),
    "alpaca": Lengths(prompt_mean=19, output_mean=58, prompt_sigma=0.5, output_sigma=0.8),
    # Assumed: most time goes into prefill, and into decoding.
    "long prompts": Lengths(
        prompt_mean=1000, output_mean=48, prompt_sigma=0.4, output_sigma=0.5, max_tokens=1536
    ),
    "long outputs": Lengths(prompt_mean=48, output_mean=800, prompt_sigma=0.5, output_sigma=0.4),
    # Assumed: later turns of conversations, whose earlier turns were computed before.
    "prefix hits": Lengths(
        prompt_mean=1000,
        output_mean=200,
        prompt_sigma=0.4,
        output_sigma=0.5,
        max_tokens=1536,
        hit_share=0.75,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Contention:
    """Use of a share of the link's bandwidth by another process for some time."""

    start_s: float
    end_s: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Arrivals and contention; the run ends at `horizon_s` or when all requests are done."""

    arrivals: Sequence[Arrival]
    horizon_s: float
    contention: Sequence[Contention] = ()

    def link_share(self, now_s: float) -> float:
        """Return the share of the link's bandwidth that other processes leave."""
        left = 1.0
        for other in self.contention:
            if other.start_s <= now_s < other.end_s:
                left *= 1 - other.share
        return left


def poisson(lengths: Lengths, phases: Sequence[tuple[float, float]], *, seed: int) -> list[Arrival]:
    """Return Poisson arrivals over consecutive phases of (seconds, requests/s).

    Raises ValueError for a phase without length or with a negative rate.
    """
    rng = random.Random(f"trace-{seed}")
    arrivals: list[Arrival] = []
    start = 0.0
    for seconds, rate in phases:
        if seconds <= 0 or rate < 0:
            raise ValueError(f"a phase of {seconds} s at {rate} requests/s: both must be above 0")
        now = start
        while rate and (now := now + rng.expovariate(rate)) < start + seconds:
            arrivals.append(lengths.draw(rng, now))
        start += seconds
    return arrivals


def all_at_once(lengths: Lengths, count: int, *, seed: int) -> list[Arrival]:
    """Return `count` requests that all arrive at time 0, which saturates the system at first."""
    rng = random.Random(f"trace-{seed}")
    return [lengths.draw(rng, 0.0) for _ in range(count)]
