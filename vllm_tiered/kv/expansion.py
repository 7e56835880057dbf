# SPDX-License-Identifier: Apache-2.0
"""Changes the number of far layers while requests run (Pie, sections 3.4.2 and 4.1).

More far       step k     the leaving layers' blocks are written out behind the computation
               step k+1   what step k wrote follows; the layers are far, their near pages drain
               step k+2   the limit rises: the engine gets blocks made of those pages
Fewer far      the limit falls first: free blocks are reserved (cached ones are evicted), the
               others as requests end or are preempted; when all fit, the layers are read back
               in one step, each before it is computed
Partial blocks move     at the first step of the level partly filled blocks are written out, in one
copy

Both are decided in the scheduler alone and carried out by the plan of a step, so all ranks are at
the same level in every step.
"""

from vllm_tiered.kv.block_limit import ElasticBlocks
from vllm_tiered.kv.layout import KvLevels


class Expansion:
    """The present level, the one aimed at, and the way there.

    Args:
        levels: the arithmetic of every level.
        elastic: the limit, which follows.
    """

    def __init__(self, levels: KvLevels, elastic: ElasticBlocks, level: int) -> None:
        self.levels = levels
        self.level = self.target = level
        self.num_changes = 0
        self._elastic = elastic
        self._is_written_out = False

    @property
    def is_settled(self) -> bool:
        return self.level == self.target

    @property
    def num_far(self) -> int:
        """Of the present level."""
        return self.levels.num_far(self.level)

    @property
    def partial_blocks_resident(self) -> bool:
        """Whether partly filled blocks stay near in them."""
        return self.levels.partial_blocks_resident(self.level)

    def aim(self, level: int) -> None:
        """Head for another level; the way that was not gone yet is forgotten."""
        if level == self.target:
            return
        self.target = level
        self._is_written_out = False
        self._elastic.target = None if self.is_settled else self.levels.geometry(level)

    def next_step(self) -> tuple[int, int]:
        """Far layers of the step that is being planned, and those to write out for behind it.

        Call it after withholding what is free of ``elastic.excess``; then ask for
        ``partial_blocks_resident``.
        """
        if self.is_settled or self._elastic.excess:
            return self.num_far, self.num_far
        after = self.levels.num_far(self.target)
        if after > self.num_far and not self._is_written_out:
            self._is_written_out = True
            return self.num_far, after
        self.level = self.target
        self.num_changes += 1
        self._is_written_out = False
        self._elastic.geometry = self.levels.geometry(self.level)
        self._elastic.target = None
        return self.num_far, self.num_far
