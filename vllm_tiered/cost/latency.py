# SPDX-License-Identifier: Apache-2.0
"""The near set that makes a step shortest, as an integer program (ours; HeLM V-B is its idea).

Sublayer i computes while sublayer i+1 arrives, so a step takes the sum over sublayers of
max(compute i, transfer i+1). Layers are alike, so the program does not choose parameters but
counts:

    n[class, choice]     how many sublayers of a class keep this choice of its parameters near
    minimise             sum of n[class, choice] * max(compute before, transfer of the rest)
    subject to           near bytes + the two slots <= the budget

A class is a kind of sublayer with the same parameters behind a compute of the same length. A slot
holds the largest sublayer that passes through it, which is a constraint for each choice in use. As
far sublayers take turns in the slots, attention has one and the FFN the other if none is wholly
near; else both must hold either. Both programs are solved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from vllm_tiered.cost.pipeline import Link, StepTimes, step_time, transfer_seconds
from vllm_tiered.cost.weights import Kind, Parameter, Placement, Sublayer, extent_bytes, place
from vllm_tiered.errors import BudgetError
from vllm_tiered.units import format_bytes

_MOST_MODULES = 8
"""Of more modules in a sublayer (experts) the largest are chosen singly, the others together."""

_ATTEMPTS = 3
"""The number of far sublayers decides about a third slot, which no program knows beforehand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """What may be far in a sublayer, and what follows from it."""

    far: frozenset[int]  # positions among the parameters
    near_bytes: int
    extent: int
    seconds: float  # of the sublayer before, with this one's transfer beside it


def place_for_latency(
    sublayers: Sequence[Sublayer],
    times: StepTimes,
    link: Link,
    near_bytes: int,
    far_bytes: int | None = None,
) -> Placement:
    """The placement with the shortest step that fits near memory, and far memory where it can.

    Never slower, in the model of :mod:`vllm_tiered.cost.pipeline`, than HeLM's or All-CPU's where
    those fit.

    Args:
        times: compute of each of ``sublayers``.
        near_bytes: for parameters and slots.
        far_bytes: None for as much as it takes.

    Raises:
        BudgetError: even the largest sublayer's slots do not fit.
    """
    candidates = [place("all_far", sublayers), place("helm", sublayers)]
    candidates += [
        Placement(policy="latency", sublayers=tuple(sublayers), far=((),) * len(sublayers))
    ]
    for may_stay in (False, True):
        budget = near_bytes
        for _ in range(_ATTEMPTS):
            solved = _solve(sublayers, times, link, budget, may_stay=may_stay)
            if solved is None:
                break
            candidates.append(solved)
            if solved.near_bytes <= near_bytes:
                break
            budget -= solved.near_bytes - near_bytes
    fitting = [candidate for candidate in candidates if candidate.near_bytes <= near_bytes]
    if not fitting:
        least = min(candidate.near_bytes for candidate in candidates)
        raise BudgetError(
            f"no placement fits {format_bytes(near_bytes)} of near memory: the least takes "
            f"{format_bytes(least)}, which is what always stays and the slots for the largest "
            "sublayers; raise weights.near_gib"
        )
    enough = [c for c in fitting if far_bytes is None or c.far_bytes <= far_bytes]
    best = min(
        enough or fitting,
        key=lambda candidate: (
            step_time(transfer_seconds(candidate, link), times).seconds,
            candidate.far_bytes,
        ),
    )
    return Placement(policy="latency", sublayers=best.sublayers, far=best.far)


