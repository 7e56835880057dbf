# SPDX-License-Identifier: Apache-2.0
"""Device of a GPU: a stream for each direction, and far pages in pinned host memory.

    compute  ─── layer 0 ──┬─ d0 ─── layer 1 ──┬─ d1 ─── waits ─┬─ layer 2 ───
                           │ signal            │ signal         │ wait
    write    ··············└─► w0 ─┐···········└─► w1           │
    read     ─── r0 ── r1 ─········└─► r2 ──────────────────────┘

No call within a step waits for the GPU. Copies whose dependencies are not recorded on the GPU yet
are held back on the host (``queue.py``). Events that are done give the times of copies and stalls.

In the tests, all code except the calls of ``CudaRuntime`` runs without a GPU, on a fake CUDA
runtime. It has not run on a GPU yet. The launch parameters (kernels/kv_pages/tuned) are assumed,
not measured.
"""

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

import torch

from vllm_tiered.devices import numa
from vllm_tiered.devices.base import Copy, Direction, Event, LinkUse
from vllm_tiered.devices.cuda.copy import BounceCopy, CopyJob, CudaCopy
from vllm_tiered.devices.cuda.event import CudaEvent
from vllm_tiered.devices.cuda.host_memory import (
    PinnedMemory,
    PinnedPages,
    allocate_pinned,
    map_near_gpu,
    pin,
)
from vllm_tiered.devices.cuda.queue import CopyQueue
from vllm_tiered.devices.cuda.runtime import RawEvent, Runtime
from vllm_tiered.devices.pages import (
    NO_PAGES,
    PageBuffer,
    PageCodec,
    PageIds,
    Pages,
    check_copy,
)
from vllm_tiered.devices.storage_device import StorageDevice
from vllm_tiered.errors import IntegrityError
from vllm_tiered.storage.checksums import checked, count_verified_slots

NUM_PAGE_IDS = 1 << 18
"""Initial capacity in page ids: 2 MiB for each direction, enough for 2000 copies of 64 pages."""


