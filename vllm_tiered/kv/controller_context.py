# SPDX-License-Identifier: Apache-2.0
"""What the expansion controller knows at the end of a window, and what it predicts from it."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from vllm_tiered.kv.baseline import BaselineComparison
from vllm_tiered.kv.layout import PARTIAL_WHILE_PREFILLING, KvLevels
from vllm_tiered.kv.windows import Record, Signals, Window


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Lengths in engine steps (10 to 60 ms each), thresholds as shares.

    Attributes:
        ramp_steps: a window while the strides double; short, as a cold start wastes throughput.
        window_steps: a window otherwise: half a second, longer than a hiccup of the link.
        record_steps: a throughput sample: spans several prefills and ends of requests.
        min_records: samples of each level in a comparison.
        max_stall: Pie's transparency: swapping adds less than 1 % to a step.
        heavy_stall: from here on not one layer is given back but as many as the link asks for.
        mild_windows: stalled windows in a row before one is: below that it is noise about the 1 %.
        ramp_link: use of the link that doubling strides may lead to; far from 1, as a stride ahead
            the prediction is rough.
        max_link: use of the link that single layers may lead to; below 1, as steps vary.
        freer_link: a transfer this much shorter than when a level stalled lifts the ceiling.
        pressure: share of blocked steps from which a window counts as blocked.
        same: a throughput this close counts as equal.
        slack: growth asks for this share of the blocks in use at least, as running requests have
            only begun.
        headroom: spare blocks (share of the limit) left when the level falls: a little. Under
            pressure blocks in use are close to the limit by nature; and where nothing was blocked
            for long, growth went too far by up to its slack, and one layer more is soon back.
        patience: steps without a blocked one before the level falls, and before a ceiling is
            tried again (at first).
        trial_every: steps before a lower level is tried (at first); a trial costs some 500 steps.
        max_backoff: how far repeated failures stretch patience, ceilings and trials.
        base_records: samples under pressure before the first layer becomes far, to compare others
            with; 0: none, as where transfers take next to nothing from compute.
        plain_loss: from here on they are all given up at once, not half of them.
    """

    ramp_steps: int = 8
    window_steps: int = 16
    record_steps: int = 64
    min_records: int = 8
    max_stall: float = 0.01
    heavy_stall: float = 0.05
    mild_windows: int = 6
    ramp_link: float = 0.75
    max_link: float = 0.9
    freer_link: float = 0.75
    pressure: float = 0.25
    same: float = 0.01
    slack: float = 0.2
    headroom: float = 0.02
    patience: int = 512
    trial_every: int = 4096
    max_backoff: int = 64
    base_records: int = 0
    plain_loss: float = 0.1


DEFAULT_TUNING = Tuning()

STORAGE_TUNING = Tuning(base_records=4)
"""For far pages on storage, which take CPU time and memory bandwidth even if nobody waits."""


class Ceiling(NamedTuple):
    """A level not to be chosen at ages below ``until``.

    ``unit_link`` is that at which it stalled; None if it merely gained nothing. ``gap`` is for how
    long it holds, as the next one may hold twice as long.
    """

    level: int
    unit_link: float | None
    until: int
    gap: int


_LEAST_STAGED = 0.1
"""Of the used blocks: of fewer nothing is learnt about the link."""

