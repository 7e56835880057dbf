# SPDX-License-Identifier: Apache-2.0
"""The near set that makes a step shortest, as an integer program (ours; HeLM V-B is its idea).

Sublayer i computes while sublayer i+1 arrives, so a step takes the sum over sublayers of
max(compute i, transfer i+1), and more where each slows the other. Layers are alike, so the program
does not choose parameters but counts:

    n[class, choice]     how many sublayers of a class have these parameters near, these far, ...
    minimise             sum of n[class, choice] * (compute before, with transfer of the rest)
    subject to           near bytes + the two slots <= the near budget
                         far bytes <= the far budget

A class is a kind of sublayer with the same parameters behind a compute of the same length. A slot
holds the largest sublayer that passes through it, which is a constraint for each choice in use. As
far sublayers take turns in the slots, attention has one and the FFN the other if none is wholly
near; else both must hold either. Both programs are solved. The last of an odd number of far
sublayers has a third slot, which is not in them: where it does not fit, even numbers are tried, and
a budget without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from vllm_tiered.cost.pipeline import (
    ALONE,
    Link,
    Slowdown,
    StepTimes,
    seconds_beside,
    step_time,
    transfer_seconds,
)
from vllm_tiered.cost.weights import (
    Kind,
    Parameter,
    Placement,
    Sublayer,
    extent_of,
    place,
    spill,
)
from vllm_tiered.errors import BudgetError
from vllm_tiered.units import format_bytes

_MOST_MODULES = 8
_MOST_STORED_MODULES = 4
"""Of more modules in a sublayer (experts) the largest are chosen singly, the others together.
Three tiers to choose from allow fewer than two."""

SOLVED = 1e-4
"""How far from the program's best, in parts of it, counts as the best."""


class Links(NamedTuple):
    """To the near tier, and what transfers and compute do to each other."""

    far: Link
    storage: Link | None
    slowdown: Slowdown = ALONE


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """What may be far or stored in a sublayer, and what follows from it."""

    far: frozenset[int]  # positions among the parameters
    stored: frozenset[int]
    near_bytes: int
    far_extent: int
    extent: int  # in a slot: of both
    seconds: float  # of the sublayer before, with this one's transfer beside it


def place_for_latency(
    sublayers: Sequence[Sublayer],
    times: StepTimes,
    link: Link,
    near_bytes: int,
    far_bytes: int | None = None,
    storage: Link | None = None,
    *,
    slowdown: Slowdown = ALONE,
    gap: float = SOLVED,
) -> Placement:
    """The placement with the shortest step that fits near memory, and far memory where it can.

    Never slower, in the model of :mod:`vllm_tiered.cost.pipeline`, than HeLM's or All-CPU's where
    those fit, with what exceeds far memory on storage.

    Args:
        times: compute of each of ``sublayers``.
        near_bytes: for parameters and slots.
        far_bytes: None for as much as it takes.
        storage: storage to near, if weights may be stored.
        slowdown: what compute and transfers do to each other.
        gap: how far from the program's best, in parts of it, is near enough.

    Raises:
        BudgetError: even the largest sublayer's slots do not fit.
    """
    links = Links(link, storage, slowdown)
    candidates = [place("all_far", sublayers), place("helm", sublayers)]
    candidates += [
        Placement(policy="latency", sublayers=tuple(sublayers), far=((),) * len(sublayers))
    ]
    if storage is not None and far_bytes is not None:
        candidates = [spill(candidate, far_bytes) for candidate in candidates]
    candidates += _solutions(sublayers, times, links, near_bytes, far_bytes, gap)
    fitting = [candidate for candidate in candidates if candidate.near_bytes <= near_bytes]
    enough = [c for c in fitting if far_bytes is None or c.far_bytes <= far_bytes]
    if not enough and far_bytes is not None:
        # Too much will be far: the caller knows what may be done about that.
        candidates += _solutions(sublayers, times, links, near_bytes, None, gap)
        fitting = [candidate for candidate in candidates if candidate.near_bytes <= near_bytes]
    if not fitting:
        least = min(candidate.near_bytes for candidate in candidates)
        raise BudgetError(
            f"no placement fits {format_bytes(near_bytes)} of near memory: the least takes "
            f"{format_bytes(least)}, which is what always stays and the slots for the largest "
            "sublayers; raise weights.near_gib"
        )
    best = min(
        enough or fitting,
        key=lambda candidate: (
            step_time(transfer_seconds(candidate, link, storage), times, slowdown).seconds,
            candidate.storage_bytes,
            candidate.far_bytes,
        ),
    )
    return replace(best, policy="latency")


