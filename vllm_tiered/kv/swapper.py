# SPDX-License-Identifier: Apache-2.0
"""Swapper: moves the offloaded layers through the staging buffers during compute (Pie, 3.3).

One step, with offloaded layers r0, r1, r2 ... and two buffers A and B:

    begin_step   queue all copies, each after the events that it waits for: read r0→A, r1→B
    r0 computed  write out the blocks that r0 wrote in A; then read r2→A
    r1 computed  write out the blocks that r1 wrote in B; then read r3→B
    ...          (the layers in between are resident and compute without a wait)
    end_step     write out the resident partial blocks that were filled, all layers in one copy

The next step keeps the buffers if its blocks are the same (``staging.py``). Otherwise the buffers
are freed, and pages that a write still reads drain.

Between two steps the number of offloaded layers may change (``relocator.py``), and the prefix store
may keep and fetch blocks (``prefix_pages.py``).
"""

from collections.abc import Container, Sequence

import numpy as np

from vllm_tiered.devices.base import Copy, Device, Event
from vllm_tiered.devices.pages import PageBuffer, PageCodec
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.far_tier import FarHomes, FarTier
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.near_pages import NearPages
from vllm_tiered.kv.page_pool import Owner, PagePool
from vllm_tiered.kv.policy import SwapOrder
from vllm_tiered.kv.prefix_pages import PrefixPages
from vllm_tiered.kv.relocator import Relocator
from vllm_tiered.kv.staging import Staging
from vllm_tiered.kv.step_plan import BlockIds, StepPlan

_NOTHING = StepPlan()


