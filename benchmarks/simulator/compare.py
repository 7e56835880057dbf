# SPDX-License-Identifier: Apache-2.0
"""Comparison of the controller with fixed levels on the same load."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.simulator.case import Case
from benchmarks.simulator.simulation import Run, simulate
from vllm_tiered.kv.layout import KvLevels, expansion_of

TRANSPARENT = 0.01
"""Largest share of stall under Pie's transparency and the controller's limit (1 % of the time)."""

_NEAR_FINAL = 0.1  # share of the expansion; throughput is nearly flat around the best level

DEFINITIONS = {
    "fraction_of_best_fixed": "output tokens/s of the controller over those of the best fixed"
    " level (found by trying them on the same requests), its ramp included",
    "fraction_of_best_transparent": "the same over the best fixed level at which compute waits at"
    " most 1 % of the time, which is the controller's own bound",
    "steps_to_converge": "engine steps after which the expansion stays within 10 % of its median"
    " over the second half of the steps for at least 500 steps; null for changing loads",
    "level_changes": "changes of the level in the whole run",
    "late_level_changes": "those in the second half of the steps",
    "seconds_per_token": "mean over finished requests of latency (queueing included) per token",
}


def fixed_levels(case: Case, stride: int) -> list[int]:
    """Return the levels to try, as indexes on the ladder.

    With resident partial blocks these are level 0, every `stride`-th from 3 layers on, and the
    highest. With offloaded partial blocks they begin at half of the layers.
    """
    levels = case.levels
    most, top = levels.max_num_far, len(levels.ladder) - 1
    moving = range(most + most // 2, top + 1, stride)
    return sorted({0, *range(3, most + 1, stride), most, *moving, top})


def compare(auto: Run, fixed: Mapping[int, Run], case: Case, *, is_steady: bool) -> dict[str, Any]:
    """Return the figures of `DEFINITIONS`, JSON-safe."""
    best = max(fixed, key=lambda level: fixed[level].tokens_per_s)
    transparent = max(
        (level for level in fixed if _stall(fixed[level]) <= TRANSPARENT),
        key=lambda level: fixed[level].tokens_per_s,
    )
    levels = case.levels
    n = case.model.num_layers

    def expansion(level: int) -> float:
        return expansion_of(n, levels.ladder[level].num_far)

    return {
        "tokens_per_s": auto.tokens_per_s,
        "fraction_of_best_fixed": auto.tokens_per_s / fixed[best].tokens_per_s,
        "fraction_of_best_transparent": auto.tokens_per_s / fixed[transparent].tokens_per_s,
        "gain_over_no_far_layer": auto.tokens_per_s / fixed[0].tokens_per_s,
        "best_fixed_expansion": expansion(best),
        "best_transparent_expansion": expansion(transparent),
        "median_expansion": expansion(_median_level(auto, 0)),
        "stall_fraction": _stall(auto),
        "steps": auto.steps,
        "steps_to_converge": steps_to_converge(auto, levels) if is_steady else None,
        "level_changes": len(auto.changes),
        "late_level_changes": sum(change.step > auto.steps / 2 for change in auto.changes),
        "preemptions": auto.num_preempted,
        "seconds_per_token": auto.seconds_per_token,
        "fixed": {
            f"{expansion(level):.2f}"
            f"{'' if levels.ladder[level].partial_blocks_resident else ', partial blocks too'}": {
                "tokens_per_s": run.tokens_per_s,
                "stall_fraction": _stall(run),
                "preemptions": run.num_preempted,
                "seconds_per_token": run.seconds_per_token,
            }
            for level, run in fixed.items()
            if expansion(level) > 1 or level == 0
        },
    }


def run_fixed(case: Case, level: int) -> Run | None:
    """Run at a fixed level; None if the longest request does not fit it."""
    try:
        return simulate(case, level)
    except ValueError:
        return None


def steps_to_converge(run: Run, levels: KvLevels) -> int | None:
    """Return the first step from which the level stays near its later median for 500 steps."""
    final = _median_level(run, run.steps // 2)
    for start, end, is_near in _spans_of_sameness(run, levels, final):
        if is_near and end - start >= min(500, run.steps // 2):
            return start
    return None


def _spans_of_sameness(run: Run, levels: KvLevels, final: int) -> list[tuple[int, int, bool]]:
    """Merge adjacent spans of levels that are near `final`, and those of levels that are not."""
    n = levels.num_layers
    wanted = expansion_of(n, levels.ladder[final].num_far)
    spans: list[tuple[int, int, bool]] = []
    for start, end, level in _spans(run):
        is_near = (
            levels.ladder[level].partial_blocks_resident
            == levels.ladder[final].partial_blocks_resident
        )
        is_near &= (
            abs(expansion_of(n, levels.ladder[level].num_far) - wanted) <= _NEAR_FINAL * wanted
        )
        if spans and spans[-1][2] == is_near:
            start = spans.pop()[0]
        spans.append((start, end, is_near))
    return spans


def _spans(run: Run) -> list[tuple[int, int, int]]:
    """Return (first step, end, level) for each level of the run, in order."""
    starts = [0, *(change.step for change in run.changes)]
    levels = [0, *(change.level_idx for change in run.changes)]
    return list(zip(starts, [*starts[1:], run.steps], levels, strict=True))


def _median_level(run: Run, first_step: int) -> int:
    """Return the median level over the steps from `first_step` on."""
    parts = [
        (level, end - max(start, first_step))
        for start, end, level in _spans(run)
        if end > first_step
    ]
    half = sum(count for _, count in parts) / 2
    passed = 0
    for level, count in sorted(parts):
        passed += count
        if passed >= half:
            return level
    return 0


def _stall(run: Run) -> float:
    return run.stall_seconds / run.busy_seconds if run.busy_seconds else 0.0


def headline(by_scenario: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the worst and the median figures over all scenarios."""

    def values(key: str) -> list[float]:
        return [entry[key] for entry in by_scenario.values() if entry[key] is not None]

    steps = values("steps_to_converge")
    return {
        "fraction_of_best_fixed": {
            "worst": min(values("fraction_of_best_fixed")),
            "median": statistics.median(values("fraction_of_best_fixed")),
        },
        "fraction_of_best_transparent": {
            "worst": min(values("fraction_of_best_transparent")),
            "median": statistics.median(values("fraction_of_best_transparent")),
        },
        "steps_to_converge": {"worst": max(steps), "median": statistics.median(steps)}
        if steps
        else None,
        "level_changes": {
            "worst": max(values("level_changes")),
            "worst_late": max(values("late_level_changes")),
        },
    }
