# SPDX-License-Identifier: Apache-2.0
"""Swaps the rotating layers through the staging areas while the engine computes (Pie, 3.3).

One step, with rotating layers r0, r1, r2 … and two areas:

    begin_step   all copies are queued, each behind what it waits for: read r0→A, r1→B
    r0 computes  blocks that r0 wrote in A go out; then read r2→A
    r1 computes  blocks that r1 wrote in B go out; then read r3→B
    …            (layers between them are pinned and compute without a wait)
    end_step     tails that were filled go out, all layers in one copy, if tails stay near

The areas stay for the next step if its blocks are the same (``staging.py``); else they become free,
and pages that a write still reads drain.

Between two steps the number of far layers may change (``relocator.py``).
"""

from collections.abc import Container, Sequence

import numpy as np

from vllm_tiered.devices.base import Copy, Device, Event
from vllm_tiered.devices.pages import PageBuffer, PageIds
from vllm_tiered.errors import IntegrityError
from vllm_tiered.kv.far_tier import FarHomes, FarTier
from vllm_tiered.kv.mapping_table import MappingTable
from vllm_tiered.kv.page_pool import Owner, PagePool
from vllm_tiered.kv.policy import SwapOrder
from vllm_tiered.kv.relocator import Relocator
from vllm_tiered.kv.staging import Staging
from vllm_tiered.kv.step_plan import BlockIds, StepPlan

