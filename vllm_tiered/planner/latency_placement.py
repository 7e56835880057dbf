# SPDX-License-Identifier: Apache-2.0
"""Placement with the shortest step in a memory budget (ours, after the idea of HeLM V-B).

The placement MILP (:mod:`vllm_tiered.planner.placement_milp`) chooses what stays near. It is solved
for three scopes: a part of every sublayer is offloaded; whole layers may stay near; any sublayer
may stay near, which needs larger weight buffers. For the last two scopes, the MILP does not know
that the last round through the buffers may be longer. If the buffers of a longer round do not fit,
the MILP is solved again for even rounds, and for a near budget that is smaller by the excess.

At a greater prefetch depth, transfers begin earlier. A transfer that is longer than the compute
before it then also hides behind earlier compute, if the link has idle time. That is worth one or
two more buffers if the FFN's transfers are longer than attention's compute, and attention's
transfers are shorter than the FFN's compute (HeLM's placement on Optane). At depths 2 and 3 the
MILP is solved for the fewest offloaded bytes. The pipeline model then compares all solutions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from vllm_tiered.errors import BudgetError
from vllm_tiered.planner.pipeline_time import (
    NO_SLOWDOWN,
    ComputeTimes,
    Link,
    Slowdown,
    pipeline_step_time,
    transfer_seconds,
)
from vllm_tiered.planner.placement_milp import (
    SOLVED,
    Links,
    NearScope,
    PlacementProblem,
    solve_placement,
)
from vllm_tiered.units import format_bytes
from vllm_tiered.weights.layout import Sublayer
from vllm_tiered.weights.placement import Placement, place, spill_to_storage


class SearchEffort(NamedTuple):
    """Effort of the search.

    Attributes:
        depths: prefetch depths to try.
        stays: scopes of sublayers that may stay near as a whole.
        gap: relative distance to the MILP's optimum at which the solver may stop.
    """

    depths: tuple[int, ...]
    stays: tuple[NearScope, ...]
    gap: float


FULL_EFFORT = SearchEffort(depths=(1, 2, 3), stays=tuple(NearScope), gap=SOLVED)
"""All scopes, and depths up to 3; at depth 3 attention and FFN have two buffers each."""

DEPTH_ONE_EFFORT = FULL_EFFORT._replace(depths=(1,))
"""Effort for the papers' pipeline, which has prefetch depth 1."""


def place_for_latency(
    sublayers: Sequence[Sublayer],
    times: ComputeTimes,
    link: Link,
    near_bytes: int,
    far_bytes: int | None = None,
    storage: Link | None = None,
    *,
    slowdown: Slowdown = NO_SLOWDOWN,
    effort: SearchEffort = FULL_EFFORT,
) -> Placement:
    """Return the placement with the shortest step that fits near memory, and far memory if it can.

    In the model of :mod:`vllm_tiered.planner.pipeline_time`, it is never slower than HeLM's
    placement or All-CPU if those fit, with the excess over far memory stored. It also chooses the
    prefetch depth. If no placement fits far memory, the result exceeds it.

    Args:
        sublayers: all sublayers, in the order of computation.
        times: compute times of the sublayers.
        link: link from far to near.
        near_bytes: budget for resident parameters and weight buffers.
        far_bytes: budget of far memory; None for no limit.
        storage: link from storage to near; None if weights may not be stored.
        slowdown: slowdown of compute and transfers while both run.
        effort: effort of the search.

    Raises:
        BudgetError: even the buffers of the largest sublayers do not fit.
    """
    links = Links(link, storage, slowdown)
    candidates = [place("all_far", sublayers), place("helm", sublayers)]
    candidates += [
        Placement(policy="latency", sublayers=tuple(sublayers), far=((),) * len(sublayers))
    ]
    if storage is not None and far_bytes is not None:
        candidates = [spill_to_storage(candidate, far_bytes) for candidate in candidates]
    candidates = [
        replace(c, prefetch_depth=prefetch_depth)
        for c in candidates
        for prefetch_depth in effort.depths
    ]
    candidates += _solutions(sublayers, times, links, near_bytes, far_bytes, effort)
    fitting = [candidate for candidate in candidates if candidate.near_bytes <= near_bytes]
    enough = [c for c in fitting if far_bytes is None or c.far_bytes <= far_bytes]
    if not enough and far_bytes is not None:
        # The result will exceed far memory; the caller decides what to do.
        candidates += _solutions(sublayers, times, links, near_bytes, None, effort)
        fitting = [candidate for candidate in candidates if candidate.near_bytes <= near_bytes]
    if not fitting:
        least = min(candidate.near_bytes for candidate in candidates)
        raise BudgetError(
            f"no placement fits {format_bytes(near_bytes)} of near memory: the least takes "
            f"{format_bytes(least)}, which is what always stays and the buffers of the largest "
            "sublayers; raise weights.near_gib"
        )
    best = min(
        enough or fitting,
        key=lambda candidate: (
            # Rounded, because sums of the same numbers differ in the last bits.
            round(
                pipeline_step_time(
                    transfer_seconds(candidate, link, storage),
                    times,
                    slowdown,
                    candidate.prefetch_depth,
                ).seconds,
                12,
            ),
            candidate.storage_bytes,
            candidate.far_bytes,
            candidate.buffer_bytes,
        ),
    )
    return replace(best, policy="latency")


def _solutions(
    sublayers: Sequence[Sublayer],
    times: ComputeTimes,
    links: Links,
    near_bytes: int,
    far_bytes: int | None,
    effort: SearchEffort,
) -> Iterator[Placement]:
    """Yield the solutions of the MILP for each prefetch depth and scope."""
    at_once = ComputeTimes(
        compute=(0.0,) * len(sublayers)
    )  # fewest bytes: no compute hides a transfer
    for prefetch_depth in effort.depths:
        for stay in effort.stays:
            if stay is NearScope.LAYERS and prefetch_depth % 2 == 0:
                continue  # attention and FFN alternate only in an even number of buffers
            problem = PlacementProblem(
                sublayers=sublayers,
                times=times if prefetch_depth == 1 else at_once,
                links=links,
                far_bytes=far_bytes,
                gap=effort.gap,
                stay=stay,
                prefetch_depth=prefetch_depth,
            )
            yield from _fitted(problem, near_bytes)


def _fitted(problem: PlacementProblem, near_bytes: int) -> Iterator[Placement]:
    """Yield the solution, and smaller ones if the buffers of a longer last round do not fit."""
    solved = solve_placement(problem, near_bytes)
    if solved is None:
        return
    yield solved
    excess = solved.near_bytes - near_bytes
    if excess <= 0:
        return
    for budget, is_even in ((near_bytes, True), (near_bytes - excess, False)):
        other = solve_placement(problem, budget, is_even=is_even)
        if other is not None:
            yield other
