# SPDX-License-Identifier: Apache-2.0
"""The way from one level of expansion to another while requests run (Pie, sections 3.4.2, 4.1).

More layers    step k     the blocks of the layers to offload are written out behind the computation
offloaded      step k+1   what step k wrote follows; the layers are offloaded, their pages drain
               step k+2   the limit rises: the engine gets blocks made of those pages
Fewer          the limit falls first: free blocks are reserved (cached ones are evicted), the others
               as requests end or are preempted; when all fit, the layers are read back in one step,
               each before it is computed
Partial        in the first step of a level that offloads partial blocks, those that are near are
blocks         written out in one copy

Both are decided in the scheduler alone and carried out by the plan of a step, so all ranks are at
the same level in every step.
"""

from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.layout import KvLevels, Level


class Expansion:
    """The present level, the target level, and the way there.

    Args:
        levels: the arithmetic of every level.
        elastic: the block limit, which follows the level.
        level: at the start.
    """

    def __init__(self, levels: KvLevels, elastic: ElasticBlocks, level: Level) -> None:
        self.levels = levels
        self.level = self.target = level
        self.num_changes = 0
        self._elastic = elastic
        self._is_written_out = False

    @property
    def is_settled(self) -> bool:
        """Whether the present level is the target."""
        return self.level == self.target

    def aim(self, level: Level) -> None:
        """Head for another level; what was begun towards the old target is dropped."""
        if level == self.target:
            return
        self.target = level
        self._is_written_out = False
        self._elastic.target = None if self.is_settled else self.levels.geometry(level)

    def next_step(self) -> tuple[int, int]:
        """Go one step towards the target.

        Call it after reserving what is free of ``elastic.excess``, then ask for ``level``.

        Returns:
            The offloaded layers of the step that is planned, and those to write out behind it.
        """
        num_far = self.level.num_far
        if self.is_settled or self._elastic.excess:
            return num_far, num_far
        if self.target.num_far > num_far and not self._is_written_out:
            self._is_written_out = True
            return num_far, self.target.num_far
        self.level = self.target
        self.num_changes += 1
        self._is_written_out = False
        self._elastic.geometry = self.levels.geometry(self.level)
        self._elastic.target = None
        return self.level.num_far, self.level.num_far
