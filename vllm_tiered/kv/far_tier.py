# SPDX-License-Identifier: Apache-2.0
"""Far tier: one region of pages for each layer that may be offloaded, and the order of writes.

The layers that are offloaded first have their regions in memory. Layers beyond the memory budget
have them in a file, so that the KV cache may be larger than DRAM. Layers are offloaded in a
low-discrepancy order. So the layers on storage are spread over the model, and the transfers of
several other layers overlap each slow read.

A codec may make far pages narrower than near pages. Then all regions hold narrow pages, and every
copy converts them.

A block's pages are in the block's *slot* of each region. Without a prefix store a block has the
slot of its own number. With one there are more slots, and blocks change them
(``prefix_store.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_tiered.devices.base import Copy, Device, Direction, Event
from vllm_tiered.devices.pages import PageBuffer, PageCodec, PageIds, Pages


@dataclass(frozen=True, kw_only=True, slots=True)
class FarHomes:
    """Placement of the layers' far regions.

    Attributes:
        memory_layers: number of layers whose regions are in memory; None for all.
        path: folder of the file with the other regions.
        verify: which reads from memory compare checksums: "off", "sample" or "full". Reads from a
            file always compare them.
    """

    memory_layers: int | None = None
    path: Path | None = None
    verify: str = "off"


class FarTier:
    """Far copies of full blocks and of offloaded partial blocks.

    Args:
        device: runs the copies and allocates the regions.
        near: the near tier's pages.
        layers: layers with a region, in the order of offloading.
        num_blocks: block ids are below this.
        homes: the placement of the regions.
        num_slots: pages of a region; ``num_blocks`` if None.
        codec: converts near pages to far pages; None if they are the same.

    Attributes:
        last_write: the event of the latest write; empty before the first. Writes run in order, so a
            read that waits for the last one waits for all earlier ones.
        num_slots: pages of a region.
        keeps_content: some slots have content that belongs to no block.

    Raises:
        BudgetError: a tier does not have the space.
    """

    def __init__(
        self,
        *,
        device: Device,
        near: PageBuffer,
        layers: Sequence[int],
        num_blocks: int,
        homes: FarHomes,
        num_slots: int | None = None,
        codec: PageCodec | None = None,
    ) -> None:
        self.last_write: tuple[Event, ...] = ()
        self.num_slots = num_blocks if num_slots is None else num_slots
        self.keeps_content = False
        self._has_own_slots = num_slots is None  # each block has the slot of its own number
        self._slots = np.arange(num_blocks, dtype=np.int64)  # by block
        # Reads not yet checked for failed pages, with their blocks and the slots of these.
        self._reads: list[tuple[Event, PageIds, PageIds]] = []
        self._device = device
        self._near = near
        self._row = {layer: row for row, layer in enumerate(layers)}
        self._rows = np.zeros(max(layers, default=-1) + 1, dtype=np.int64)  # by layer
        self._rows[list(layers)] = np.arange(len(layers))
        memory = len(layers) if homes.memory_layers is None else homes.memory_layers
        self._memory_layers = min(len(layers), memory)
        page_bytes = near.page_bytes if codec is None else codec.far_bytes
        self._memory = device.far_buffer(
            self._memory_layers * self.num_slots, page_bytes, homes.verify, codec
        )
        self._storage: PageBuffer | None = None
        if self._memory_layers < len(layers):
            assert homes.path is not None, "regions beyond memory need a folder"
            pages = (len(layers) - self._memory_layers) * self.num_slots
            self._storage = device.storage_buffer(homes.path, pages, page_bytes, codec=codec)

    def far_region(self, layer: int) -> PageBuffer:
        """Return the layer's far pages, by slot."""
        buffer, row = self._home(layer)
        return buffer.part(row * self.num_slots, self.num_slots)

    def slots_of(self, block_ids: PageIds) -> PageIds:
        """Return the slots of blocks."""
        return block_ids if self._has_own_slots else self._slots[block_ids]

    def assign_slots(self, block_ids: PageIds, slots: PageIds) -> None:
        """Give blocks other slots; no copy that runs may use either."""
        self._slots[block_ids] = slots

    def far_pages(self, block_ids: PageIds) -> Pages:
        """Return the pages of blocks, which are ascending, in a layer's region."""
        return Pages(self.slots_of(block_ids), ascending=self._has_own_slots)

    def write(self, layers: PageIds, block_ids: PageIds, pages: PageIds) -> None:
        """Write near page ``pages[i]`` to block ``block_ids[i]`` of layer ``layers[i]`` for all i.

        There is one copy for each buffer. They run when the compute queued so far is done.
        """
        copies = []
        rows, slots = self._rows[layers], self.slots_of(block_ids)
        is_here = rows < self._memory_layers
        parts = [(self._memory, 0, is_here), (self._storage, self._memory_layers, ~is_here)]
        for buffer, first_row, chosen in parts:
            if buffer is None or not chosen.any():
                continue
            far_pages = (rows[chosen] - first_row) * self.num_slots + slots[chosen]
            copies.append(
                self._device.prepare(
                    Direction.WRITE, self._near, Pages(pages[chosen]), buffer, Pages(far_pages)
                )
            )
        self.write_computed(copies)

    def prepare_write(self, layer: int, block_ids: PageIds, pages: PageIds) -> Copy:
        """Prepare a copy of a layer's near ``pages`` to the far tier, for :meth:`submit_writes`."""
        far, slots = self.far_region(layer), Pages(self.slots_of(block_ids))
        return self._device.prepare(Direction.WRITE, self._near, Pages(pages), far, slots)

    def submit_writes(self, writes: Sequence[tuple[Copy, tuple[Event, ...]]]) -> list[Event]:
        """Queue prepared writes in order, each with the events that it must wait for."""
        events = self._device.submit_together(writes)
        self.last_write = (events[-1],)
        return events

    def write_computed(self, writes: Sequence[Copy]) -> None:
        """Queue prepared writes that run when the compute queued so far is done."""
        computed = (self._device.compute_event(),)
        self.submit_writes([(copy, computed) for copy in writes])

    def submit_reads(
        self, reads: Sequence[tuple[Copy, tuple[Event, ...]]], block_ids: PageIds
    ) -> list[Event]:
        """Queue prepared reads of these blocks in order, each with the events it must wait for."""
        events = self._device.submit_together(reads)
        slots = self.slots_of(block_ids)
        self._reads += [(event, block_ids, slots) for event in events]
        return events

    def read(
        self,
        layers: Sequence[int],
        block_ids: PageIds,
        pages: npt.NDArray[np.int64],
        drained: tuple[Event, ...] = (),
    ) -> list[Event]:
        """Read blocks into near ``pages`` [layers, blocks] once the ``drained`` events are done.

        Nothing that is submitted later may use the pages before the read is done.

        Returns:
            The event of each layer's read.
        """
        after = (self._device.compute_event(), *self.last_write, *drained)
        slots = Pages(self.slots_of(block_ids))
        reads = [
            (
                self._device.prepare(
                    Direction.READ, self.far_region(layer), slots, self._near, Pages(own_pages)
                ),
                after,
            )
            for layer, own_pages in zip(layers, pages, strict=True)
        ]
        return self.submit_reads(reads, block_ids)

    @property
    def is_quiet(self) -> bool:
        """Whether all reads and writes of the far tier are done."""
        events = (*self.last_write, *(event for event, _, _ in self._reads))
        return all(event.done() for event in events)

    def wait(self, event: Event) -> float:
        """Stall compute until a copy is done; return the seconds of stall."""
        return self._device.wait(event)

    def take_lost(self) -> set[int]:
        """Return the blocks that lost a page in reads that ended since the last call."""
        reads, self._reads = self._reads, []
        lost: set[int] = set()
        for read in reads:
            event, block_ids, slots = read
            if not event.done():
                self._reads.append(read)
            elif len(failed := self._device.failed_pages(event)):
                lost.update(block_ids[np.isin(slots, failed)].tolist())
        return lost

    def discard(self) -> None:
        """Return the regions' memory to the system; the far tier then holds no page."""
        for buffer in (self._memory, self._storage):
            if buffer is not None:
                buffer.discard(0, buffer.num_pages)

    def _home(self, layer: int) -> tuple[PageBuffer, int]:
        row = self._row[layer]
        if row < self._memory_layers:
            return self._memory, row
        assert self._storage is not None
        return self._storage, row - self._memory_layers
