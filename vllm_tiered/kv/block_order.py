# SPDX-License-Identifier: Apache-2.0
"""KV pages in the order of block ids, for code that knows only those.

Without the plugin page b of a layer's view holds block b. Code that was written for this finds any
block's page by its id. In near memory a block's page may be anywhere, and another one in the next
step. So such code gets memory of its own, with a page for every block in every layer:

    gather    near pages ─► pages in block order      the code may read them
    scatter   pages in block order ─► near pages      the code has written them

The system allocates a page when it is first written. ``release`` returns all of them, so between
two steps nothing is held.
"""

import mmap

import numpy as np
import torch

from vllm_tiered.devices.memory_release import release_pages
from vllm_tiered.devices.pages import PageBuffer
from vllm_tiered.errors import BudgetError
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.step_plan import BlockIds
from vllm_tiered.units import format_bytes


class BlockOrderedPages:
    """Pages of all layers, in each of which block b is page b.

    Args:
        table: the mapping table; it says where a block's near page is in each layer.
        near: the near tier's pages, in memory that the host reads and writes.

    Attributes:
        data: uint8 [layers, blocks, page bytes].

    Raises:
        BudgetError: the process cannot reserve so many addresses.
    """

    def __init__(self, table: MappingTable, near: PageBuffer) -> None:
        self._table = table
        self._near = near
        num_layers, num_blocks = table.pages.shape
        page_bytes = near.data.shape[1]
        num_bytes = num_layers * num_blocks * page_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            memory = mmap.mmap(-1, max(1, num_bytes), flags=flags)
        except (OSError, OverflowError) as error:
            raise BudgetError(
                f"no {format_bytes(num_bytes)} of addresses to show {num_blocks} blocks to another "
                "KV connector: lower kv.far_gib, or set vm.overcommit_memory to 0 or 1"
            ) from error
        flat = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
        self.data = flat.view(num_layers, num_blocks, page_bytes)
        self._is_used = False

    def gather(self, layer: int, block_ids: BlockIds) -> None:
        """Copy the blocks' near pages of a layer, which must be near."""
        self._is_used = True
        pages = self._table.pages[layer, block_ids].astype(np.int64)
        found = self._near.data.index_select(0, torch.from_numpy(pages))
        self.data[layer].index_copy_(0, torch.from_numpy(block_ids), found)

    def scatter(self, layer: int, block_ids: BlockIds) -> None:
        """Copy the blocks' pages to the near pages of a layer, which compute may write."""
        pages = self._table.pages[layer, block_ids].astype(np.int64)
        written = self.data[layer].index_select(0, torch.from_numpy(block_ids))
        self._near.data.index_copy_(0, torch.from_numpy(pages), written)

    def begin_writing(self) -> None:
        """Record that other code may write pages from now on."""
        self._is_used = True

    def release(self) -> None:
        """Return the memory of all pages to the system; they read as zeros afterwards."""
        if self._is_used:
            self._is_used = False
            release_pages(self.data.data_ptr(), self.data.numel())


_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it since 3.13
