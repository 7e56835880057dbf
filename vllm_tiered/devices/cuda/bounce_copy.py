# SPDX-License-Identifier: Apache-2.0
"""A GPU's copies from and to a page store: a file, or memory with checksums.

A thread for each direction carries them through registered memory, piece by piece, as the CPU has
to read the file or to make the checksums:

    read    thread: store ─► bounce 0          thread: store ─► bounce 1        …
            GPU:                      bounce 0 ─► near            bounce 1 ─► near
    write   GPU: near ─► bounce 0     thread: bounce 0 ─► store

Until the thread is done with a copy, those behind it in its direction are held back, and compute
that comes to wait for it holds the host: a GPU cannot wait for a disk.
"""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import numpy as np
import torch

from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import copy_pages
from vllm_tiered.devices.cuda.copy import CudaCopy
from vllm_tiered.devices.cuda.event import CudaEvent
from vllm_tiered.devices.cuda.job import CopyJob, StoredCopy
from vllm_tiered.devices.cuda.page_id_buffer import IdRing
from vllm_tiered.devices.cuda.runtime import Runtime, Stream
from vllm_tiered.devices.pages import NO_PAGES, PageBuffer, PageIds, Pages
from vllm_tiered.units import MIB

BOUNCE_BYTES = 8 * MIB
"""Of each of a direction's two pieces of registered memory; assumed, not measured. Pages that lie
together in a file come in requests of 1 MiB, 32 of which keep the readers busy."""


class _Bounce:
    """A piece of registered memory; ``copied`` is done when the GPU has read it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.pages = PageBuffer(data)
        self.copied: CudaEvent | None = None
        self.in_use: object = None


class Carrier:
    """Carries one copy at a time, in a thread that starts with the first.

    Args:
        stream: of the direction, as is ``ids``; used under ``changed``.
        allocate: registered memory of so many bytes, uint8.
        finish: called, under ``changed``, with each job and what made it fail.
    """

    def __init__(
        self,
        runtime: Runtime,
        stream: Stream,
        ids: IdRing,
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
        self._bounces: dict[int, list[_Bounce]] = {}  # by bytes of a page
        self._jobs: SimpleQueue[CopyJob | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: CopyJob) -> None:
        """Carry it; all that it waits for has been recorded."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="tiered-carry", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """All jobs are finished."""
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
        assert isinstance(copy, StoredCopy)
        carry = self._read if copy.direction is Direction.READ else self._write
        with self._changed:
            self._runtime.record(job.begun, self._stream)
            bounces = self._bounces_for(copy.src.page_bytes)
        lost = [NO_PAGES]
        for number, (src, dst) in enumerate(pieces(copy, bounces[0].pages.num_pages)):
            lost.append(carry(copy, src, dst, bounces[number % len(bounces)]))
        job.done.failed_pages = np.concatenate(lost)

    def _read(self, copy: StoredCopy, src: Pages, dst: Pages, bounce: _Bounce) -> PageIds:
        if bounce.copied is not None:
            bounce.copied.wait()
        all_of_it = _first(len(src))
        lost = copy_pages(copy.src, src, bounce.pages, all_of_it)
        self._launch(copy, bounce.pages, all_of_it, copy.dst, dst, bounce)
        return lost

    def _write(self, copy: StoredCopy, src: Pages, dst: Pages, bounce: _Bounce) -> PageIds:
        all_of_it = _first(len(src))
        self._launch(copy, copy.src, src, bounce.pages, all_of_it, bounce).wait()
        return copy_pages(bounce.pages, all_of_it, copy.dst, dst)

    def _launch(
        self,
        copy: StoredCopy,
        src: PageBuffer,
        src_pages: Pages,
        dst: PageBuffer,
        dst_pages: Pages,
        bounce: _Bounce,
    ) -> CudaEvent:
        inner = CudaCopy(
            copy.direction, src, src_pages, dst, dst_pages, engine_run_bytes=copy.engine_run_bytes
        )
        with self._changed:
            bounce.copied = copied = CudaEvent(self._runtime, self._changed)
            lists = inner.launch(self._runtime, self._stream, self._ids, copied)
            bounce.in_use = inner, lists
            copied.record(self._stream)
        return copied

    def _bounces_for(self, page_bytes: int) -> list[_Bounce]:
        if page_bytes not in self._bounces:
            num_pages = max(1, BOUNCE_BYTES // page_bytes)
            memory = [self._allocate(num_pages * page_bytes) for _ in range(2)]
            self._bounces[page_bytes] = [_Bounce(one.view(num_pages, page_bytes)) for one in memory]
        return self._bounces[page_bytes]


def pieces(copy: StoredCopy, num_pages: int) -> Iterator[tuple[Pages, Pages]]:
    """Source and target pages of at most so many at a time."""
    for first in range(0, len(copy.src_pages), num_pages):
        part = slice(first, first + num_pages)
        yield Pages(copy.src_pages.ids[part]), Pages(copy.dst_pages.ids[part])


def _first(num_pages: int) -> Pages:
    return Pages(np.arange(num_pages, dtype=np.int64), ascending=True)
