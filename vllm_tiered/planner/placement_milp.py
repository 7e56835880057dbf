# SPDX-License-Identifier: Apache-2.0
"""Placement MILP: the placement that minimises an integer program (ours; idea of HeLM V-B).

Sublayer i computes while sublayer i+1 is in transfer. A step takes the sum over sublayers of
max(compute i, transfer i+1), and longer if compute and transfers slow each other. Layers are alike,
so the variables are not the tiers of parameters, but counts:

    n[class, choice]     how many sublayers of a class have these parameters near, these far, ...
    minimise             sum of n[class, choice] * (compute before, overlapped with the transfer)
    subject to           near bytes + the weight buffers <= the near budget
                         far bytes <= the far budget

A class is a set of sublayers of one kind, with equal parameters, that follow compute of equal
length. A buffer fits the largest sublayer that it receives, which takes a flag for each size that
it may have. Offloaded sublayers take turns in the buffers. If the number of buffers is even, and
only whole layers may stay near, attention and FFN alternate: each kind has half of the buffers.
Otherwise every buffer must fit both kinds.

This module makes the choices of each class, and a placement from the counts that
:mod:`vllm_tiered.planner.choice_counts` finds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from vllm_tiered.planner.choice_counts import Choice, CountProblem, count_choices
from vllm_tiered.planner.pipeline_time import (
    NO_SLOWDOWN,
    ComputeTimes,
    Link,
    Slowdown,
    overlapped_seconds,
)
from vllm_tiered.weights.layout import Kind, Parameter, Sublayer, buffer_of, extent_bytes_of
from vllm_tiered.weights.placement import Placement

_MOST_MODULES = 8
_MOST_STORED_MODULES = 4
"""Number of a sublayer's modules that are placed one by one, largest first.

The other modules (experts) are placed together. With three tiers the number is smaller."""

SOLVED = 1e-4
"""Relative distance to the optimum at which a solution counts as optimal."""


class Links(NamedTuple):
    """Links to the near tier, and the slowdown of concurrent transfers and compute."""

    far: Link
    storage: Link | None
    slowdown: Slowdown = NO_SLOWDOWN


class NearScope(Enum):
    """Scope of sublayers that may stay near as a whole."""

    NONE = "none"
    LAYERS = "both of a layer"
    ANY = "any"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementProblem:
    """Placement problem without the near budget.

    Attributes:
        sublayers: all sublayers, in the order of computation.
        times: compute times that transfers hide behind.
        links: links to the near tier.
        far_bytes: budget of far memory; None for no limit.
        gap: relative distance to the optimum at which the solver may stop.
        stay: which sublayers may stay near as a whole.
        prefetch_depth: offloaded sublayers in transfer while one computes.
    """

    sublayers: Sequence[Sublayer]
    times: ComputeTimes
    links: Links
    far_bytes: int | None
    gap: float = SOLVED
    stay: NearScope
    prefetch_depth: int = 1


def solve_placement(
    problem: PlacementProblem, near_bytes: int, *, is_even: bool = False
) -> Placement | None:
    """Return the placement that minimises the program's sum; None if nothing fits.

    Args:
        problem: the problem to solve.
        near_bytes: budget for resident parameters and weight buffers.
        is_even: whether each buffer must receive the same number of offloaded sublayers.
    """
    sublayers, times = problem.sublayers, problem.times
    members = _classes(sublayers, times)
    choices = [
        [
            choice
            for choice in _choices(
                sublayers[positions[0]], _before(times, positions[0]), problem.links
            )
            if choice.extent or problem.stay is not NearScope.NONE
        ]
        for positions in members
    ]
    kinds = [sublayers[positions[0]].kind for positions in members]
    num_buffers = _num_buffers(problem)
    counts = count_choices(
        CountProblem(
            choices=choices,
            sizes=[len(positions) for positions in members],
            buffers=[list(Kind).index(kind) if len(num_buffers) > 1 else 0 for kind in kinds],
            kinds=kinds if problem.stay is NearScope.LAYERS else (),
            num_buffers=num_buffers,
            near_bytes=near_bytes,
            far_bytes=problem.far_bytes,
            is_even=is_even,
        ),
        problem.gap,
    )
    if counts is None:
        return None
    far: list[tuple[Parameter, ...]] = [()] * len(sublayers)
    stored: list[tuple[Parameter, ...]] = [()] * len(sublayers)
    near_layers: set[int] = set()
    classes = zip(members, choices, counts, kinds, strict=True)
    for positions, options, numbers, kind in sorted(classes, key=lambda one: one[3].value):
        chosen = [
            option for option, number in zip(options, numbers, strict=True) for _ in range(number)
        ]
        in_order = _spread(chosen)
        if problem.stay is NearScope.LAYERS and kind is Kind.FFN:
            in_order = _with_attention(
                in_order, [sublayers[at].layer in near_layers for at in positions]
            )
        for position, option in zip(positions, in_order, strict=True):
            if not option.extent:
                near_layers.add(sublayers[position].layer)
            parameters = sublayers[position].parameters
            far[position] = tuple(parameters[index] for index in sorted(option.far))
            stored[position] = tuple(parameters[index] for index in sorted(option.stored))
    return Placement(
        policy="latency",
        sublayers=tuple(sublayers),
        far=tuple(far),
        stored=tuple(stored) if any(stored) else (),
        prefetch_depth=problem.prefetch_depth,
    )


def _num_buffers(problem: PlacementProblem) -> tuple[float, ...]:
    """Return the number of buffers of each kind, or of all if a buffer may receive both kinds.

    If no sublayer may stay near as a whole, the buffer of each sublayer is known. Otherwise the
    last round may be longer and have more buffers, which this function does not count.
    """
    if problem.stay is not NearScope.NONE:
        number = problem.prefetch_depth + 1
        is_shared = problem.stay is NearScope.ANY or number % 2
        return (number,) if is_shared else (number / 2, number / 2)
    order = list(Kind)
    holds: dict[int, set[int]] = {}
    for position, sublayer in enumerate(problem.sublayers):
        buffer = buffer_of(position, len(problem.sublayers), problem.prefetch_depth)
        holds.setdefault(buffer, set()).add(order.index(sublayer.kind))
    if any(len(kinds) > 1 for kinds in holds.values()):
        return (len(holds),)
    num_attention = sum(kinds == {0} for kinds in holds.values())
    return num_attention, len(holds) - num_attention


def _classes(sublayers: Sequence[Sublayer], times: ComputeTimes) -> list[list[int]]:
    """Return the positions of the sublayers of each class."""
    classes: dict[object, list[int]] = {}
    for position, sublayer in enumerate(sublayers):
        sizes = tuple((p.num_bytes, p.role) for p in sublayer.parameters)
        key = (sublayer.kind, sizes, round(_before(times, position), 9))
        classes.setdefault(key, []).append(position)
    return list(classes.values())


def _before(times: ComputeTimes, position: int) -> float:
    """Return the compute that overlaps a transfer; for the first sublayer, with the step's rest."""
    return times.compute[position - 1] + (0.0 if position else times.rest)


