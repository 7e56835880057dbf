# SPDX-License-Identifier: Apache-2.0
"""Pages of the prefix store in a worker: near pages go to their slots, and come back from them.

A step's moves are applied in two parts. Content is kept, and slots change their blocks, before
anything else happens to the pages. Content is fetched when the step's layers and pages are known:

    begin    near pages of reused blocks ─► slots; slots get other blocks
             ... layers move, pages are released and reserved ...
    fetch    slots ─► near pages of hit blocks, layer by layer; each layer waits for its own read

In an offloaded layer nothing is copied here: the step reads such blocks as it reads all others.
"""

import numpy as np

from vllm_tiered.devices.base import Event
from vllm_tiered.kv.far_tier import FarTier
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.relocator import Relocator
from vllm_tiered.kv.step_plan import BlockIds, PrefixMoves, StepPlan

_NO_TAG = 0


class PrefixPages:
    """Applier of the prefix store's moves to one rank's pages.

    Args:
        far: the far tier, with more slots than blocks.
        table: the mapping table.
        relocator: knows which pages are in the far tier.

    Attributes:
        lost: blocks whose content was not in the slot where it should be, since ``take_lost``.
    """

    def __init__(self, far: FarTier, table: MappingTable, relocator: Relocator) -> None:
        self.lost: set[int] = set()
        self._far = far
        self._table = table
        self._relocator = relocator
        self._tags = np.full(far.num_slots, _NO_TAG, dtype=np.int64)  # by slot

    def begin(self, plan: StepPlan) -> Event | None:
        """Keep the content of reused blocks, and give blocks their new slots.

        Returns:
            The event until which the step's compute must not overwrite near pages; None if nothing
            was kept. Pages of reserved blocks are read until the far tier's last write.
        """
        moves = plan.prefixes
        if moves is None:
            return None
        relocator = self._relocator
        # A block that has lost a page meanwhile holds nothing; a fetch then misses its tag.
        is_held = relocator.holds(moves.keep)
        keep = moves.keep[is_held]
        # What the step's compute overwrites is written first, as compute waits for it.
        is_reserved = np.isin(keep, plan.reserved)
        relocator.write_out_blocks(keep[~is_reserved])
        written = next(iter(self._far.last_write), None) if len(keep) else None
        relocator.write_out_blocks(keep[is_reserved])
        self._tags[self._far.slots_of(keep)] = moves.keep_tags[is_held]
        for block_ids in (moves.keep, moves.fetch):
            relocator.empty_blocks(block_ids)
        self._far.assign_slots(moves.blocks, moves.slots)
        self._check_tags(moves)
        self._tags[moves.slots] = _NO_TAG
        self._far.keeps_content = bool(self._tags.any())
        return written

    def fetch(self, block_ids: BlockIds, written: Event | None) -> None:
        """Read the blocks in each resident layer, which waits for its read, or for ``written``."""
        layers, returning = self._table.order.resident, self._relocator.returning
        if len(block_ids):
            self._relocator.hold_everywhere(block_ids)
            pages = self._table.pages[np.array(layers)[:, None], block_ids].astype(np.int64)
            # A layer that is being read back has queued that read before.
            returning.update(zip(layers, self._far.read(layers, block_ids, pages), strict=True))
        elif written is not None and not written.done():
            for layer in layers:  # a layer that is being read back waits for all writes
                returning.setdefault(layer, written)

    def take_lost(self) -> set[int]:
        """Return the blocks whose content was not found since the last call."""
        lost, self.lost = self.lost, set()
        return lost

    def _check_tags(self, moves: PrefixMoves) -> None:
        if not len(moves.fetch):
            return
        is_wrong = self._tags[self._far.slots_of(moves.fetch)] != moves.fetch_tags
        self.lost.update(moves.fetch[is_wrong].tolist())
