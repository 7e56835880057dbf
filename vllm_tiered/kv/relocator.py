# SPDX-License-Identifier: Apache-2.0
"""Layers change their home between steps, while requests run (Pie, sections 3.4.2 and 4.1).

KV is append-only, so all that must be known is which blocks hold something, and of which layers the
far tier has that as it is now. A layer that leaves writes out what it does not have there yet; one
that returns is read back whole. A layer that left before and comes again finds its full blocks
still in place. Partial blocks that are near stay where they are, and are no part of this until
they are full or, where partial blocks do not stay, go to the far tier.
"""

from collections.abc import Iterable

import numpy as np

from vllm_tiered.devices.base import Copy, Event
from vllm_tiered.devices.pages import PageIds
from vllm_tiered.kv.far_tier import FarTier
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.page_pool import Owner, PagePool
from vllm_tiered.kv.policy import SwapOrder
from vllm_tiered.kv.step_plan import BlockIds, StepPlan


class Relocator:
    """Follows the blocks of every step, and moves layers when the level changes.

    Args:
        pool: the near tier's pages and who holds them.
        table: where every layer's pages are.
        far: the far tier.
    """

    def __init__(self, pool: PagePool, table: MappingTable, far: FarTier) -> None:
        self.leaving: list[int] = []  # layers that are still to be written out
        self.returning: dict[int, Event] = {}
        self._pool = pool
        self._table = table
        self._far = far
        self._is_idle = True  # nothing is far, and the far tier's memory is given back
        num_layers, num_blocks = table.pages.shape
        self._holds = np.zeros(num_blocks, dtype=np.bool_)
        self._is_offloaded = np.zeros(num_layers, dtype=np.bool_)
        self._is_offloaded[list(table.order.offloaded)] = True
        self._is_far = np.zeros((num_blocks, num_layers), dtype=np.bool_)

    def begin_step(self, plan: StepPlan) -> None:
        """Blocks that the step writes anew, or that are reserved, hold nothing."""
        self._settle(becomes_far=bool(plan.num_far))
        for block_ids in (plan.store_new, plan.alloc_partial, plan.reserved):
            if len(block_ids):
                self._holds[block_ids] = False
                self._is_far[block_ids] = False

    def end_step(self, plan: StepPlan) -> None:
        """What the step wrote is far in the offloaded layers, and only there."""
        for block_ids in (plan.store_new, plan.load_and_store, plan.store_partial):
            if len(block_ids):
                self.hold(block_ids)

    def hold(self, block_ids: BlockIds) -> None:
        """The blocks hold what is far in the offloaded layers, and only there."""
        self._holds[block_ids] = True
        self._is_far[block_ids] = self._is_offloaded

    def forget(self, block_ids: Iterable[int]) -> None:
        """Blocks of which a page was lost: they are computed anew before they are used."""
        for block_id in block_ids:
            self._holds[block_id] = False
            self._is_far[block_id] = False

    def begin_write_out(self, order: SwapOrder) -> None:
        """Layers leave under ``order`` in the next step: begin to write out what they hold.

        One layer at a time (:meth:`write_out_one`), so that the reads which wait behind the
        writes of a step do not wait for all of them; all at once if no layer is far yet.
        """
        self.leaving = _added(order.offloaded, self._table.order.offloaded)
        if not self._table.order.offloaded:
            self._write_out_all()

    def write_out_one(self) -> list[Copy]:
        """Of one of the leaving layers, what it holds and the far tier does not have.

        Returns:
            The copy, to be submitted; none if the far tier has all.
        """
        layer = self.leaving.pop()
        block_ids = np.flatnonzero(self._holds & ~self._is_far[:, layer])
        if not len(block_ids):
            return []
        self._is_far[block_ids, layer] = True
        self._is_idle = False
        pages = self._table.pages[layer, block_ids].astype(np.int64)
        return [self._far.prepare_write(layer, block_ids, pages)]

    def move(self, order: SwapOrder, released: Iterable[int], partial: Iterable[int]) -> float:
        """Change the layers' homes to those under ``order``; seconds of standstill.

        Raises:
            IntegrityError: the pages do not suffice; the scheduler's limit is wrong.
        """
        self.leaving = _added(order.offloaded, self._table.order.offloaded)
        self._write_out_all()
        partial_ids = np.fromiter(partial, np.int64)
        other_ids = np.setdiff1d(np.fromiter(released, np.int64), partial_ids)
        before = self._table.order.offloaded
        for layer in _added(order.offloaded, before):
            self._leave(layer, other_ids, partial_ids)
            self._is_idle = False
        seconds = 0.0
        for layer in _added(before, order.offloaded):
            seconds += self._return(layer, other_ids, partial_ids)
        self._table.follow(order)
        self._is_offloaded[:] = False
        self._is_offloaded[list(order.offloaded)] = True
        return seconds

    def wait(self, layer: int) -> float:
        """Hold compute until a layer that returns is near; seconds of standstill."""
        event = self.returning.pop(layer, None)
        return 0.0 if event is None else self._far.wait(event)

    def _write_out_all(self) -> None:
        copies = [copy for _ in range(len(self.leaving)) for copy in self.write_out_one()]
        if copies:
            self._far.write_computed(copies)

    def _settle(self, *, becomes_far: bool) -> None:
        """Wait for what no step has waited for, before its pages may be anybody else's.

        Args:
            becomes_far: there are far layers in the step to come, which may just have been written.
        """
        for layer in list(self.returning):
            self.wait(layer)
        self.leaving = []
        is_near = not (self._is_idle or becomes_far or self._table.order.offloaded)
        if is_near and self._far.is_quiet:
            self._far.discard()
            self._is_far[:] = False
            self._is_idle = True

    def _leave(self, layer: int, other_ids: PageIds, partial_ids: PageIds) -> None:
        pages = self._table.pages[layer, other_ids].astype(np.int64)
        if self._far.last_write:
            self._pool.drain(pages, Owner.RESIDENT, self._far.last_write[0])
        else:
            self._pool.free(pages, Owner.RESIDENT)
        self._table.pages[layer, other_ids] = MappingTable.HOLE
        partial_pages = self._table.pages[layer, partial_ids].astype(np.int64)
        self._pool.transfer(partial_pages, Owner.RESIDENT, Owner.PARTIAL)

    def _return(self, layer: int, other_ids: PageIds, partial_ids: PageIds) -> float:
        partial_pages = self._table.pages[layer, partial_ids].astype(np.int64)
        self._pool.transfer(partial_pages, Owner.PARTIAL, Owner.RESIDENT)
        other_pages, drained = self._pool.allocate(len(other_ids), Owner.RESIDENT)
        self._table.pages[layer, other_ids] = other_pages
        block_ids = np.flatnonzero(self._holds & self._is_far[:, layer])
        if len(block_ids):
            # Compute waits for it before it writes to any page of the layer.
            pages = self._table.pages[layer, block_ids].astype(np.int64)
            self.returning[layer] = self._far.read(layer, block_ids, pages, drained)
            return 0.0
        return sum(self._far.wait(event) for event in drained)


def _added(layers: Iterable[int], before: Iterable[int]) -> list[int]:
    return sorted(set(layers) - set(before))