def _solve(
    sublayers: Sequence[Sublayer],
    times: StepTimes,
    link: Link,
    near_bytes: int,
    *,
    may_stay: bool,
) -> Placement | None:
    """With or without sublayers of which nothing is far."""
    members = _classes(sublayers, times)
    choices = [
        [
            choice
            for choice in _choices(sublayers[positions[0]], times.compute[positions[0] - 1], link)
            if choice.extent or may_stay
        ]
        for positions in members
    ]
    kinds = [sublayers[positions[0]].kind for positions in members]
    counts = _counts(
        choices=choices,
        sizes=[len(positions) for positions in members],
        slots=[[0, 1] if may_stay else [list(Kind).index(kind)] for kind in kinds],
        near_bytes=near_bytes,
    )
    if counts is None:
        return None
    far: list[tuple[Parameter, ...]] = [()] * len(sublayers)
    for positions, options, numbers in zip(members, choices, counts, strict=True):
        chosen = itertools.chain.from_iterable(
            itertools.repeat(option, number)
            for option, number in zip(options, numbers, strict=True)
        )
        for position, option in zip(positions, _spread(list(chosen)), strict=True):
            parameters = sublayers[position].parameters
            far[position] = tuple(parameters[index] for index in sorted(option.far))
    return Placement(policy="latency", sublayers=tuple(sublayers), far=tuple(far))


def _classes(sublayers: Sequence[Sublayer], times: StepTimes) -> list[list[int]]:
    """Positions of sublayers that are alike."""
    classes: dict[object, list[int]] = {}
    for position, sublayer in enumerate(sublayers):
        sizes = tuple((p.num_bytes, p.role) for p in sublayer.parameters)
        key = (sublayer.kind, sizes, round(times.compute[position - 1], 9))
        classes.setdefault(key, []).append(position)
    return list(classes.values())


def _choices(sublayer: Sublayer, compute_before: float, link: Link) -> Iterator[_Choice]:
    """Every set of modules that may be far: a matrix goes with its bias."""
    modules: dict[str, list[int]] = {}
    for index, parameter in enumerate(sublayer.parameters):
        if parameter.may_move:
            modules.setdefault(parameter.name.rpartition(".")[0], []).append(index)
    by_size = sorted(
        modules.values(), key=lambda group: -sum(sublayer.parameters[i].num_bytes for i in group)
    )
    groups, others = by_size[:_MOST_MODULES], by_size[_MOST_MODULES:]
    if others:
        groups.append([index for group in others for index in group])
    for size in range(len(groups) + 1):
        for chosen in itertools.combinations(groups, size):
            far = frozenset(itertools.chain.from_iterable(chosen))
            far_bytes = sum(sublayer.parameters[index].num_bytes for index in far)
            extent = extent_bytes(sublayer.parameters[index].num_bytes for index in sorted(far))
            yield _Choice(
                far=far,
                near_bytes=sublayer.num_bytes - far_bytes,
                extent=extent,
                seconds=max(compute_before, link.seconds(extent)),
            )


def _counts(
    *,
    choices: Sequence[Sequence[_Choice]],
    sizes: Sequence[int],
    slots: Sequence[Sequence[int]],
    near_bytes: int,
) -> list[list[int]] | None:
    """How often each choice is taken; None if nothing fits.

    Args:
        slots: for each class, those that must hold its sublayers.

    Variables: the counts, then a flag for each that is not 0, then the bytes of the slots.
    """
    flat = [(group, choice) for group, options in enumerate(choices) for choice in options]
    num_choices = len(flat)
    num_slots = len(Kind)
    num_variables = 2 * num_choices + num_slots
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
    budget[2 * num_choices :] = 1
    add(budget, -np.inf, near_bytes * unit)
    cost = np.zeros(num_variables)
    cost[:num_choices] = [choice.seconds * 1e3 for _, choice in flat]
    # Of placements as fast the one that moves least.
    cost[:num_choices] += [choice.extent * unit * 1e-6 for _, choice in flat]
    upper = np.concatenate(
        [[sizes[group] for group, _ in flat], np.ones(num_choices), np.full(num_slots, np.inf)]
    )
    integrality = np.concatenate([np.ones(2 * num_choices), np.zeros(num_slots)])
    solution = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), low, high),
        bounds=Bounds(0, upper),
        integrality=integrality,
        options={"time_limit": 10.0, "mip_rel_gap": 1e-4},
    )
    if solution.x is None:
        return None
    numbers = iter(np.rint(solution.x[:num_choices]).astype(int).tolist())
    return [[next(numbers) for _ in options] for options in choices]


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
