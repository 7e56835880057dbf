# SPDX-License-Identifier: Apache-2.0
"""Policies that keep whole blocks near in far layers, in the near pages that are left over.

With P near pages, m of n layers far, R blocks with pages in the resident layers, T partial and U
full blocks in use, and S staging buffers, this many full blocks are *kept*:

    ┌─ resident layers ─┬─ far layers ─┬─ far layers ─┬─ buffers ──────┐
    │ (n - m) R         │ m T          │ m kept       │ S (U - kept)   │  = P
    └───────────────────┴──────────────┴──────────────┴────────────────┘

The other U - kept full blocks are read in every far layer. Which blocks are kept is not modelled:
a block that begins to be kept is read in that step anyway, and one that ends to be kept has been
written out before, as every full block is.
"""

from __future__ import annotations

from benchmarks.simulator.policies.base import Burden, StepBlocks
from benchmarks.simulator.policies.interleave import Interleave
from vllm_tiered.kv.layout import KvLevels, Level


class Blocks(Interleave):
    """Interleaved far layers that keep as many blocks near as there are pages for.

    Args:
        on_demand: a block has pages in the resident layers while it is used; if False, as soon as
            the engine may use it.
    """

    def __init__(self, levels: KvLevels, *, on_demand: bool = False) -> None:
        super().__init__(levels)
        self._on_demand = on_demand

    def kept(self, level: Level, blocks: StepBlocks) -> int:
        """Return the full blocks that have pages in every layer."""
        levels, m = self._levels, level.num_far
        buffers = levels.staging_buffers
        partial = blocks.partial * level.partial_blocks_resident
        full = blocks.used - partial
        if m <= buffers:
            return full
        with_pages = blocks.used if self._on_demand else blocks.released
        resident = (levels.num_layers - m) * with_pages
        left_over = levels.near_pages - resident - m * partial - buffers * full
        return max(0, min(full, left_over // (m - buffers)))

    def staged(self, level: Level, blocks: StepBlocks) -> int:
        """Return the blocks that are read in every far layer."""
        # New blocks are the first to be kept: their pages are near when they are written.
        full = super().staged(level, blocks)
        return max(0, min(full, full + blocks.prefilled - self.kept(level, blocks)))

    def burden(self, level: Level, blocks: StepBlocks) -> Burden:
        """Return what the step's copies cost compute; nothing if every block is kept."""
        if not self.staged(level, blocks):
            return Burden(0, self.written(level, blocks) * level.num_far)
        return super().burden(level, blocks)
