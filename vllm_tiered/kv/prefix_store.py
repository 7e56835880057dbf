# SPDX-License-Identifier: Apache-2.0
"""Prefix store: full blocks that the engine evicts stay in the far tier, found by their content.

Every released block has a *slot*: the place of its pages in each layer's far region. There are more
slots than released blocks. When the engine reuses a full block of its prefix cache, the block's
slot keeps the content under its key, and the block gets another slot. When a later request hits the
key, the block that the engine gives it gets the slot:

    block 7 is reused     key ─► slot 7      block 7 ─► slot 40
    key is hit            block 3 ─► slot 7  slot 3 is spare

So content changes its block without a copy. Only layers that do not have the block in the far tier
write their pages to the slot, and only resident layers read them from it. A block that was hit and
is reused once more costs no write at all.

A level with more blocks needs their slots. The content that was not used for the longest time then
goes first.

This is the scheduler's side; ``prefix_pages.py`` applies its moves in the workers.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence, Set
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.step_plan import BlockIds, PrefixMoves

_NO_SLOT = -1


class _Kept(NamedTuple):
    """Content in a slot that belongs to no block.

    Attributes:
        tag: a number that stands for the content; the workers check it. Not 0.
    """

    slot: int
    tag: int


class PrefixStore:
    """Index of the content in slots, and of the blocks' slots.

    Args:
        num_blocks: block ids are below this; block 0 is the engine's null block.
        num_slots: slots of each far region; at least ``num_blocks``.
        released: blocks that the engine may use at the start; each has the slot of its own number.
        is_full: bool [num_blocks], whether a step that was planned has filled the block. The step
            planner sets it. Blocks that are reused are unset here.

    Attributes:
        num_hits: blocks that were fetched since the start.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_slots: int,
        released: Iterable[int],
        is_full: npt.NDArray[np.bool_],
    ) -> None:
        if num_slots < num_blocks:
            raise IntegrityError(f"{num_slots} slots for {num_blocks} blocks")
        self.num_hits = 0
        self._is_full = is_full
        self._slot_of = np.full(num_blocks, _NO_SLOT, dtype=np.int64)
        for block_id in released:
            self._slot_of[block_id] = block_id
        self._num_slots = num_slots
        used = set(self._slot_of.tolist())
        self._spare = [slot for slot in range(num_slots - 1, 0, -1) if slot not in used]
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()  # the oldest first
        self._matched: Set[Hashable] = frozenset()  # content that must stay for now
        # This step's moves
        self._keep: dict[int, int] = {}  # tags by block
        self._fetch: dict[int, int] = {}
        self._moved: set[int] = set()

    @property
    def num_stored(self) -> int:
        """Contents that belong to no block."""
        return len(self._kept)

    def match(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """Return the leading keys whose content is here; it stays until the next call or step."""
        matched = []
        for key in keys:
            if key not in self._kept:
                break
            matched.append(key)
        self._matched = frozenset(matched)
        return matched

    def evict(self, block_id: int, key: Hashable | None) -> None:
        """Keep the content of a block that the engine reuses, or drop it if there is no slot left.

        Args:
            key: the block's key in the engine's prefix cache; None if it is not there.
        """
        was_full, self._is_full[block_id] = bool(self._is_full[block_id]), False
        fetch_tag = self._fetch.pop(block_id, None)
        slot = int(self._slot_of[block_id])
        if key is None or not was_full or slot == _NO_SLOT:
            return
        if key in self._kept:  # two requests have computed it
            self._kept.move_to_end(key)
            return
        spare = self._take_slot()
        if spare is None:
            return
        tag = hash(key) or 1
        if fetch_tag is None:
            self._keep[block_id] = tag
        self._kept[key] = _Kept(slot, tag)
        self._give(block_id, spare)

    def fetch(self, keys: Sequence[Hashable], block_ids: Sequence[int]) -> None:
        """Give the content of ``keys`` to these blocks, which the engine has just allocated.

        Raises:
            IntegrityError: a content is not here any more.
        """
        for key, block_id in zip(keys, block_ids, strict=True):
            kept = self._kept.pop(key, None)
            if kept is None:
                raise IntegrityError(f"the content that matched for block {block_id} is gone")
            self._give_up_slot(block_id)
            self._give(block_id, kept.slot)
            self._fetch[block_id] = kept.tag
            self._is_full[block_id] = True
        self.num_hits += len(keys)
        self._matched = frozenset()

    def drop_all(self) -> None:
        """Drop all content that belongs to no block."""
        self._spare += [kept.slot for kept in self._kept.values()]
        self._kept.clear()

    def take_moves(
        self, released: Sequence[int] = (), reserved: Sequence[int] = ()
    ) -> PrefixMoves | None:
        """Return the moves since the last call; None if there are none.

        Args:
            released: blocks that the engine may use from this step on, which get slots.
            reserved: blocks that it may not use any more, which give up theirs.
        """
        self._matched = frozenset()
        for block_id in reserved:
            self._give_up_slot(block_id)
            self._slot_of[block_id] = _NO_SLOT
            self._moved.discard(block_id)
        for block_id in released:
            if self._slot_of[block_id] == _NO_SLOT:
                slot = self._take_slot()
                assert slot is not None, "there is a slot for every block"
                self._give(block_id, slot)
        if not (self._keep or self._moved):
            return None
        blocks = np.array(sorted(self._moved), dtype=np.int64)
        moves = PrefixMoves(
            keep=_array(self._keep),
            keep_tags=_array(self._keep.values()),
            fetch=_array(self._fetch),
            fetch_tags=_array(self._fetch.values()),
            blocks=blocks,
            slots=self._slot_of[blocks],
        )
        self._keep, self._fetch, self._moved = {}, {}, set()
        return moves

    def contents(self) -> list[tuple[int, int]]:
        """Return the slot and the tag of each content that belongs to no block, for checks."""
        return list(self._kept.values())

    def check_integrity(self) -> None:
        """Check that every slot belongs to one block or one content, or is spare.

        Raises:
            IntegrityError: the numbers do not agree; the message states them.
        """
        owned = self._slot_of[self._slot_of != _NO_SLOT].tolist()
        kept = [kept.slot for kept in self._kept.values()]
        if sorted([*owned, *kept, *self._spare]) != list(range(1, self._num_slots)):
            raise IntegrityError(
                f"{len(owned)} slots of blocks, {len(kept)} with other content and "
                f"{len(self._spare)} spare, of {self._num_slots - 1}"
            )

    def _give(self, block_id: int, slot: int) -> None:
        self._slot_of[block_id] = slot
        self._moved.add(block_id)

    def _give_up_slot(self, block_id: int) -> None:
        slot = int(self._slot_of[block_id])
        if slot != _NO_SLOT:
            self._spare.append(slot)

    def _take_slot(self) -> int | None:
        """Return a spare slot, or that of the oldest content; None if all content has to stay."""
        if self._spare:
            return self._spare.pop()
        for key in self._kept:
            if key not in self._matched:
                return self._kept.pop(key).slot
        return None


def _array(numbers: Iterable[int]) -> BlockIds:
    return np.fromiter(numbers, dtype=np.int64)
