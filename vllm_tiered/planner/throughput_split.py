# SPDX-License-Identifier: Apache-2.0
"""Memory split between weights and KV cache for throughput (ours, after HeLM V-C).

At one end, All-CPU gives all near memory to the KV cache, so that many requests share each
transferred weight. At the other end, the KV cache has only what the workload can use, and weights
have the rest. In between, each further request takes near memory for its KV, so transfers are
longer:

    near memory   │ resident weights │ buffers │ KV of n requests │     n = 1, 2, ... that fit
    tokens/s      n * output / (output * decode step(n, placement) + prefills(n, placement))

For each number of requests, :mod:`vllm_tiered.planner.latency_placement` chooses what stays near,
and :mod:`vllm_tiered.planner.serving` predicts the result. The search tries a coarse grid first,
then numbers around the best one. The papers' placements are candidates too, so the split is never
worse than theirs under its own model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from vllm_tiered.planner.latency_placement import SearchEffort
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.memory_split import (
    BASELINES,
    MemoryBudget,
    MemorySplit,
    Target,
    baseline,
    milp_placement,
    milp_placements,
    no_room,
    pick_split,
    split_for_latency,
    split_with,
)
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.placement_milp import NearScope
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.step_time import compute_times
from vllm_tiered.weights.placement import Placement

_GRID = 16
"""Numbers of requests to try per round; each takes 0.08 s for 96 layers (a Xeon core)."""

_SEARCH = SearchEffort(depths=(1,), stays=(NearScope.NONE, NearScope.ANY), gap=1e-3)
"""Effort of comparing numbers of requests; the best number gets the full effort.

The wider gap takes a third off the time with two tiers. Predictions are less accurate."""

_SAME = 1e-9
"""Relative difference up to which scores count as equal, as they are sums in different orders."""


def split_for(
    target: Target, shape: ModelShape, machine: Machine, load: Workload, room: MemoryBudget
) -> MemorySplit:
    """Return the better of both plans for the target; the target's own if they are equally good.

    Raises:
        BudgetError: no placement fits together with the KV cache of one request.
    """
    plans = [
        split_for_latency(shape, machine, load, room),
        split_for_throughput(shape, machine, load, room),
    ]
    return pick_split(target, plans)


def split_for_throughput(
    shape: ModelShape, machine: Machine, load: Workload, room: MemoryBudget
) -> MemorySplit:
    """Return the split with the most predicted output tokens/s.

    Raises:
        BudgetError: no placement fits together with the KV cache of one request.
    """
    search = _Search(shape, machine, load, room)
    for name in BASELINES:
        search.consider(baseline(name, shape))
    score: dict[int, float] = {}
    for requests in _coarse_to_fine(load.max_requests_in(shape, room.near_bytes), score):
        if requests not in score:
            times = compute_times(shape, machine, load.decode(requests))
            kv_bytes = load.kv_bytes(shape, requests)
            score[requests] = search.consider(
                milp_placement(shape, machine, times, room, kv_bytes, _SEARCH)
            )
    if score:
        best = max(score, key=score.__getitem__)
        for placement in milp_placements(shape, machine, load, room, best):
            search.consider(placement)
    if search.best is None:
        raise no_room(shape, load, room)
    return search.best


class _Search:
    """State of the search, with the best split so far."""

    def __init__(
        self, shape: ModelShape, machine: Machine, load: Workload, room: MemoryBudget
    ) -> None:
        self._given = (shape, machine, load, room)
        self.best: MemorySplit | None = None

    def consider(self, placement: Placement | None) -> float:
        """Return the placement's tokens/s, or 0 if it does not fit, and keep the best split."""
        split = split_with(placement, *self._given) if placement else None
        if split is None:
            return 0.0
        if self.best is None or _rank(split) > _rank(self.best):
            named = replace(split.placement, policy="throughput")
            self.best = replace(split, placement=named)
        return split.served.tokens_per_s


def _rank(split: MemorySplit) -> tuple[float, int]:
    """Return the sort key: tokens/s, then the bytes of the KV cache."""
    return split.served.tokens_per_s, split.kv_bytes


def _coarse_to_fine(most: int, score: Mapping[int, float]) -> Iterator[int]:
    """Yield all numbers if they are few, otherwise some in equal ratios and those around the best.

    Often many numbers are equally good, because the same weights stay near or the link is the
    bottleneck. A better number, if there is one, lies between the last of them and the next number,
    which is worse.

    Args:
        most: the largest number.
        score: score of each number that was yielded before; the caller fills it.
    """
    low, high = 1, most
    while high >= low:
        numbers = _spread(low, high)
        yield from numbers
        if len(numbers) == high - low + 1:
            return
        best = max(score[number] for number in numbers)
        best -= _SAME * abs(best)
        at = max(index for index, number in enumerate(numbers) if score[number] >= best)
        low = numbers[max(at - 1, 0)]
        high = numbers[min(at + 1, len(numbers) - 1)]


def _spread(low: int, high: int) -> list[int]:
    """Return at most ``_GRID`` numbers from low to high, in equal ratios if they are far apart."""
    if high - low < _GRID:
        return list(range(low, high + 1))
    ratio = (high / low) ** (1 / (_GRID - 1))
    return sorted({round(low * ratio**step) for step in range(_GRID)} | {low, high})
