# SPDX-License-Identifier: Apache-2.0
"""Near pages of the released blocks and of the partial blocks.

Methods that allocate pages which compute writes return the seconds for which compute stalled until
copies had drained those pages.
"""

from collections.abc import Callable

import numpy as np

from vllm_tiered.devices.base import Device, Event
from vllm_tiered.devices.pages import PageBuffer, PageIds
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.page_pool import Owner, PagePool
from vllm_tiered.kv.policy import SwapOrder
from vllm_tiered.kv.step_plan import BlockIds


class NearPages:
    """Allocator of blocks' pages in the layers where the blocks stay near.

    Args:
        pool: the near tier's pages and their owners.
        table: the mapping table, which this class updates.
        near: the near tier's pages themselves.
        device: waits for copies, and moves pages as a part of compute.

    Attributes:
        released: blocks that the engine may use; each has a page in every resident layer.
        partial: resident partial blocks and blocks of resident groups; each also has a page in
            every offloaded layer.
        columns: the columns of state blocks, by block id.
        is_laid_out_as_vllm: block b of layer l is page ``l * (P / n) + b``, as in vLLM's own
            layout.
    """

    def __init__(
        self, pool: PagePool, table: MappingTable, near: PageBuffer, device: Device
    ) -> None:
        self.released: set[int] = set()
        self.partial: set[int] = set()
        self.columns: dict[int, int] = {}
        self.is_laid_out_as_vllm = False
        self._pool = pool
        self._table = table
        self._near = near
        self._device = device

    @property
    def _order(self) -> SwapOrder:
        return self._table.order

    def lay_out_as_vllm(self, num_released: int) -> None:
        """Give each layer contiguous pages, the null block's page first."""
        layers = np.arange(len(self._table.rows), dtype=np.int64)[:, None]
        block_ids = np.arange(1, num_released + 1, dtype=np.int64)
        pages = layers * (self._pool.num_pages // len(layers)) + block_ids
        self._pool.claim(pages.ravel(), Owner.RESIDENT)
        self._table.set_resident_pages(block_ids, pages)
        self.released.update(block_ids.tolist())
        self.is_laid_out_as_vllm = True

    def release_blocks(self, block_ids: BlockIds) -> float:
        """Allocate a page in every resident layer for each block, which the engine may now use."""
        if not len(block_ids):
            return 0.0
        self.is_laid_out_as_vllm = False
        shape = (len(self._order.resident), len(block_ids))
        pages, seconds = self._allocate(shape[0] * shape[1], Owner.RESIDENT)
        self._table.set_resident_pages(block_ids, pages.reshape(shape))
        self.released.update(block_ids.tolist())
        return seconds

    def reserve_blocks(self, block_ids: BlockIds, read_until: Event | None = None) -> None:
        """Free the pages of blocks that the engine may no longer use.

        Args:
            read_until: a copy that may read them; they drain until it is done.
        """
        if len(block_ids):
            self.is_laid_out_as_vllm = False
            pages = self._table.resident_pages(block_ids)
            if read_until is None:
                self._pool.free(pages, Owner.RESIDENT)
            else:
                self._pool.drain(pages, Owner.RESIDENT, read_until)
            self._table.set_resident_pages(block_ids, np.array(MappingTable.HOLE))
            self.released.difference_update(block_ids.tolist())

    def alloc_partial(self, block_ids: BlockIds) -> float:
        """Allocate a page in every offloaded layer for partial blocks."""
        seconds = 0.0
        if len(block_ids) and self._order.offloaded:
            shape = (len(self._order.offloaded), len(block_ids))
            pages, seconds = self._allocate(shape[0] * shape[1], Owner.PARTIAL)
            self._table.set_offloaded_pages(block_ids, pages.reshape(shape))
        self.partial.update(block_ids.tolist())
        return seconds

    def free_partial(self, block_ids: BlockIds) -> None:
        """Free the pages of partial blocks whose requests ended or were preempted."""
        if len(block_ids) and self._order.offloaded:
            pages = self._table.offloaded_pages(block_ids).ravel()
            self._pool.free(pages, Owner.PARTIAL)
        self.partial.difference_update(block_ids.tolist())

    def alloc_states(
        self, block_ids: BlockIds, columns: BlockIds, end_copies: Callable[[], float]
    ) -> float:
        """Give state blocks the pages of their columns, in every layer.

        Whatever is there is moved. No staging buffer may be open.

        Args:
            end_copies: stalls compute until no copy reads or writes a near page, and returns the
                seconds.
        """
        if not len(block_ids):
            return 0.0
        self.columns.update(zip(block_ids.tolist(), columns.tolist(), strict=True))
        self.partial.update(block_ids.tolist())
        if self.is_laid_out_as_vllm and np.array_equal(block_ids, columns):
            return 0.0
        self.is_laid_out_as_vllm = False
        self._pool.free(self._table.resident_pages(block_ids), Owner.RESIDENT)
        wanted = self._column_pages(columns)
        seconds = self._vacate(wanted.ravel(), end_copies)
        for layers, owner in (
            (self._order.resident, Owner.RESIDENT),
            (self._order.offloaded, Owner.PARTIAL),
        ):
            if layers:
                self._pool.claim(wanted[list(layers)].ravel(), owner)
        self._table.pages[:, block_ids] = wanted
        return seconds

    def free_states(self, block_ids: BlockIds) -> None:
        """Clear the pages of state blocks, and free those in offloaded layers.

        A recurrent state may look like NaN to attention, which reads slots of a page that nothing
        was written to, with weight 0.
        """
        if not len(block_ids):
            return
        pages = self._table.pages[:, block_ids].astype(np.int64).ravel()
        self._device.clear_pages(self._near, pages)
        for block_id in block_ids.tolist():
            del self.columns[block_id]
        self.free_partial(block_ids)

    def clear(self) -> None:
        """Fill all pages with zeros."""
        self._near.data.zero_()

    def _column_pages(self, columns: BlockIds) -> PageIds:
        """Return the pages of columns [layers, columns]."""
        rows = np.arange(len(self._table.rows), dtype=np.int64)[:, None]
        return rows * (self._pool.num_pages // len(rows)) + columns

    def _vacate(self, wanted: PageIds, end_copies: Callable[[], float]) -> float:
        """Make pages free for compute to write to; move the blocks' pages among them."""
        owners = self._pool.owners(wanted)
        available = np.isin(owners, (int(Owner.FREE), int(Owner.DRAINING)))
        # They are held meanwhile, so that the other blocks do not move there.
        drained = self._pool.claim_available(wanted[available], Owner.STAGING)
        seconds = sum(self._device.wait(event) for event in drained)
        if not available.all():
            seconds += end_copies()
            moved_to = np.arange(self._pool.num_pages, dtype=np.int32)
            for owner in (Owner.RESIDENT, Owner.PARTIAL):
                src = wanted[owners == int(owner)]
                dst, stalled = self._allocate(len(src), owner)
                seconds += stalled
                self._device.move_pages(self._near, src, dst)
                self._pool.transfer(src, owner, Owner.STAGING)
                moved_to[src] = dst
            self._table.pages[:] = moved_to[self._table.pages]
        self._pool.free(wanted, Owner.STAGING)
        return seconds

    def check_integrity(self, staging_pages: PageIds) -> None:
        """Check that pages are conserved, and that no page belongs to two blocks or layers.

        resident layers x released + offloaded layers x partial + staging + draining + free = all

        Raises:
            IntegrityError: the numbers do not agree; the message states them.
        """
        expected = {
            Owner.RESIDENT: len(self._order.resident) * len(self.released),
            Owner.PARTIAL: len(self._order.offloaded) * len(self.partial),
            Owner.STAGING: staging_pages.size,
        }
        for owner, pages in expected.items():
            if self._pool.count(owner) != pages:
                raise IntegrityError(f"{owner.name}: expected {pages}; {self._pool.describe()}")
        held = [self._table.resident_pages(np.fromiter(self.released, np.int64))]
        held.append(self._table.offloaded_pages(np.fromiter(self.partial, np.int64)).ravel())
        held.append(staging_pages.ravel())
        all_pages = np.concatenate(held)
        for block_id, column in self.columns.items():
            own = self._column_pages(np.array([column])).ravel()
            if not np.array_equal(self._table.pages[:, block_id], own):
                raise IntegrityError(f"state block {block_id} is not in its column {column}")
        if len(np.unique(all_pages)) != len(all_pages):
            raise IntegrityError("a page stands for two blocks or layers")

    def _allocate(self, num_pages: int, owner: Owner) -> tuple[PageIds, float]:
        """Allocate pages that compute will write; stall compute until they have drained."""
        pages, drained = self._pool.allocate(num_pages, owner)
        return pages, sum(self._device.wait(event) for event in drained)
