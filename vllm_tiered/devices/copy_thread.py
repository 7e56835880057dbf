# SPDX-License-Identifier: Apache-2.0
"""Thread that copies pages in CPU memory, in the order of submission, and its events."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from vllm_tiered.devices.base import Event
from vllm_tiered.devices.pages import (
    NO_PAGES,
    PageBuffer,
    PageIds,
    Pages,
    copy_words,
    link_bytes,
    read_words,
    write_words,
)
from vllm_tiered.devices.spread_pages import NodePart, parts_by_node
from vllm_tiered.devices.throttle import Throttle

logger = logging.getLogger("vllm.tiered")


def copy_pages(src: PageBuffer, src_pages: Pages, dst: PageBuffer, dst_pages: Pages) -> PageIds:
    """Copy ``src[src_pages.ids[i]]`` to ``dst[dst_pages.ids[i]]`` for all i.

    Returns:
        Those of ``src_pages.ids`` that did not arrive intact. Their targets are zeroed. Results
        computed from them are dropped, but their bytes stay in pages that other blocks will use.
        Kernels also multiply masked values, so a NaN in such a page would spread.
    """
    if src.store is not None:
        return begin_read(src, src_pages, dst, dst_pages)()
    if dst.store is not None:
        dst.store.write(src, src_pages.ids, dst_pages.ids + dst.first_page)
        return NO_PAGES
    assert src.words is not None and dst.words is not None, "the CPU device copies CPU memory"
    if src.codec is not None:
        read_words(src.words, src_pages.ids, dst, dst_pages, src.codec)
    elif dst.codec is not None:
        write_words(src, src_pages.ids, dst.words, dst_pages, dst.codec)
    else:
        copy_words(src.words, src_pages.ids, dst.words, dst_pages)
    return NO_PAGES


def begin_read(
    src: PageBuffer, src_pages: Pages, dst: PageBuffer, dst_pages: Pages
) -> Callable[[], PageIds]:
    """Begin to copy from a store.

    Returns:
        Waits for the copy, and returns what :func:`copy_pages` returns; see
        :meth:`PageStore.begin_read`.
    """
    assert src.store is not None
    ids = src_pages.ids + src.first_page
    end_read = src.store.begin_read(ids, dst, dst_pages)

    def end() -> PageIds:
        lost = end_read()
        if len(lost) and dst.words is not None:
            dst.words[dst_pages.ids[np.isin(ids, lost)]] = 0
        return lost - src.first_page

    return end


_FIRST_WAIT = threading.Lock()

_MOST_NODES = 64
"""Most threads beside a copy thread; one starts for each further NUMA node of a copy."""


class CpuEvent:
    """Event that a copy thread or compute completes.

    A step makes dozens of events and waits for few of them. So the first waiter creates the lock,
    which is cheaper than ``threading.Event``.

    Attributes:
        began, ended: ``time.perf_counter`` when the copy started and ended; 0.0 before.
        failed_pages: source pages that did not arrive intact.
        is_over: whether it is done or has failed.
    """

    __slots__ = ("_error", "_lock", "began", "ended", "failed_pages", "is_over")

    def __init__(self) -> None:
        self.began = 0.0
        self.ended = 0.0
        self.failed_pages = NO_PAGES
        self.is_over = False
        self._error: BaseException | None = None
        self._lock: threading.Lock | None = None

    def done(self) -> bool:
        if not self.is_over:  # read first, as finish() sets the error before it
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self) -> None:
        if not self.is_over:
            lock = self._held_until_over()
            if not self.is_over:  # finish() may have run before the lock existed
                with lock:
                    pass
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None = None) -> None:
        """Complete the event; called once, by the thread that did the work or by ``signal``."""
        self._error = error
        self.is_over = True  # before reading the lock: a waiter rereads it after creating the lock
        if self._lock is not None:
            self._lock.release()

    def _held_until_over(self) -> threading.Lock:
        with _FIRST_WAIT:
            if self._lock is None:
                lock = threading.Lock()
                lock.acquire()
                self._lock = lock
            return self._lock


class CpuCopy:
    """Prepared copy; immutable, so several submissions of it may be under way.

    Attributes:
        num_bytes: bytes on the link.
        parts: parts to copy at once, each of one NUMA node; empty for a copy that is not divided.
    """

    __slots__ = ("dst", "dst_pages", "num_bytes", "parts", "src", "src_pages", "thread")

    def __init__(
        self,
        thread: "CopyThread",
        src: PageBuffer,
        src_pages: Pages,
        dst: PageBuffer,
        dst_pages: Pages,
    ) -> None:
        self.thread = thread
        self.src = src
        self.src_pages = src_pages
        self.dst = dst
        self.dst_pages = dst_pages
        self.num_bytes = len(src_pages) * link_bytes(src, dst)
        self.parts = parts_by_node(src, src_pages, dst_pages)


class CopyJob(NamedTuple):
    """Submitted copy."""

    copy: CpuCopy
    after: tuple[Event, ...]
    done: CpuEvent


class CopyThread:
    """Thread that runs copy jobs in order and counts bytes and busy seconds.

    Reads of a file that are queued together are begun together, so that the disk has the next when
    one ends; they end in order. Only the thread writes the counters.
    """

    def __init__(
        self, name: str, cpus: Iterable[int] | None, throttle: Throttle | None = None
    ) -> None:
        self.name = name
        self.throttle = throttle
        self.num_bytes = 0
        self.busy_seconds = 0.0
        self.is_closed = False
        self.jobs: SimpleQueue[list[CopyJob] | None] = SimpleQueue()
        self._cpus = cpus
        self._begun: dict[CpuEvent, Callable[[], PageIds]] = {}
        self._disk_works_since = 0.0
        self._helpers: ThreadPoolExecutor | None = None  # from the first copy of several nodes on
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.jobs.put(None)
            self._thread.join()
            if self._helpers is not None:
                self._helpers.shutdown()

    def begin(self, job: CopyJob) -> None:
        """Begin a read of a file; its dependencies are done."""
        copy = job.copy
        self._begun[job.done] = begin_read(copy.src, copy.src_pages, copy.dst, copy.dst_pages)

    def run(self, job: CopyJob) -> None:
        """Copy once the job's dependencies are done."""
        for event in job.after:
            if not event.done():
                event.wait()
        copy, done, throttle = job.copy, job.done, self.throttle
        is_begun = done in self._begun
        done.began = start = self._disk_works_since if is_begun else time.perf_counter()
        ticket = throttle.admit(copy.num_bytes, start) if throttle else 0.0
        if copy.src.store is not None and not is_begun:
            self.begin(job)
        if (end_read := self._begun.pop(done, None)) is not None:
            done.failed_pages = end_read()
        elif copy.parts:
            self._copy_parts(copy)
        else:
            done.failed_pages = copy_pages(copy.src, copy.src_pages, copy.dst, copy.dst_pages)
        if throttle:
            throttle.hold(ticket)
        done.ended = self._disk_works_since = end = time.perf_counter()
        self.busy_seconds += end - start
        self.num_bytes += copy.num_bytes

    def copy_part(self, copy: CpuCopy, part: NodePart) -> None:
        """Copy the pages of one node."""
        copy_pages(copy.src, part.sources, copy.dst, part.targets)

    def _copy_parts(self, copy: CpuCopy) -> None:
        """Copy from all nodes at once.

        No part is under way any more when this returns or raises: a later copy may write to the
        same pages, and after a failure their memory may be freed.
        """
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(
                max_workers=_MOST_NODES,
                thread_name_prefix=f"{self.name}-node",
                initializer=self._unbind,
            )
        others = [self._helpers.submit(self.copy_part, copy, part) for part in copy.parts[1:]]
        try:
            self.copy_part(copy, copy.parts[0])
        finally:
            wait(others)
        for other in others:
            other.result()

    def _loop(self) -> None:
        self._unbind()
        failure: BaseException | None = None
        while (jobs := self.jobs.get()) is not None:
            if failure is None:
                try:
                    self._begin_reads(jobs)
                except BaseException as error:
                    failure = error
            for job in jobs:
                if failure is None:
                    try:
                        self.run(job)
                    except BaseException as error:
                        failure = error
                # After a failure no copy of this direction completes: copies run in order, so a
                # waiter for a later copy relies on the earlier ones too.
                job.done.finish(failure)
            if failure is not None:
                self._end_reads()

    def _begin_reads(self, jobs: list[CopyJob]) -> None:
        if len(jobs) == 1 or self.throttle is not None:
            return
        self._disk_works_since = time.perf_counter()
        for job in jobs:
            store = job.copy.src.store
            # Another store would read only when it is waited for, even after an earlier failure.
            if store is not None and store.begins_reads and all(e.done() for e in job.after):
                self.begin(job)

    def _end_reads(self) -> None:
        """Wait for reads that nobody waits for any more, before their memory may be freed."""
        for end_read in self._begun.values():
            with contextlib.suppress(Exception):
                end_read()
        self._begun.clear()

    def _unbind(self) -> None:
        """Run on all given CPUs, not only on the one to which the engine bound the creator."""
        if self._cpus:
            try:
                os.sched_setaffinity(0, self._cpus)
            except OSError as error:
                logger.warning("tiered: %s stays bound to its CPU: %s", self.name, error)
