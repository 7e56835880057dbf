# SPDX-License-Identifier: Apache-2.0
"""Staging buffers: near pages that the offloaded layers share, and the copies in and out.

A buffer has a page for each block that the step reads or writes. In most steps the requests only
add to blocks that they already have. Then the next step has the same blocks and reuses the buffers,
the block tables and the prepared copies.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_tiered.devices.base import Copy, Device, Direction, Event
from vllm_tiered.devices.pages import PageBuffer, PageIds, Pages
from vllm_tiered.kv.far_tier import FarTier
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.page_pool import Owner, PagePool
from vllm_tiered.kv.policy import SwapOrder
from vllm_tiered.kv.step_plan import BlockIds, StepPlan

_NO_BLOCKS: BlockIds = np.empty(0, np.int64)
_NO_PAGES: PageIds = np.empty((0, 0), np.int64)


class Staging:
    """Buffers for one step's blocks, used by the offloaded layers in turn.

    Args:
        pool: allocates the buffers' pages, free or draining ones.
        near: the near tier's pages.
        far: the far tier.
        device: prepares the copies.
        max_buffers: the most buffers to open, or the policy's number if that is larger. Fewer are
            opened if there are too few pages.

    Attributes:
        pages: int64 [buffers, blocks].
        read_ids: the blocks that are staged, ascending.
        vacated: for each buffer, the events that must be done before a layer is read into it.
        reads: by offloaded position, the copy that stages the layer.
        writes: by offloaded position, the copy that writes out the layer's new KV; empty if the
            step writes to no block of a buffer.
    """

    def __init__(
        self, *, pool: PagePool, near: PageBuffer, far: FarTier, device: Device, max_buffers: int
    ) -> None:
        self._pool = pool
        self._near = near
        self._far = far
        self._device = device
        self._max_buffers = max_buffers
        self.pages: PageIds = _NO_PAGES
        self.read_ids: BlockIds = _NO_BLOCKS
        self.vacated: list[tuple[Event, ...]] = []
        self.reads: list[Copy] = []
        self.writes: list[Copy] = []
        self._load = self._load_and_store = _NO_BLOCKS
        self._stores_new = False
        self._wanted = 0
        self._is_written: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    @property
    def num_buffers(self) -> int:
        """Number of open buffers."""
        return len(self.vacated)

    def fits(self, plan: StepPlan) -> bool:
        """Return whether the open buffers fit this step, and no more could be opened."""
        others = (
            plan.store_new,
            plan.alloc_partial,
            plan.alloc_state,
            plan.released,
            plan.reserved,
        )
        return (
            self.num_buffers > 0
            and not any(map(len, others))
            and plan.prefixes is None
            and _are_equal(plan.load, self._load)
            and _are_equal(plan.load_and_store, self._load_and_store)
            and not self._stores_new
            and (self.num_buffers == self._wanted or not self._has_pages_for_more())
        )

    def open(
        self, plan: StepPlan, order: SwapOrder, regions: Sequence[PageBuffer], table: MappingTable
    ) -> None:
        """Open as many buffers for a step as the available pages allow; none if it has no blocks.

        A buffer holds the blocks that are read, by ascending id, and then the new blocks.

        Args:
            order: the layers' present roles.
            regions: the offloaded layers' far pages, by slot.
            table: the mapping table; the blocks' pages in each offloaded layer are set in it.
        """
        read_ids, written_ids = plan.load, plan.store_new
        if len(plan.load_and_store):
            read_ids = np.sort(np.concatenate([plan.load, plan.load_and_store]))
            written_ids = np.concatenate([plan.load_and_store, plan.store_new])
        num_read = len(read_ids)
        self.read_ids = read_ids
        pages_per_buffer = num_read + len(plan.store_new)
        if not pages_per_buffer:
            return
        self._wanted = wanted = min(len(regions), max(self._max_buffers, order.num_staging_buffers))
        # Draining pages cost no extra wait: reads wait for all earlier writes anyway.
        count = max(1, min(wanted, self._pool.num_available // pages_per_buffer))
        pages, drained = self._pool.allocate(count * pages_per_buffer, Owner.STAGING)
        self.pages = pages.reshape(count, pages_per_buffer)
        self._load, self._load_and_store, self._stores_new = (
            plan.load,
            plan.load_and_store,
            len(plan.store_new) > 0,
        )
        # On a device with deferred compute, the previous step may still use these pages, so the
        # reads wait for it. Compute may write new blocks to the pages because each layer first
        # waits for its buffer's read, and every layer has a read.
        self.vacated = [(self._device.compute_event(), *drained)] * count
        self.reads = self._prepare_reads(read_ids, regions)
        extended = np.searchsorted(read_ids, plan.load_and_store)
        written = np.concatenate([extended, np.arange(num_read, pages_per_buffer)])
        self.writes = self._prepare_writes(written, written_ids, regions) if len(written) else []
        self._is_written = np.zeros(pages_per_buffer, np.bool_)
        self._is_written[written] = True
        blocks = np.concatenate([read_ids, plan.store_new])
        table.set_offloaded_pages(blocks, self.pages[np.arange(len(regions)) % count])

    def release(self, last_write: Event | None) -> None:
        """Free the buffers' pages; pages that were written out drain until ``last_write``."""
        if last_write is None or not self.writes:
            self._pool.free(self.pages.ravel(), Owner.STAGING)
        else:
            written = self.pages[:, self._is_written].ravel()
            self._pool.free(self.pages[:, ~self._is_written].ravel(), Owner.STAGING)
            self._pool.drain(written, Owner.STAGING, last_write)
        self.pages, self.vacated, self.reads, self.writes = _NO_PAGES, [], [], []

    def _has_pages_for_more(self) -> bool:
        """Return whether enough pages for one more buffer have become available since."""
        pages_per_buffer: int = self.pages.shape[1]
        return self._pool.num_available >= pages_per_buffer

    def _prepare_reads(self, block_ids: BlockIds, regions: Sequence[PageBuffer]) -> list[Copy]:
        blocks = self._far.far_pages(block_ids)
        buffers = [Pages(buffer[: len(block_ids)], ascending=True) for buffer in self.pages]
        return [
            self._device.prepare(
                Direction.READ, far, blocks, self._near, buffers[position % len(buffers)]
            )
            for position, far in enumerate(regions)
        ]

    def _prepare_writes(
        self, written: PageIds, block_ids: BlockIds, regions: Sequence[PageBuffer]
    ) -> list[Copy]:
        """Prepare the writes; ``written`` are the positions of ``block_ids`` in a buffer."""
        blocks = Pages(self._far.slots_of(block_ids))
        buffers = [Pages(buffer[written]) for buffer in self.pages]
        return [
            self._device.prepare(
                Direction.WRITE, self._near, buffers[position % len(buffers)], far, blocks
            )
            for position, far in enumerate(regions)
        ]


def _are_equal(ids: BlockIds, others: BlockIds) -> bool:
    """Compare by identity first, as the planner reuses an array while its blocks are the same."""
    # A plan that comes through a pipe has a copy of the array.
    return ids is others or np.array_equal(ids, others)
