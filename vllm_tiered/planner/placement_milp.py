# SPDX-License-Identifier: Apache-2.0
"""The integer program that counts what stays near (ours; HeLM V-B is its idea).

Sublayer i computes while sublayer i+1 arrives, so a step takes the sum over sublayers of
max(compute i, transfer i+1), and more where each slows the other. Layers are alike, so the program
does not choose parameters but counts:

    n[class, choice]     how many sublayers of a class have these parameters near, these far, ...
    minimise             sum of n[class, choice] * (compute before, with transfer of the rest)
    subject to           near bytes + the slots <= the near budget
                         far bytes <= the far budget

A class is a kind of sublayer with the same parameters behind a compute of the same length. A slot
holds the largest sublayer that passes through it, which is a constraint for each choice in use. As
far sublayers take turns in the slots, attention has every other one and the FFN the others, if
slots are even in number and sublayers are wholly near by layers only; else all must hold either.
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
"""Of more modules in a sublayer (experts) the largest are chosen singly, the others together.
Three tiers to choose from allow fewer than two."""

_MOST_SECONDS = 3.0
"""Of a program, which takes 0.02 s; then the best so far is taken."""

SOLVED = 1e-4
"""How far from the program's best, in parts of it, counts as the best."""


class Links(NamedTuple):
    """To the near tier, and what transfers and compute do to each other."""

    far: Link
    storage: Link | None
    slowdown: Slowdown = NO_SLOWDOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """What may be far or stored in a sublayer, and what follows from it."""

    far: frozenset[int]  # positions among the parameters
    stored: frozenset[int]
    near_bytes: int
    far_extent: int
    extent: int  # in a slot: of both
    seconds: float  # of the sublayer before, with this one's transfer beside it


