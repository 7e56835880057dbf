# SPDX-License-Identifier: Apache-2.0
"""Whether the prefix store goes on storing: as long as what it stores is hit.

A block that leaves near memory costs a write, and compute waits for it. Where no prompt begins as
an earlier one did, nothing comes of that. So storing is on trial, for as many blocks as the store
has slots: content is rarely kept for longer. If few of them are hit, nothing is stored for four
times as many blocks; then comes the next trial, and after each that failed the pause is twice as
long.
"""

MIN_HITS = 0.05
"""Least share of a trial's blocks that are hit.

A hit saves the computation of a block, which takes many times as long as the copies of twenty.
"""

FIRST_PAUSE, LONGEST_PAUSE = 4, 64
"""Lengths of a pause, in trials: the cost of storing falls to a fifth, and to a 65th at last."""


class StoreTrial:
    """Decision whether blocks that leave near memory are stored.

    Args:
        num_blocks: blocks of a trial.

    Attributes:
        is_storing: whether blocks are stored now.
        num_pauses: pauses since the start.
    """

    def __init__(self, num_blocks: int) -> None:
        self.is_storing = True
        self.num_pauses = 0
        self._num_blocks = num_blocks
        self._pause = FIRST_PAUSE
        self._evicted = self._hits = 0  # since the trial or the pause began

    def evict(self) -> bool:
        """Count a block that leaves near memory; return whether to store it."""
        self._evicted += 1
        if self.is_storing and self._evicted > self._num_blocks:
            self._end_trial()
        elif not self.is_storing and self._evicted > self._pause * self._num_blocks:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._begin(is_storing=True)
        return self.is_storing

    def hit(self, num_blocks: int) -> None:
        """Count hits of stored blocks; one in a pause ends it."""
        if num_blocks and not self.is_storing:
            self._pause = FIRST_PAUSE
            self._begin(is_storing=True)
            self._evicted = 0
        self._hits += num_blocks

    def _end_trial(self) -> None:
        is_good = self._hits >= MIN_HITS * self._num_blocks
        if is_good:
            self._pause = FIRST_PAUSE
        else:
            self.num_pauses += 1
        self._begin(is_storing=is_good)

    def _begin(self, *, is_storing: bool) -> None:
        self.is_storing = is_storing
        self._evicted, self._hits = 1, 0  # the evicted block that begins it counts
