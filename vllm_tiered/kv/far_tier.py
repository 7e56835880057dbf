# SPDX-License-Identifier: Apache-2.0
"""The far tier's pages: a region for each layer that may be offloaded, and the order of writes.

The layers that are offloaded first have their regions in memory, those beyond its budget in a file:
a KV cache larger than DRAM. As layers are offloaded in a low-discrepancy order, those on storage
are spread over the model, and each can arrive behind the transfers of several others.
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
    """Where the layers' far regions go.

    Attributes:
        memory_layers: how many layers' regions fit into memory; None for all.
        path: folder of the file for the others.
        verify: which reads from memory compare checksums: "off", "sample" or "full". Pages in a
            file always do.
    """

    memory_layers: int | None = None
    path: Path | None = None
    verify: str = "off"


class FarTier:
    """Far copies of blocks: full ones, written once, and partial ones where they are offloaded.

    Args:
        device: copies; the regions are allocated from it.
        near: the near tier's pages.
        layers: layers that may be offloaded, in the order in which they are.
        num_blocks: pages of a far region.
        homes: where regions go.

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
        # A read follows all writes before it: the last one, as writes are in order.
        self.last_write: tuple[Event, ...] = ()
        self._reads: list[Event] = []  # of which it is not known whether all pages arrived
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
        """Write near ``pages`` [layers, blocks] out, in one copy for each buffer.

        They run when what was computed so far is done.
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
        """Prepare a copy that writes near ``pages`` of a layer out; for :meth:`submit_writes`."""
        far = self.far_region(layer)
        return self._device.prepare(
            Direction.WRITE, self._near, Pages(pages), far, Pages(block_ids)
        )

    def submit_writes(self, writes: Sequence[tuple[Copy, tuple[Event, ...]]]) -> list[Event]:
        """Queue prepared writes, in order, each with what it must wait for."""
        events = self._device.submit_together(writes)
        self.last_write = (events[-1],)
        return events

    def write_computed(self, writes: Sequence[Copy]) -> None:
        """Queue prepared writes that run when what was computed so far is done."""
        computed = (self._device.compute_event(),)
        self.submit_writes([(copy, computed) for copy in writes])

    def submit_reads(self, reads: Sequence[tuple[Copy, tuple[Event, ...]]]) -> list[Event]:
        """Queue prepared reads, in order, each with what it must wait for."""
        events = self._device.submit_together(reads)
        self._reads += events
        return events

    def read(
        self, layer: int, block_ids: PageIds, pages: PageIds, drained: tuple[Event, ...]
    ) -> Event:
        """Read blocks of a layer into near ``pages`` that have ``drained``.

        Nothing submitted later may use the pages before.
        """
        copy = self._device.prepare(
            Direction.READ, self.far_region(layer), Pages(block_ids), self._near, Pages(pages)
        )
        after = (self._device.compute_event(), *self.last_write, *drained)
        return self.submit_reads([(copy, after)])[0]

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is read from it or written to it any more."""
        return all(event.done() for event in (*self.last_write, *self._reads))

    def wait(self, event: Event) -> float:
        """Hold compute until a copy is done; return seconds of standstill."""
        return self._device.wait(event)

    def take_lost(self) -> set[int]:
        """Return blocks of which a page did not arrive, in reads that ended since the last call."""
        reads, self._reads = self._reads, []
        lost: set[int] = set()
        for event in reads:
            if not event.done():
                self._reads.append(event)
            elif len(failed := self._device.failed_pages(event)):
                lost.update(failed.tolist())
        return lost

    def discard(self) -> None:
        """Give memory back to the system; the far tier holds no page from now on."""
        for buffer in (self._memory, self._storage):
            if buffer is not None:
                buffer.discard(0, buffer.num_pages)

    def _home(self, layer: int) -> tuple[PageBuffer, int]:
        row = self._row[layer]
        if row < self._memory_layers:
            return self._memory, row
        assert self._storage is not None
        return self._storage, row - self._memory_layers
