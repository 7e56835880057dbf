# SPDX-License-Identifier: Apache-2.0
"""Near memory split between weights and the KV cache, for throughput (ours; HeLM V-C is its idea).

All-CPU gives the KV cache everything: many requests share each arriving weight. That is one end.
At the other the KV cache has what the load can use; more of it would lie idle while weights are
far. In between a request more costs the bytes of its KV, and so longer transfers:

    near memory   │ weights near │ slots │ KV of n requests │        n = 1, 2, ... that fit
    tokens/s      n * output / (output * decode step(n, placement) + prefills(n, placement))

For a number of requests :mod:`vllm_tiered.planner.latency_placement` chooses what stays near,
and the prediction of :mod:`vllm_tiered.planner.serving` says what that gives. Numbers are searched
coarsely first, then around the best. The placements of the papers are candidates too, so under its
own model the split is never worse than those.
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
    near_set,
    near_sets,
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
"""Numbers of requests tried at a time; one takes 0.08 s for 96 layers (a core of a Xeon)."""

_SEARCH = SearchEffort(depths=(1,), stays=(NearScope.NONE, NearScope.ANY), gap=3e-3)
"""Of each number's near set while numbers are compared; the best number's is solved out. Three
tiers are searched in half the time, and predictions are off by more than that."""

_SAME = 1e-9
"""By which equal scores may differ, as they are sums."""


def split_for(
    target: Target, shape: ModelShape, machine: Machine, load: Workload, room: MemoryBudget
) -> MemorySplit:
    """The better of both plans at the target, its own where they are as good.

    Raises:
        BudgetError: no placement fits beside the KV cache of one request.
    """
    plans = [
        split_for_latency(shape, machine, load, room),
        split_for_throughput(shape, machine, load, room),
    ]
    return pick_split(target, plans)


def split_for_throughput(
    shape: ModelShape, machine: Machine, load: Workload, room: MemoryBudget
) -> MemorySplit:
    """The split with the most predicted output tokens/s.

    Raises:
        BudgetError: no placement fits beside the KV cache of one request.
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
                near_set(shape, machine, times, room, kv_bytes, _SEARCH)
            )
    if score:
        best = max(score, key=score.__getitem__)
        for placement in near_sets(shape, machine, load, room, best):
            search.consider(placement)
    if search.best is None:
        raise no_room(shape, load, room)
    return search.best


class _Search:
    """The best split so far."""

    def __init__(
        self, shape: ModelShape, machine: Machine, load: Workload, room: MemoryBudget
    ) -> None:
        self._given = (shape, machine, load, room)
        self.best: MemorySplit | None = None

    def consider(self, placement: Placement | None) -> float:
        """Its tokens/s; 0 where it does not fit."""
        split = split_with(placement, *self._given) if placement else None
        if split is None:
            return 0.0
        if self.best is None or _rank(split) > _rank(self.best):
            named = replace(split.placement, policy="throughput")
            self.best = replace(split, placement=named)
        return split.served.tokens_per_s


def _rank(split: MemorySplit) -> tuple[float, int]:
    """More tokens/s; of splits as fast the one that leaves more to the KV cache."""
    return split.served.tokens_per_s, split.kv_bytes


def _coarse_to_fine(most: int, score: Mapping[int, float]) -> Iterator[int]:
    """All numbers if they are few; else some in equal ratios, then those around the best.

    Often many are equally good, as the same weights stay near or the link sets the pace. What is
    better, if anything, lies behind the last of them, before the next that is worse.

    Args:
        score: of each number that was given before, filled by the caller.
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
    """Up to ``_GRID`` numbers between, and both, in equal ratios where they are far apart."""
    if high - low < _GRID:
        return list(range(low, high + 1))
    ratio = (high / low) ** (1 / (_GRID - 1))
    return sorted({round(low * ratio**step) for step in range(_GRID)} | {low, high})
