# SPDX-License-Identifier: Apache-2.0
"""Input of the expansion controller's rules, and the predictions made from it."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache

from vllm_tiered.kv.history import Ceiling, History
from vllm_tiered.kv.layout import KvLevels, Level
from vllm_tiered.kv.tuning import Tuning
from vllm_tiered.kv.windows import Peak, Signals, Window


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerContext:
    """Input of a rule at the end of a window.

    Attributes:
        level_idx: the level at which the window ran.
        window: sums over the window's steps.
        last: the window's last step.
        history: the history with the window already added.
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

        All of them hold the largest live request, if any level does.
        """
        shares = (self.history.partial_share, self.history.resident_share)
        capacities = _capacities(self.levels, *(math.ceil(share * 32) / 32 for share in shares))
        held = held_blocks(self.levels, self.last.needed_resident)
        lowest = lowest_level(self.levels, self.last.needed_blocks, self.last.needed_resident)
        needed = min(held[lowest], self.last.needed_blocks)
        choices = {index: blocks for index, blocks in capacities.items() if held[index] >= needed}
        # With many partial blocks, each level that holds the request may have fewer blocks than a
        # level that does not hold it.
        return choices or {lowest: held[lowest]}

    def lower(self) -> list[int]:
        """Return the choices below the present level, ascending."""
        return [index for index in self.choices() if index < self.level_idx]

    def link_use(self, level_idx: int, blocks: float) -> float:
        """Predict the ratio of read time to compute time; 0 if nothing is known."""
        geometry = self.levels.geometry(self.levels.ladder[level_idx])
        history = self.history
        staged = geometry.staged_blocks(
            blocks, blocks * history.partly_filled, blocks * history.resident_share
        )
        pages = geometry.num_far * staged
        return (history.unit_link or 0.0) * pages / self.window.compute_seconds

    def fits_now(self, level_idx: int) -> bool:
        """Return whether the level holds the used blocks, so that no request is preempted."""
        last = self.last
        return self._fits(level_idx, Peak(last.used_blocks, last.num_partial, last.num_resident))

    def fits_for_long(self, level_idx: int) -> bool:
        """Return whether the level holds the blocks used in every step since one was blocked."""
        peaks = self.history.quiet.peaks
        return all(self._fits(level_idx, peak) for peak in peaks)

    def _fits(self, level_idx: int, peak: Peak) -> bool:
        level = self.levels.ladder[level_idx]
        num_partial = peak.partial + self.levels.partial.prefilling
        limit = self.levels.block_limit(level, num_partial, peak.resident)
        return peak.used <= limit * (1 - self.tuning.headroom)

    def higher(self) -> tuple[list[int], bool]:
        """Return the higher choices whose blocks requests would use and that the link can serve.

        Returns:
            The levels, ascending; and whether the link or a ceiling limits them.
        """
        history, window, tuning = self.history, self.window, self.tuning
        used = window.used / window.steps
        # Assume that a waiting request needs as many blocks as a running one holds. That is too low
        # if the running ones have only begun. But too low is corrected in the next window, while
        # too much would stay for long.
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
        """Return the context without an outdated ceiling or link measurement.

        At level 0 after the ceiling's end, the link measurement is dropped, as there were no recent
        reads. If transfers are clearly faster than when the ceiling was set, the ceiling is lifted.
        """
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
        """Return a new ceiling; it lasts twice as long as the last one if that ended recently."""
        longest = self.tuning.patience * self.tuning.max_backoff
        return self._next(self.history.ceiling, level_idx, unit_link, self.tuning.patience, longest)

    def next_cost_ceiling(self, level_idx: int) -> Ceiling:
        """Return a new cost ceiling, for levels that cost more than they gained.

        A change of the load does not lift it. With few running requests the load seems to change
        all the time, and each attempt is expensive.
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
def held_blocks(levels: KvLevels, resident: int = 0) -> tuple[int, ...]:
    """Return, for each level, the blocks of the longest request that can run alone.

    Args:
        resident: blocks of resident groups that it holds.
    """
    return tuple(
        levels.block_limit(level, levels.partial.prefilling, resident) for level in levels.ladder
    )


def lowest_level(levels: KvLevels, needed_blocks: int, resident: int = 0) -> int:
    """Return the lowest level that holds such a request, or else the level that holds most.

    Args:
        resident: blocks of resident groups among the needed ones.
    """
    held = held_blocks(levels, resident)
    enough = (index for index, blocks in enumerate(held) if blocks >= needed_blocks)
    return next(enough, held.index(max(held)))


@lru_cache(maxsize=256)
def _capacities(levels: KvLevels, partial_share: float, resident_share: float) -> dict[int, int]:
    """Return the blocks of each level that has over 1 % more blocks than all lower levels.

    The shares of the blocks are partial, and of resident groups.
    """
    capacities: dict[int, int] = {}
    best = -1.0
    for index, level in enumerate(levels.ladder):

        def is_too_many(blocks: int, level: Level = level) -> bool:
            num_partial, resident = partial_share * blocks, resident_share * blocks
            return levels.block_limit(level, math.ceil(num_partial), math.ceil(resident)) < blocks

        blocks = bisect_left(range(levels.max_blocks + 1), True, key=is_too_many) - 1
        if blocks > best * 1.01:
            capacities[index] = best = blocks
    return capacities
