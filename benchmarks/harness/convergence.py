# SPDX-License-Identifier: Apache-2.0
"""Convergence of an adaptive expansion: warm-up rounds and their figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness.jobs import ExpansionAt, RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import Engine
from benchmarks.harness.summary import LEVEL_CHANGES
from benchmarks.inputs.workload import Request

SAME_LEVEL = 0.15
"""Relative difference within which two expansions count as equal.

With 30 layers at an expansion of 3, it is about the step from one number of far layers to the next.
"""

DEFINITIONS = {
    "steps_to_converge": "engine steps of the warm-up until the expansion was first within 15 % of"
    " working_expansion, and partial blocks were where they are then; null if never",
    "working_expansion": "the median expansion over the engine steps of the measured rounds",
    "working_partial_blocks_far": "whether partial blocks were far too in most of those steps",
    "level_changes_per_round": "changes of level in a measured round (median). The load of a round"
    " rises and ends, so a controller that steps aside changes it even when it has converged",
}


def warm_up(
    engine: Engine, requests: Sequence[Request], num_rounds: int, step: Step
) -> list[RoundResult]:
    """Run the load that will be measured; return the rounds. The engine keeps its level."""
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
    working, partial_blocks_far = working_expansion(measured), working_partial_blocks_far(measured)
    return {
        "steps_to_converge": steps_to_reach(warmup, working, partial_blocks_far=partial_blocks_far),
        "working_expansion": working,
        "working_partial_blocks_far": partial_blocks_far,
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
    """Return the median expansion over all steps. Raises ValueError for no steps."""
    spans = sorted((at.expansion, num_steps) for r in rounds for _, num_steps, at in _spans(r))
    half = sum(num_steps for _, num_steps in spans) / 2
    passed = 0
    for expansion, num_steps in spans:
        passed += num_steps
        if passed >= half:
            return expansion
    raise ValueError("no steps, so no expansion")


def working_partial_blocks_far(rounds: Sequence[RoundResult]) -> bool:
    """Return whether partial blocks were far in more than half of all steps."""
    far = sum(num_steps for r in rounds for _, num_steps, at in _spans(r) if at.partial_blocks_far)
    return 2 * far > sum(r.num_steps for r in rounds)


def steps_to_reach(
    rounds: Sequence[RoundResult], expansion: float, *, partial_blocks_far: bool = False
) -> int | None:
    """Return the steps until the level first came close to that, or None if it never did."""
    before = 0
    for result in rounds:
        for first_step, _, at in _spans(result):
            is_close = abs(at.expansion - expansion) <= SAME_LEVEL * expansion
            if is_close and at.partial_blocks_far == partial_blocks_far:
                return before + first_step
        before += result.num_steps
    return None


def _spans(result: RoundResult) -> Iterator[tuple[int, int, ExpansionAt]]:
    """Yield (steps before, steps at, level) for each level of a round."""
    levels = [*result.expansions]
    if not levels or levels[0].step > 1:
        levels.insert(0, ExpansionAt(step=1, seconds=0.0, expansion=1.0))
    starts = [level.step - 1 for level in levels]
    ends = [*starts[1:], result.num_steps]
    for start, end, level in zip(starts, ends, levels, strict=True):
        yield start, end - start, level
