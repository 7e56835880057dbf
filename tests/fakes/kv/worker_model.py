# SPDX-License-Identifier: Apache-2.0
"""Model of a worker that computes steps on the swapper's pages and knows their right content.

Computing a layer stores a new, unique value for each token of the step, at the place that the
mapping table gives. Then it reads *all* tokens of the step's requests, as attention does. Each page
must hold exactly the values that were stored when its tokens were computed, in whatever step and by
whichever request.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fakes.kv.halved_pages import HalvedPages
from tests.fakes.kv.request_model import Part, Step
from tests.fakes.kv.simulated_device import SimulatedDevice
from vllm_tiered.devices.base import Copy, Device, Direction, Event, LinkUse
from vllm_tiered.devices.pages import PageBuffer, PageCodec, PageIds, Pages, link_bytes
from vllm_tiered.kv.layout import KvGeometry
from vllm_tiered.kv.page_pool import Owner
from vllm_tiered.kv.policy import SwapOrder
from vllm_tiered.kv.step_plan import PrefixMoves
from vllm_tiered.kv.swapper import Swapper

NEVER_WRITTEN = -2
FREED = -3


class WrongKv(AssertionError):
    """Attention would have read something other than the token's KV."""


class CountedCopy(NamedTuple):
    direction: Direction
    num_bytes: int
    inner: Copy


