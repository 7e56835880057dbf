# SPDX-License-Identifier: Apache-2.0
"""How soon an adaptive expansion finds its level: warm-up rounds, and what they show."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.jobs import RoundResult
from benchmarks.progress import Step
from benchmarks.runner import Engine
from benchmarks.summary import LEVEL_CHANGES
from benchmarks.workload import Request

SAME_LEVEL = 0.15
"""Expansions this close (relative) count as one: about the step from one number of far layers to
the next with 30 layers at an expansion of 3."""

DEFINITIONS = {
    "steps_to_converge": "engine steps of the warm-up until the expansion was first within 15 % of"
    " working_expansion; null if it never was",
    "working_expansion": "the median expansion over the engine steps of the measured rounds",
    "level_changes_per_round": "changes of level in a measured round (median). The load of a round"
    " rises and ends, so a controller that steps aside changes it even when it has converged",
}


def warm_up(
    engine: Engine, requests: Sequence[Request], num_rounds: int, step: Step
) -> list[RoundResult]:
    """Run the load that will be measured, and return the rounds; the engine keeps its level."""
    rounds = []
    for index in range(num_rounds):
        result = engine.run(requests)
        rounds.append(result)
        step(
            f"warm-up {index + 1}/{num_rounds} {result.label}:"
            f" {result.num_output_tokens / result.seconds:.0f} tokens/s,"
            f" expansion {last_expansion(result):.2f}"
        )
    return rounds


def summarise_convergence(
    warmup: Sequence[RoundResult], measured: Sequence[RoundResult]
) -> dict[str, Any]:
    """Return the figures of `DEFINITIONS`, and the warm-up's tokens/s."""
    working = working_expansion(measured)
    return {
        "steps_to_converge": steps_to_reach(warmup, working),
        "working_expansion": working,
        "level_changes_per_round": statistics.median(
            result.counters[LEVEL_CHANGES] for result in measured
        ),
        "warmup_tokens_per_s": [result.num_output_tokens / result.seconds for result in warmup],
        "warmup_steps": sum(result.num_steps for result in warmup),
    }


def last_expansion(result: RoundResult) -> float:
    """Return the expansion at the end of a round, 1 if the plugin never swapped."""
    return result.expansions[-1].expansion if result.expansions else 1.0


def working_expansion(rounds: Sequence[RoundResult]) -> float:
    """Return the median over all steps of the rounds. Raises ValueError for no steps."""
    spans = sorted((expansion, num_steps) for r in rounds for _, num_steps, expansion in _spans(r))
    half = sum(num_steps for _, num_steps in spans) / 2
    passed = 0
    for expansion, num_steps in spans:
        passed += num_steps
        if passed >= half:
            return expansion
    raise ValueError("no steps, so no expansion")


def steps_to_reach(rounds: Sequence[RoundResult], expansion: float) -> int | None:
    """Return the steps until the level was first close to `expansion`, None if it never was."""
    before = 0
    for result in rounds:
        for first_step, _, level in _spans(result):
            if abs(level - expansion) <= SAME_LEVEL * expansion:
                return before + first_step
        before += result.num_steps
    return None


def _spans(result: RoundResult) -> Iterator[tuple[int, int, float]]:
    """Yield (steps before, steps at, expansion) for each level of a round."""
    starts = [level.step - 1 for level in result.expansions]
    levels = [level.expansion for level in result.expansions]
    if not starts or starts[0] > 0:
        starts.insert(0, 0)
        levels.insert(0, 1.0)
    ends = [*starts[1:], result.num_steps]
    for start, end, level in zip(starts, ends, levels, strict=True):
        yield start, end - start, level
