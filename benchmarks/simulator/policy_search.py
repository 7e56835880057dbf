# SPDX-License-Identifier: Apache-2.0
"""Best fixed expansion of a policy on a case, and policies at one expansion."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulator.case import Case
from benchmarks.simulator.policies.table import POLICIES
from benchmarks.simulator.simulation import Run, simulate

_BLOCKS_STEP = 1.035
"""Ratio of neighbouring expansions of a policy whose expansion limits the blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A case with its policy, a fixed level, and the expansion that they give."""

    case: Case
    level_idx: int
    expansion: float

    @property
    def is_partial_resident(self) -> bool:
        """Whether partial blocks stay near."""
        return self.case.levels.ladder[self.level_idx].partial_blocks_resident


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The setting with the most tokens/s; without one, no layer is far."""

    setting: Setting | None
    run: Run


def settings_of(case: Case) -> list[list[Setting]]:
    """Return the settings of the case's policy with an expansion above 1.

    Settings whose partial blocks stay near come first, then those whose partial blocks move; each
    in the order of their expansions.
    """
    policy, levels = POLICIES[case.policy], case.levels
    if policy.is_by_blocks:
        return [[_by_blocks(case, expansion) for expansion in _expansions(case.max_expansion)]]
    rows: dict[bool, list[Setting]] = {}
    for level_idx, level in enumerate(levels.ladder):
        expansion = levels.expansion(level)
        if expansion <= 1 or (level.partial_blocks_resident and not policy.resident_partial):
            continue
        setting = Setting(case=case, level_idx=level_idx, expansion=expansion)
        rows.setdefault(level.partial_blocks_resident, []).append(setting)
    return list(rows.values())


def best_of(case: Case, none: Run, stride: int) -> Best:
    """Return the best setting of the case's policy.

    Every `stride`-th setting is tried, and then those around the best one, ever closer.

    Args:
        none: the run without far layers, which is best if no setting gives more.
    """
    best = Best(setting=None, run=none)
    for row in settings_of(case):
        runs: dict[int, Run | None] = {}
        _try(row, range(0, len(row), stride), runs)
        step = stride
        while (found := _most(runs)) is not None and step > 1:
            step = (step + 1) // 2
            _try(row, (found - step, found + step), runs)
        if found is not None and (run := runs[found]) and run.tokens_per_s > best.run.tokens_per_s:
            best = Best(setting=row[found], run=run)
    return best


def at_expansion(case: Case, expansion: float) -> tuple[Setting, Run] | None:
    """Run the first setting with at least this expansion, if the policy has one that fits.

    Partial blocks move if the policy allows that, so that policies have the same blocks.
    """
    row = settings_of(case)[-1]
    for setting in row:
        if setting.expansion >= expansion - 1e-9:
            run = run_setting(setting)
            return None if run is None else (setting, run)
    return None


def run_setting(setting: Setting) -> Run | None:
    """Run a setting; None if the longest request does not fit it."""
    try:
        return simulate(setting.case, setting.level_idx)
    except ValueError:
        return None


def _expansions(most: float) -> list[float]:
    expansions = []
    expansion = _BLOCKS_STEP
    while expansion < most:
        expansions.append(expansion)
        expansion *= _BLOCKS_STEP
    return [*expansions, most]


def _by_blocks(case: Case, expansion: float) -> Setting:
    limited = dataclasses.replace(case, max_expansion=expansion)
    return Setting(case=limited, level_idx=limited.levels.max_num_far, expansion=expansion)


def _try(row: Sequence[Setting], positions: Sequence[int], runs: dict[int, Run | None]) -> None:
    for position in positions:
        if 0 <= position < len(row) and position not in runs:
            runs[position] = run_setting(row[position])


def _most(runs: dict[int, Run | None]) -> int | None:
    """Return the position of the run with the most tokens/s."""
    tokens = {position: run.tokens_per_s for position, run in runs.items() if run}
    return max(tokens, key=lambda position: tokens[position]) if tokens else None
