# SPDX-License-Identifier: Apache-2.0
"""A device without threads: a seed decides which of the orders that its contract allows happens.

Copies make progress only inside calls of the device and its events, a random number of pieces at
a time. One seed gives one history, so what fails is replayed exactly, and orders that real
threads show once in a million runs come up in each other run.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_tiered.devices.base import Copy, Device, Direction, Event, LinkUse
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.errors import IntegrityError

POISON = -1  # all bits set: no test stores it


class Operation:
    """A copy, a wait or a piece of compute in one of the queues; also its own event."""

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
        """The first operation that this one has to wait for."""
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
        return len(self.src_pages) * self.src.page_bytes


class SimulatedDevice(Device):
    """Copies between two tiers in numpy, in any order that events leave open.

    Args:
        rng: decides what makes progress, and when.
        haste: 0 copies only what is waited for, 1 everything at once, others in between.
        late_compute: compute is queued too, as on a GPU; otherwise it runs when submitted.
    """

    def __init__(self, rng: random.Random, *, haste: float, late_compute: bool = False) -> None:
        self._rng = rng
        self._haste = haste
        self._late_compute = late_compute
        self._compute: deque[Operation] = deque()
        self._queues = {direction: deque[Operation]() for direction in Direction}
        self._bytes = dict.fromkeys(Direction, 0)

    def far_buffer(self, num_pages: int, page_bytes: int, verify: str = "off") -> PageBuffer:
        return PageBuffer(torch.zeros((num_pages, page_bytes), dtype=torch.uint8))

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
        """Submit a kernel. What it raises comes out of the call in which it runs."""
        if self._late_compute:
            self._enqueue(self._compute, (), _one_piece(kernel))
        else:
            kernel()

    def compute_event(self) -> Event:
        if self._late_compute:
            return self._enqueue(self._compute, (), _one_piece(lambda: None))
        over = Operation(self, (), iter(()))
        over.advance()
        return over

    def deferred_events(self, count: int) -> list[Operation]:
        return [Operation(self, (), iter(())) for _ in range(count)]

    def signal(self, deferred_event: Event) -> None:
        assert isinstance(deferred_event, Operation), "a deferred event of another device"
        assert not deferred_event.over and deferred_event not in self._compute, "reached twice"
        if self._late_compute:
            self._compute.append(deferred_event)
            self.run_a_while()
        else:
            deferred_event.advance()

    def wait(self, event: Event) -> float:
        if self._late_compute:
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
        """Let queues advance by random pieces."""
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
        """Let all queues advance until nothing can."""
        haste, self._haste = self._haste, 1.0
        self.run_a_while()
        self._haste = haste

    def advance_towards(self, operation: Operation) -> None:
        """One piece of what ``operation`` needs first; other queues stand still if they can."""
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
        """Poison the target, copy some pages, copy the others: each is looked up when copied."""
        src, dst = copy.src.words, copy.dst.words
        assert src is not None and dst is not None
        num_pages = len(copy.src_pages)
        order = np.array(self._rng.sample(range(num_pages), num_pages), dtype=np.int64)
        dst[copy.dst_pages.ids] = POISON
        yield
        for part in np.split(order, [self._rng.randint(0, num_pages)]):
            dst[copy.dst_pages.ids[part]] = src[copy.src_pages.ids[part]]
            yield
        self._bytes[copy.direction] += copy.num_bytes


def _one_piece(action: Callable[[], None]) -> Iterator[None]:
    action()
    return
    yield