class CudaDevice(StorageDevice):
    """Device whose near tier is GPU memory and whose far tier is host memory, or a file.

    Host memory is on the GPU's NUMA node. Any thread may call the device. Compute is the work on
    the calling thread's current stream.

    Args:
        runtime: CUDA calls of the GPU.
        engine_run_bytes: copy engines do the copies whose runs of consecutive pages have at least
            this many bytes on average; the kernel does the others. 256 KiB is assumed, not
            measured: a call takes a few microseconds, and a link of 50 GB/s needs five for it.
        num_ids: initial capacity of each direction's page id buffer.
    """

    has_device_memory: ClassVar[bool] = True

    def __init__(
        self, runtime: Runtime, *, engine_run_bytes: int, num_ids: int = NUM_PAGE_IDS
    ) -> None:
        super().__init__()
        self._runtime = runtime
        self._engine_run_bytes = engine_run_bytes
        self._changed = threading.Condition(threading.RLock())
        self._memory: weakref.WeakSet[PinnedMemory] = weakref.WeakSet()
        self._unpinned: dict[PageBuffer, PinnedMemory] = {}
        self._queues = {
            direction: CopyQueue(
                runtime, self._changed, self._allocate_pinned, self._launch_ready, num_ids
            )
            for direction in Direction
        }
        self._deferred_events: list[CudaEvent] = []
        self._waits: deque[tuple[RawEvent, CudaEvent]] = deque()
        self._is_closed = False

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return self._allocate_pinned(num_bytes)

    def far_nodes(self) -> Sequence[numa.Node]:
        number = self._runtime.numa_node()
        nodes = numa.nodes() if numa.can_bind() and number is not None else []
        if number is None or len(nodes) < 2:
            return ()
        return numa.far_order_near(number, nodes, self.node_use.rates)

    def far_buffer(
        self,
        num_pages: int,
        page_bytes: int,
        verify: str = "off",
        codec: PageCodec | None = None,
    ) -> PageBuffer:
        if verify != "off":  # the CPU reads the pages to check their checksums
            num_slots = count_verified_slots(num_pages, verify)
            _, data = map_near_gpu(self._runtime, num_slots * page_bytes, self.node_use)
            pages = PageBuffer(data.view(num_slots, page_bytes), codec=codec)
            return self._keep_store(checked(pages, num_pages, verify))
        data = self._allocate_pinned(num_pages * page_bytes).view(num_pages, page_bytes)
        if num_pages:
            self._runtime.compile_for(data.view(torch.int32), codec)
        return PinnedPages(data, codec=codec)

    def far_buffer_to_fill(self, num_pages: int, page_bytes: int) -> PageBuffer:
        memory, data = map_near_gpu(self._runtime, num_pages * page_bytes, self.node_use)
        pages = PinnedPages(data.view(num_pages, page_bytes))
        self._unpinned[pages] = memory
        return pages

    def pin(self, pages: PageBuffer) -> None:
        memory = self._unpinned.get(pages)
        if memory is None:
            return
        data = pages.data.view(-1)
        if len(data):
            pin(self._runtime, memory, data)
            self._memory.add(memory)
            self._runtime.compile_for(pages.data.view(torch.int32), None)
        del self._unpinned[pages]

    def prepare(
        self,
        direction: Direction,
        src: PageBuffer,
        src_pages: Pages,
        dst: PageBuffer,
        dst_pages: Pages,
    ) -> CudaCopy | BounceCopy:
        check_copy(src, src_pages, dst, dst_pages)
        if src.store is not None or dst.store is not None:
            return BounceCopy(direction, src, src_pages, dst, dst_pages, self._engine_run_bytes)
        return CudaCopy(
            direction, src, src_pages, dst, dst_pages, engine_run_bytes=self._engine_run_bytes
        )

    def submit_together(self, copies: Sequence[tuple[Copy, tuple[Event, ...]]]) -> list[Event]:
        with self._changed:
            if self._is_closed:
                raise IntegrityError("a copy after the device was closed")
            events: list[Event] = []
            for copy, after in copies:
                assert isinstance(copy, CudaCopy | BounceCopy), "a copy of another device"
                done = self._new_event()
                job = CopyJob(copy, _own(after), done, self._runtime.new_event())
                self._queues[copy.direction].add(job)
                events.append(done)
            self._launch_ready()
            return events

    def failed_pages(self, event: Event) -> PageIds:
        return event.failed_pages if isinstance(event, CudaEvent) else NO_PAGES

    def compute_event(self) -> Event:
        with self._changed:
            event = self._new_event()
            event.record(self._runtime.compute_stream())
            return event

    def seconds_between(self, begin: Event, end: Event) -> float | None:
        assert isinstance(begin, CudaEvent) and isinstance(end, CudaEvent)
        if not (begin.done() and end.done()):
            return None
        return max(0.0, self._runtime.seconds_between(begin.raw_event, end.raw_event))

    def deferred_events(self, count: int) -> list[CudaEvent]:
        with self._changed:
            deferred_events = [self._new_event() for _ in range(count)]
            waiting = [event for event in self._deferred_events if not event.is_settled]
            self._deferred_events = waiting + deferred_events
            return deferred_events

    def signal(self, deferred_event: Event) -> None:
        assert isinstance(deferred_event, CudaEvent), "a deferred event of another device"
        with self._changed:
            if deferred_event.is_recorded:
                raise IntegrityError("a deferred event was signalled twice")
            deferred_event.record(self._runtime.compute_stream())
            self._launch_ready()

    def wait(self, event: Event) -> float:
        """Hold later compute; see the contract. A bounce copy under way also blocks the host.

        A thread cannot wait for a copy that is held back by a deferred event that the same thread
        has yet to signal.

        Raises:
            IntegrityError: the event's copy waits for compute that comes after it.
        """
        assert isinstance(event, CudaEvent), "an event of another device"
        with self._changed:
            stalled = self._collect_stall_seconds()
            if event.done():
                return stalled
            stream = self._runtime.compute_stream()
            reached = self._runtime.new_event()
            self._runtime.record(reached, stream)
            self._changed.wait_for(lambda: event.is_settled or not self._is_bouncing)
            if event.error is not None:
                raise event.error
            if not event.is_recorded:
                raise IntegrityError("compute waits for a copy that waits for later compute")
            self._runtime.stream_wait(stream, event.raw_event)
            self._waits.append((reached, event))
            return stalled

    def use(self, direction: Direction) -> LinkUse:
        with self._changed:
            return self._queues[direction].use()

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._unpinned.clear()
            for event in self._deferred_events:
                if not event.is_settled:
                    event.fail(
                        IntegrityError("the device was closed before this event was signalled")
                    )
            self._launch_ready()
            self._changed.wait_for(lambda: not self._is_bouncing)
        for queue in self._queues.values():
            queue.stop_worker()
        with self._changed:
            try:
                for queue in self._queues.values():
                    queue.finish()
                # Kernels read pinned memory too, and the last ones have no event yet.
                computed = self._runtime.new_event()
                self._runtime.record(computed, self._runtime.compute_stream())
                self._runtime.synchronize(computed)
            finally:
                self._close_stores()
                for memory in list(self._memory):
                    memory.unpin()

    @property
    def _is_bouncing(self) -> bool:
        return any(queue.is_bouncing for queue in self._queues.values())

    def _launch_ready(self) -> None:
        """Launch in both directions until neither has a ready copy; each may wait for the other."""
        while any([queue.launch_ready() for queue in self._queues.values()]):
            pass
        self._changed.notify_all()

    def _collect_stall_seconds(self) -> float:
        """Sum the stalls of waits that are over: from the wait to the end of its copy.

        A copy that ended before the wait counts as 0.
        """
        seconds = 0.0
        while self._waits:
            reached, event = self._waits[0]
            if not (self._runtime.is_done(reached) and event.done()):
                break
            self._waits.popleft()
            seconds += max(0.0, self._runtime.seconds_between(reached, event.raw_event))
        return seconds

    def _new_event(self) -> CudaEvent:
        return CudaEvent(self._runtime, self._changed)

    def _allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        memory, data = allocate_pinned(self._runtime, num_bytes, self.node_use)
        self._memory.add(memory)
        return data


def _own(events: tuple[Event, ...]) -> tuple[CudaEvent, ...]:
    own = tuple(event for event in events if isinstance(event, CudaEvent))
    assert len(own) == len(events), "an event of another device"
    return own
