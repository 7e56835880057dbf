# SPDX-License-Identifier: Apache-2.0
"""Integer program of the placement MILP: how often each choice of tiers is taken.

The variables, in this order, where C is the number of choices of all classes:

    C counts │ C flags, 1 for a count > 0 │ 2 buffer sizes │ number of sublayers a buffer receives

Bytes are in MiB and times in milliseconds, because the solver's tolerances are absolute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from vllm_tiered.planner.solver_output import suppress_solver_output
from vllm_tiered.weights.layout import Kind

_MIB = 1 / (1 << 20)

_MOST_SECONDS = 3.0
"""Time limit of the solver, which usually takes 0.02 s; the best solution so far is then used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Choice of tiers for a sublayer's parameters, with its bytes and time.

    Attributes:
        far, stored: positions of the parameters in far memory and in storage.
        near_bytes: bytes of the other parameters.
        far_extent: far bytes, in a weight buffer.
        extent: far and stored bytes, in a weight buffer.
        seconds: time until the compute before and this transfer are both done.
    """

    far: frozenset[int]
    stored: frozenset[int]
    near_bytes: int
    far_extent: int
    extent: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CountProblem:
    """Classes of sublayers with their choices, and the budgets.

    Attributes:
        choices: for each class, the ways to place one of its sublayers.
        sizes: for each class, the number of its sublayers.
        buffers: for each class, which of the two buffer sizes must fit its sublayers.
        kinds: kind of each class, if equally many attention and FFN sublayers must stay near as a
            whole; otherwise empty.
        num_buffers: number of buffers of each of the two sizes.
        near_bytes: budget of near memory.
        far_bytes: budget of far memory; None for no limit.
        is_even: whether each buffer must receive the same number of sublayers.
    """

    choices: Sequence[Sequence[Choice]]
    sizes: Sequence[int]
    buffers: Sequence[Sequence[int]]
    kinds: Sequence[Kind]
    num_buffers: tuple[float, float]
    near_bytes: int
    far_bytes: int | None
    is_even: bool


class _Row(NamedTuple):
    """Linear constraint: ``low <= factors @ variables <= high``."""

    factors: npt.NDArray[np.float64]
    low: float
    high: float


_Flat = Sequence[tuple[int, Choice]]
"""Every choice with the index of its class, in the order of the variables."""


def count_choices(problem: CountProblem, gap: float) -> list[list[int]] | None:
    """Return how often each choice of each class is taken; None if nothing fits.

    Args:
        problem: the problem to solve.
        gap: relative distance to the optimum at which the solver may stop.
    """
    flat = [(group, choice) for group, options in enumerate(problem.choices) for choice in options]
    num_choices = len(flat)
    num_others = len(Kind) + 1
    rows = [*_count_rows(problem, flat), *_budget_rows(problem, flat)]
    cost = np.zeros(2 * num_choices + num_others)
    cost[:num_choices] = [choice.seconds * 1e3 for _, choice in flat]
    # Among equally fast placements, prefer the one that moves the fewest bytes.
    cost[:num_choices] += [choice.extent * _MIB * 1e-6 for _, choice in flat]
    most = [problem.sizes[group] for group, _ in flat]
    upper = np.concatenate([most, np.ones(num_choices), np.full(num_others, np.inf)])
    is_integer = np.concatenate([np.ones(2 * num_choices), np.zeros(len(Kind)), [problem.is_even]])
    with suppress_solver_output():
        solution = milp(
            cost,
            constraints=LinearConstraint(
                np.array([row.factors for row in rows]),
                [row.low for row in rows],
                [row.high for row in rows],
            ),
            bounds=Bounds(0, upper),
            integrality=is_integer,
            options={"time_limit": _MOST_SECONDS, "mip_rel_gap": gap},
        )
    if solution.x is None:
        return None
    numbers = iter(np.rint(solution.x[:num_choices]).astype(int).tolist())
    return [[next(numbers) for _ in options] for options in problem.choices]


def _count_rows(problem: CountProblem, flat: _Flat) -> Iterator[_Row]:
    """Yield the constraints that tie counts to classes, flags and buffer sizes."""
    num_choices = len(flat)
    for group, size in enumerate(problem.sizes):
        row = _no_factors(flat)
        for index, (at, _) in enumerate(flat):
            row[index] = at == group
        yield _Row(row, size, size)
    for index, (group, choice) in enumerate(flat):
        used = _no_factors(flat)
        used[index], used[num_choices + index] = 1, -problem.sizes[group]
        yield _Row(used, -np.inf, 0)
        for buffer in problem.buffers[group]:
            holds = _no_factors(flat)
            holds[num_choices + index] = choice.extent * _MIB
            holds[2 * num_choices + buffer] = -1
            yield _Row(holds, -np.inf, 0)


def _budget_rows(problem: CountProblem, flat: _Flat) -> Iterator[_Row]:
    """Yield the constraints of the budgets, of even rounds, and of whole layers that stay near."""
    num_choices = len(flat)
    near = _no_factors(flat)
    near[:num_choices] = [choice.near_bytes * _MIB for _, choice in flat]
    near[2 * num_choices : -1] = problem.num_buffers
    yield _Row(near, -np.inf, problem.near_bytes * _MIB)
    if problem.is_even:
        received = _no_factors(flat)
        received[:num_choices] = [choice.extent > 0 for _, choice in flat]
        received[-1] = -sum(problem.num_buffers)
        yield _Row(received, 0, 0)
    if problem.kinds:
        pairs = _no_factors(flat)
        pairs[:num_choices] = [
            (not choice.extent) * (1 if problem.kinds[group] is Kind.FFN else -1)
            for group, choice in flat
        ]
        yield _Row(pairs, 0, 0)
    if problem.far_bytes is not None:
        far = _no_factors(flat)
        far[:num_choices] = [choice.far_extent * _MIB for _, choice in flat]
        yield _Row(far, -np.inf, problem.far_bytes * _MIB)


def _no_factors(flat: _Flat) -> npt.NDArray[np.float64]:
    """Return a factor of 0 for each variable."""
    return np.zeros(2 * len(flat) + len(Kind) + 1)
