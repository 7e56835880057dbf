# SPDX-License-Identifier: Apache-2.0
"""The staging areas: near pages through which the rotating layers pass, and the copies for it.

An area has a page for each block that the step reads or writes. While requests only add to blocks
that they have, which is most of the time, the next step's blocks are those of this one: areas,
block tables and prepared copies stay as they are.
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
    """Areas for one step's blocks, in turn for the rotating layers.

    Args:
        pool: whose pages the areas take, of those that are free or drain.
        near: those pages.
        device: prepares the copies.
        max_areas: take at most this many (or what the policy asks for), pages permitting.

    Attributes:
        pages: int64 [areas, blocks].
        vacated: for each area, what must be over before a layer is read into it.
        reads: by rotating position, the copy that stages the layer.
        writes: likewise the copy that writes out what the layer computed; none if the step fills
            no block of an area.
    """

    def __init__(self, *, pool: PagePool, near: PageBuffer, device: Device, max_areas: int) -> None:
        self._pool = pool
        self._near = near
        self._device = device
        self._max_areas = max_areas
        self.pages: PageIds = _NO_PAGES
        self.vacated: list[tuple[Event, ...]] = []
        self.reads: list[Copy] = []
        self.writes: list[Copy] = []
        self._read = self._extend = _NO_BLOCKS
        self._has_ring = False
        self._wanted = 0
        self._is_written: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    @property
    def num_areas(self) -> int:
        return len(self.vacated)

    def serves(self, plan: StepPlan) -> bool:
        """Whether the areas are right for this step too, and no better ones could be had."""
        others = (plan.ring, plan.tail_acquire, plan.granted, plan.withheld)
        return (
            self.num_areas > 0
            and not any(map(len, others))
            and _are_equal(plan.read, self._read)
            and _are_equal(plan.extend, self._extend)
            and not self._has_ring
            and (self.num_areas == self._wanted or not self._has_pages_for_more())
        )

    def open(
        self, plan: StepPlan, order: SwapOrder, slabs: Sequence[PageBuffer], table: MappingTable
    ) -> None:
        """Take areas for a step that reads or writes blocks, as many as pages give.

        An area holds the blocks read, by id, and then those that are new.

        Args:
            order: the layers' roles now.
            slabs: the rotating layers' far pages, by block id.
            table: is told where the blocks are in each rotating layer.
        """
        read_ids, written_ids = plan.read, plan.ring
        if len(plan.extend):
            read_ids = np.sort(np.concatenate([plan.read, plan.extend]))
            written_ids = np.concatenate([plan.extend, plan.ring])
        num_read = len(read_ids)
        pages_per_area = num_read + len(plan.ring)
        if not pages_per_area:
            return
        self._wanted = wanted = min(len(slabs), max(self._max_areas, order.areas))
        # Pages that drain are as good as free ones: reads are behind the writes before them anyway.
        count = max(1, min(wanted, self._pool.num_available // pages_per_area))
        pages, drained = self._pool.allocate(count * pages_per_area, Owner.STAGING)
        self.pages = pages.reshape(count, pages_per_area)
        self._read, self._extend, self._has_ring = plan.read, plan.extend, len(plan.ring) > 0
        # On a device whose compute runs later, the step before may still use these pages. Compute
        # writes new blocks to them when it has waited for the area's read, which all layers have.
        self.vacated = [(self._device.compute_event(), *drained)] * count
        self.reads = self._prepare_reads(read_ids, slabs)
        extended = np.searchsorted(read_ids, plan.extend)
        written = np.concatenate([extended, np.arange(num_read, pages_per_area)])
        self.writes = self._prepare_writes(written, written_ids, slabs) if len(written) else []
        self._is_written = np.zeros(pages_per_area, np.bool_)
        self._is_written[written] = True
        blocks = np.concatenate([read_ids, plan.ring])
        table.set_rotating(blocks, self.pages[np.arange(len(slabs)) % count])

    def release(self, last_write: Event | None) -> None:
        """Give the areas back; what was written out of them drains until ``last_write``."""
        if last_write is None or not self.writes:
            self._pool.free(self.pages.ravel(), Owner.STAGING)
        else:
            written = self.pages[:, self._is_written].ravel()
            self._pool.free(self.pages[:, ~self._is_written].ravel(), Owner.STAGING)
            self._pool.drain(written, Owner.STAGING, last_write)
        self.pages, self.vacated, self.reads, self.writes = _NO_PAGES, [], [], []

    def _has_pages_for_more(self) -> bool:
        """Tails that have left since the areas were opened gave their pages back."""
        pages_per_area: int = self.pages.shape[1]
        return self._pool.num_available >= pages_per_area

    def _prepare_reads(self, block_ids: BlockIds, slabs: Sequence[PageBuffer]) -> list[Copy]:
        blocks = Pages(block_ids, ascending=True)
        areas = [Pages(area[: len(block_ids)], ascending=True) for area in self.pages]
        return [
            self._device.prepare(
                Direction.READ, far, blocks, self._near, areas[position % len(areas)]
            )
            for position, far in enumerate(slabs)
        ]

    def _prepare_writes(
        self, written: PageIds, block_ids: BlockIds, slabs: Sequence[PageBuffer]
    ) -> list[Copy]:
        """``written`` are the positions in an area of ``block_ids``."""
        blocks = Pages(block_ids)
        areas = [Pages(area[written]) for area in self.pages]
        return [
            self._device.prepare(
                Direction.WRITE, self._near, areas[position % len(areas)], far, blocks
            )
            for position, far in enumerate(slabs)
        ]


def _are_equal(ids: BlockIds, others: BlockIds) -> bool:
    """The planner gives the same array again while nothing changes; a copy if it came by a pipe."""
    return ids is others or np.array_equal(ids, others)
