# SPDX-License-Identifier: Apache-2.0
"""The near set that makes a step shortest (ours; HeLM V-B is its idea).

What stays near is an integer program's solution (:mod:`vllm_tiered.planner.placement_milp`). It is
solved where something of every sublayer is far, where whole layers may be near, and where any
sublayer may, which asks for larger slots. The last round through the slots may be longer, which is
not in the last two: where its slots do not fit, even rounds are tried, and a budget without them.

With more slots transfers begin earlier, and one that is longer than the compute before it hides
behind what comes before that too, as long as the link has time somewhere. Where attention's
transfers are shorter than the FFN's compute and the FFN's longer than attention's, as with HeLM's
placement on Optane, that is worth a slot or two. Two and three ahead the program is also solved
for the fewest bytes, and the pipeline's model says which of all is the best.
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
    """How much is tried.

    Attributes:
        depths: how many far sublayers may be on their way while one computes.
        stays: which sublayers may be wholly near.
        gap: how far from a program's best, in parts of it, is near enough.
    """

    depths: tuple[int, ...]
    stays: tuple[NearScope, ...]
    gap: float


FULL_EFFORT = SearchEffort(depths=(1, 2, 3), stays=tuple(NearScope), gap=SOLVED)
"""With three ahead attention and FFN take turns in two slots each."""

DEPTH_ONE_EFFORT = FULL_EFFORT._replace(depths=(1,))
"""As the papers' pipeline."""


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
    """The placement with the shortest step that fits near memory, and far memory where it can.

    It says how many slots it takes too (``Placement.ahead``).

    Never slower, in the model of :mod:`vllm_tiered.planner.pipeline_time`, than HeLM's or All-CPU's
    where those fit, with what exceeds far memory on storage.

    Args:
        times: compute of each of ``sublayers``.
        near_bytes: for parameters and slots.
        far_bytes: None for as much as it takes.
        storage: storage to near, if weights may be stored.
        slowdown: what compute and transfers do to each other.
        effort: how much is tried.

    Raises:
        BudgetError: even the largest sublayer's slots do not fit.
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
        # Too much will be far: the caller knows what may be done about that.
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
            # Sums of the same numbers differ in the last bits.
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
    """For each number of slots, and for what may be wholly near."""
    at_once = ComputeTimes(compute=(0.0,) * len(sublayers))  # the fewest bytes: nothing hides them
    for prefetch_depth in effort.depths:
        for stay in effort.stays:
            if stay is NearScope.LAYERS and prefetch_depth % 2 == 0:
                continue  # attention and FFN take turns in slots of an even number only
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
    """Its solution; the slots of a longer last round may make that exceed near memory."""
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