def _solutions(
    sublayers: Sequence[Sublayer],
    times: StepTimes,
    links: Links,
    near_bytes: int,
    far_bytes: int | None,
    gap: float,
) -> Iterator[Placement]:
    """Of both programs; a third slot may make one exceed near memory."""
    for may_stay in (False, True):
        solved = _solve(sublayers, times, links, near_bytes, far_bytes, gap, may_stay=may_stay)
        if solved is None:
            continue
        yield solved
        excess = solved.near_bytes - near_bytes
        if excess <= 0:
            continue
        for budget, is_even in ((near_bytes, True), (near_bytes - excess, False)):
            other = _solve(
                sublayers,
                times,
                links,
                budget,
                far_bytes,
                gap,
                may_stay=may_stay,
                is_even=is_even,
            )
            if other is not None:
                yield other


def _solve(
    sublayers: Sequence[Sublayer],
    times: StepTimes,
    links: Links,
    near_bytes: int,
    far_bytes: int | None,
    gap: float = SOLVED,
    *,
    may_stay: bool,
    is_even: bool = False,
) -> Placement | None:
    """With or without sublayers of which nothing is far; with an even number of the others."""
    members = _classes(sublayers, times)
    choices = [
        [
            choice
            for choice in _choices(sublayers[positions[0]], _before(times, positions[0]), links)
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
        far_bytes=far_bytes,
        gap=gap,
        is_even=is_even,
    )
    if counts is None:
        return None
    far: list[tuple[Parameter, ...]] = [()] * len(sublayers)
    stored: list[tuple[Parameter, ...]] = [()] * len(sublayers)
    for positions, options, numbers in zip(members, choices, counts, strict=True):
        chosen = itertools.chain.from_iterable(
            itertools.repeat(option, number)
            for option, number in zip(options, numbers, strict=True)
        )
        for position, option in zip(positions, _spread(list(chosen)), strict=True):
            parameters = sublayers[position].parameters
            far[position] = tuple(parameters[index] for index in sorted(option.far))
            stored[position] = tuple(parameters[index] for index in sorted(option.stored))
    return Placement(
        policy="latency",
        sublayers=tuple(sublayers),
        far=tuple(far),
        stored=tuple(stored) if any(stored) else (),
    )


def _classes(sublayers: Sequence[Sublayer], times: StepTimes) -> list[list[int]]:
    """Positions of sublayers that are alike."""
    classes: dict[object, list[int]] = {}
    for position, sublayer in enumerate(sublayers):
        sizes = tuple((p.num_bytes, p.role) for p in sublayer.parameters)
        key = (sublayer.kind, sizes, round(_before(times, position), 9))
        classes.setdefault(key, []).append(position)
    return list(classes.values())


def _before(times: StepTimes, position: int) -> float:
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
            extent_of(sublayer.parameters[index] for index in sorted(chosen))
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
            seconds=seconds_beside(compute_before, seconds, links.slowdown),
        )


def _counts(
    *,
    choices: Sequence[Sequence[_Choice]],
    sizes: Sequence[int],
    slots: Sequence[Sequence[int]],
    near_bytes: int,
    far_bytes: int | None,
    gap: float,
    is_even: bool,
) -> list[list[int]] | None:
    """How often each choice is taken; None if nothing fits.

    Args:
        slots: for each class, those that must hold its sublayers.
        far_bytes: None for as much as it takes.
        is_even: as many sublayers pass through one slot as through the other.

    Variables: the counts, then a flag for each that is not 0, then the bytes of the slots, then
    the number of sublayers that pass through one of them.
    """
    flat = [(group, choice) for group, options in enumerate(choices) for choice in options]
    num_choices = len(flat)
    num_slots = len(Kind)
    num_variables = 2 * num_choices + num_slots + 1
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
    budget[2 * num_choices : -1] = 1
    add(budget, -np.inf, near_bytes * unit)
    if is_even:
        half = np.zeros(num_variables)
        half[:num_choices] = [choice.extent > 0 for _, choice in flat]
        half[-1] = -2
        add(half, 0, 0)
    if far_bytes is not None:
        far = np.zeros(num_variables)
        far[:num_choices] = [choice.far_extent * unit for _, choice in flat]
        add(far, -np.inf, far_bytes * unit)
    cost = np.zeros(num_variables)
    cost[:num_choices] = [choice.seconds * 1e3 for _, choice in flat]
    # Of placements as fast the one that moves least.
    cost[:num_choices] += [choice.extent * unit * 1e-6 for _, choice in flat]
    upper = np.concatenate(
        [[sizes[group] for group, _ in flat], np.ones(num_choices), np.full(num_slots + 1, np.inf)]
    )
    integrality = np.concatenate([np.ones(2 * num_choices), np.zeros(num_slots), [is_even]])
    solution = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), low, high),
        bounds=Bounds(0, upper),
        integrality=integrality,
        options={"time_limit": 10.0, "mip_rel_gap": gap},
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
