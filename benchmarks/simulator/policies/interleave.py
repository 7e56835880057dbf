# SPDX-License-Identifier: Apache-2.0
"""Interleaved far layers, each read once a step into a few staging buffers.

         ┌ overhead ┐
compute  │··········│ 0 │ 1 │ 2 │··stall··│ 3 │ 4 │ ...        far layers: 2, 3, ...
link     │ read 2 │  read 3              │ read 5: layer 2's buffer is free │
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.simulator.policies.base import Burden, Outcome, Pace, StepBlocks
from vllm_tiered.kv.layout import KvLevels, Level
from vllm_tiered.kv.policy import interleave


def product_order(num_layers: int, num_far: int) -> Sequence[int]:
    """Return the product's far layers, ascending."""
    return interleave(num_layers, num_far).offloaded


def even_order(num_layers: int, num_far: int) -> Sequence[int]:
    """Return evenly spaced far layers, ascending, the last of which is the last layer.

    With at most half of the layers far, none follows another. A change of their number moves many.
    """
    return [(position + 1) * num_layers // num_far - 1 for position in range(num_far)]


class Interleave:
    """Policy `interleave`: the same far layers in every step, each read once (the product's).

    Args:
        levels: the levels of the near budget.
        order: the far layers by the number of layers and of far ones.
    """

    def __init__(
        self, levels: KvLevels, order: Callable[[int, int], Sequence[int]] = product_order
    ) -> None:
        n = levels.num_layers
        self._levels = levels
        self._far_layers = [order(n, m) if m else () for m in range(levels.max_num_far + 1)]

    def staged(self, level: Level, blocks: StepBlocks) -> int:
        """Return the blocks that are read in every far layer."""
        near = blocks.partial * level.partial_blocks_resident
        return max(0, blocks.used - near - blocks.prefilled)

    def written(self, level: Level, blocks: StepBlocks) -> int:
        """Return the blocks that are written out in every far layer."""
        if level.partial_blocks_resident:
            return blocks.filled
        return blocks.partial + blocks.prefilled  # a partial block is written out in every step

    def burden(self, level: Level, blocks: StepBlocks) -> Burden:
        """Return what the step's copies cost compute."""
        pages = self.staged(level, blocks) + self.written(level, blocks)
        return Burden(level.num_far, pages * level.num_far)

    def step(self, level: Level, blocks: StepBlocks, pace: Pace) -> Outcome:
        """Run one step."""
        staged, written = self.staged(level, blocks), self.written(level, blocks)
        return Outcome(
            stall_s=self._stall(level, pace.read_s(staged), blocks, pace),
            read_pages=staged * level.num_far,
            written_pages=written * level.num_far,
        )

    def _stall(self, level: Level, read_s: float, blocks: StepBlocks, pace: Pace) -> float:
        if not level.num_far or not read_s:
            return max(0.0, pace.link_busy_s - pace.overhead_s) if pace.link_busy_s else 0.0
        free = [0.0] * self._levels.staging_buffers
        return self._read_layers(level, read_s, pace, pace.link_busy_s, free)[0]

    def _read_layers(
        self, level: Level, read_s: float, pace: Pace, link_free: float, free: Sequence[float]
    ) -> tuple[float, float, list[float]]:
        """Read and compute the layers of one step.

        Args:
            link_free: time from which the link is free.
            free: times from which the buffers are free, in the order of their use.

        Returns:
            The stall, and the two arguments for reads of the next step; all times count from this
            step's start.
        """
        done = [*free]  # when each far layer was computed, behind those of the step before
        stall_s = 0.0
        for position, layer in enumerate(self._far_layers[level.num_far]):
            link_free = max(link_free, done[position]) + read_s
            arrives = pace.overhead_s + layer * pace.layer_s + stall_s
            if link_free > arrives:
                stall_s += link_free - arrives
                arrives = link_free
            done.append(arrives + pace.layer_s)
        return stall_s, link_free, done[-len(free) :]


class InterleaveAcrossSteps(Interleave):
    """Variant whose first reads of a step begin in the step before, as soon as buffers are free.

    Args:
        always: reads begin early in every step; if False, only in steps whose blocks are those of
            the step before. True is more than an engine could do, as new blocks are not known.
    """

    def __init__(self, levels: KvLevels, *, always: bool = False) -> None:
        super().__init__(levels)
        self._always = always
        self._early: tuple[Level, float, list[float]] | None = None  # in this step's time

    def _stall(self, level: Level, read_s: float, blocks: StepBlocks, pace: Pace) -> float:
        early, self._early = self._early, None
        if not level.num_far or not read_s:
            return super()._stall(level, read_s, blocks, pace)
        link_free, free = pace.link_busy_s, [0.0] * self._levels.staging_buffers
        if early and early[0] == level and (blocks.is_same or self._always) and not link_free:
            _, link_free, free = early
        stall_s, link_free, free = self._read_layers(level, read_s, pace, link_free, free)
        seconds = pace.overhead_s + self._levels.num_layers * pace.layer_s + stall_s
        self._early = level, link_free - seconds, [time - seconds for time in free]
        return stall_s
