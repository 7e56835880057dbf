# SPDX-License-Identifier: Apache-2.0
"""Near pages of the released blocks and of the partial blocks.

Methods that allocate pages which compute writes return the seconds for which compute stalled until
copies had drained those pages.
"""

import numpy as np

from vllm_tiered.devices.base import Device
from vllm_tiered.devices.pages import PageIds
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
        device: waits for copies.

    Attributes:
        released: blocks that the engine may use; each has a page in every resident layer.
        partial: resident partial blocks and blocks of resident groups; each also has a page in
            every offloaded layer.
        is_laid_out_as_vllm: block b of layer l is page ``l * (P / n) + b``, as in vLLM's own
            layout.
    """

    def __init__(self, pool: PagePool, table: MappingTable, device: Device) -> None:
        self.released: set[int] = set()
        self.partial: set[int] = set()
        self.is_laid_out_as_vllm = False
        self._pool = pool
        self._table = table
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

    def reserve_blocks(self, block_ids: BlockIds) -> None:
        """Free the pages of blocks that the engine may no longer use."""
        if len(block_ids):
            self.is_laid_out_as_vllm = False
            self._pool.free(self._table.resident_pages(block_ids), Owner.RESIDENT)
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
        if len(np.unique(all_pages)) != len(all_pages):
            raise IntegrityError("a page stands for two blocks or layers")

    def _allocate(self, num_pages: int, owner: Owner) -> tuple[PageIds, float]:
        """Allocate pages that compute will write; stall compute until they have drained."""
        pages, drained = self._pool.allocate(num_pages, owner)
        return pages, sum(self._device.wait(event) for event in drained)
