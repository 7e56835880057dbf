# SPDX-License-Identifier: Apache-2.0
"""Relocator: offloads layers and makes them resident, between steps (Pie, 3.4.2 and 4.1).

KV is append-only. So the relocator tracks only which blocks hold KV, and for which layers the far
tier has an up-to-date copy of each block. When a layer is offloaded, the blocks without such a copy
are written out. When a layer becomes resident again, all its blocks are read back. If the layer is
offloaded once more, its full blocks are still in the far tier. Resident partial blocks keep their
near pages; the relocator ignores them until they are full, or until partial blocks are offloaded.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from vllm_tiered.devices.base import Copy, Event
from vllm_tiered.devices.pages import PageIds
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.far_tier import FarTier
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.page_pool import Owner, PagePool
from vllm_tiered.kv.policy import SwapOrder
from vllm_tiered.kv.step_plan import BlockIds, StepPlan


class Relocator:
    """Tracker of which blocks hold KV and where; it moves layers when the level changes.

    Args:
        pool: the near tier's pages and their owners.
        table: the mapping table.
        far: the far tier.

    Attributes:
        leaving: layers that are still to be written out.
        returning: layers that must not be computed before the event: they are read back, or blocks
            of the prefix store are.
    """

    def __init__(self, pool: PagePool, table: MappingTable, far: FarTier) -> None:
        self.leaving: list[int] = []
        self.returning: dict[int, Event] = {}
        self._pool = pool
        self._table = table
        self._far = far
        # No page is far, and the system has the far tier's memory back.
        self._is_idle = not table.order.offloaded
        num_layers, num_blocks = table.pages.shape
        self._holds = np.zeros(num_blocks, dtype=np.bool_)
        self._is_offloaded = np.zeros(num_layers, dtype=np.bool_)
        self._is_offloaded[list(table.order.offloaded)] = True
        self._is_far = np.zeros((num_blocks, num_layers), dtype=np.bool_)

    def settle(self, plan: StepPlan) -> None:
        """Wait for reads that no step has waited for, before their pages may get another owner.

        Discard the far tier's content if nothing needs it: no layer is offloaded or becomes so in
        the step, no slot has content of its own, and all copies are done.
        """
        self.end_reads()
        self.leaving = []
        is_near = not (self._is_idle or plan.num_far or self._table.order.offloaded)
        keeps_content = self._far.keeps_content or plan.prefixes is not None
        if is_near and not keeps_content and self._far.is_quiet:
            self._far.discard()
            self._is_far[:] = False
            self._is_idle = True

    def begin_step(self, plan: StepPlan) -> None:
        """Mark the blocks as empty that the step writes from their start, or that are reserved."""
        for block_ids in (plan.store_new, plan.alloc_partial, plan.alloc_state, plan.reserved):
            self.empty_blocks(block_ids)

    def end_step(self, plan: StepPlan) -> None:
        """Record the blocks that the step wrote as far in the offloaded layers, and only there."""
        for block_ids in (plan.store_new, plan.load_and_store, plan.store_partial):
            if len(block_ids):
                self.hold(block_ids)

    def hold(self, block_ids: BlockIds) -> None:
        """Record that the blocks' content is far in the offloaded layers, and only there."""
        self._holds[block_ids] = True
        self._is_far[block_ids] = self._is_offloaded

    def holds(self, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Return for each block whether it is full, or far, and none of its pages was lost."""
        return self._holds[block_ids]

    def hold_everywhere(self, block_ids: BlockIds) -> None:
        """Record that the blocks' content is in the far tier for every layer."""
        self._holds[block_ids] = True
        self._is_far[block_ids] = True

    def empty_blocks(self, block_ids: BlockIds) -> None:
        """Mark blocks as empty; they are computed again before use."""
        if len(block_ids):
            self._holds[block_ids] = False
            self._is_far[block_ids] = False

    def write_out_blocks(self, block_ids: BlockIds) -> None:
        """Write out the pages of full blocks that the far tier does not have.

        Raises:
            IntegrityError: a page that is in the far tier alone should be written.
        """
        at, layers = np.nonzero(~self._is_far[block_ids])
        if not len(at):
            return
        if self._is_offloaded[layers].any():
            raise IntegrityError(f"of blocks {block_ids.tolist()} an offloaded layer has no page")
        self._is_idle = False
        blocks = block_ids[at]
        self._far.write(layers, blocks, self._table.pages[layers, blocks].astype(np.int64))

    def begin_write_out(self, order: SwapOrder) -> None:
        """Begin to write out the layers that ``order`` will offload in the next step.

        If no layer is offloaded yet, all are written out at once. Otherwise :meth:`write_out_one`
        writes them one at a time, so that a read need not wait for all of these writes.
        """
        self.leaving = _added(order.offloaded, self._table.order.offloaded)
        if not self._table.order.offloaded:
            self._write_out_all()

    def write_out_one(self) -> list[Copy]:
        """Prepare the write of one leaving layer's blocks that the far tier does not have.

        Returns:
            The copy, which the caller submits; empty if the far tier has all of the blocks.
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
        """Move the layers to their homes under ``order``; return the seconds of stall.

        Raises:
            IntegrityError: there are too few pages, as the scheduler's limit is wrong.
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
        self._table.set_order(order)
        self._is_offloaded[:] = False
        self._is_offloaded[list(order.offloaded)] = True
        return seconds

    def wait(self, layer: int) -> float:
        """Stall compute until a returning layer is near; return the seconds of stall."""
        event = self.returning.pop(layer, None)
        return 0.0 if event is None else self._far.wait(event)

    def end_reads(self) -> float:
        """Stall compute until all returning layers are near; return the seconds of stall."""
        return sum(self.wait(layer) for layer in list(self.returning))

    def _write_out_all(self) -> None:
        copies = [copy for _ in range(len(self.leaving)) for copy in self.write_out_one()]
        if copies:
            self._far.write_computed(copies)

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
            # Compute waits for this read before it writes to any page of the layer.
            pages = self._table.pages[layer, block_ids].astype(np.int64)
            (event,) = self._far.read([layer], block_ids, pages[None], drained)
            self.returning[layer] = event
            return 0.0
        return sum(self._far.wait(event) for event in drained)


def _added(layers: Iterable[int], before: Iterable[int]) -> list[int]:
    return sorted(set(layers) - set(before))
