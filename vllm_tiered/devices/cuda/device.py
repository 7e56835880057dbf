# SPDX-License-Identifier: Apache-2.0
"""A GPU's device: a stream for each direction, and far pages in registered host memory.

    compute  ─── layer 0 ──┬─ m0 ─── layer 1 ──┬─ m1 ─── waits ─┬─ layer 2 ───
                           │ reach             │ reach          │ wait
    write    ··············└─► w0 ─┐···········└─► w1           │
    read     ─── r0 ── r1 ─········└─► r2 ──────────────────────┘

No call in a step's path waits for the GPU. What the GPU does not know yet is held back on the host
(``cuda_queue.py``); how long copies took and compute stood still is asked when it is known.

All but the calls of ``CudaRuntime`` runs in the tests without a GPU, on a double of it. It has not
run on a GPU yet, and the launch parameters (kernels/kv_pages/tuned) are assumed, not measured.
"""

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from vllm_tiered.devices.base import Copy, Device, Direction, Event, LinkUse
from vllm_tiered.devices.cuda.copy import CudaCopy
from vllm_tiered.devices.cuda.event import CudaEvent
from vllm_tiered.devices.cuda.host_memory import (
    RegisteredMemory,
    RegisteredPages,
    host_memory_near,
    registered_memory,
)
from vllm_tiered.devices.cuda.job import CopyJob, StoredCopy
from vllm_tiered.devices.cuda.queue import CopyQueue
from vllm_tiered.devices.cuda.runtime import Mark, Runtime
from vllm_tiered.devices.pages import (
    NO_PAGES,
    PageBuffer,
    PageError,
    PageIds,
    Pages,
    PageStore,
    check_copy,
)
from vllm_tiered.errors import IntegrityError
from vllm_tiered.storage.checksums import checked
from vllm_tiered.storage.page_file import PageFile

RING_IDS = 1 << 18
"""2 MiB for each direction: 2000 copies of 64 pages under way."""


