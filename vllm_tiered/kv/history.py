# SPDX-License-Identifier: Apache-2.0
"""Memory of the expansion controller across windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_tiered.kv.baseline import BaselineComparison
from vllm_tiered.kv.layout import KvLevels
from vllm_tiered.kv.tuning import Tuning
from vllm_tiered.kv.windows import Record, Window


class Ceiling(NamedTuple):
    """Lowest level that must not be chosen before the age ``until``; none above it may be either.

    Attributes:
        unit_link: link seconds per staged block of one layer when the level stalled; None if the
            level only gained nothing.
        gap: number of steps for which the ceiling holds; the next ceiling may hold twice as long.
    """

    level_idx: int
    unit_link: float | None
    until: int
    gap: int


_MIN_STAGED = 0.1
"""Share of the used blocks below which a window's staged blocks say nothing about the link."""

NO_STEPS = Window()
_NO_RECORD = Record()
_NO_COMPARISON = BaselineComparison()


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """State that is kept from window to window, with ages in settled steps."""

    age: int = 0
    stride: int = 1  # stride of the next growth while `is_ramping`
    is_ramping: bool = True
    unit_link: float | None = None  # link seconds per staged block of one offloaded layer
    partial_share: float = 0.0  # charged partial blocks per used block
    partly_filled: float = 0.0  # the most partial blocks that can exist, per used block
    resident_share: float = 0.0  # blocks of resident groups per used block
    stalled_windows: int = 0
    quiet: Window = NO_STEPS  # the steps since the last blocked one
    patience: int = 0
    release_age: int | None = None  # age at which unused blocks were released
    good_level_idx: int = 0  # the last level that ran under pressure without stall
    ceiling: Ceiling | None = None
    sample: Window = NO_STEPS
    fill_steps: int = 0  # steps until samples count, as the batch still adapts to the level
    current: Record = _NO_RECORD
    num_unlike: int = 0  # number of samples in a row with another load
    came_from: Record | None = None  # record of the previous level, if a comparison with it is fair
    trial_age: int = 0
    trial_gap: int = 0
    is_trial: bool = False
    baseline: BaselineComparison = _NO_COMPARISON
    cost_ceiling: Ceiling | None = None  # levels that cost more than they gained

    @property
    def barred_from(self) -> int | None:
        """The lowest level that may not be chosen now, nor any above it; None if all may."""
        ceilings = (self.ceiling, self.cost_ceiling)
        barred = [c.level_idx for c in ceilings if c is not None and self.age < c.until]
        return min(barred, default=None)


def observe(
    window: Window,
    steady: Window,
    level_idx: int,
    history: History,
    levels: KvLevels,
    tuning: Tuning,
) -> History:
    """Return the history updated with a window; it does not depend on the decision.

    Args:
        steady: the window's steps that count in the comparison with the baseline.
    """
    age = history.age + window.steps
    geometry = levels.geometry(levels.ladder[level_idx])
    # Some of the charges are for a second partial block, which few requests have.
    partial = min(window.partial, window.running, window.used)
    means = (count / window.steps for count in (window.used, partial, window.resident))
    staged = window.steps * geometry.staged_blocks(*means)
    unit_link = history.unit_link
    if geometry.num_far and staged >= _MIN_STAGED * window.used > 0:
        unit_link = window.link_seconds / (geometry.num_far * staged)
    stalls = window.is_stalled(tuning.max_stall)
    was_quiet = history.quiet.steps >= tuning.record_steps
    is_ramping, stride = history.is_ramping, history.stride
    if not window.blocked_steps:
        is_ramping = is_ramping and not was_quiet
    elif was_quiet:  # the load is another: search its level from here, with doubling strides
        is_ramping, stride = True, 1
    patience, release_age = history.patience, history.release_age
    if release_age is not None and window.is_blocked(tuning.pressure):
        # Releasing blocks was a mistake if the pressure returns so soon.
        soon = age - release_age < 4 * patience
        longest = tuning.patience * tuning.max_backoff
        patience = min(2 * patience, longest) if soon else tuning.patience
        release_age = None
    history = replace(
        history,
        age=age,
        stride=stride,
        is_ramping=is_ramping,
        unit_link=unit_link,
        partial_share=window.partial / window.used if window.used else history.partial_share,
        partly_filled=partial / window.used if window.used else history.partly_filled,
        resident_share=window.resident / window.used if window.used else history.resident_share,
        stalled_windows=history.stalled_windows + 1 if stalls else 0,
        quiet=NO_STEPS if window.blocked_steps else history.quiet.merged(window),
        patience=patience,
        release_age=release_age,
        fill_steps=max(0, history.fill_steps - window.steps),
    )
    if tuning.base_records and _is_pressed(window, level_idx, levels, tuning):
        baseline = history.baseline.with_window(
            steady, level_idx, tuning.record_steps, tuning.base_records
        )
        history = replace(history, baseline=baseline)
    if history.fill_steps:
        return history
    sample = history.sample.merged(window)
    if sample.steps < tuning.record_steps:
        return replace(history, sample=sample)
    return _with_sample(sample, level_idx, replace(history, sample=NO_STEPS), tuning)


def _is_pressed(window: Window, level_idx: int, levels: KvLevels, tuning: Tuning) -> bool:
    """Return whether requests are blocked, or would be without offloaded layers."""
    if window.is_blocked(tuning.pressure):
        return True
    limit = levels.block_limit(levels.ladder[0], window.max_partial)
    return level_idx > 0 and window.used > limit * window.steps


def _with_sample(sample: Window, level_idx: int, history: History, tuning: Tuning) -> History:
    """Record a sample, unless nothing was blocked; drop all records if the load changed."""
    if not sample.is_blocked(tuning.pressure):
        return replace(history, current=Record(level_idx=level_idx), came_from=None, is_trial=False)
    if not history.current.is_like(sample):
        if not history.num_unlike:
            return replace(history, num_unlike=1)
        return replace(
            history,
            num_unlike=0,
            current=Record(level_idx=level_idx).with_sample(sample),
            came_from=None,
            ceiling=history.ceiling and history.ceiling._replace(until=history.age),
            is_trial=False,
            trial_gap=tuning.trial_every,
            trial_age=history.age + tuning.trial_every,
        )
    is_good = not history.is_trial and not sample.is_stalled(tuning.max_stall)
    return replace(
        history,
        num_unlike=0,
        current=history.current.with_sample(sample),
        good_level_idx=level_idx if is_good else history.good_level_idx,
    )
