# SPDX-License-Identifier: Apache-2.0
"""Staging buffers: near pages through which the offloaded layers pass, and the copies for it.

A buffer has a page for each block that the step reads or writes. Mostly requests only
add to blocks that they have; then the next step has the same blocks, and buffers, block tables and
prepared copies stay as they are.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_tiered.devices.base import Copy, Device, Direction, Event
from vllm_tiered.devices.pages import PageBuffer, PageIds, Pages
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.page_pool import Owner, PagePool
from vllm_tiered.kv.policy import SwapOrder
from vllm_tiered.kv.step_plan import BlockIds, StepPlan

_NO_BLOCKS: BlockIds = np.empty(0, np.int64)
_NO_PAGES: PageIds = np.empty((0, 0), np.int64)


class Staging:
    """Buffers for one step's blocks, used by the offloaded layers in turn.

    Args:
        pool: gives the buffers pages that are free or drain.
        near: the near tier's pages.
        device: prepares the copies.
        max_buffers: take at most this many (or what the policy asks for), pages permitting.

    Attributes:
        pages: int64 [buffers, blocks].
        vacated: for each buffer, what must be over before a layer is read into it.
        reads: by offloaded position, the copy that stages the layer.
        writes: likewise the copy that writes out what the layer computed; none if the step fills
            no block of a buffer.
    """

    def __init__(
        self, *, pool: PagePool, near: PageBuffer, device: Device, max_buffers: int
    ) -> None:
        self._pool = pool
        self._near = near
        self._device = device
        self._max_buffers = max_buffers
        self.pages: PageIds = _NO_PAGES
        self.vacated: list[tuple[Event, ...]] = []
        self.reads: list[Copy] = []
        self.writes: list[Copy] = []
        self._load = self._load_and_store = _NO_BLOCKS
        self._stores_new = False
        self._wanted = 0
        self._is_written: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    @property
    def num_buffers(self) -> int:
        """Buffers that are open."""
        return len(self.vacated)

    def fits(self, plan: StepPlan) -> bool:
        """Return whether the buffers fit this step too, and pages would not give more of them."""
        others = (plan.store_new, plan.alloc_partial, plan.released, plan.reserved)
        return (
            self.num_buffers > 0
            and not any(map(len, others))
            and _are_equal(plan.load, self._load)
            and _are_equal(plan.load_and_store, self._load_and_store)
            and not self._stores_new
            and (self.num_buffers == self._wanted or not self._has_pages_for_more())
        )

    def open(
        self, plan: StepPlan, order: SwapOrder, regions: Sequence[PageBuffer], table: MappingTable
    ) -> None:
        """Take buffers for a step that reads or writes blocks, as many as pages give.

        A buffer holds the blocks read, by id, and then those that are new.

        Args:
            order: the layers' roles now.
            regions: the offloaded layers' far pages, by block id.
            table: gets the blocks' pages in each offloaded layer.
        """
        read_ids, written_ids = plan.load, plan.store_new
        if len(plan.load_and_store):
            read_ids = np.sort(np.concatenate([plan.load, plan.load_and_store]))
            written_ids = np.concatenate([plan.load_and_store, plan.store_new])
        num_read = len(read_ids)
        pages_per_buffer = num_read + len(plan.store_new)
        if not pages_per_buffer:
            return
        self._wanted = wanted = min(len(regions), max(self._max_buffers, order.num_staging_buffers))
        # Pages that drain are as good as free ones: reads are behind the writes before them anyway.
        count = max(1, min(wanted, self._pool.num_available // pages_per_buffer))
        pages, drained = self._pool.allocate(count * pages_per_buffer, Owner.STAGING)
        self.pages = pages.reshape(count, pages_per_buffer)
        self._load, self._load_and_store, self._stores_new = (
            plan.load,
            plan.load_and_store,
            len(plan.store_new) > 0,
        )
        # On a device whose compute runs later, the step before may still use these pages. Compute
        # writes new blocks to them when it has waited for the buffer's read, which all layers have.
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
        """Give the buffers back; what was written out of them drains until ``last_write``."""
        if last_write is None or not self.writes:
            self._pool.free(self.pages.ravel(), Owner.STAGING)
        else:
            written = self.pages[:, self._is_written].ravel()
            self._pool.free(self.pages[:, ~self._is_written].ravel(), Owner.STAGING)
            self._pool.drain(written, Owner.STAGING, last_write)
        self.pages, self.vacated, self.reads, self.writes = _NO_PAGES, [], [], []

    def _has_pages_for_more(self) -> bool:
        """Return whether partial blocks that left since have given back pages for a buffer."""
        pages_per_buffer: int = self.pages.shape[1]
        return self._pool.num_available >= pages_per_buffer

    def _prepare_reads(self, block_ids: BlockIds, regions: Sequence[PageBuffer]) -> list[Copy]:
        blocks = Pages(block_ids, ascending=True)
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
        """Prepare the copies; ``written`` are the positions of ``block_ids`` in a buffer."""
        blocks = Pages(block_ids)
        buffers = [Pages(buffer[written]) for buffer in self.pages]
        return [
            self._device.prepare(
                Direction.WRITE, self._near, buffers[position % len(buffers)], far, blocks
            )
            for position, far in enumerate(regions)
        ]


def _are_equal(ids: BlockIds, others: BlockIds) -> bool:
    """Compare by identity first: the planner gives the same array while nothing changes."""
    # Through a pipe it arrives as a copy.
    return ids is others or np.array_equal(ids, others)
