# SPDX-License-Identifier: Apache-2.0
"""Integer program of the placement MILP: how often each choice of tiers is taken.

The variables, in this order, where C is the number of choices of all classes:

    C counts │ a flag for each size that buffers may have │ number of sublayers a buffer receives

A flag is 1 if the buffers have at least that size. Bytes are in MiB and times in milliseconds,
because the solver's tolerances are absolute.
"""

from __future__ import annotations

import itertools
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
        buffers: for each class, which of the buffer sizes must fit its sublayers.
        kinds: kind of each class, if equally many attention and FFN sublayers must stay near as a
            whole; otherwise empty.
        num_buffers: number of buffers of each size.
        near_bytes: budget of near memory.
        far_bytes: budget of far memory; None for no limit.
        is_even: whether each buffer must receive the same number of sublayers.
    """

    choices: Sequence[Sequence[Choice]]
    sizes: Sequence[int]
    buffers: Sequence[int]
    kinds: Sequence[Kind]
    num_buffers: tuple[float, ...]
    near_bytes: int
    far_bytes: int | None
    is_even: bool


class _SizeFlag(NamedTuple):
    """Flag for buffers of at least ``extent`` bytes, with the bytes that it adds to all of them."""

    buffer: int
    extent: int
    added_bytes: float


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
    flags = _size_flags(problem)
    rows = [*_count_rows(problem, flat, flags), *_budget_rows(problem, flat, flags)]
    cost = _factors(flat, flags)
    # Among equally fast placements, prefer the one that moves the fewest bytes.
    cost[: len(flat)] = [c.seconds * 1e3 + c.extent * _MIB * 1e-6 for _, c in flat]
    most = [problem.sizes[group] for group, _ in flat]
    is_integer = np.ones(len(cost))
    is_integer[-1] = problem.is_even
    with suppress_solver_output():
        solution = milp(
            cost,
            constraints=LinearConstraint(
                np.array([row.factors for row in rows]),
                [row.low for row in rows],
                [row.high for row in rows],
            ),
            bounds=Bounds(0, np.array([*most, *(1 for _ in flags), np.inf])),
            integrality=is_integer,
            options={"time_limit": _MOST_SECONDS, "mip_rel_gap": gap},
        )
    if solution.x is None:
        return None
    numbers = iter(np.rint(solution.x[: len(flat)]).astype(int).tolist())
    return [[next(numbers) for _ in options] for options in problem.choices]


def _size_flags(problem: CountProblem) -> list[_SizeFlag]:
    """Return the flags of each buffer size by ascending extents."""
    flags: list[_SizeFlag] = []
    for buffer, number in enumerate(problem.num_buffers):
        received = {
            choice.extent
            for options, into in zip(problem.choices, problem.buffers, strict=True)
            for choice in options
            if buffer == into
        }
        flags += [
            _SizeFlag(buffer, extent, number * (extent - smaller))
            for smaller, extent in itertools.pairwise(sorted(received | {0}))
        ]
    return flags


def _count_rows(problem: CountProblem, flat: _Flat, flags: Sequence[_SizeFlag]) -> Iterator[_Row]:
    """Yield the constraints that tie counts to classes and flags, and a flag to the smaller one."""
    for group, size in enumerate(problem.sizes):
        yield _Row(_factors(flat, flags, [at == group for at, _ in flat]), size, size)
        for index, flag in enumerate(flags, start=len(flat)):
            # One constraint for all of a class's choices of this size or more. With one for each
            # choice, and the size as a variable, the relaxation is weak: the 400 programs of four
            # plans took 29 s instead of 10 s (an EPYC core, 2026-11-25).
            if flag.buffer == problem.buffers[group]:
                larger = [at == group and choice.extent >= flag.extent for at, choice in flat]
                used = _factors(flat, flags, larger)
                used[index] = -size
                yield _Row(used, -np.inf, 0)
    for index, (smaller, flag) in enumerate(itertools.pairwise(flags), start=len(flat) + 1):
        if flag.buffer == smaller.buffer:
            implies = _factors(flat, flags)
            implies[index - 1], implies[index] = -1, 1
            yield _Row(implies, -np.inf, 0)


def _budget_rows(problem: CountProblem, flat: _Flat, flags: Sequence[_SizeFlag]) -> Iterator[_Row]:
    """Yield the constraints of the budgets, of even rounds, and of whole layers that stay near."""
    near = _factors(flat, flags, [choice.near_bytes * _MIB for _, choice in flat])
    near[len(flat) : -1] = [flag.added_bytes * _MIB for flag in flags]
    yield _Row(near, -np.inf, problem.near_bytes * _MIB)
    if problem.is_even:
        received = _factors(flat, flags, [choice.extent > 0 for _, choice in flat])
        received[-1] = -sum(problem.num_buffers)
        yield _Row(received, 0, 0)
    if problem.kinds:
        signs = [
            (not choice.extent) * (1 if problem.kinds[group] is Kind.FFN else -1)
            for group, choice in flat
        ]
        yield _Row(_factors(flat, flags, signs), 0, 0)
    if problem.far_bytes is not None:
        far = _factors(flat, flags, [choice.far_extent * _MIB for _, choice in flat])
        yield _Row(far, -np.inf, problem.far_bytes * _MIB)


def _factors(
    flat: _Flat, flags: Sequence[_SizeFlag], counts: Sequence[float] = ()
) -> npt.NDArray[np.float64]:
    """Return the factors of all variables: ``counts``, and 0 for the others."""
    factors = np.zeros(len(flat) + len(flags) + 1)
    factors[: len(counts)] = counts
    return factors
