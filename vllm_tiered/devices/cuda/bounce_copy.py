# SPDX-License-Identifier: Apache-2.0
"""Bounce copies: copies between a GPU and a page store (a file, or memory with checksums).

The CPU has to read the file or compute the checksums, so a worker thread for each direction copies
the pages through pinned bounce buffers, piece by piece:

    read    thread: store ─► buffer 0          thread: store ─► buffer 1        …
            GPU:                      buffer 0 ─► near            buffer 1 ─► near
    write   GPU: near ─► buffer 0     thread: buffer 0 ─► store

Bounce buffers hold pages in their far form, which the GPU converts.

A GPU cannot wait for a disk. So later copies of the direction are held back until the worker has
finished a copy. Compute that waits for one of them blocks the host.
"""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np
import torch

from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.copy_thread import copy_pages
from vllm_tiered.devices.cuda.copy import BounceCopy, CopyJob, CudaCopy
from vllm_tiered.devices.cuda.event import CudaEvent
from vllm_tiered.devices.cuda.page_id_buffer import PageIdBuffer
from vllm_tiered.devices.cuda.runtime import Runtime, Stream
from vllm_tiered.devices.pages import NO_PAGES, PageBuffer, PageCodec, PageIds, Pages, link_bytes
from vllm_tiered.units import MIB

BOUNCE_BYTES = 8 * MIB
"""Size of each of a direction's two bounce buffers; assumed, not measured. Adjacent pages of a file
are read in requests of 1 MiB, and 32 requests keep the readers busy."""


class _BounceBuffer:
    """Bounce buffer; ``copied`` is done when the GPU has copied from or to it."""

    def __init__(self, data: torch.Tensor, codec: PageCodec | None) -> None:
        self.pages = PageBuffer(data, codec=codec)
        self.copied: CudaEvent | None = None
        self.in_use: object = None


class BounceCopyWorker:
    """Worker thread of one direction, which runs one bounce copy at a time.

    The thread starts with the first copy.

    Args:
        stream: the direction's stream; it and ``ids`` are used with ``changed`` held.
        allocate: returns pinned memory of a given number of bytes, uint8.
        finish: called with each finished job and its error, if any, with ``changed`` held.
    """

    def __init__(
        self,
        runtime: Runtime,
        stream: Stream,
        ids: PageIdBuffer,
        changed: threading.Condition,
        allocate: Callable[[int], torch.Tensor],
        finish: Callable[[CopyJob, BaseException | None], None],
    ) -> None:
        self._runtime = runtime
        self._stream = stream
        self._ids = ids
        self._changed = changed
        self._allocate = allocate
        self._finish = finish
        # By page size and codec
        self._buffers: dict[tuple[int, PageCodec | None], list[_BounceBuffer]] = {}
        self._jobs: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: CopyJob) -> None:
        """Queue a job, all of whose dependencies are recorded."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="tiered-bounce", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """Stop the thread; all jobs must be finished."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            failure = None
            try:
                self._run(job)
            except BaseException as error:
                failure = error
            with self._changed:
                self._finish(job, failure)

    def _run(self, job: CopyJob) -> None:
        for event in job.after:
            event.wait()
        copy = job.copy
        assert isinstance(copy, BounceCopy)
        move = self._read if copy.direction is Direction.READ else self._write
        with self._changed:
            self._runtime.record(job.begun, self._stream)
            store = copy.dst if copy.src.store is None else copy.src
            buffers = self._buffers_for(link_bytes(copy.src, copy.dst), store.codec)
        lost = [NO_PAGES]
        for number, (src, dst) in enumerate(split_copy(copy, buffers[0].pages.num_pages)):
            lost.append(move(copy, src, dst, buffers[number % len(buffers)]))
        job.done.failed_pages = np.concatenate(lost)

    def _read(self, copy: BounceCopy, src: Pages, dst: Pages, buffer: _BounceBuffer) -> PageIds:
        if buffer.copied is not None:
            buffer.copied.wait()
        whole = _first(len(src))
        lost = copy_pages(copy.src, src, buffer.pages, whole)
        self._launch(copy, buffer.pages, whole, copy.dst, dst, buffer)
        return lost

    def _write(self, copy: BounceCopy, src: Pages, dst: Pages, buffer: _BounceBuffer) -> PageIds:
        whole = _first(len(src))
        self._launch(copy, copy.src, src, buffer.pages, whole, buffer).wait()
        return copy_pages(buffer.pages, whole, copy.dst, dst)

    def _launch(
        self,
        copy: BounceCopy,
        src: PageBuffer,
        src_pages: Pages,
        dst: PageBuffer,
        dst_pages: Pages,
        buffer: _BounceBuffer,
    ) -> CudaEvent:
        inner = CudaCopy(
            copy.direction, src, src_pages, dst, dst_pages, engine_run_bytes=copy.engine_run_bytes
        )
        with self._changed:
            buffer.copied = copied = CudaEvent(self._runtime, self._changed)
            lists = inner.launch(self._runtime, self._stream, self._ids, copied)
            buffer.in_use = inner, lists
            copied.record(self._stream)
        return copied

    def _buffers_for(self, page_bytes: int, codec: PageCodec | None) -> list[_BounceBuffer]:
        key = page_bytes, codec
        if key not in self._buffers:
            num_pages = max(1, BOUNCE_BYTES // page_bytes)
            memory = [self._allocate(num_pages * page_bytes) for _ in range(2)]
            self._buffers[key] = [
                _BounceBuffer(one.view(num_pages, page_bytes), codec) for one in memory
            ]
        return self._buffers[key]


def split_copy(copy: BounceCopy, num_pages: int) -> Iterator[tuple[Pages, Pages]]:
    """Yield source and target pages, at most ``num_pages`` at a time."""
    for first in range(0, len(copy.src_pages), num_pages):
        part = slice(first, first + num_pages)
        yield Pages(copy.src_pages.ids[part]), Pages(copy.dst_pages.ids[part])


def _first(num_pages: int) -> Pages:
    return Pages(np.arange(num_pages, dtype=np.int64), ascending=True)
