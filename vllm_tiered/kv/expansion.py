# SPDX-License-Identifier: Apache-2.0
"""Transition between levels of expansion while requests run (Pie, sections 3.4.2 and 4.1).

More layers    step k     the blocks of the layers to offload are written out during compute
offloaded      step k+1   the blocks that step k wrote are written out; then the layers are
                          offloaded, and their pages drain
               step k+2   the limit rises: the engine gets more blocks, made of those pages
Fewer          The limit falls first. Free blocks are reserved at once (cached ones are evicted),
               the others as requests end or are preempted. When all blocks fit, the layers are read
               back in one step, each before it is computed.
Partial        In the first step of a level that offloads partial blocks, the near ones are written
blocks         out in one copy.

Only the scheduler decides a transition, and the step plans carry it out. So all ranks are at the
same level in every step.
"""

from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.layout import KvLevels, Level


class Expansion:
    """Present and target level, and the steps of the transition between them.

    Args:
        levels: the sizes of every level.
        elastic: the block limit, which follows the level.
        level: the level at the start.
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
        """Set another target level; drop what was begun for the old target."""
        if level == self.target:
            return
        self.target = level
        self._is_written_out = False
        self._elastic.target = None if self.is_settled else self.levels.geometry(level)

    def restrict(self, levels: KvLevels, level: Level) -> None:
        """Use other levels from now on, and set one of them as the target."""
        self.levels = levels
        self.aim(level)

    def next_step(self) -> tuple[int, int]:
        """Advance one step towards the target.

        Call it after reserving the free blocks of ``elastic.excess``. Read ``level`` after it.

        Returns:
            The number of offloaded layers in the planned step, and the number that the next step
            may have, for which layers are written out during the planned step.
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
