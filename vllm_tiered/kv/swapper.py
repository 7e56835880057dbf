# SPDX-License-Identifier: Apache-2.0
"""Swaps the rotating layers through the staging areas while the engine computes (Pie, 3.3).

One step, with rotating layers r0, r1, r2 … and two areas:

    begin_step   read r0→A, r1→B
    r0 computes  blocks that r0 wrote in A go out; then read r2→A
    r1 computes  blocks that r1 wrote in B go out; then read r3→B
    …            (layers between them are pinned and compute without a wait)
    end_step     tails that were filled go out, all layers in one copy, if tails stay near; areas
                 are free, pages that a write still reads drain

Between two steps the number of far layers may change (``relocator.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_tiered.cost.kv import STAGING_AREAS
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.far_tier import FarHomes, FarTier
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.page_pool import Owner, PagePool
from vllm_tiered.kv.policy import SwapOrder
from vllm_tiered.kv.relocator import Relocator
from vllm_tiered.kv.step_plan import BlockIds, StepPlan
from vllm_tiered.tiers.base import Copy, Device, Direction, Event, PageBuffer, PageIds, Pages

_NOTHING = StepPlan()


@dataclass(slots=True)
class _Area:
    """Staging pages of one layer: of the blocks read, and of the blocks that the step writes."""

    read: Pages
    written: Pages
    vacated: tuple[Event, ...]


class Swapper:
    """The worker's side: applies a :class:`StepPlan`, layer by layer.

    Args:
        order: the layers' roles at the start.
        far_layers: layers that may be far, in the order in which they become it; the rotating
            ones if None.
        homes: where their slabs go.
        orders: by number of far layers, if that may change; ``order`` is one of them.
        granted: blocks 1 to ``granted`` are the engine's at the start; all if None.
        num_blocks: block ids are below this; block 0 is the engine's null block.
        near: the near tier's pages, which the kernels read and write.
        device: copies; the far tier is allocated from it.
        max_areas: stage at most this many layers ahead (or what the policy asks for): more
            areas take more cache and hide little more.

    Raises:
        BudgetError: the far tier does not have the memory.
    """

    def __init__(
        self,
        *,
        order: SwapOrder,
        num_blocks: int,
        near: PageBuffer,
        device: Device,
        max_areas: int = 4,
        far_layers: Sequence[int] | None = None,
        homes: FarHomes = FarHomes(),  # noqa: B008 - frozen
        orders: Sequence[SwapOrder] = (),
        granted: int | None = None,
    ) -> None:
        far_layers = order.rotating if far_layers is None else far_layers
        self.table = MappingTable(order, num_blocks, far_layers)
        self.pool = PagePool(near.num_pages)
        self.far = FarTier(
            device=device, near=near, layers=far_layers, num_blocks=num_blocks, homes=homes
        )
        self.stall_seconds = 0.0
        self.num_steps = 0
        self._failure: Exception | None = None
        self._near = near
        self._device = device
        self._max_areas = max(max_areas, order.areas)
        self._orders = orders
        self._relocator = Relocator(self.pool, self.table, self.far)
        self._written_before: tuple[Event, ...] = ()
        self._granted: set[int] = set()
        self._tails: set[int] = set()
        self._plan = _NOTHING
        self._areas: list[_Area] = []
        self._staging: PageIds = np.empty((0, 0), np.int64)
        self._is_written = np.empty(0, np.bool_)
        self._reads_of_step: list[Copy] = []
        self._writes_of_step: list[Copy] = []
        self._reads: list[Event | None] = []
        self._writes: list[Event | None] = []
        self._next_read = 0
        self._ahead = 0
        self._together = 1
        self._due_writes: list[int] = []
        self._follow_order()
        granted = num_blocks - 1 if granted is None else granted
        self._as_vllm = bool(orders) and not order.rotating
        if self._as_vllm:
            self._lay_out_as_vllm(granted)
        else:
            self._grant(np.arange(1, granted + 1, dtype=np.int64))

    @property
    def order(self) -> SwapOrder:
        """The layers' roles now."""
        return self.table.order

    @property
    def is_laid_out_as_vllm(self) -> bool:
        """Whether block b of layer l still is page ``l * (P / n) + b``, as in vLLM's own layout."""
        return self._as_vllm

    # One step ---------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Apply the plan to pages and table, and start reading the first layers.

        Raises:
            IntegrityError: the plan does not fit the pages; the scheduler's bound is wrong.
        """
        self.num_steps += 1
        self._plan = plan
        self._writes = [None] * len(self.order.rotating)
        self._release_tails(plan.tail_release)
        if self._orders:
            self._relocator.begin_step(plan)
        self._withhold(plan.withheld)
        if plan.far_layers is not None and plan.far_layers != self.order.far_layers:
            self._move_to(self._orders[plan.far_layers])
        self._grant(plan.granted)
        self._written_before = self.far.last_write
        if plan.write_out_for is not None and plan.write_out_for != self.order.far_layers:
            self._relocator.begin_write_out(self._orders[plan.write_out_for])
        self._acquire_tails(plan.tail_acquire)
        if not self.order.rotating:
            return
        self._make_areas()
        self._next_read = 0
        if self.order.prefetches:
            self._submit_reads(len(self._areas))

    def wait_layer(self, layer: int) -> None:
        """Hold compute until the layer's pages are near. Pinned layers are, or return just now.

        Raises:
            Exception: what made the copy fail; the pages must not be used.
        """
        position = self._position.get(layer)
        try:
            if position is None:
                if self._relocator.returning:
                    self.stall_seconds += self._relocator.wait(layer)
                return
            if not self.order.prefetches and self._areas:
                self._submit_reads(position + 1)
            if (event := self._reads[position]) is None:
                return
            self._reads[position] = None
            self.stall_seconds += self.far.wait(event)
        except Exception as failure:
            self._failure = failure
            raise
        self.table.publish(layer, self.num_steps)

    def layer_done(self, layer: int) -> None:
        """The layer was computed: write out what it wrote, read a later layer into its area."""
        position = self._position.get(layer)
        if position is None or not self._areas:
            return
        self._areas[position % len(self._areas)].vacated = (self._device.compute_event(),)
        self.table.evict(layer)
        if self._writes_of_step:
            self._due_writes.append(position)
        last = len(self._reads)
        end = min(position + self._ahead, last)
        num_due = end - self._next_read
        if num_due < self._together and (num_due <= 0 or end < last):
            end = self._next_read  # too few: each submission wakes a copying thread
            if len(self._due_writes) < self._together and position + 1 < last:
                return
        if self._due_writes:
            self._submit_writes(end)
        elif self._next_read < end:
            self._submit_reads(end)
        if self._relocator.leaving:  # behind the copies that the layers to come wait for
            self._relocator.write_out_one()

    def end_step(self) -> None:
        """All layers were computed: write out filled tails; areas become free, or drain.

        Raises:
            IntegrityError: a rotating layer was staged but not computed.
        """
        if self._failure is not None:  # vLLM ends a step also when its forward has raised
            raise self._failure
        if self.table.num_staged:
            staged = [at for at, row in enumerate(self.table.rows) if row.area is not None]
            raise IntegrityError(f"layers {staged} were staged and never computed")
        plan, self._plan = self._plan, _NOTHING
        if len(plan.tail_flush):
            self._flush_tails(plan.tail_flush)
        if self._orders:
            self._relocator.end_step(plan)
        if not self._writes_of_step:
            self.pool.free(self._staging.ravel(), Owner.STAGING)
        else:
            written = self._staging[:, self._is_written]
            self.pool.free(self._staging[:, ~self._is_written].ravel(), Owner.STAGING)
            self.pool.drain(written.ravel(), Owner.STAGING, self.far.last_write[0])
        self._areas = []
        self._staging = self._staging[:0]
        self._writes_of_step = []

    def pending_read(self, layer: int) -> Event | None:
        """The copy that :meth:`wait_layer` will wait for."""
        position = self._position.get(layer)
        return None if position is None else self._reads[position]

    def write_of(self, layer: int) -> Event | None:
        """The copy that wrote out what the layer computed, in the step that ran last."""
        position = self._position.get(layer)
        return None if position is None else self._writes[position]

    def take_lost(self) -> set[int]:
        """Blocks of which a page did not arrive intact since the last call.

        What was computed with them is wrong; whoever uses them must compute them anew.
        """
        lost, self.far.lost = self.far.lost, set()
        self._relocator.forget(lost)
        return lost

    def check_integrity(self) -> None:
        """Pages are conserved: pinned x granted + rotating x tails + areas + draining + free.

        Raises:
            IntegrityError: with the numbers that do not agree.
        """
        self.pool.check_integrity()
        self.table.check_integrity()
        expected = {
            Owner.PINNED: len(self.order.pinned) * len(self._granted),
            Owner.TAIL: len(self.order.rotating) * len(self._tails),
            Owner.STAGING: self._staging.size,
        }
        for owner, pages in expected.items():
            if self.pool.count(owner) != pages:
                raise IntegrityError(f"{owner.name}: expected {pages}; {self.pool.describe()}")
        self._check_no_page_twice()

    # Pages ------------------------------------------------------------------------------

    def _follow_order(self) -> None:
        rotating = self.order.rotating
        self._position = {layer: i for i, layer in enumerate(rotating)}
        self._slabs = [self.far.slab(layer) for layer in rotating]
        self._reads = [None] * len(rotating)
        self._writes = [None] * len(rotating)

    def _move_to(self, order: SwapOrder) -> None:
        self._as_vllm = False
        self._relocator.move(order, self._granted, self._tails)
        self._follow_order()

    def _lay_out_as_vllm(self, granted: int) -> None:
        """Each layer's pages one after the other, that of the null block first."""
        layers = np.arange(len(self.table.rows), dtype=np.int64)[:, None]
        block_ids = np.arange(1, granted + 1, dtype=np.int64)
        pages = layers * (self.pool.num_pages // len(layers)) + block_ids
        self.pool.claim(pages.ravel(), Owner.PINNED)
        self.table.set_pinned(block_ids, pages)
        self._granted.update(block_ids.tolist())

    def _grant(self, block_ids: BlockIds) -> None:
        if len(block_ids):
            self._as_vllm = False
            shape = (len(self.order.pinned), len(block_ids))
            pages = self.pool.allocate(shape[0] * shape[1], Owner.PINNED)
            self.table.set_pinned(block_ids, pages.reshape(shape))
            self._granted.update(block_ids.tolist())

    def _withhold(self, block_ids: BlockIds) -> None:
        if len(block_ids):
            self._as_vllm = False
            self.pool.free(self.table.pinned_pages(block_ids), Owner.PINNED)
            self.table.set_pinned(block_ids, np.array(MappingTable.HOLE))
            self._granted.difference_update(block_ids.tolist())

    def _acquire_tails(self, block_ids: BlockIds) -> None:
        if len(block_ids):
            shape = (len(self.order.rotating), len(block_ids))
            pages = self.pool.allocate(shape[0] * shape[1], Owner.TAIL)
            self.table.set_rotating(block_ids, pages.reshape(shape))
            self._tails.update(block_ids.tolist())

    def _release_tails(self, block_ids: BlockIds) -> None:
        if len(block_ids):
            self.pool.free(self.table.rotating_pages(block_ids).ravel(), Owner.TAIL)
            self._tails.difference_update(block_ids.tolist())

    def _make_areas(self) -> None:
        """As many areas as free pages give, up to the number of rotating layers.

        An area holds the blocks read, by id, and then those that are new.
        """
        plan = self._plan
        read_ids, written_ids = plan.read, plan.ring
        if len(plan.extend):
            read_ids = np.sort(np.concatenate([plan.read, plan.extend]))
            written_ids = np.concatenate([plan.extend, plan.ring])
        num_read = len(read_ids)
        pages_per_area = num_read + len(plan.ring)
        if not pages_per_area:
            return
        rotating = len(self.order.rotating)
        wanted = min(rotating, self._max_areas)
        # Two areas are worth a wait: the step's reads wait for the same writes anyway.
        num_free = self.pool.free_at_least(min(wanted, STAGING_AREAS) * pages_per_area)
        count = max(1, min(wanted, num_free // pages_per_area))
        pages = self.pool.allocate(count * pages_per_area, Owner.STAGING)
        self._staging = areas = pages.reshape(count, pages_per_area)
        extended = np.searchsorted(read_ids, plan.extend)
        # How far reads run ahead, and from three areas on how many copies are submitted together.
        self._ahead = count + 1 if self.order.prefetches else 0
        self._together = (count + 1) // 2 if self.order.prefetches else 1
        written = np.concatenate([extended, np.arange(num_read, pages_per_area)])
        self._is_written = np.zeros(pages_per_area, np.bool_)
        self._is_written[written] = True
        # On a device whose compute runs later, the step before may still use these pages.
        vacated = (self._device.compute_event(),)
        self._areas = [
            _Area(
                Pages(area[:num_read], ascending=True),
                Pages(area[written]),
                vacated,
            )
            for area in areas
        ]
        read_blocks = Pages(read_ids, ascending=True)
        self._reads_of_step = [
            self._device.prepare(
                Direction.READ, far, read_blocks, self._near, self._areas[position % count].read
            )
            for position, far in enumerate(self._slabs)
        ]
        self._writes_of_step = []
        if len(written):
            written_blocks = Pages(written_ids)
            self._writes_of_step = [
                self._device.prepare(
                    Direction.WRITE,
                    self._near,
                    self._areas[position % count].written,
                    far,
                    written_blocks,
                )
                for position, far in enumerate(self._slabs)
            ]
        blocks = np.concatenate([read_ids, plan.ring])
        self.table.set_rotating(blocks, areas[np.arange(rotating) % count])

    # Copies -----------------------------------------------------------------------------

    def _submit_reads(self, end: int) -> None:
        """Start staging the rotating layers before ``end`` that were not started yet."""
        if self._next_read < end:
            copies = [self._read(position) for position in range(self._next_read, end)]
            self._reads[self._next_read : end] = self._device.submit_together(copies)
            self._next_read = end

    def _read(self, position: int) -> tuple[Copy, tuple[Event, ...]]:
        """The copy that stages the ``position``-th rotating layer (two-phase: reserve now)."""
        index = position % len(self._areas)
        self.table.reserve(self.order.rotating[position], index)
        after = self._areas[index].vacated + self._written_before
        return self._reads_of_step[position], after

    def _submit_writes(self, end: int) -> None:
        """Write out what computed layers have written; behind that, stage layers before ``end``."""
        writes = [
            (self._writes_of_step[position], self._areas[position % len(self._areas)].vacated)
            for position in self._due_writes
        ]
        reads = [self._read(position) for position in range(self._next_read, end)]
        written, self._reads[self._next_read : end] = self.far.submit_writes(writes, reads)
        self._next_read = end
        for position, event in zip(self._due_writes, written, strict=True):
            self._areas[position % len(self._areas)].vacated = (event,)
            self._writes[position] = event
        self._due_writes = []

    def _flush_tails(self, block_ids: BlockIds) -> None:
        if self.order.rotating:
            pages = self.table.rotating_pages(block_ids)
            self.far.write(self.order.rotating, block_ids, pages)
            self.pool.drain(pages.ravel(), Owner.TAIL, self.far.last_write[0])
        self._tails.difference_update(block_ids.tolist())

    def _check_no_page_twice(self) -> None:
        held = [self.table.pinned_pages(np.fromiter(self._granted, np.int64))]
        held.append(self.table.rotating_pages(np.fromiter(self._tails, np.int64)).ravel())
        held.append(self._staging.ravel())
        pages = np.concatenate(held)
        if len(np.unique(pages)) != len(pages):
            raise IntegrityError("a page stands for two blocks or layers")
