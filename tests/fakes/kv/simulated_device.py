# SPDX-License-Identifier: Apache-2.0
"""Device without threads: a seed chooses one of the orders that the device contract allows.

Copies advance only inside calls of the device and its events, by a random number of pieces. One
seed always gives the same order, so a failure is replayed exactly. Orders that real threads show
once in a million runs occur in every second run here.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_tiered.devices.base import Copy, Device, Direction, Event, LinkUse
from vllm_tiered.devices.pages import PageBuffer, PageCodec, PageIds, Pages, link_bytes
from vllm_tiered.errors import IntegrityError

POISON = -1  # all bits set: no test stores it


class Operation:
    """Copy, wait or piece of compute in one of the queues; it is also its own event."""

    def __init__(
        self, device: "SimulatedDevice", after: Sequence[Event], pieces: Iterator[None]
    ) -> None:
        self.after = after
        self.over = False
        self._device = device
        self._pieces = pieces

    def done(self) -> bool:
        self._device.run_a_while()
        return self.over

    def wait(self) -> None:
        while not self.over:
            self._device.advance_towards(self)

    def advance(self) -> None:
        try:
            next(self._pieces)
        except StopIteration:
            self.over = True

    def blocker(self) -> "Operation | None":
        """Return the first unfinished operation that this one must wait for."""
        operations = (event for event in self.after if isinstance(event, Operation))
        return next((operation for operation in operations if not operation.over), None)


@dataclass(frozen=True, eq=False)
class PreparedCopy:
    direction: Direction
    src: PageBuffer
    src_pages: Pages
    dst: PageBuffer
    dst_pages: Pages

    @property
    def num_bytes(self) -> int:
        return len(self.src_pages) * link_bytes(self.src, self.dst)


class SimulatedDevice(Device):
    """Device that copies between two tiers in numpy, in any order that the events allow.

    Args:
        rng: chooses the queues that advance, and when.
        haste: 0 runs a copy only when something waits for it, 1 runs everything at once; values in
            between mix both.
        defers_compute: compute is queued too, as on a GPU; if False, it runs when it is submitted.
    """

    def __init__(self, rng: random.Random, *, haste: float, defers_compute: bool = False) -> None:
        self._rng = rng
        self._haste = haste
        self._defers_compute = defers_compute
        self._compute: deque[Operation] = deque()
        self._queues = {direction: deque[Operation]() for direction in Direction}
        self._bytes = dict.fromkeys(Direction, 0)

    def far_buffer(
        self,
        num_pages: int,
        page_bytes: int,
        verify: str = "off",
        codec: PageCodec | None = None,
    ) -> PageBuffer:
        return PageBuffer(torch.zeros((num_pages, page_bytes), dtype=torch.uint8), codec=codec)

    def prepare(
        self,
        direction: Direction,
        src: PageBuffer,
        src_pages: Pages,
        dst: PageBuffer,
        dst_pages: Pages,
    ) -> PreparedCopy:
        for pages, buffer in ((src_pages, src), (dst_pages, dst)):
            if pages.lowest < 0 or pages.highest >= buffer.num_pages:
                raise IntegrityError(f"page {pages.highest} of {buffer.num_pages}")
        return PreparedCopy(direction, src, src_pages, dst, dst_pages)

    def submit(self, copy: Copy, after: tuple[Event, ...] = ()) -> Event:
        assert isinstance(copy, PreparedCopy), "a copy of another device"
        return self._enqueue(self._queues[copy.direction], after, self._copy_pieces(copy))

    def compute(self, kernel: Callable[[], None]) -> None:
        """Submit a kernel; its error is raised from the call in which it runs."""
        if self._defers_compute:
            self._enqueue(self._compute, (), _one_piece(kernel))
        else:
            kernel()

    def move_pages(self, buffer: PageBuffer, src: PageIds, dst: PageIds) -> None:
        move = super().move_pages
        self.compute(lambda: move(buffer, src, dst))

    def clear_pages(self, buffer: PageBuffer, pages: PageIds) -> None:
        clear = super().clear_pages
        self.compute(lambda: clear(buffer, pages))

    def compute_event(self) -> Event:
        if self._defers_compute:
            return self._enqueue(self._compute, (), _one_piece(lambda: None))
        over = Operation(self, (), iter(()))
        over.advance()
        return over

    def deferred_events(self, count: int) -> list[Operation]:
        return [Operation(self, (), iter(())) for _ in range(count)]

    def signal(self, deferred_event: Event) -> None:
        assert isinstance(deferred_event, Operation), "a deferred event of another device"
        assert not deferred_event.over and deferred_event not in self._compute, "reached twice"
        if self._defers_compute:
            self._compute.append(deferred_event)
            self.run_a_while()
        else:
            deferred_event.advance()

    def wait(self, event: Event) -> float:
        if self._defers_compute:
            self._enqueue(self._compute, (event,), _one_piece(lambda: None))
            return 0.0
        stalled = not event.done()
        event.wait()
        return 1e-3 if stalled else 0.0

    def use(self, direction: Direction) -> LinkUse:
        return LinkUse(num_bytes=self._bytes[direction])

    def close(self) -> None:
        for queue in (self._compute, *self._queues.values()):
            while queue:
                queue[-1].wait()

    def run_a_while(self) -> None:
        """Advance queues by a random number of pieces."""
        while self._rng.random() < self._haste:
            ready = [
                queue[0]
                for queue in (self._compute, *self._queues.values())
                if queue and queue[0].blocker() is None
            ]
            if not ready:
                return
            self._rng.choice(ready).advance()
            self._drop_finished()

    def run_all(self) -> None:
        """Advance all queues until none can advance."""
        haste, self._haste = self._haste, 1.0
        self.run_a_while()
        self._haste = haste

    def advance_towards(self, operation: Operation) -> None:
        """Run one piece of the first operation that ``operation`` waits for, and no other queue."""
        while True:
            queues = (self._compute, *self._queues.values())
            queue = next((queue for queue in queues if operation in queue), None)
            if queue is None:
                raise IntegrityError("a copy waits for compute that comes after it")
            operation = queue[0]
            blocker = operation.blocker()
            if blocker is None:
                break
            operation = blocker
        operation.advance()
        self._drop_finished()

    def _enqueue(
        self, queue: deque[Operation], after: Sequence[Event], pieces: Iterator[None]
    ) -> Operation:
        operation = Operation(self, after, pieces)
        queue.append(operation)
        self.run_a_while()
        return operation

    def _drop_finished(self) -> None:
        for queue in (self._compute, *self._queues.values()):
            while queue and queue[0].over:
                queue.popleft()

    def _copy_pieces(self, copy: PreparedCopy) -> Iterator[None]:
        """Poison the target, copy some pages, then the others; read each page only when copied."""
        src, dst = copy.src.words, copy.dst.words
        assert src is not None and dst is not None
        num_pages = len(copy.src_pages)
        order = np.array(self._rng.sample(range(num_pages), num_pages), dtype=np.int64)
        dst[copy.dst_pages.ids] = POISON
        yield
        for part in np.split(order, [self._rng.randint(0, num_pages)]):
            src_ids, dst_ids = copy.src_pages.ids[part], copy.dst_pages.ids[part]
            if copy.src.codec is not None:
                copy.src.codec.decode(src, src_ids, dst, dst_ids)
            elif copy.dst.codec is not None:
                copy.dst.codec.encode(src, src_ids, dst, dst_ids)
            else:
                dst[dst_ids] = src[src_ids]
            yield
        self._bytes[copy.direction] += copy.num_bytes


def _one_piece(action: Callable[[], None]) -> Iterator[None]:
    action()
    return
    yield
