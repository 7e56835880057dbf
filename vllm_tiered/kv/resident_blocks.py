# SPDX-License-Identifier: Apache-2.0
"""Blocks of resident groups: which of them have near pages in the offloaded layers too.

A resident group keeps a sliding window, an attention chunk or a recurrent state. Its blocks are
near in every layer, for as long as a request holds them. A block that was freed, and that the
engine's prefix cache still knows, keeps its pages too: a later request may hit it. These cached
blocks give way, oldest first, when a request would not get its blocks otherwise. Blocks of
recurrent states, *state blocks*, lie in columns (``state_columns.py``); the others are called
*window blocks*.
"""

from collections.abc import Container, Iterable
from itertools import islice
from typing import NamedTuple

from vllm_tiered.kv.state_columns import StateColumns


class ResidentChanges(NamedTuple):
    """Blocks of resident groups that get or lose their pages in a step; ids ascend.

    Attributes:
        new: window blocks that need pages.
        lost: window blocks that do not need them any more.
        new_states: state blocks that need pages.
        columns: their columns.
        lost_states: state blocks that do not need them any more.
    """

    new: list[int]
    lost: list[int]
    new_states: list[int]
    columns: list[int]
    lost_states: list[int]


NO_CHANGES = ResidentChanges([], [], [], [], [])


class ResidentBlocks:
    """Tracker of the blocks of resident groups, in the scheduler.

    Attributes:
        columns: the columns of state blocks; None without recurrent groups.
    """

    def __init__(self) -> None:
        self.columns: StateColumns | None = None
        self._states: set[int] = set()  # of the blocks below, those of recurrent states
        self._held: set[int] = set()
        self._cached: dict[int, None] = {}  # in the order of being freed
        self._announced: dict[int, bool] = {}  # blocks that workers know, and if they are states
        self._touched: set[int] = set()  # blocks that may have changed since the last announcement
        self._num_charged = 0

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return len(self._held)

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix cache knows."""
        return len(self._cached)

    @property
    def block_ids(self) -> frozenset[int]:
        """All these blocks."""
        return frozenset(self._held).union(self._cached)

    @property
    def num_charged(self) -> int:
        """Blocks whose pages are counted: somewhat more than there are.

        A window gives up its first block some steps before or after it takes a new one. The charge
        does not follow this, as each change of the block limit makes work in every worker.
        """
        return self._num_charged

    @property
    def _num_blocks(self) -> int:
        return len(self._held) + len(self._cached)

    def charged_with(self, new_blocks: int) -> int:
        """Return the charge once requests hold so many new blocks."""
        return max(self._num_charged, self._num_blocks + new_blocks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._held or block_id in self._cached

    def hold(self, block_ids: Iterable[int]) -> None:
        """Record that a request holds these blocks, which are here already or of a window."""
        for block_id in block_ids:
            self._cached.pop(block_id, None)
            self._held.add(block_id)
            self._touched.add(block_id)
        self._num_charged = max(self._num_charged, self._num_blocks)

    def hold_states(self, block_ids: Iterable[int]) -> None:
        """Record that a request got these new blocks for recurrent states."""
        states = list(block_ids)
        self._states.update(states)
        self.hold(states)

    def cache(self, block_id: int) -> None:
        """Record that no request holds the block any more, but the prefix cache knows it."""
        self._held.discard(block_id)
        self._cached[block_id] = None

    def drop(self, block_ids: Iterable[int]) -> None:
        """Record that the content of these blocks is lost; blocks of other groups are ignored."""
        for block_id in block_ids:
            if block_id in self:
                self._held.discard(block_id)
                self._cached.pop(block_id, None)
                self._states.discard(block_id)
                self._touched.add(block_id)

    def drop_all(self) -> None:
        """Record that no block has any content."""
        self.drop([*self._held, *self._cached])
        self._num_charged = 0

    def drop_oldest(self, count: int, keep: Container[int] = ()) -> list[int]:
        """Drop the ``count`` cached blocks that were freed first, and return their ids.

        Args:
            keep: blocks that are not dropped.
        """
        oldest = list(islice((block for block in self._cached if block not in keep), count))
        self.drop(oldest)
        return oldest

    def lower_charge(self, *, slack: bool) -> None:
        """Charge for what is there only; with ``slack`` only if the charge is well above that."""
        count = self._num_blocks
        if not (slack and self._held) or self._num_charged - count > 8 + count // 4:
            self._num_charged = count

    def take_changes(self) -> ResidentChanges:
        """Return what has changed since the last call, and assign columns to new state blocks.

        A block that was lost and has come back as the same kind is not in it: it keeps its pages.
        """
        if not self._touched:
            return NO_CHANGES
        changes = ResidentChanges([], [], [], [], [])
        for block_id in sorted(self._touched):
            is_here, is_state = block_id in self, block_id in self._states
            was_state = self._announced.get(block_id)
            if is_here and was_state is is_state:
                continue
            if was_state is not None:
                del self._announced[block_id]
                (changes.lost_states if was_state else changes.lost).append(block_id)
                if was_state and self.columns:
                    self.columns.release(block_id)
            if is_here:
                self._announced[block_id] = is_state
                (changes.new_states if is_state else changes.new).append(block_id)
        self._touched.clear()
        # Only now, so that columns that were released in this step can be assigned.
        for block_id in changes.new_states:
            assert self.columns is not None, "state blocks need columns"
            changes.columns.append(self.columns.assign(block_id))
        return changes