class Swapper:
    """Applier of step plans in a worker, layer by layer.

    Args:
        order: the layers' roles at the start.
        offloadable_layers: layers that may be offloaded, in the order of offloading; if None, the
            layers that are offloaded at the start.
        homes: the placement of their far regions.
        orders: the layers' roles by number of offloaded layers, if that may change; ``order`` is
            one of them.
        released: the engine may use blocks 1 to ``released`` at the start; all if None.
        num_slots: with a prefix store, the blocks that the far tier holds in each layer.
        codec: converts near pages to far pages; None if they are the same. It must not change a
            page that was converted before.
        num_blocks: block ids are below this; block 0 is the engine's null block.
        near: the near tier's pages, which the kernels read and write.
        device: runs the copies and allocates the far tier.
        max_buffers: the most staging buffers, or the policy's number if that is larger. More
            buffers take more pages and hide little more.

    Attributes:
        stall_seconds: seconds for which compute has stalled since the start.
        num_steps: steps begun since the start.
        keeps_pages: every block of the step has the same pages as in the previous step.

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
        max_buffers: int = 4,
        offloadable_layers: Sequence[int] | None = None,
        homes: FarHomes = FarHomes(),  # noqa: B008 - frozen
        orders: Sequence[SwapOrder] = (),
        released: int | None = None,
        num_slots: int | None = None,
        codec: PageCodec | None = None,
    ) -> None:
        if offloadable_layers is None:
            offloadable_layers = order.offloaded
        self.table = MappingTable(order, num_blocks, offloadable_layers)
        self.pool = PagePool(near.num_pages)
        layers = list(offloadable_layers)
        if num_slots is not None:  # then any layer's pages may have to be kept
            layers += [layer for layer in range(len(self.table.rows)) if layer not in layers]
        self.far = FarTier(
            device=device,
            near=near,
            layers=layers,
            num_blocks=num_blocks,
            homes=homes,
            num_slots=num_slots,
            codec=codec,
        )
        self.stall_seconds = 0.0
        self.num_steps = 0
        self.keeps_pages = False
        self._failure: BaseException | None = None
        self._device = device
        self._near_pages = NearPages(self.pool, self.table, near, device)
        self._staging = Staging(
            pool=self.pool, near=near, far=self.far, device=device, max_buffers=max_buffers
        )
        self._orders = orders
        self._relocator = Relocator(self.pool, self.table, self.far)
        self._prefixes: PrefixPages | None = None
        if num_slots is not None:
            self._prefixes = PrefixPages(self.far, self.table, self._relocator)
        self._follows_blocks = bool(orders) or num_slots is not None
        self._written_before: tuple[Event, ...] = ()
        self._lost: set[int] = set()
        self._plan = _NOTHING
        self._reads: list[Event | None] = []
        self._writes: list[Event | None] = []
        self._turns: dict[int, Event] = {}  # deferred events by position of a turn's last layer
        self._asked: Sequence[Event] = ()  # deferred events by position, if layers are read on use
        self._update_positions()
        released = num_blocks - 1 if released is None else released
        if orders and not order.offloaded:
            self._near_pages.lay_out_as_vllm(released)
        else:
            self._near_pages.release_blocks(np.arange(1, released + 1, dtype=np.int64))

    @property
    def order(self) -> SwapOrder:
        """The layers' present roles."""
        return self.table.order

    @property
    def num_released(self) -> int:
        """Blocks that the engine may use."""
        return len(self._near_pages.released)

    @property
    def is_laid_out_as_vllm(self) -> bool:
        """Whether block b of layer l is page ``l * (P / n) + b``, as in vLLM's own layout."""
        return self._near_pages.is_laid_out_as_vllm

    def will_be_laid_out_as_vllm(self, plan: StepPlan) -> bool:
        """Return what `is_laid_out_as_vllm` will be once ``begin_step`` has applied the plan."""
        moves_layers = plan.num_far is not None and plan.num_far != self.order.num_far
        moves_pages = moves_layers or len(plan.released) or len(plan.reserved)
        moves_pages = moves_pages or not np.array_equal(plan.alloc_state, plan.state_columns)
        return self.is_laid_out_as_vllm and not moves_pages

    @property
    def layers_to_come(self) -> Container[int]:
        """Layers that the running step must wait for; the other layers' pages are near."""
        returning = self._relocator.returning
        return {*self._position, *returning} if returning else self._position

    def clear_near_pages(self) -> None:
        """Fill all near pages with zeros, before the first step.

        Raises:
            IntegrityError: a step has begun, so pages may hold KV.
        """
        if self.num_steps:
            raise IntegrityError(f"{self.num_steps} steps have written to near pages")
        self._near_pages.clear()

    def end_copies(self) -> None:
        """Block until no copy reads or writes a near page; between two steps.

        Raises:
            IntegrityError: the previous step was abandoned, so a copy may wait for ever.
            Exception: a copy failed with this error.
        """
        self._check_step_ended()
        self.stall_seconds += self._end_copies()
        for event in self.far.last_write:
            event.wait()
        self._device.compute_event().wait()  # reads, too, as compute waits for each of them

    def restore_near_pages(self) -> None:
        """Fill all near pages with zeros, as their memory was given up; between two steps.

        No block has any content that is needed, near or far.
        """
        self.end_copies()
        self._near_pages.clear()

    # One step ---------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Apply the plan to the page pool and the mapping table, and queue all copies of the step.

        Raises:
            IntegrityError: the plan does not fit the pages, as the scheduler's limit is wrong; or
                the previous step was abandoned.
        """
        self._check_step_ended()
        self.num_steps += 1
        self._plan = plan
        self._writes = [None] * len(self.order.offloaded)
        self.keeps_pages = self.keeps_buffers(plan)
        if not self.keeps_pages and self._staging.num_buffers:
            self._staging.release(next(iter(self.far.last_write), None))
        self._near_pages.free_partial(plan.free_partial)
        self._near_pages.free_states(plan.free_state)
        if len(plan.evict_partial):
            self._store_partial(plan.evict_partial)
            self._relocator.hold(plan.evict_partial)
        kept = None
        if self._follows_blocks:
            self._relocator.settle(plan)
            kept = self._prefixes.begin(plan) if self._prefixes else None
            self._relocator.begin_step(plan)
        read_until = None if kept is None else self.far.last_write[0]
        self._near_pages.reserve_blocks(plan.reserved, read_until)
        if plan.num_far is not None and plan.num_far != self.order.num_far:
            self._change_order(self._orders[plan.num_far])
        self.stall_seconds += self._near_pages.release_blocks(plan.released)
        self.stall_seconds += self._near_pages.alloc_states(
            plan.alloc_state, plan.state_columns, self._end_copies
        )
        self._written_before = self.far.last_write
        if plan.num_far_next is not None and plan.num_far_next != self.order.num_far:
            self._relocator.begin_write_out(self._orders[plan.num_far_next])
        self.stall_seconds += self._near_pages.alloc_partial(plan.alloc_partial)
        if self._prefixes and plan.prefixes is not None:
            self._prefixes.fetch(plan.prefixes.fetch, kept)
        if not self.order.offloaded:
            return
        if not self._staging.num_buffers:
            self._staging.open(plan, self.order, self._regions, self.table)
        if self._staging.num_buffers:
            self._queue_copies()

    def _check_step_ended(self) -> None:
        if self._failure is not None or self._turns or self._plan is not _NOTHING:
            raise IntegrityError("the step before was not computed to its end") from self._failure

    def keeps_buffers(self, plan: StepPlan) -> bool:
        """Return whether the previous step's buffers fit this step, and no layer moves."""
        same_level = plan.num_far is None or plan.num_far == self.order.num_far
        return same_level and self._staging.fits(plan)

    def wait_layer(self, layer: int) -> None:
        """Stall compute until the layer's pages are near; do nothing for a resident layer.

        Raises:
            Exception: the copy failed with this error; the pages must not be used.
        """
        position = self._position.get(layer)
        try:
            if position is None:
                if self._relocator.returning:
                    self.stall_seconds += self._relocator.wait(layer)
                return
            if (event := self._reads[position]) is None:
                return
            self._reads[position] = None
            if self._asked:
                self._device.signal(self._asked[position])
            if not event.done():
                self.stall_seconds += self._device.wait(event)
        except Exception as failure:
            self._failure = failure
            raise
        self.table.publish(layer, self.num_steps)

    def layer_done(self, layer: int) -> None:
        """Signal that the layer was computed, so that the copies which wait for it run.

        Raises:
            IntegrityError: ``wait_layer`` was not called for the layer.
        """
        position = self._position.get(layer)
        if position is None or not self._turns:
            return
        self.table.evict(layer)
        if (deferred_event := self._turns.pop(position, None)) is not None:
            self._device.signal(deferred_event)

    def end_step(self) -> None:
        """Write out the partial blocks that the step filled, once all layers were computed.

        Raises:
            IntegrityError: an offloaded layer was staged but not computed.
        """
        if self._failure is not None:  # vLLM also ends a step whose forward pass has raised
            raise self._failure
        if self._turns:
            raise IntegrityError(f"offloaded layers {[*self._turns]} were staged, never computed")
        self._lost |= self.far.take_lost()
        plan, self._plan = self._plan, _NOTHING
        if len(plan.store_partial):
            self._store_partial(plan.store_partial)
        if self._follows_blocks:
            self._relocator.end_step(plan)

    def abandon(self, failure: BaseException) -> None:
        """End a step early; if layers were staged but not computed, the next step will fail."""
        if self._turns:
            self._failure = failure
        else:
            self.end_step()

    def pending_read(self, layer: int) -> Event | None:
        """Return the event of the read that `wait_layer` will wait for; None if there is none."""
        position = self._position.get(layer)
        return None if position is None else self._reads[position]

    def last_write_of(self, layer: int) -> Event | None:
        """Return the event of the latest step's write of the layer; None if there was none."""
        position = self._position.get(layer)
        return None if position is None else self._writes[position]

    def take_lost(self) -> set[int]:
        """Return the blocks that lost a page in a read since the last call.

        Results computed with these blocks are wrong. Requests that use them must recompute them.
        """
        # vLLM may ask before it ends the step (behind the drafter), so look for the latest, too.
        lost, self._lost = self._lost | self.far.take_lost(), set()
        if self._prefixes:
            lost |= self._prefixes.take_lost()
        self._relocator.empty_blocks(np.fromiter(lost, np.int64))
        return lost

    def wait_for_all_layers(self) -> None:
        """Stall compute until every resident layer's pages are near.

        Call it for a step that runs no hook between layers.
        """
        self.stall_seconds += self._relocator.end_reads()

    def check_integrity(self) -> None:
        """Check that pages are conserved, and that the table agrees with the layers' roles.

        Raises:
            IntegrityError: the numbers do not agree; the message states them.
        """
        self.pool.check_integrity()
        self.table.check_integrity()
        self._near_pages.check_integrity(self._staging.pages)

    # Layers' roles ----------------------------------------------------------------------

    def _update_positions(self) -> None:
        offloaded = self.order.offloaded
        self._position = {layer: i for i, layer in enumerate(offloaded)}
        self._regions = [self.far.far_region(layer) for layer in offloaded]
        self._reads = [None] * len(offloaded)
        self._writes = [None] * len(offloaded)

    def _change_order(self, order: SwapOrder) -> None:
        pages = self._near_pages
        pages.is_laid_out_as_vllm = False
        self.stall_seconds += self._relocator.move(order, pages.released, pages.partial)
        self._update_positions()

    def _end_copies(self) -> float:
        """Stall compute until no copy reads or writes a near page."""
        seconds = self._relocator.end_reads()
        return seconds + sum(self._device.wait(event) for event in self.far.last_write)

    # Copies -----------------------------------------------------------------------------

    def _queue_copies(self) -> None:
        """Queue all reads and writes of the step, each with the events that it must wait for.

        During compute the only work left is to signal that layers were computed. It is done once
        per *turn* of several layers, as waking a copy thread costs as much as all the other work.
        """
        staging, prefetches = self._staging, self.order.prefetches
        last, num_buffers = len(self.order.offloaded) - 1, staging.num_buffers
        turn = (num_buffers + 1) // 2 if prefetches else 1
        ends = [*range(turn - 1, last, turn), last]
        deferred_events = self._device.deferred_events(len(ends))
        self._turns = dict(zip(ends, deferred_events, strict=True))
        computed = [(deferred_events[position // turn],) for position in range(last + 1)]
        self._asked = [] if prefetches else self._device.deferred_events(last + 1)
        self._queue_writes(computed)
        reads = []
        for position, layer in enumerate(self.order.offloaded):
            buffer = position % num_buffers
            self.table.reserve(layer, buffer)
            after = staging.vacated[buffer] + self._written_before
            if self._asked:
                after += (self._asked[position],)
            reads.append((staging.reads[position], after))
            write = self._writes[position]
            staging.vacated[buffer] = computed[position] if write is None else (write,)
        self._reads[:] = self.far.submit_reads(reads, staging.read_ids)

    def _queue_writes(self, computed: Sequence[tuple[Event, ...]]) -> None:
        """Queue each offloaded layer's write, and after each turn the write-out of a leaving layer.

        Args:
            computed: by offloaded position, the events that the write must wait for.
        """
        copies: list[tuple[Copy, tuple[Event, ...]]] = []
        positions: list[int] = []
        for position, after in enumerate(computed):
            if self._staging.writes:
                positions.append(len(copies))
                copies.append((self._staging.writes[position], after))
            if self._relocator.leaving and position in self._turns:
                copies += [(copy, after) for copy in self._relocator.write_out_one()]
        if copies:
            events = self.far.submit_writes(copies)
            self._writes[: len(positions)] = [events[at] for at in positions]

    def _store_partial(self, block_ids: BlockIds) -> None:
        """Write partial blocks to the far tier in every offloaded layer; their near pages drain."""
        if self.order.offloaded:
            layers = np.repeat(self.order.offloaded, len(block_ids))
            pages = self.table.offloaded_pages(block_ids).ravel()
            self.far.write(layers, np.tile(block_ids, len(self.order.offloaded)), pages)
            self.pool.drain(pages, Owner.PARTIAL, self.far.last_write[0])
        self._near_pages.partial.difference_update(block_ids.tolist())