class CountedDevice(Device):
    """Device that counts the bytes of copies submitted to ``inner``, and keeps the far buffer."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.submitted = dict.fromkeys(Direction, 0)
        self.far: PageBuffer | None = None

    def far_buffer(
        self,
        num_pages: int,
        page_bytes: int,
        verify: str = "off",
        codec: PageCodec | None = None,
    ) -> PageBuffer:
        self.far = self.inner.far_buffer(num_pages, page_bytes, verify, codec)
        assert self.far.words is not None
        self.far.words[:] = NEVER_WRITTEN
        return self.far

    def prepare(
        self,
        direction: Direction,
        src: PageBuffer,
        src_pages: Pages,
        dst: PageBuffer,
        dst_pages: Pages,
    ) -> CountedCopy:
        copy = self.inner.prepare(direction, src, src_pages, dst, dst_pages)
        return CountedCopy(direction, len(src_pages) * link_bytes(src, dst), copy)

    def submit(self, copy: Copy, after: tuple[Event, ...] = ()) -> Event:
        assert isinstance(copy, CountedCopy)
        self.submitted[copy.direction] += copy.num_bytes
        return self.inner.submit(copy.inner, after)

    def compute_event(self) -> Event:
        return self.inner.compute_event()

    def move_pages(self, buffer: PageBuffer, src: PageIds, dst: PageIds) -> None:
        self.inner.move_pages(buffer, src, dst)

    def clear_pages(self, buffer: PageBuffer, pages: PageIds) -> None:
        self.inner.clear_pages(buffer, pages)

    def deferred_events(self, count: int) -> Sequence[Event]:
        return self.inner.deferred_events(count)

    def signal(self, deferred_event: Event) -> None:
        self.inner.signal(deferred_event)

    def wait(self, event: Event) -> float:
        return self.inner.wait(event)

    def use(self, direction: Direction) -> LinkUse:
        return self.inner.use(direction)

    def failed_pages(self, event: Event) -> PageIds:
        return self.inner.failed_pages(event)

    def close(self) -> None:
        self.inner.close()


class WorkerModel:
    """Worker that runs scheduled steps.

    Args:
        poison_freed: overwrite free pages after each step; not possible with deferred compute.
        window_tokens: tokens that the layers of a second group see; 0 without such a group.
        has_states: the layers of a third group have a recurrent state per request.
        num_readers: layers behind each layer that read its KV cache, and have none of their own.
        check_bytes: also check the bytes that each step copies; not possible if the level changes,
            as moving layers copies more.
    """

    def __init__(
        self,
        *,
        geometry: KvGeometry,
        near_pages: int,
        order: SwapOrder,
        num_blocks: int,
        device: Device,
        offloadable_layers: Sequence[int] | None = None,
        orders: Sequence[SwapOrder] = (),
        released: int | None = None,
        poison_freed: bool = True,
        check_bytes: bool = True,
        window_tokens: int = 0,
        has_states: bool = False,
        num_slots: int | None = None,
        codec: HalvedPages | None = None,
        num_readers: int = 0,
    ) -> None:
        near = PageBuffer(torch.empty((near_pages, geometry.page_bytes), dtype=torch.uint8))
        assert near.words is not None
        self.words = near.words  # [near page, slot]
        self.words[:] = NEVER_WRITTEN
        self.device = CountedDevice(device)
        self.swapper = Swapper(
            order=order,
            num_blocks=num_blocks,
            near=near,
            device=self.device,
            offloadable_layers=offloadable_layers,
            orders=orders,
            released=released,
            num_slots=num_slots,
            codec=codec,
        )
        self._codec = codec
        self._far_page_bytes = geometry.page_bytes if codec is None else codec.far_bytes
        shape = (num_blocks, geometry.block_tokens)
        self.truth = np.zeros((geometry.num_layers, *shape), dtype=np.int64)
        self.prefixes = np.zeros(shape, dtype=np.int64)  # hash of the tokens up to a slot
        # Of the contents in the prefix store, by tag
        self.kept_truth: dict[int, np.ndarray] = {}
        self._kept_prefixes: dict[int, np.ndarray] = {}
        self._has_store = num_slots is not None
        self._geometry = geometry
        self._window_tokens = window_tokens
        self._has_states = has_states
        self._num_readers = num_readers
        self.num_kept = 0  # steps that reused the buffers of the previous step
        self.layouts: list[bool] = []  # for each step, whether the pages were in vLLM's layout
        self._next_value = 1
        self._expected = dict.fromkeys(Direction, 0)
        self._poison_freed = poison_freed
        self._check_bytes = check_bytes

    def run(self, step: Step) -> None:
        """Run a step: call the swapper as the connector's hooks do, in vLLM's order.

        Raises:
            WrongKv: a page does not hold the computed values.
        """
        self._follow_moves(step.plan.prefixes)
        self._follow_prefixes(step.parts)
        as_vllm = self.swapper.will_be_laid_out_as_vllm(step.plan)
        self.swapper.begin_step(step.plan)
        self._check_layout(step, as_vllm)
        self.num_kept += self.swapper.keeps_pages
        self.swapper.check_integrity()
        # The adapter translates vLLM's block tables once per step, for all layers, at this point.
        pages = self.swapper.table.pages.astype(np.int64)
        if step.parts:
            for layer in range(self._geometry.num_layers):
                if self._window_tokens:  # it waits for nothing, as its pages are near
                    self._submit(self._kernel(layer, pages[layer], step.parts, window=True))
                if self._has_states:
                    self._submit(self._state_kernel(layer, step.parts))
                self.swapper.wait_layer(layer)
                self.swapper.wait_layer(layer)  # a second wait: before the update, before attention
                self._submit(self._kernel(layer, pages[layer], step.parts))
                self._read_later(layer, pages[layer], step.parts)
                self.swapper.table.check_integrity()
                self.swapper.layer_done(layer)
        self.swapper.end_step()
        self._check_step(step)

    def close(self) -> None:
        """Finish all copies, and compare the copied bytes with the expected ones."""
        if isinstance(self.device.inner, SimulatedCudaDevice):
            self.device.inner.cuda.run_all()  # so that deferred kernels raise their errors now
        self.device.close()
        if self._check_bytes:
            for direction, num_bytes in self._expected.items():
                assert self.device.use(direction).num_bytes == num_bytes

    def check_far(self, blocks: Sequence[int]) -> None:
        """Check that full ``blocks`` are far in every offloaded layer; call it after ``close``."""
        for layer in self.swapper.order.offloaded:
            slots = self.swapper.far.slots_of(np.array(blocks, dtype=np.int64))
            np.testing.assert_array_equal(self._far_values(layer, slots), self.truth[layer, blocks])

    def check_kept(self, slot: int, tag: int) -> None:
        """Check that a slot has the content of this tag in every layer; call it after ``close``."""
        for layer in range(self._geometry.num_layers):
            values = self._far_values(layer, np.array([slot]))
            np.testing.assert_array_equal(values[0], self.kept_truth[tag][layer])

    def _far_values(self, layer: int, slots: PageIds) -> "np.ndarray":
        words = self.swapper.far.far_region(layer).words
        assert words is not None
        found = words[slots]
        return found if self._codec is None else self._codec.values_of(found)

    def _check_layout(self, step: Step, as_vllm: bool) -> None:
        """Check that the layout is as predicted; vLLM's must hold for the replay of a graph."""
        assert self.swapper.is_laid_out_as_vllm == as_vllm
        self.layouts.append(as_vllm)
        if as_vllm:
            block_ids = np.array(sorted(step.released), dtype=np.int64)
            layers = np.arange(self._geometry.num_layers)[:, None]
            own_pages = self.swapper.pool.num_pages // self._geometry.num_layers
            expected = layers * own_pages + block_ids
            np.testing.assert_array_equal(self.swapper.table.pages[:, block_ids], expected)
            if step.plan.prefixes is None:
                assert all(layer not in self.swapper.layers_to_come for layer in layers.ravel())

    def _submit(self, kernel: Callable[[], None]) -> None:
        if isinstance(self.device.inner, SimulatedDevice | SimulatedCudaDevice):
            self.device.inner.compute(kernel)
        else:
            kernel()

    def _read_later(
        self,
        layer: int,
        pages: "np.ndarray[tuple[int], np.dtype[np.int64]]",
        parts: Sequence[Part],
    ) -> None:
        """Compute the layers that read this layer's KV cache."""
        for _ in range(self._num_readers):
            self._submit(self._kernel(layer, pages, parts, writes=False))

    def _kernel(
        self,
        layer: int,
        pages: "np.ndarray[tuple[int], np.dtype[np.int64]]",
        parts: Sequence[Part],
        *,
        window: bool = False,
        writes: bool = True,
    ) -> Callable[[], None]:
        written = self._slots(parts if writes else [], new_only=True, window=window)
        looked_at = self._slots(parts, new_only=False, window=window)
        values = np.arange(self._next_value, self._next_value + len(written[0]))
        self._next_value += len(values)

        def kernel() -> None:
            block_ids, slots = written
            self.words[pages[block_ids], slots] = self.truth[layer, block_ids, slots] = values
            block_ids, slots = looked_at
            seen = self.words[pages[block_ids], slots]
            wrong = np.flatnonzero(seen != self.truth[layer, block_ids, slots])
            if len(wrong):
                first = wrong[0]
                block_id, slot = int(block_ids[first]), int(slots[first])
                raise WrongKv(
                    f"{len(wrong)} of {len(seen)} slots in layer {layer}; block {block_id} slot "
                    f"{slot} (page {pages[block_id]}) holds {seen[first]}, computed was "
                    f"{self.truth[layer, block_id, slot]}"
                )

        return kernel

    def _state_kernel(self, layer: int, parts: Sequence[Part]) -> Callable[[], None]:
        """Return a kernel that reads and replaces the states of requests in their columns."""
        num_columns = self.swapper.pool.num_pages // self._geometry.num_layers
        values = np.arange(self._next_value, self._next_value + len(parts))
        self._next_value += len(values)

        def kernel() -> None:
            for part, value in zip(parts, values, strict=True):
                page = layer * num_columns + part.state_column
                block_id = part.state_block
                assert part.state_column > 0
                if part.first:
                    seen = self.words[page]
                    if (seen != self.truth[layer, block_id]).any():
                        raise WrongKv(f"the state of block {block_id} in layer {layer} is {seen}")
                self.words[page] = self.truth[layer, block_id] = value

        return kernel

    def _slots(
        self, parts: Sequence[Part], *, new_only: bool, window: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return block ids and slots of the step's tokens, with or without earlier tokens."""
        block_ids, slots = [], []
        for part in parts:
            computed = part.first
            seen_from = max(0, computed - self._window_tokens + 1) if window else 0
            positions = np.arange(computed if new_only else seen_from, part.end_tokens)
            blocks = np.array(part.window_blocks if window else part.blocks)
            block_ids.append(blocks[positions // self._geometry.block_tokens])
            slots.append(positions % self._geometry.block_tokens)
        if not parts:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(block_ids), np.concatenate(slots)

    def _follow_prefixes(self, parts: Sequence[Part]) -> None:
        """Check the engine model: a request's blocks hold that request's tokens."""
        hashes = {id(part): self._prefix_hashes(part) for part in parts}
        for new_only, window in ((True, False), (True, True), (False, False), (False, True)):
            if window and not self._window_tokens:
                continue
            for part in parts:
                block_ids, slots = self._slots([part], new_only=new_only, window=window)
                own = hashes[id(part)][part.end_tokens - len(slots) :]
                if new_only:
                    self.prefixes[block_ids, slots] = own
                else:
                    kept = len(slots) - (part.end_tokens - part.kept_end)
                    seen = self.prefixes[block_ids, slots][:kept]
                    assert (seen == own[:kept]).all(), "a wrong prefix hit"

    def _follow_moves(self, moves: PrefixMoves | None) -> None:
        """Follow what blocks hold that the prefix store keeps and fetches."""
        if moves is None:
            return
        keep = list(zip(moves.keep.tolist(), moves.keep_tags.tolist(), strict=True))
        fetch = list(zip(moves.fetch.tolist(), moves.fetch_tags.tolist(), strict=True))
        for block, tag in keep:
            self._kept_prefixes[tag] = self.prefixes[block].copy()
        for block, tag in fetch:
            self.prefixes[block] = self._kept_prefixes[tag]

        def kernel() -> None:
            for block, tag in keep:
                self.kept_truth[tag] = self.truth[:, block].copy()
            for block, tag in fetch:
                self.truth[:, block] = self.kept_truth[tag]

        self._submit(kernel)

    def _prefix_hashes(self, part: Part) -> "np.ndarray":
        tokens = part.tokens
        # Under async scheduling a request runs for some tokens more than its last.
        hashes = [hash((*tokens[:end], end)) for end in range(1, part.kept_end + 1)]
        hashes += [-1] * (part.end_tokens - part.kept_end)  # rejected drafts are no one's tokens
        return np.array(hashes, dtype=np.int64)

    def _check_step(self, step: Step) -> None:
        self.swapper.check_integrity()
        if self._has_store:
            assert not self.swapper.take_lost()
        pool = self.swapper.pool
        order = self.swapper.order
        assert pool.count(Owner.RESIDENT) == len(order.resident) * len(step.released)
        block_tokens = self._geometry.block_tokens
        read: set[int] = set()
        touched: set[int] = set()
        extended: set[int] = set()
        filled: list[int] = []
        for part in step.parts:
            first, partial = divmod(part.first, block_tokens)
            read.update(part.blocks[:first])
            extended.update(part.blocks[first : first + bool(partial)])
            touched.update(part.blocks[first : -(-part.end_tokens // block_tokens)])
            filled += part.blocks[first : part.kept_end // block_tokens]
        assert len(set(filled)) == len(filled)
        per_block = len(order.offloaded) * self._far_page_bytes
        num_read, num_written = len(read - touched), len(filled)
        if not self._geometry.partial_blocks_resident:
            num_read += len(extended)
            num_written = len(touched)
        self._expected[Direction.READ] += num_read * per_block
        self._expected[Direction.WRITE] += num_written * per_block
        if self._check_bytes:
            assert self.device.submitted == self._expected
        if self._poison_freed:
            free, after = pool.allocate(pool.num_free, Owner.STAGING)
            assert not after
            self.words[free] = FREED
            pool.free(free, Owner.STAGING)
