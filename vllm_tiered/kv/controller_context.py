# SPDX-License-Identifier: Apache-2.0
"""What a rule of the expansion controller may look at, and what it predicts from it."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache

from vllm_tiered.kv.history import Ceiling, History
from vllm_tiered.kv.layout import PARTIAL_WHILE_PREFILLING, KvLevels, Level
from vllm_tiered.kv.tuning import Tuning
from vllm_tiered.kv.windows import Signals, Window


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerContext:
    """Everything that a rule may look at, at a window's end.

    Attributes:
        level_idx: the level that the window was run at.
        window: its steps.
        last: its last step.
        history: what was known before, and what the window taught.
    """

    level_idx: int
    window: Window
    last: Signals
    history: History
    levels: KvLevels
    tuning: Tuning

    @property
    def is_blocked(self) -> bool:
        """Whether the window counts as blocked."""
        return self.window.is_blocked(self.tuning.pressure)

    def choices(self) -> dict[int, int]:
        """Return the levels worth choosing, ascending, with their blocks at the present load.

        All of them hold the largest live request, if one does.
        """
        capacities = _capacities(self.levels, math.ceil(self.history.partial_share * 32) / 32)
        held = held_blocks(self.levels)
        lowest = lowest_level(self.levels, self.last.needed_blocks)
        needed = min(held[lowest], self.last.needed_blocks)
        choices = {index: blocks for index, blocks in capacities.items() if held[index] >= needed}
        # Many partial blocks may make every level that holds the request worse than one that
        # does not.
        return choices or {lowest: held[lowest]}

    def lower(self) -> list[int]:
        """Return the choices below the present level, ascending."""
        return [index for index in self.choices() if index < self.level_idx]

    def link_use(self, level_idx: int, blocks: float) -> float:
        """Predict read time over compute time; 0 if nothing is known."""
        geometry = self.levels.geometry(self.levels.ladder[level_idx])
        staged = geometry.staged_blocks(blocks, blocks * self.history.partly_filled)
        pages = geometry.num_far * staged
        return (self.history.unit_link or 0.0) * pages / self.window.compute_seconds

    def fits_now(self, level_idx: int) -> bool:
        """Return whether the level holds the blocks in use: no request would be preempted."""
        return self._fits(level_idx, self.last.used_blocks, self.last.num_partial)

    def fits_for_long(self, level_idx: int) -> bool:
        """Return whether the level holds all that was in use since a request was blocked."""
        peaks = self.history.quiet.peaks
        return all(self._fits(level_idx, peak.used, peak.partial) for peak in peaks)

    def _fits(self, level_idx: int, used_blocks: int, num_partial: int) -> bool:
        level = self.levels.ladder[level_idx]
        limit = self.levels.block_limit(level, num_partial + PARTIAL_WHILE_PREFILLING)
        return used_blocks <= limit * (1 - self.tuning.headroom)

    def higher(self) -> tuple[list[int], bool]:
        """Find the choices above the present level that requests would use and the link bears.

        Returns:
            The levels, ascending; and whether the link bounds them, or the ceiling where it failed.
        """
        history, window, tuning = self.history, self.window, self.tuning
        used = window.used / window.steps
        # Waiting requests are taken to hold what running ones do. Too low where those have only
        # begun: then the next window asks for more, but what was asked too much stays for long.
        mean_blocks = window.used / max(1, window.running)
        demand = used + max(mean_blocks * self.last.num_waiting, tuning.slack * used)
        max_link = tuning.ramp_link if history.is_ramping else tuning.max_link
        barred_from = history.barred_from
        higher: list[int] = []
        for index, blocks in self.choices().items():
            if index <= self.level_idx or blocks <= used:
                continue
            is_barred = barred_from is not None and index >= barred_from
            if is_barred or self.link_use(index, min(blocks, demand)) > max_link:
                return higher, True
            higher.append(index)
            if blocks >= demand:
                break
        return higher, False

    def with_ceiling_lifted(self) -> ControllerContext:
        """Return the context without what no longer holds: the link may be free again."""
        history, ceiling = self.history, self.history.ceiling
        if ceiling is None or history.age >= ceiling.until:
            if self.level_idx:
                return self
            return replace(self, history=replace(history, unit_link=None))  # no reads lately
        if not self.level_idx or not ceiling.unit_link or not history.unit_link:
            return self
        if history.unit_link > self.tuning.freer_link * ceiling.unit_link:
            return self
        lifted = ceiling._replace(until=history.age, gap=self.tuning.patience)
        return replace(self, history=replace(history, ceiling=lifted, is_ramping=True, stride=1))

    def next_ceiling(self, level_idx: int, unit_link: float | None) -> Ceiling:
        """Return a new ceiling; one that follows soon on another lasts twice as long."""
        longest = self.tuning.patience * self.tuning.max_backoff
        return self._next(self.history.ceiling, level_idx, unit_link, self.tuning.patience, longest)

    def next_cost_ceiling(self, level_idx: int) -> Ceiling:
        """Return a new ceiling for levels that cost more than they gave.

        A change of the load does not lift it: where few requests run the load seems to change all
        the time, and each attempt is expensive.
        """
        gap = self.tuning.trial_every
        return self._next(self.history.cost_ceiling, level_idx, None, gap, 8 * gap)

    def _next(
        self, old: Ceiling | None, level_idx: int, unit_link: float | None, gap: int, longest: int
    ) -> Ceiling:
        age = self.history.age
        if old is not None and age - old.until < 2 * old.gap:
            gap = min(2 * old.gap, longest)
        return Ceiling(level_idx, unit_link, age + gap, gap)


@lru_cache(maxsize=64)
def held_blocks(levels: KvLevels) -> tuple[int, ...]:
    """Return for each level the blocks of the longest request that can run alone."""
    return tuple(levels.block_limit(level, PARTIAL_WHILE_PREFILLING) for level in levels.ladder)


def lowest_level(levels: KvLevels, needed_blocks: int) -> int:
    """Return the lowest level that holds such a request; if none does, the one that holds most."""
    held = held_blocks(levels)
    enough = (index for index, blocks in enumerate(held) if blocks >= needed_blocks)
    return next(enough, held.index(max(held)))


@lru_cache(maxsize=256)
def _capacities(levels: KvLevels, partial_share: float) -> dict[int, int]:
    """Return the blocks of each level that has more than all lower ones.

    A share of ``partial_share`` of the blocks are partial.
    """
    capacities: dict[int, int] = {}
    best = -1.0
    for index, level in enumerate(levels.ladder):

        def is_too_many(blocks: int, level: Level = level) -> bool:
            return levels.block_limit(level, math.ceil(partial_share * blocks)) < blocks

        blocks = bisect_left(range(levels.max_blocks + 1), True, key=is_too_many) - 1
        if blocks > best * 1.01:
            capacities[index] = best = blocks
    return capacities
