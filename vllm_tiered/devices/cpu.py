# SPDX-License-Identifier: Apache-2.0
"""CPU backend's device: a copy thread per direction; far pages in DRAM or in a file."""

import mmap
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch

from vllm_tiered.devices import numa
from vllm_tiered.devices.base import Copy, Direction, Event, LinkUse
from vllm_tiered.devices.copy_thread import CopyJob, CopyThread, CpuCopy, CpuEvent
from vllm_tiered.devices.pages import (
    NO_PAGES,
    PageBuffer,
    PageCodec,
    PageIds,
    Pages,
    check_copy,
)
from vllm_tiered.devices.spread_pages import spread_pages
from vllm_tiered.devices.storage_device import StorageDevice
from vllm_tiered.devices.throttle import Throttle
from vllm_tiered.errors import BudgetError, IntegrityError
from vllm_tiered.storage.checksums import checked, count_verified_slots


class _Now:
    """Compute event of the CPU backend, where compute is done when its call returns."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


_NOW = _Now()


class CpuDevice(StorageDevice):
    """Device whose near tier is DRAM within a budget and whose far tier is other DRAM, or a file.

    Args:
        cpus: CPUs on which the copy threads may run; None keeps the creating thread's binding.
        throttles: bandwidth limits by direction.
    """

    reads_nodes_at_once: ClassVar[bool] = True
    thread_class: type[CopyThread] = CopyThread

    def __init__(
        self,
        cpus: Iterable[int] | None = None,
        throttles: Mapping[Direction, Throttle] | None = None,
    ) -> None:
        super().__init__()
        throttles = throttles or {}
        self._cpus = os.sched_getaffinity(0) if cpus is None else set(cpus)
        self._threads = {
            direction: self.thread_class(
                f"tiered-{direction.value}", cpus, throttles.get(direction)
            )
            for direction in Direction
        }
        self._deferred_events: list[CpuEvent] = []

    def far_nodes(self) -> Sequence[numa.Node]:
        nodes = numa.nodes() if numa.can_bind() else []
        return numa.far_order(self._cpus, nodes, self.node_use.rates) if len(nodes) > 1 else ()

    def far_buffer(
        self,
        num_pages: int,
        page_bytes: int,
        verify: str = "off",
        codec: PageCodec | None = None,
    ) -> PageBuffer:
        num_slots = count_verified_slots(num_pages, verify)
        num_bytes = num_slots * page_bytes
        try:
            # The size is exact; the system allocates each page at its first write.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared pages cannot be released
            memory = mmap.mmap(-1, max(1, num_bytes), flags=flags)
        except (OSError, OverflowError) as error:
            raise BudgetError(
                f"the far tier could not get {num_bytes / 2**30:.2f} GiB "
                f"({num_pages} pages of {page_bytes} bytes): lower kv.far_gib, kv.expansion or "
                "ffn.far_gib, or keep more weights near"
            ) from error
        data = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes].view(num_slots, page_bytes)
        runs = numa.bind(data.data_ptr(), num_bytes, self._cpus, self.node_use)
        if self.node_use.extents and verify == "off" and codec is None:
            return spread_pages(data, runs)
        return self._keep_store(checked(PageBuffer(data, codec=codec), num_pages, verify))

    def prepare(
        self,
        direction: Direction,
        src: PageBuffer,
        src_pages: Pages,
        dst: PageBuffer,
        dst_pages: Pages,
    ) -> CpuCopy:
        check_copy(src, src_pages, dst, dst_pages)
        return CpuCopy(self._threads[direction], src, src_pages, dst, dst_pages)

    def submit_together(self, copies: Sequence[tuple[Copy, tuple[Event, ...]]]) -> list[Event]:
        """Queue copies with one wake-up of the thread, which costs as much as all other work."""
        jobs: list[CopyJob] = []
        for copy, after in copies:
            assert isinstance(copy, CpuCopy), "a copy of another device"
            jobs.append(CopyJob(copy, after, CpuEvent()))
        thread = jobs[0].copy.thread
        if thread.is_closed:
            raise IntegrityError("a copy after the device was closed")
        thread.jobs.put(jobs)
        return [job.done for job in jobs]

    def failed_pages(self, event: Event) -> PageIds:
        return event.failed_pages if isinstance(event, CpuEvent) else NO_PAGES

    def compute_event(self) -> Event:
        return _NOW

    def deferred_events(self, count: int) -> list[CpuEvent]:
        events = [CpuEvent() for _ in range(count)]
        pending = [event for event in self._deferred_events if not event.is_over]
        self._deferred_events = pending + events
        return events

    def signal(self, deferred_event: Event) -> None:
        assert isinstance(deferred_event, CpuEvent), "a deferred event of another device"
        deferred_event.finish()

    def wait(self, event: Event) -> float:
        if event.done():
            return 0.0
        start = time.perf_counter()
        event.wait()
        return time.perf_counter() - start

    def use(self, direction: Direction) -> LinkUse:
        thread = self._threads[direction]
        return LinkUse(num_bytes=thread.num_bytes, busy_seconds=thread.busy_seconds)

    def close(self) -> None:
        for event in self._deferred_events:
            if not event.is_over:
                event.finish(
                    IntegrityError("the device was closed before this event was signalled")
                )
        for thread in self._threads.values():
            thread.close()
        self._close_stores()
