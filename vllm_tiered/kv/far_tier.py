# SPDX-License-Identifier: Apache-2.0
"""Far tier: one region of pages for each layer that may be offloaded, and the order of writes.

The layers that are offloaded first have their regions in memory. Layers beyond the memory budget
have them in a file, so that the KV cache may be larger than DRAM. Layers are offloaded in a
low-discrepancy order. So the layers on storage are spread over the model, and the transfers of
several other layers overlap each slow read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_tiered.devices.base import Copy, Device, Direction, Event
from vllm_tiered.devices.pages import PageBuffer, PageIds, Pages


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
        layers: layers that may be offloaded, in the order of offloading.
        num_blocks: pages of a far region.
        homes: the placement of the regions.

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
    ) -> None:
        # Writes run in order, so a read that waits for the last one waits for all earlier ones.
        self.last_write: tuple[Event, ...] = ()
        self._reads: list[Event] = []  # reads not yet checked for failed pages
        self._device = device
        self._near = near
        self._num_blocks = num_blocks
        self._row = {layer: row for row, layer in enumerate(layers)}
        memory = len(layers) if homes.memory_layers is None else homes.memory_layers
        self._memory_layers = min(len(layers), memory)
        self._memory = device.far_buffer(
            self._memory_layers * num_blocks, near.page_bytes, homes.verify
        )
        self._storage: PageBuffer | None = None
        if self._memory_layers < len(layers):
            assert homes.path is not None, "regions beyond memory need a folder"
            pages = (len(layers) - self._memory_layers) * num_blocks
            self._storage = device.storage_buffer(homes.path, pages, near.page_bytes)

    def far_region(self, layer: int) -> PageBuffer:
        """Return the layer's far pages, by block id."""
        buffer, row = self._home(layer)
        return buffer.part(row * self._num_blocks, self._num_blocks)

    def write(
        self, layers: Sequence[int], block_ids: PageIds, pages: npt.NDArray[np.int64]
    ) -> None:
        """Write near ``pages`` [layers, blocks] to the far tier, with one copy for each buffer.

        The copies run when the compute queued so far is done.
        """
        copies = []
        homes = [self._home(layer) for layer in layers]
        for buffer in {id(buffer): buffer for buffer, _ in homes}.values():
            here = [at for at, (home, _) in enumerate(homes) if home is buffer]
            rows = np.array([homes[at][1] for at in here], dtype=np.int64)[:, None]
            far_pages = (rows * self._num_blocks + block_ids).ravel()
            near_pages = Pages(pages[here].ravel())
            copies.append(
                self._device.prepare(
                    Direction.WRITE, self._near, near_pages, buffer, Pages(far_pages)
                )
            )
        self.write_computed(copies)

    def prepare_write(self, layer: int, block_ids: PageIds, pages: PageIds) -> Copy:
        """Prepare a copy of a layer's near ``pages`` to the far tier, for :meth:`submit_writes`."""
        far = self.far_region(layer)
        return self._device.prepare(
            Direction.WRITE, self._near, Pages(pages), far, Pages(block_ids)
        )

    def submit_writes(self, writes: Sequence[tuple[Copy, tuple[Event, ...]]]) -> list[Event]:
        """Queue prepared writes in order, each with the events that it must wait for."""
        events = self._device.submit_together(writes)
        self.last_write = (events[-1],)
        return events

    def write_computed(self, writes: Sequence[Copy]) -> None:
        """Queue prepared writes that run when the compute queued so far is done."""
        computed = (self._device.compute_event(),)
        self.submit_writes([(copy, computed) for copy in writes])

    def submit_reads(self, reads: Sequence[tuple[Copy, tuple[Event, ...]]]) -> list[Event]:
        """Queue prepared reads in order, each with the events that it must wait for."""
        events = self._device.submit_together(reads)
        self._reads += events
        return events

    def read(
        self, layer: int, block_ids: PageIds, pages: PageIds, drained: tuple[Event, ...]
    ) -> Event:
        """Read blocks of a layer into near ``pages`` once the ``drained`` events are done.

        Nothing that is submitted later may use the pages before the read is done.
        """
        copy = self._device.prepare(
            Direction.READ, self.far_region(layer), Pages(block_ids), self._near, Pages(pages)
        )
        after = (self._device.compute_event(), *self.last_write, *drained)
        return self.submit_reads([(copy, after)])[0]

    @property
    def is_quiet(self) -> bool:
        """Whether all reads and writes of the far tier are done."""
        return all(event.done() for event in (*self.last_write, *self._reads))

    def wait(self, event: Event) -> float:
        """Stall compute until a copy is done; return the seconds of stall."""
        return self._device.wait(event)

    def take_lost(self) -> set[int]:
        """Return the blocks that lost a page in reads that ended since the last call."""
        reads, self._reads = self._reads, []
        lost: set[int] = set()
        for event in reads:
            if not event.done():
                self._reads.append(event)
            elif len(failed := self._device.failed_pages(event)):
                lost.update(failed.tolist())
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