class NearScope(Enum):
    """Which sublayers may be wholly near."""

    NONE = "none"
    LAYERS = "both of a layer"
    ANY = "any"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementProblem:
    """What is solved for a near budget.

    Attributes:
        times: compute that transfers hide behind.
        far_bytes: None for as much as it takes.
        gap: how far from the best, in parts of it, is near enough.
        stay: which sublayers may be wholly near.
        ahead: far sublayers on their way while one computes.
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
    """The placement with the least sum in a near budget; None if nothing fits.

    Args:
        is_even: as many far sublayers pass through one slot as through another.
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
    is_any, num_slots = _slots(problem)
    counts = _counts(
        choices=choices,
        sizes=[len(positions) for positions in members],
        slots=[[0, 1] if is_any else [list(Kind).index(kind)] for kind in kinds],
        kinds=kinds if problem.stay is NearScope.LAYERS else (),
        num_slots=num_slots,
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


def _slots(problem: PlacementProblem) -> tuple[bool, tuple[float, float]]:
    """Whether any slot may have to hold attention and FFN, and how many there are of each.

    Where nothing may stay it is known which sublayer passes through which slot; else a last round
    may be longer, and have more.
    """
    if problem.stay is not NearScope.NONE:
        each = (problem.prefetch_depth + 1) / 2
        return problem.stay is NearScope.ANY or problem.prefetch_depth % 2 == 0, (each, each)
    order = list(Kind)
    holds: dict[int, set[int]] = {}
    for position, sublayer in enumerate(problem.sublayers):
        slot = buffer_of(position, len(problem.sublayers), problem.prefetch_depth)
        holds.setdefault(slot, set()).add(order.index(sublayer.kind))
    if any(len(kinds) > 1 for kinds in holds.values()):
        return True, (len(holds) / 2, len(holds) / 2)
    num_attention = sum(kinds == {0} for kinds in holds.values())
    return False, (num_attention, len(holds) - num_attention)


def _classes(sublayers: Sequence[Sublayer], times: ComputeTimes) -> list[list[int]]:
    """Positions of sublayers that are alike."""
    classes: dict[object, list[int]] = {}
    for position, sublayer in enumerate(sublayers):
        sizes = tuple((p.num_bytes, p.role) for p in sublayer.parameters)
        key = (sublayer.kind, sizes, round(_before(times, position), 9))
        classes.setdefault(key, []).append(position)
    return list(classes.values())


def _before(times: ComputeTimes, position: int) -> float:
    """Seconds beside which the sublayer arrives; the first one has the rest of the step too."""
    return times.compute[position - 1] + (0.0 if position else times.rest)


def _choices(sublayer: Sublayer, compute_before: float, links: Links) -> Iterator[_Choice]:
    """Every way to give the modules to the tiers: a matrix goes with its bias."""
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
    for homes in itertools.product(tiers, repeat=len(groups)):
        far, stored = (
            frozenset(
                itertools.chain.from_iterable(
                    group for group, home in zip(groups, homes, strict=True) if home == tier
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
    slots: Sequence[Sequence[int]],
    kinds: Sequence[Kind],
    num_slots: tuple[float, float],
    near_bytes: int,
    far_bytes: int | None,
    gap: float,
    is_even: bool,
) -> list[list[int]] | None:
    """How often each choice is taken; None if nothing fits.

    Args:
        slots: for each class, which of two sizes must hold its sublayers.
        kinds: of each class, if as much attention as FFN is wholly near; else none.
        num_slots: of each of the two sizes.
        far_bytes: None for as much as it takes.
        is_even: as many sublayers pass through one slot as through another.

    Variables: the counts, then a flag for each that is not 0, then the two sizes of slots in bytes,
    then the number of sublayers that pass through one of them.
    """
    flat = [(group, choice) for group, options in enumerate(choices) for choice in options]
    num_choices = len(flat)
    num_sizes = len(Kind)
    num_variables = 2 * num_choices + num_sizes + 1
    # In MiB and milliseconds: the solver's tolerances are absolute.
    unit = 1 / (1 << 20)
    rows: list[npt.NDArray[np.float64]] = []
    low: list[float] = []
    high: list[float] = []

    def add(row: npt.NDArray[np.float64], at_least: float, at_most: float) -> None:
        rows.append(row)
        low.append(at_least)
        high.append(at_most)

    for group, size in enumerate(sizes):
        row = np.zeros(num_variables)
        for index, (at, _) in enumerate(flat):
            row[index] = at == group
        add(row, size, size)
    budget = np.zeros(num_variables)
    for index, (group, choice) in enumerate(flat):
        budget[index] = choice.near_bytes * unit
        used = np.zeros(num_variables)
        used[index], used[num_choices + index] = 1, -sizes[group]
        add(used, -np.inf, 0)
        for slot in slots[group]:
            holds = np.zeros(num_variables)
            holds[num_choices + index] = choice.extent * unit
            holds[2 * num_choices + slot] = -1
            add(holds, -np.inf, 0)
    budget[2 * num_choices : -1] = num_slots
    add(budget, -np.inf, near_bytes * unit)
    if is_even:
        half = np.zeros(num_variables)
        half[:num_choices] = [choice.extent > 0 for _, choice in flat]
        half[-1] = -sum(num_slots)
        add(half, 0, 0)
    if kinds:
        pairs = np.zeros(num_variables)
        pairs[:num_choices] = [
            (not choice.extent) * (1 if kinds[group] is Kind.FFN else -1) for group, choice in flat
        ]
        add(pairs, 0, 0)
    if far_bytes is not None:
        far = np.zeros(num_variables)
        far[:num_choices] = [choice.far_extent * unit for _, choice in flat]
        add(far, -np.inf, far_bytes * unit)
    cost = np.zeros(num_variables)
    cost[:num_choices] = [choice.seconds * 1e3 for _, choice in flat]
    # Of placements as fast the one that moves least.
    cost[:num_choices] += [choice.extent * unit * 1e-6 for _, choice in flat]
    upper = np.concatenate(
        [[sizes[group] for group, _ in flat], np.ones(num_choices), np.full(num_sizes + 1, np.inf)]
    )
    integrality = np.concatenate([np.ones(2 * num_choices), np.zeros(num_sizes), [is_even]])
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


def _with_attention(items: list[_Choice], is_near: Sequence[bool]) -> list[_Choice]:
    """FFNs that are wholly near in the layers whose attention is, as far as there are as many.

    Where layers differ (dense and sparse FFNs) there may not be; slots are larger then, and what
    does not fit is not taken.
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
    """Different choices alternate over the layers, so that the link's load is even."""
    by_choice: dict[int, list[_Choice]] = {}
    for item in items:
        by_choice.setdefault(id(item), []).append(item)
    placed = [
        ((index + 0.5) / len(group), item)
        for group in by_choice.values()
        for index, item in enumerate(group)
    ]
    return [item for _, item in sorted(placed, key=lambda pair: pair[0])]