_NOTHING = StepPlan()


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

    Attributes:
        stall_seconds: for which compute stood still since the start.
        num_steps: begun since the start.
        keeps_pages: every block of the step has the pages that it had in the step before.

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
        self.keeps_pages = False
        self._failure: BaseException | None = None
        self._device = device
        self._staging = Staging(pool=self.pool, near=near, device=device, max_areas=max_areas)
        self._orders = orders
        self._relocator = Relocator(self.pool, self.table, self.far)
        self._written_before: tuple[Event, ...] = ()
        self._lost: set[int] = set()
        self._granted: set[int] = set()
        self._tails: set[int] = set()
        self._plan = _NOTHING
        self._reads: list[Event | None] = []
        self._writes: list[Event | None] = []
        self._turns: dict[int, Event] = {}  # by position of the last layer of each turn
        self._asked: Sequence[Event] = ()  # by position, where layers are read when asked for
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

    def will_be_laid_out_as_vllm(self, plan: StepPlan) -> bool:
        """What :attr:`is_laid_out_as_vllm` will be once ``begin_step`` has applied the plan."""
        level = plan.far_layers
        moves_layers = level is not None and level != self.order.far_layers
        return self._as_vllm and not (moves_layers or len(plan.granted) or len(plan.withheld))

    @property
    def layers_to_come(self) -> Container[int]:
        """Layers that the step which has begun must wait for: the others' pages are near."""
        returning = self._relocator.returning
        return {*self._position, *returning} if returning else self._position

    # One step ---------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Apply the plan to pages and table, and queue all copies of the step.

        Raises:
            IntegrityError: the plan does not fit the pages, as the scheduler's bound is wrong; or
                the step before was abandoned.
        """
        if self._failure is not None or self._turns:
            raise IntegrityError("the step before was not computed to its end") from self._failure
        self.num_steps += 1
        self._plan = plan
        self._writes = [None] * len(self.order.rotating)
        self.keeps_pages = self.serves(plan)
        if not self.keeps_pages and self._staging.num_areas:
            self._staging.release(next(iter(self.far.last_write), None))
        self._release_tails(plan.tail_release)
        if len(plan.tail_leave):
            self._flush_tails(plan.tail_leave)
            self._relocator.hold(plan.tail_leave)
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
        if not self._staging.num_areas:
            self._staging.open(plan, self.order, self._slabs, self.table)
        if self._staging.num_areas:
            self._queue_copies()

    def serves(self, plan: StepPlan) -> bool:
        """Whether the areas of the step before are right for this one, and nothing moves."""
        level = plan.far_layers
        same_level = level is None or level == self.order.far_layers
        return same_level and self._staging.serves(plan)

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
            if (event := self._reads[position]) is None:
                return
            self._reads[position] = None
            if self._asked:
                self._device.reach(self._asked[position])
            if not event.done():
                self.stall_seconds += self._device.wait(event)
        except Exception as failure:
            self._failure = failure
            raise
        self.table.publish(layer, self.num_steps)

    def layer_done(self, layer: int) -> None:
        """The layer was computed: copies that wait for it may run.

        Raises:
            IntegrityError: nobody waited for its pages.
        """
        position = self._position.get(layer)
        if position is None or not self._turns:
            return
        self.table.evict(layer)
        if (milestone := self._turns.pop(position, None)) is not None:
            self._device.reach(milestone)

    def end_step(self) -> None:
        """All layers were computed: write out filled tails.

        Raises:
            IntegrityError: a rotating layer was staged but not computed.
        """
        if self._failure is not None:  # vLLM ends a step also when its forward has raised
            raise self._failure
        if self._turns:
            raise IntegrityError(f"rotating layers {[*self._turns]} were staged, never computed")
        self._lost |= self.far.take_lost()
        plan, self._plan = self._plan, _NOTHING
        if len(plan.tail_flush):
            self._flush_tails(plan.tail_flush)
        if self._orders:
            self._relocator.end_step(plan)

    def abandon(self, failure: BaseException) -> None:
        """The step will not be computed to its end: layers that were staged are left out."""
        if self._turns:
            self._failure = failure
        else:
            self.end_step()

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
        lost, self._lost = self._lost, set()
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
            Owner.STAGING: self._staging.pages.size,
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
        self.stall_seconds += self._relocator.move(order, self._granted, self._tails)
        self._follow_order()

    def _lay_out_as_vllm(self, granted: int) -> None:
        """Each layer's pages one after the other, that of the null block first."""
        layers = np.arange(len(self.table.rows), dtype=np.int64)[:, None]
        block_ids = np.arange(1, granted + 1, dtype=np.int64)
        pages = layers * (self.pool.num_pages // len(layers)) + block_ids
        self.pool.claim(pages.ravel(), Owner.PINNED)
        self.table.set_pinned(block_ids, pages)
        self._granted.update(block_ids.tolist())

    def _take(self, num_pages: int, owner: Owner) -> PageIds:
        """Pages for what compute writes, which is held until they have drained."""
        pages, drained = self.pool.allocate(num_pages, owner)
        for event in drained:
            self.stall_seconds += self._device.wait(event)
        return pages

    def _grant(self, block_ids: BlockIds) -> None:
        if len(block_ids):
            self._as_vllm = False
            shape = (len(self.order.pinned), len(block_ids))
            pages = self._take(shape[0] * shape[1], Owner.PINNED)
            self.table.set_pinned(block_ids, pages.reshape(shape))
            self._granted.update(block_ids.tolist())

    def _withhold(self, block_ids: BlockIds) -> None:
        if len(block_ids):
            self._as_vllm = False
            self.pool.free(self.table.pinned_pages(block_ids), Owner.PINNED)
            self.table.set_pinned(block_ids, np.array(MappingTable.HOLE))
            self._granted.difference_update(block_ids.tolist())

    def _acquire_tails(self, block_ids: BlockIds) -> None:
        if len(block_ids) and self.order.rotating:
            shape = (len(self.order.rotating), len(block_ids))
            pages = self._take(shape[0] * shape[1], Owner.TAIL)
            self.table.set_rotating(block_ids, pages.reshape(shape))
        self._tails.update(block_ids.tolist())

    def _release_tails(self, block_ids: BlockIds) -> None:
        if len(block_ids) and self.order.rotating:
            self.pool.free(self.table.rotating_pages(block_ids).ravel(), Owner.TAIL)
        self._tails.difference_update(block_ids.tolist())

    # Copies -----------------------------------------------------------------------------

    def _queue_copies(self) -> None:
        """All reads and writes of the step, each behind what it has to wait for.

        Between two layers nothing is left to do but to say that they were computed, and that only
        in turns of some layers: to wake a copying thread costs as much as all the rest.
        """
        staging, prefetches = self._staging, self.order.prefetches
        last, num_areas = len(self.order.rotating) - 1, staging.num_areas
        turn = (num_areas + 1) // 2 if prefetches else 1
        ends = [*range(turn - 1, last, turn), last]
        milestones = self._device.milestones(len(ends))
        self._turns = dict(zip(ends, milestones, strict=True))
        computed = [(milestones[position // turn],) for position in range(last + 1)]
        self._asked = [] if prefetches else self._device.milestones(last + 1)
        self._queue_writes(computed)
        reads = []
        for position, layer in enumerate(self.order.rotating):
            area = position % num_areas
            self.table.reserve(layer, area)
            after = staging.vacated[area] + self._written_before
            if self._asked:
                after += (self._asked[position],)
            reads.append((staging.reads[position], after))
            write = self._writes[position]
            staging.vacated[area] = computed[position] if write is None else (write,)
        self._reads[:] = self.far.submit_reads(reads)

    def _queue_writes(self, computed: Sequence[tuple[Event, ...]]) -> None:
        """What each rotating layer writes, and after a turn of them a layer that leaves.

        Args:
            computed: by rotating position, what the write has to wait for.
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

    def _flush_tails(self, block_ids: BlockIds) -> None:
        if self.order.rotating:
            pages = self.table.rotating_pages(block_ids)
            self.far.write(self.order.rotating, block_ids, pages)
            self.pool.drain(pages.ravel(), Owner.TAIL, self.far.last_write[0])
        self._tails.difference_update(block_ids.tolist())

    def _check_no_page_twice(self) -> None:
        held = [self.table.pinned_pages(np.fromiter(self._granted, np.int64))]
        held.append(self.table.rotating_pages(np.fromiter(self._tails, np.int64)).ravel())
        held.append(self._staging.pages.ravel())
        pages = np.concatenate(held)
        if len(np.unique(pages)) != len(pages):
            raise IntegrityError("a page stands for two blocks or layers")