def _choices(sublayer: Sublayer, compute_before: float, links: Links) -> Iterator[Choice]:
    """Yield every way to place the modules in tiers; a matrix and its bias share a tier."""
    modules: dict[str, list[int]] = {}
    for index, parameter in enumerate(sublayer.parameters):
        if parameter.may_move:
            modules.setdefault(parameter.name.rpartition(".")[0], []).append(index)
    by_size = sorted(
        modules.values(), key=lambda group: -sum(sublayer.parameters[i].num_bytes for i in group)
    )
    most = _MOST_STORED_MODULES if links.storage else _MOST_MODULES
    groups, others = by_size[:most], by_size[most:]
    if others:
        groups.append([index for group in others for index in group])
    tiers = ("near", "far", "stored") if links.storage else ("near", "far")
    for tier_of_group in itertools.product(tiers, repeat=len(groups)):
        far, stored = (
            frozenset(
                itertools.chain.from_iterable(
                    group
                    for group, chosen_tier in zip(groups, tier_of_group, strict=True)
                    if chosen_tier == tier
                )
            )
            for tier in ("far", "stored")
        )
        far_extent, stored_extent = (
            extent_bytes_of(sublayer.parameters[index] for index in sorted(chosen))
            for chosen in (far, stored)
        )
        seconds = links.far.seconds(far_extent)
        if links.storage:
            seconds += links.storage.seconds(stored_extent)
        yield Choice(
            far=far,
            stored=stored,
            near_bytes=sublayer.num_bytes
            - sum(sublayer.parameters[index].num_bytes for index in far | stored),
            far_extent=far_extent,
            extent=far_extent + stored_extent,
            seconds=overlapped_seconds(compute_before, seconds, links.slowdown),
        )


def _with_attention(items: list[Choice], is_near: Sequence[bool]) -> list[Choice]:
    """Order FFNs so that an FFN is near as a whole where its layer's attention is.

    If layers differ (dense and sparse FFNs), there may be too few such FFNs. Then the buffers are
    larger, and the caller drops the solution if it does not fit.
    """
    near = [item for item in items if not item.extent]
    others = [item for item in items if item.extent]
    arranged = []
    for index, first in enumerate(is_near):
        left = len(is_near) - index
        wants_near = (first and near) or len(near) >= left
        arranged.append((near if wants_near or not others else others).pop(0))
    return arranged


def _spread(items: list[Choice]) -> list[Choice]:
    """Alternate the choices over the layers, so that the load on the link is even."""
    by_choice: dict[int, list[Choice]] = {}
    for item in items:
        by_choice.setdefault(id(item), []).append(item)
    placed = [
        ((index + 0.5) / len(group), item)
        for group in by_choice.values()
        for index, item in enumerate(group)
    ]
    return [item for _, item in sorted(placed, key=lambda pair: pair[0])]
