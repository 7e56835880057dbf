# SPDX-License-Identifier: Apache-2.0
"""Placement MILP, the integer program that counts what stays near (ours; idea of HeLM V-B).

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
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from vllm_tiered.planner.pipeline_time import (
    NO_SLOWDOWN,
    ComputeTimes,
    Link,
    Slowdown,
    overlapped_seconds,
)
from vllm_tiered.planner.solver_output import suppress_solver_output
from vllm_tiered.weights.layout import Kind, Parameter, Sublayer, buffer_of, extent_bytes_of
from vllm_tiered.weights.placement import Placement

_MOST_MODULES = 8
_MOST_STORED_MODULES = 4
"""Number of a sublayer's modules that are placed one by one, largest first.

The other modules (experts) are placed together. With three tiers the number is smaller."""

_MOST_SECONDS = 3.0
"""Time limit of the solver, which usually takes 0.02 s; the best solution so far is then used."""

SOLVED = 1e-4
"""Relative distance to the optimum at which a solution counts as optimal."""


class Links(NamedTuple):
    """Links to the near tier, and the slowdown of concurrent transfers and compute."""

    far: Link
    storage: Link | None
    slowdown: Slowdown = NO_SLOWDOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """Choice of tiers for a sublayer's parameters, with its bytes and time."""

    far: frozenset[int]  # positions among the parameters
    stored: frozenset[int]
    near_bytes: int
    far_extent: int
    extent: int  # far and stored bytes, in a weight buffer
    seconds: float  # until compute before and this transfer are both done


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
    counts = _counts(
        choices=choices,
        sizes=[len(positions) for positions in members],
        buffers=[list(Kind).index(kind) if len(num_buffers) > 1 else 0 for kind in kinds],
        kinds=kinds if problem.stay is NearScope.LAYERS else (),
        num_buffers=num_buffers,
        near_bytes=near_bytes,
        far_bytes=problem.far_bytes,
        gap=problem.gap,
        is_even=is_even,
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


def _choices(sublayer: Sublayer, compute_before: float, links: Links) -> Iterator[_Choice]:
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
        yield _Choice(
            far=far,
            stored=stored,
            near_bytes=sublayer.num_bytes
            - sum(sublayer.parameters[index].num_bytes for index in far | stored),
            far_extent=far_extent,
            extent=far_extent + stored_extent,
            seconds=overlapped_seconds(compute_before, seconds, links.slowdown),
        )


def _counts(
    *,
    choices: Sequence[Sequence[_Choice]],
    sizes: Sequence[int],
    buffers: Sequence[int],
    kinds: Sequence[Kind],
    num_buffers: Sequence[float],
    near_bytes: int,
    far_bytes: int | None,
    gap: float,
    is_even: bool,
) -> list[list[int]] | None:
    """Return how often each choice is taken; None if nothing fits.

    The variables are the counts, then a flag for each size that buffers may have, then the number
    of sublayers that each buffer receives. A flag means that the buffers have at least that size.

    Args:
        choices: for each class, the ways to place one of its sublayers.
        sizes: for each class, the number of its sublayers.
        buffers: for each class, which of the buffer sizes must fit its sublayers.
        kinds: kind of each class, if equally many attention and FFN sublayers must stay near as a
            whole; otherwise empty.
        num_buffers: number of buffers of each size.
        near_bytes: budget of near memory.
        far_bytes: budget of far memory; None for no limit.
        gap: relative distance to the optimum at which the solver may stop.
        is_even: whether each buffer must receive the same number of sublayers.
    """
    flat = [(group, choice) for group, options in enumerate(choices) for choice in options]
    num_choices = len(flat)
    flags = _size_flags(choices, buffers, num_buffers)
    num_variables = num_choices + len(flags) + 1
    # In MiB and milliseconds, because the solver's tolerances are absolute.
    unit = 1 / (1 << 20)
    rows: list[npt.NDArray[np.float64]] = []
    low: list[float] = []
    high: list[float] = []

    def add(at_counts: Sequence[float], at_least: float, at_most: float) -> npt.NDArray[np.float64]:
        """Add a constraint on the counts; the caller sets the coefficients of the rest."""
        row = np.zeros(num_variables)
        row[:num_choices] = at_counts
        rows.append(row)
        low.append(at_least)
        high.append(at_most)
        return row

    for group, size in enumerate(sizes):
        add([at == group for at, _ in flat], size, size)
        for flag, (buffer, extent, _) in enumerate(flags, start=num_choices):
            # One constraint for all of a class's choices of this size or more. With one for each
            # choice, and the size as a variable, the relaxation is weak: the 400 programs of four
            # plans took 29 s instead of 10 s (a Xeon core, 2026-11-25).
            if buffer == buffers[group]:
                used = add([at == group and c.extent >= extent for at, c in flat], -np.inf, 0)
                used[flag] = -size
    budget = add([choice.near_bytes * unit for _, choice in flat], -np.inf, near_bytes * unit)
    budget[num_choices:-1] = [added * unit for _, _, added in flags]
    for flag in range(num_choices + 1, num_choices + len(flags)):
        if flags[flag - num_choices].buffer == flags[flag - num_choices - 1].buffer:
            larger = add([0] * num_choices, -np.inf, 0)
            larger[flag - 1], larger[flag] = -1, 1
    if is_even:
        half = add([choice.extent > 0 for _, choice in flat], 0, 0)
        half[-1] = -sum(num_buffers)
    if kinds:
        signs = [1 if kinds[group] is Kind.FFN else -1 for group, _ in flat]
        add([(not c.extent) * sign for (_, c), sign in zip(flat, signs, strict=True)], 0, 0)
    if far_bytes is not None:
        add([choice.far_extent * unit for _, choice in flat], -np.inf, far_bytes * unit)
    cost = np.zeros(num_variables)
    # Among equally fast placements, prefer the one that moves the fewest bytes.
    cost[:num_choices] = [c.seconds * 1e3 + c.extent * unit * 1e-6 for _, c in flat]
    upper = np.array([*(sizes[group] for group, _ in flat), *(1 for _ in flags), np.inf])
    integrality = np.ones(num_variables)
    integrality[-1] = is_even
    with suppress_solver_output():
        solution = milp(
            cost,
            constraints=LinearConstraint(np.array(rows), low, high),
            bounds=Bounds(0, upper),
            integrality=integrality,
            options={"time_limit": _MOST_SECONDS, "mip_rel_gap": gap},
        )
    if solution.x is None:
        return None
    numbers = iter(np.rint(solution.x[:num_choices]).astype(int).tolist())
    return [[next(numbers) for _ in options] for options in choices]


class _SizeFlag(NamedTuple):
    """Flag for buffers of at least ``extent`` bytes, with the bytes that it adds to all of them."""

    buffer: int
    extent: int
    added_bytes: float


def _size_flags(
    choices: Sequence[Sequence[_Choice]],
    buffers: Sequence[int],
    num_buffers: Sequence[float],
) -> list[_SizeFlag]:
    """Return the flags of each buffer size by ascending extents; see :func:`_counts`."""
    flags: list[_SizeFlag] = []
    for buffer, number in enumerate(num_buffers):
        received = {
            choice.extent
            for options, into in zip(choices, buffers, strict=True)
            for choice in options
            if buffer == into
        }
        ascending = sorted(received | {0})
        flags += [
            _SizeFlag(buffer, extent, number * (extent - smaller))
            for smaller, extent in itertools.pairwise(ascending)
        ]
    return flags


def _with_attention(items: list[_Choice], is_near: Sequence[bool]) -> list[_Choice]:
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


def _spread(items: list[_Choice]) -> list[_Choice]:
    """Alternate the choices over the layers, so that the load on the link is even."""
    by_choice: dict[int, list[_Choice]] = {}
    for item in items:
        by_choice.setdefault(id(item), []).append(item)
    placed = [
        ((index + 0.5) / len(group), item)
        for group in by_choice.values()
        for index, item in enumerate(group)
    ]
    return [item for _, item in sorted(placed, key=lambda pair: pair[0])]
