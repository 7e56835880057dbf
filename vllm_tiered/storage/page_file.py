# SPDX-License-Identifier: Apache-2.0
"""The storage tier: far pages in a file on a disk, read and written past the page cache.

Pages go through bounce buffers, as O_DIRECT wants addresses, offsets and lengths in whole disk
blocks, and near pages lie where the engine put them:

    read    reader threads: file ─► bounce, verify       copying thread: bounce ─► near
    write   copying thread: near ─► bounce, checksum     writer threads: bounce ─► file

Near pages are touched by the copying thread alone, within the copy. What a slow disk delivers after
the copy has given up ends in a bounce buffer that nobody looks at.

Pages that lie together travel together, as an *extent*. The file has no name, so it goes away with
the process, however that ends: it holds users' text.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import torch

from vllm_tiered.devices.pages import (
    PageBuffer,
    PageError,
    PageIds,
    Pages,
    PageStore,
    Words,
    copy_words,
)
from vllm_tiered.storage.checksums import UNWRITTEN, checksum, checksums_of, new_checksums
from vllm_tiered.storage.direct_io import make_direct
from vllm_tiered.storage.extent import Extent, cut_extents
from vllm_tiered.storage.io_pool import BouncePool, IoPool, SharedFd, Transfer, transfer
from vllm_tiered.storage.tmpfile import open_unnamed
from vllm_tiered.units import KIB, MIB

logger = logging.getLogger("vllm.tiered")

ALIGNMENT = 4096
"""Bytes in which O_DIRECT counts: the blocks of all but very old or exotic disks divide it."""

EXTENT_BYTES = MIB
"""At most for one request: a disk reads whole MiB at its full bandwidth."""

HOLE_BYTES = 48 * KIB
"""At most read along between two pages, as a request more costs more. Pages of 24 KiB, one of four
missing: 9.7 us of CPU a page, against 14.8 without; one of two: 16 against 33 (2 cores, virtio
disk, 16 readers, 2026-11-21)."""

NUM_READERS = 16
"""Scattered pages of 24 KiB: 200 MB/s with 1 reader, 360 with 4, 410 with 8, 500 with 16, 530 with
32; runs of four: 0.5, 1.0, 1.3, 1.5, 1.6 GB/s; consecutive: 2 GB/s from 2 on, as much as ``dd``
(same machine, busy with other work: these figures spread by 20 %)."""

PROBE_SECONDS = 0.1
PROBING_SECONDS = 3.0
"""A disk that let a copy give up, and has brought nothing since, is given so little for each copy
in the next seconds. A step copies many layers, and vLLM gives up on a step that takes minutes. But
not for longer: requests that lose pages too often in a short time stop the engine."""

NUM_WRITERS = 8
"""Consecutive pages: 2.2 GB/s with 1 writer and no more with 32; scattered ones as reads."""


class PageFile(PageStore):
    """Pages in a file without a name, each with a checksum that stays in memory.

    Nothing that goes wrong with the file raises: a read names the pages that it could not bring,
    and a page that could not be written is not there for later reads.

    Args:
        folder: where the file lives.
        deadline_seconds: a copy gives up what is still on its way when nothing of it has arrived
            for this long. (Not the time of the whole copy: that would give up on a disk that is
            slow, but works, again and again.) After that see ``PROBE_SECONDS``.
        num_readers, num_writers: I/O requests at a time.

    Attributes:
        is_direct: whether the file system takes O_DIRECT; otherwise its page cache is in between.
        num_bytes: reserved on the disk.

    Raises:
        ConfigError: no file can be made in ``folder``.
        BudgetError: the file system does not have the space.
    """

    def __init__(
        self,
        folder: str | Path,
        num_pages: int,
        page_bytes: int,
        *,
        deadline_seconds: float = 10.0,
        num_readers: int = NUM_READERS,
        num_writers: int = NUM_WRITERS,
    ) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.slot_bytes = -(-page_bytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = num_pages * self.slot_bytes
        self._deadline_seconds = deadline_seconds
        self._checksums = new_checksums(num_pages)
        self._max_slots = max(1, EXTENT_BYTES // self.slot_bytes)
        self._bounce = BouncePool(self._max_slots * self.slot_bytes)
        self._readers = IoPool("tiered-disk-read", num_readers)
        self._writers = IoPool("tiered-disk-write", num_writers)
        self._probe_seconds = min(PROBE_SECONDS, deadline_seconds)
        # When a copy gave up after the whole deadline: what the pool had finished, and until when
        # the next ones give up sooner.
        self._silent: dict[IoPool, tuple[int, float]] = {}
        fd = open_unnamed(self.folder, self.num_bytes)
        self._file = SharedFd(fd)
        self.is_direct = make_direct(fd, self._bounce.take()[:ALIGNMENT])
        if not self.is_direct:
            logger.warning(
                "tiered: the file system of %s does not take O_DIRECT: far pages in it go through "
                "the page cache",
                self.folder,
            )

    def buffer(self) -> PageBuffer:
        """All pages, to copy from and to."""
        shape = (self.num_pages, self.page_bytes)
        return PageBuffer(torch.empty(shape, dtype=torch.uint8, device="meta"), self)

    def read(self, page_ids: PageIds, near: PageBuffer, near_pages: Pages) -> PageIds:
        assert near.words is not None
        is_written = self._checksums[page_ids] != UNWRITTEN
        unwritten = page_ids[~is_written]
        self._count(PageError.UNWRITTEN, len(unwritten))
        extents = cut_extents(
            page_ids[is_written],
            near_pages.ids[is_written],
            max_slots=self._max_slots,
            max_hole=HOLE_BYTES // self.slot_bytes,
        )
        for extent in extents:
            extent.checksums = self._checksums[extent.page_ids].tolist()
        deliver = partial(self._deliver, near.words)
        num_late = self._carry(self._readers, extents, work=self._fetch, end=deliver)
        self._count(PageError.LATE, num_late)
        lost = [unwritten]
        for extent in extents:
            positions = slice(None) if extent.is_given_up else self._count_errors(extent)
            lost.append(extent.page_ids[positions])
        return np.concatenate(lost)

    def write(self, near: PageBuffer, near_ids: PageIds, page_ids: PageIds) -> None:
        assert near.words is not None
        self._checksums[page_ids] = UNWRITTEN
        extents = cut_extents(page_ids, near_ids, max_slots=self._max_slots, max_hole=0)
        gather = partial(self._gather, near.words)
        num_late = self._carry(
            self._writers, extents, begin=gather, work=self._put, end=self._publish
        )
        self._count(PageError.WRITE, num_late, "the disk does not answer")

    def forget(self, first_page: int, num_pages: int) -> None:
        self._checksums[first_page : first_page + num_pages] = UNWRITTEN

    def close(self) -> None:
        """Copies that are under way lose the pages that have not begun to travel."""
        self._file.close()
        pools = (self._readers, self._writers)
        if not all([pool.close(self._deadline_seconds) for pool in pools]):
            logger.warning(
                "tiered: the storage under %s has not answered for %g s; its file is closed when "
                "it does",
                self.folder,
                self._deadline_seconds,
            )
        self._bounce.clear()

    # Copying thread ---------------------------------------------------------------------

    def _carry(
        self,
        pool: IoPool,
        extents: Sequence[Extent],
        *,
        begin: Callable[[Extent], None] | None = None,
        work: Callable[[Extent], None],
        end: Callable[[Extent], None],
    ) -> int:
        """``work`` in the pool on each extent; ``begin`` before and ``end`` after it right here.

        Returns:
            Pages that are late. Their extents are given up: ``end`` will not be called.
        """
        deadline, most = self._deadline_seconds, 2 * pool.size  # enough for no thread to wait
        num_finished, until = self._silent.get(pool, (-1, 0.0))
        if num_finished == pool.num_finished and time.monotonic() < until:
            deadline, most = self._probe_seconds, 1
        done: SimpleQueue[Extent] = SimpleQueue()
        waiting = deque(extents)
        under_way: set[Extent] = set()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < most:
                    extent = waiting.popleft()
                    extent.buffer = self._bounce.take()
                    if begin is not None:
                        begin(extent)
                    under_way.add(extent)
                    pool.submit(partial(extent.run, work, done))
                extent = done.get(timeout=deadline)
                deadline, most = self._deadline_seconds, 2 * pool.size
                under_way.discard(extent)
                if extent.failure is not None:
                    raise extent.failure
                end(extent)
                self._bounce.give(extent.buffer)
        except Empty:
            if deadline == self._deadline_seconds:
                until = time.monotonic() + PROBING_SECONDS
            self._silent[pool] = (pool.num_finished, until)
            waiting.extend(under_way)
            return sum(map(len, waiting))
        finally:
            for extent in (*under_way, *waiting):
                extent.is_given_up = True
        return 0

    def _deliver(self, near: Words, extent: Extent) -> None:
        """What was read, to the near pages; lost pages too, as those may hold anything."""
        copy_words(self._words(extent), extent.slots, near, extent.near_pages)

    def _gather(self, near: Words, extent: Extent) -> None:
        pages = self._words(extent)
        for start, count, first in extent.near_pages.runs:
            pages[start : start + count] = near[first : first + count]
        extent.checksums = checksums_of(near, extent.near_pages.ids)

    def _publish(self, extent: Extent) -> None:
        """Pages that were written exist for later reads."""
        lost = self._count_errors(extent)
        self._checksums[extent.page_ids] = extent.checksums
        self._checksums[extent.page_ids[lost]] = UNWRITTEN

    def _count_errors(self, extent: Extent) -> list[int]:
        """Positions of the pages that were lost."""
        lost = []
        for position, error in enumerate(extent.errors):
            if error is not None:
                self._count(error, 1, extent.reason)
                lost.append(position)
        return lost

    def _count(self, error: PageError, num_pages: int, reason: str = "") -> None:
        if num_pages and not self.errors[error]:
            logger.warning(
                "tiered: %d far pages in %s are lost (%s%s); such pages are only counted from now "
                "on",
                num_pages,
                self.folder,
                error.value,
                f": {reason}" if reason else "",
            )
        self.errors[error] += num_pages

    # Reader and writer threads ----------------------------------------------------------

    def _fetch(self, extent: Extent) -> None:
        self._move(os.preadv, extent, 0, len(extent), PageError.IO, PageError.SHORT)
        pages = self._words(extent)
        for position, expected in enumerate(extent.checksums):
            if extent.errors[position] is not None:
                continue
            if checksum(pages[extent.slots[position]]) != expected:
                extent.errors[position] = PageError.CHECKSUM

    def _put(self, extent: Extent) -> None:
        self._move(os.pwritev, extent, 0, len(extent), PageError.WRITE, PageError.WRITE)

    def _move(
        self,
        call: Transfer,
        extent: Extent,
        begin: int,
        end: int,
        if_failed: PageError,
        if_short: PageError,
    ) -> None:
        """Pages ``begin`` to ``end`` of the extent; one by one after an error.

        So a bad disk block costs its own page, and not those that happen to travel with it.
        """
        first, last = int(extent.slots[begin]), int(extent.slots[end - 1])
        buffer = extent.buffer[first * self.slot_bytes : (last + 1) * self.slot_bytes]
        offset = int(extent.page_ids[begin]) * self.slot_bytes
        try:
            with self._file as fd:
                moved_bytes = transfer(call, fd, buffer, offset, ALIGNMENT)
        except OSError as error:
            extent.reason = str(error)
            if end - begin == 1:
                extent.errors[begin] = if_failed
                return
            for page in range(begin, end):
                if not extent.is_given_up:  # a dying disk takes its time for each
                    self._move(call, extent, page, page + 1, if_failed, if_short)
            return
        if moved_bytes < len(buffer):
            ends = (extent.slots[begin:end] - first) * self.slot_bytes + self.page_bytes
            for page in (begin + np.flatnonzero(ends > moved_bytes)).tolist():
                extent.errors[page] = if_short

    def _words(self, extent: Extent) -> Words:
        """The slots in the extent's bounce buffer, int64 [num_slots, page_bytes / 8]."""
        slots = extent.buffer[: extent.num_slots * self.slot_bytes]
        slots = slots.reshape(extent.num_slots, self.slot_bytes)
        return slots[:, : self.page_bytes].view(np.int64)