class CudaDevice(Device):
    """Near is the GPU's memory; far is host memory on its NUMA node, or a file.

    Any thread may call it. Compute is what the calling thread's current stream is given.

    Args:
        runtime: the GPU.
        engine_run_bytes: the copy engines take copies whose runs of consecutive pages have this
            many bytes on average; the kernel takes the others. Assumed until measured: 256 KiB,
            where a call of a few microseconds carries what takes a link of 50 GB/s five.
        num_ids: page ids that a direction's ring holds before it has to grow.
    """

    is_apart: ClassVar[bool] = True

    def __init__(self, runtime: Runtime, *, engine_run_bytes: int, num_ids: int = RING_IDS) -> None:
        self._runtime = runtime
        self._engine_run_bytes = engine_run_bytes
        self._changed = threading.Condition(threading.RLock())
        self._memory: weakref.WeakSet[RegisteredMemory] = weakref.WeakSet()
        self._queues = {
            direction: CopyQueue(
                runtime, self._changed, self._registered, self._launch_ready, num_ids
            )
            for direction in Direction
        }
        self._stores: list[PageStore] = []
        self._milestones: list[CudaEvent] = []
        self._waits: deque[tuple[Mark, CudaEvent]] = deque()
        self._is_closed = False

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return self._registered(num_bytes)

    def far_buffer(self, num_pages: int, page_bytes: int, verify: str = "off") -> PageBuffer:
        if verify != "off":  # the CPU carries its pages, and looks at them
            _, data = host_memory_near(self._runtime, num_pages * page_bytes)
            return self._keep(checked(PageBuffer(data.view(num_pages, page_bytes)), verify))
        data = self._registered(num_pages * page_bytes).view(num_pages, page_bytes)
        if num_pages:
            self._runtime.compile_for(data.view(torch.int32))
        return RegisteredPages(data)

    def storage_buffer(
        self,
        path: str | Path,
        num_pages: int,
        page_bytes: int,
        *,
        deadline_seconds: float = 10.0,
    ) -> PageBuffer:
        file = PageFile(path, num_pages, page_bytes, deadline_seconds=deadline_seconds)
        return self._keep(file.buffer())

    def _keep(self, buffer: PageBuffer) -> PageBuffer:
        if buffer.store is not None:
            self._stores.append(buffer.store)
        return buffer

    def prepare(
        self,
        direction: Direction,
        src: PageBuffer,
        src_pages: Pages,
        dst: PageBuffer,
        dst_pages: Pages,
    ) -> CudaCopy | StoredCopy:
        check_copy(src, src_pages, dst, dst_pages)
        if src.store is not None or dst.store is not None:
            return StoredCopy(direction, src, src_pages, dst, dst_pages, self._engine_run_bytes)
        return CudaCopy(
            direction, src, src_pages, dst, dst_pages, engine_run_bytes=self._engine_run_bytes
        )

    def submit(self, copy: Copy, after: tuple[Event, ...] = ()) -> Event:
        return self.submit_together(((copy, after),))[0]

    def submit_together(self, copies: Sequence[tuple[Copy, tuple[Event, ...]]]) -> list[Event]:
        with self._changed:
            if self._is_closed:
                raise IntegrityError("a copy after the device was closed")
            events: list[Event] = []
            for copy, after in copies:
                assert isinstance(copy, CudaCopy | StoredCopy), "a copy of another device"
                done = self._new_event()
                job = CopyJob(copy, _own(after), done, self._runtime.new_mark())
                self._queues[copy.direction].add(job)
                events.append(done)
            self._launch_ready()
            return events

    def failed_pages(self, event: Event) -> PageIds:
        return event.failed_pages if isinstance(event, CudaEvent) else NO_PAGES

    def page_errors(self) -> dict[PageError, int]:
        return {kind: sum(store.errors[kind] for store in self._stores) for kind in PageError}

    def compute_event(self) -> Event:
        with self._changed:
            event = self._new_event()
            event.record(self._runtime.compute_stream())
            return event

    def seconds_between(self, begin: Event, end: Event) -> float | None:
        assert isinstance(begin, CudaEvent) and isinstance(end, CudaEvent)
        if not (begin.done() and end.done()):
            return None
        return max(0.0, self._runtime.seconds_between(begin.mark, end.mark))

    def milestones(self, count: int) -> list[CudaEvent]:
        with self._changed:
            milestones = [self._new_event() for _ in range(count)]
            waiting = [event for event in self._milestones if not event.is_settled]
            self._milestones = waiting + milestones
            return milestones

    def reach(self, milestone: Event) -> None:
        assert isinstance(milestone, CudaEvent), "a milestone of another device"
        with self._changed:
            if milestone.is_recorded:
                raise IntegrityError("compute came to a milestone for the second time")
            milestone.record(self._runtime.compute_stream())
            self._launch_ready()

    def wait(self, event: Event) -> float:
        """As the contract says; the host is held, too, while a copy comes from a page store, or
        goes there.

        What is held back cannot be waited for by the thread that has yet to reach its milestone.

        Raises:
            IntegrityError: the event is of a copy that waits for compute which comes after it.
        """
        assert isinstance(event, CudaEvent), "an event of another device"
        with self._changed:
            stood_still = self._take_standstill()
            if event.done():
                return stood_still
            stream = self._runtime.compute_stream()
            came = self._runtime.new_mark()
            self._runtime.record(came, stream)
            self._changed.wait_for(lambda: event.is_settled or not self._carries)
            if event.error is not None:
                raise event.error
            if not event.is_recorded:
                raise IntegrityError("compute waits for a copy that waits for later compute")
            self._runtime.stream_wait(stream, event.mark)
            self._waits.append((came, event))
            return stood_still

    def use(self, direction: Direction) -> LinkUse:
        with self._changed:
            return self._queues[direction].use()

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for milestone in self._milestones:
                if not milestone.is_settled:
                    milestone.fail(IntegrityError("the device was closed before compute came here"))
            self._launch_ready()
            self._changed.wait_for(lambda: not self._carries)
        for queue in self._queues.values():
            queue.end_thread()
        with self._changed:
            try:
                for queue in self._queues.values():
                    queue.finish()
                # Kernels read registered memory too, and nobody has waited for the last of them.
                computed = self._runtime.new_mark()
                self._runtime.record(computed, self._runtime.compute_stream())
                self._runtime.synchronize(computed)
            finally:
                for store in self._stores:
                    store.close()
                for memory in list(self._memory):
                    memory.let_go()

    @property
    def _carries(self) -> bool:
        return any(queue.carries for queue in self._queues.values())

    def _launch_ready(self) -> None:
        """In both directions, until neither has something: each may wait for the other."""
        while any([queue.launch_ready() for queue in self._queues.values()]):
            pass
        self._changed.notify_all()

    def _take_standstill(self) -> float:
        """Seconds from where compute came to a wait to where the copy was done, of waits that
        are over. Without what it takes to record: a copy that was done first counts as nothing.
        """
        seconds = 0.0
        while self._waits:
            came, event = self._waits[0]
            if not (self._runtime.is_done(came) and event.done()):
                break
            self._waits.popleft()
            seconds += max(0.0, self._runtime.seconds_between(came, event.mark))
        return seconds

    def _new_event(self) -> CudaEvent:
        return CudaEvent(self._runtime, self._changed)

    def _registered(self, num_bytes: int) -> torch.Tensor:
        memory, data = registered_memory(self._runtime, num_bytes)
        self._memory.add(memory)
        return data


def _own(events: tuple[Event, ...]) -> tuple[CudaEvent, ...]:
    own = tuple(event for event in events if isinstance(event, CudaEvent))
    assert len(own) == len(events), "an event of another device"
    return own