NO_STEPS = Window()
_NO_RECORD = Record()
_UNKNOWN_WORTH = BaselineComparison()


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What outlives a window. Ages are counted in settled steps."""

    age: int = 0
    stride: int = 1  # of the next growth while `is_ramping`
    is_ramping: bool = True
    unit_link: float | None = None  # link seconds per staged block of one far layer
    partial_share: float = 0.0  # partial blocks per used block
    partly_filled: float = 0.0  # of the used blocks, at most
    stalled_windows: int = 0
    quiet: Window = NO_STEPS  # since a step was blocked
    patience: int = 0
    release_age: int | None = None
    good_level: int = 0  # carried pressure without stall
    ceiling: Ceiling | None = None
    sample: Window = NO_STEPS
    fill_steps: int = 0  # until samples count: the batch still adapts to the level
    current: Record = _NO_RECORD
    num_unlike: int = 0  # samples of another load in a row
    came_from: Record | None = None  # the level before, if a comparison with it is fair
    trial_age: int = 0
    trial_gap: int = 0
    is_trial: bool = False
    worth: BaselineComparison = _UNKNOWN_WORTH
    cost_ceiling: Ceiling | None = None  # levels that cost more than they gave

    @property
    def barred_from(self) -> int | None:
        """Levels from here on are not to be chosen now; None if all may be."""
        ceilings = (self.ceiling, self.cost_ceiling)
        barred = [c.level for c in ceilings if c is not None and self.age < c.until]
        return min(barred, default=None)


def observe(window: Window, level: int, memory: Memory, levels: KvLevels, tuning: Tuning) -> Memory:
    """What a window teaches, whatever is decided."""
    age = memory.age + window.steps
    geometry = levels.geometry(level)
    # Of the slots that are charged some are for a second partial block, which few requests have.
    partial = min(window.partial, window.running, window.used)
    staged = geometry.staged_blocks(window.used, partial)
    unit_link = memory.unit_link
    if geometry.num_far and staged >= _LEAST_STAGED * window.used > 0:
        unit_link = window.link_seconds / (geometry.num_far * staged)
    stalls = window.is_stalled(tuning.max_stall)
    was_quiet = memory.quiet.steps >= tuning.record_steps
    is_ramping, stride = memory.is_ramping, memory.stride
    if not window.blocked_steps:
        is_ramping = is_ramping and not was_quiet
    elif was_quiet:  # another load: look for its level from here, with doubling strides
        is_ramping, stride = True, 1
    patience, release_age = memory.patience, memory.release_age
    if release_age is not None and window.is_blocked(tuning.pressure):
        # Stepping aside was a mistake if the pressure is back so soon.
        soon = age - release_age < 4 * patience
        longest = tuning.patience * tuning.max_backoff
        patience = min(2 * patience, longest) if soon else tuning.patience
        release_age = None
    memory = replace(
        memory,
        age=age,
        stride=stride,
        is_ramping=is_ramping,
        unit_link=unit_link,
        partial_share=window.partial / window.used if window.used else memory.partial_share,
        partly_filled=partial / window.used if window.used else memory.partly_filled,
        stalled_windows=memory.stalled_windows + 1 if stalls else 0,
        quiet=NO_STEPS if window.blocked_steps else memory.quiet.merged(window),
        patience=patience,
        release_age=release_age,
        fill_steps=max(0, memory.fill_steps - window.steps),
    )
    if tuning.base_records and _is_pressed(window, level, levels, tuning):
        worth = memory.worth.with_window(window, level, tuning.record_steps, tuning.base_records)
        memory = replace(memory, worth=worth)
    if memory.fill_steps:
        return memory
    sample = memory.sample.merged(window)
    if sample.steps < tuning.record_steps:
        return replace(memory, sample=sample)
    return _with_sample(sample, level, replace(memory, sample=NO_STEPS), tuning)


def _is_pressed(window: Window, level: int, levels: KvLevels, tuning: Tuning) -> bool:
    """Whether requests are blocked, or would be without far layers."""
    if window.is_blocked(tuning.pressure):
        return True
    return level > 0 and window.used > levels.block_limit(0, window.max_partial) * window.steps


def _with_sample(sample: Window, level: int, memory: Memory, tuning: Tuning) -> Memory:
    """Record a long window, unless nothing was blocked; forget all records if the load changed."""
    if not sample.is_blocked(tuning.pressure):
        return replace(memory, current=Record(level=level), came_from=None, is_trial=False)
    if not memory.current.is_like(sample):
        if not memory.num_unlike:
            return replace(memory, num_unlike=1)
        return replace(
            memory,
            num_unlike=0,
            current=Record(level=level).with_sample(sample),
            came_from=None,
            ceiling=memory.ceiling and memory.ceiling._replace(until=memory.age),
            is_trial=False,
            trial_gap=tuning.trial_every,
            trial_age=memory.age + tuning.trial_every,
        )
    is_good = not memory.is_trial and not sample.is_stalled(tuning.max_stall)
    return replace(
        memory,
        num_unlike=0,
        current=memory.current.with_sample(sample),
        good_level=level if is_good else memory.good_level,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerContext:
    """All that a rule may look at, at a window's end.

    Attributes:
        level: the level that the window was run at.
        window: its steps.
        last: its last step.
        memory: what was known before, and what the window taught.
    """

    level: int
    window: Window
    last: Signals
    memory: Memory
    levels: KvLevels
    tuning: Tuning

    @property
    def is_blocked(self) -> bool:
        return self.window.is_blocked(self.tuning.pressure)

    def choices(self) -> dict[int, int]:
        """Levels worth choosing, ascending, with their blocks at the present partial blocks per
        block.

        All of them hold the largest live request, if one does.
        """
        capacities = _capacities(self.levels, math.ceil(self.memory.partial_share * 32) / 32)
        held = held_blocks(self.levels)
        lowest = lowest_level(self.levels, self.last.needed_blocks)
        needed = min(held[lowest], self.last.needed_blocks)
        choices = {level: blocks for level, blocks in capacities.items() if held[level] >= needed}
        # Many partial blocks may make every level that holds the request worse than one that does
        # not.
        return choices or {lowest: held[lowest]}

    def lower(self) -> list[int]:
        """Choices below the present level, ascending."""
        return [level for level in self.choices() if level < self.level]

    def link_use(self, level: int, blocks: float) -> float:
        """Predicted read time over compute time, 0 if nothing is known."""
        geometry = self.levels.geometry(level)
        staged = geometry.staged_blocks(blocks, blocks * self.memory.partly_filled)
        pages = geometry.num_far * staged
        return (self.memory.unit_link or 0.0) * pages / self.window.compute_seconds

    def fits_now(self, level: int) -> bool:
        """Whether the blocks in use fit the level at this moment: nobody is preempted."""
        return self._fits(level, self.last.used_blocks, self.last.num_partial)

    def fits_for_long(self, level: int) -> bool:
        """Whether all that was in use since a request was blocked fits."""
        return all(self._fits(level, peak.used, peak.partial) for peak in self.memory.quiet.peaks)

    def _fits(self, level: int, used_blocks: int, num_partial: int) -> bool:
        limit = self.levels.block_limit(level, num_partial + PARTIAL_WHILE_PREFILLING)
        return used_blocks <= limit * (1 - self.tuning.headroom)

    def higher(self) -> tuple[list[int], bool]:
        """Choices above the present level that requests would use and that the link bears, and
        whether the link (or the ceiling, where it failed) bounds them."""
        memory, window, tuning = self.memory, self.window, self.tuning
        used = window.used / window.steps
        # What waits is taken to hold what running requests do. Too low where those have only begun;
        # then the next window asks for more, but what was asked too much stays for long.
        mean_blocks = window.used / max(1, window.running)
        demand = used + max(mean_blocks * self.last.num_waiting, tuning.slack * used)
        max_link = tuning.ramp_link if memory.is_ramping else tuning.max_link
        barred_from = memory.barred_from
        higher: list[int] = []
        for level, blocks in self.choices().items():
            if level <= self.level or blocks <= used:
                continue
            is_barred = barred_from is not None and level >= barred_from
            if is_barred or self.link_use(level, min(blocks, demand)) > max_link:
                return higher, True
            higher.append(level)
            if blocks >= demand:
                break
        return higher, False

    def with_ceiling_lifted(self) -> ControllerContext:
        """The same, less what is no longer so: the link may be free again."""
        memory, ceiling = self.memory, self.memory.ceiling
        if ceiling is None or memory.age >= ceiling.until:
            if self.level:
                return self
            return replace(self, memory=replace(memory, unit_link=None))  # nothing was read lately
        if not self.level or not ceiling.unit_link or not memory.unit_link:
            return self
        if memory.unit_link > self.tuning.freer_link * ceiling.unit_link:
            return self
        lifted = ceiling._replace(until=memory.age, gap=self.tuning.patience)
        return replace(self, memory=replace(memory, ceiling=lifted, is_ramping=True, stride=1))

    def next_ceiling(self, level: int, unit_link: float | None) -> Ceiling:
        """One that follows soon on another lasts twice as long."""
        longest = self.tuning.patience * self.tuning.max_backoff
        return self._next(self.memory.ceiling, level, unit_link, self.tuning.patience, longest)

    def next_cost_ceiling(self, level: int) -> Ceiling:
        """The same for levels that cost more than they gave. A change of the load does not lift it:
        where few requests run the load seems to change all the time, and each attempt is
        cost_ceiling."""
        gap = self.tuning.trial_every
        return self._next(self.memory.cost_ceiling, level, None, gap, 8 * gap)

    def _next(
        self, old: Ceiling | None, level: int, unit_link: float | None, gap: int, longest: int
    ) -> Ceiling:
        age = self.memory.age
        if old is not None and age - old.until < 2 * old.gap:
            gap = min(2 * old.gap, longest)
        return Ceiling(level, unit_link, age + gap, gap)


@lru_cache(maxsize=64)
def held_blocks(levels: KvLevels) -> tuple[int, ...]:
    """Per level, the blocks of the longest request that can run alone."""
    return tuple(
        levels.block_limit(level, PARTIAL_WHILE_PREFILLING) for level in range(levels.highest + 1)
    )


def lowest_level(levels: KvLevels, needed_blocks: int) -> int:
    """The lowest level that holds such a request; if none does, the one that holds most."""
    held = held_blocks(levels)
    enough = (level for level, blocks in enumerate(held) if blocks >= needed_blocks)
    return next(enough, held.index(max(held)))


@lru_cache(maxsize=256)
def _capacities(levels: KvLevels, partial_share: float) -> dict[int, int]:
    """Usable blocks per level when a share of them are partial blocks; only levels above all lower
    ones."""
    worth: dict[int, int] = {}
    best = -1.0
    for level in range(levels.highest + 1):

        def is_too_many(blocks: int, level: int = level) -> bool:
            return levels.block_limit(level, math.ceil(partial_share * blocks)) < blocks

        blocks = bisect_left(range(levels.max_blocks + 1), True, key=is_too_many) - 1
        if blocks > best * 1.01:
            worth[level] = best = blocks
    return worth
