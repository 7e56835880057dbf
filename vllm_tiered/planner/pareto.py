# SPDX-License-Identifier: Apache-2.0
"""Plans that no other plan beats in all of latency, responsiveness and throughput."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_tiered.planner.expert_slots import NAME, SlotsFit
from vllm_tiered.planner.fit import Fit, NoFit
from vllm_tiered.planner.serving import ServingEstimate


def pareto_front(
    results: Sequence[Fit | NoFit], slots: SlotsFit | NoFit | None = None
) -> list[tuple[str, ServingEstimate]]:
    """Return the plans that no other beats, by ascending time between tokens.

    One plan beats another if it is as good in time to first token, in time between tokens and in
    tokens/s, and better in one of them.

    Args:
        results: the result of each placement; each of its numbers of requests is a plan.
        slots: slots for experts.
    """
    front: list[tuple[str, ServingEstimate]] = []
    for name, served in sorted(_plans(results, slots), key=lambda plan: _costs(plan[1])):
        costs = _costs(served)
        if not any(_is_as_good(_costs(other), costs) for _, other in front):
            front.append((name, served))
    return front


def _plans(
    results: Sequence[Fit | NoFit], slots: SlotsFit | NoFit | None
) -> Iterator[tuple[str, ServingEstimate]]:
    for result in results:
        if isinstance(result, Fit):
            for served in result.batches:
                yield result.placement, served
            if result.swapped:
                yield f"{result.placement}, KV swapped", result.swapped.served
    if isinstance(slots, SlotsFit):
        yield NAME, slots.alone
        yield NAME, slots.served
        if slots.swapped:
            yield f"{NAME}, KV swapped", slots.swapped.served


def _costs(served: ServingEstimate) -> tuple[float, float, float]:
    # Rounded, as equal plans are computed in different orders.
    costs = (served.decode_seconds, served.prefill_seconds, -served.tokens_per_s)
    first, second, third = (float(f"{cost:.6g}") for cost in costs)
    return first, second, third


def _is_as_good(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
