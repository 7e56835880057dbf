# SPDX-License-Identifier: Apache-2.0
"""Storage tier of the KV cache: far pages in a file that is read and written with O_DIRECT.

O_DIRECT needs addresses, offsets and lengths in whole disk blocks, and near pages are not aligned.
So pages pass through bounce buffers:

    read    reader threads: file ─► bounce, verify       copying thread: bounce ─► near
    write   copying thread: near ─► bounce, checksum     writer threads: bounce ─► file

If pages are narrower in the file, the copying thread converts them on the way.

Only the copying thread touches near pages, and only during the copy. Data that a slow disk delivers
after the copy has given up goes to a bounce buffer that nothing reads.

A page that is lost to a bad block gets a spare slot (slot_map.py), so that it is lost once. When
the spare slots run out, or the disk has been silent for long, the file has failed. It then moves
no page any more, and all pages are lost.

The file holds users' text. It has no name, so it is deleted when the process ends, even by a crash.
"""

import logging
import os
from errno import EBADF
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vllm_tiered.devices.pages import (
    PageBuffer,
    PageCodec,
    PageError,
    PageIds,
    Pages,
    PageStore,
    Words,
    read_words,
    write_words,
)
from vllm_tiered.storage.checksums import UNWRITTEN, Checksums, checksums_of, new_checksums
from vllm_tiered.storage.direct_file import ALIGNMENT, Bytes, DirectFile, transfer
from vllm_tiered.storage.io_pool import BouncePool, DeadlinePool
from vllm_tiered.storage.scatter_plan import ScatterPlan, Section
from vllm_tiered.storage.slot_map import SlotMap, count_spares
from vllm_tiered.storage.tmpfile import open_tmpfile
from vllm_tiered.storage.verified_read import Problem, read_extent
from vllm_tiered.units import KIB, MIB

logger = logging.getLogger("vllm.tiered")

EXTENT_BYTES = MIB
"""Most bytes of a request: a disk reads 1 MiB at its full bandwidth."""

HOLE_BYTES = 48 * KIB
"""Longest gap between two pages that one request reads across; a second request costs more. With
pages of 24 KiB, and one of four not wanted: 9.7 us of CPU a page, against 14.8 without; one of two:
16 against 33 (2 cores, virtio disk, 16 readers, 2026-11-21)."""

NUM_READERS = 16
"""Reader threads. Scattered pages of 24 KiB: 200 MB/s with 1 reader, 360 with 4, 410 with 8, 500
with 16, 530 with 32; runs of four pages: 0.5, 1.0, 1.3, 1.5, 1.6 GB/s; consecutive pages: 2 GB/s
from 2 readers on, as much as ``dd`` (same machine, busy with other work: these figures spread by
20 %)."""

NUM_WRITERS = 8
"""Writer threads. Consecutive pages: 2.2 GB/s with 1 writer and no more with 32; scattered pages:
as for reads."""

MAX_SILENT_SECONDS = 30.0
"""Length of an outage after which the file has failed."""


class PageFile(PageStore):
    """Page store in a file without a name, with a checksum of each page in memory.

    I/O errors do not raise. A read returns the pages that it could not load, and a page that could
    not be written is lost for later reads.

    Args:
        folder: folder of the file.
        num_pages: number of pages.
        page_bytes: bytes of a page in the file.
        codec: see :class:`PageStore`.
        deadline_seconds: see :class:`DeadlinePool`.
        num_readers, num_writers: most threads that read and write.
        num_spares: number of spare slots.

    Attributes:
        folder, num_pages, page_bytes: as given.
        slot_bytes: bytes of a page in the file, whole blocks.
        num_bytes: bytes reserved on the disk, spare slots included.
        is_direct: reads and writes bypass the page cache.

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
        codec: PageCodec | None = None,
        deadline_seconds: float = 10.0,
        num_readers: int = NUM_READERS,
        num_writers: int = NUM_WRITERS,
        num_spares: int | None = None,
    ) -> None:
        super().__init__(codec)
        self.folder = Path(folder)
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.slot_bytes = -(-page_bytes // ALIGNMENT) * ALIGNMENT
        if num_spares is None:
            num_spares = count_spares(num_pages)
        self.slots = SlotMap(num_pages, num_spares)
        self.num_bytes = self.slots.num_slots * self.slot_bytes
        self._checksums = new_checksums(self.slots.num_slots)
        self._section = Section(
            offset=0,
            stride=self.slot_bytes,
            num_bytes=page_bytes,
            checksums=self._checksums,
            describe="slot {}".format,
        )
        self._bounce = BouncePool(max(1, EXTENT_BYTES // self.slot_bytes) * self.slot_bytes)
        self._readers = DeadlinePool("tiered-disk-read", num_readers, deadline_seconds)
        self._writers = DeadlinePool("tiered-disk-write", num_writers, deadline_seconds)
        self._file = DirectFile(open_tmpfile(self.folder, self.num_bytes), self.folder)
        self.is_direct = self._file.is_direct

    def buffer(self) -> PageBuffer:
        """Return a page buffer of all pages, to copy from and to."""
        shape = (self.num_pages, self.page_bytes)
        pages = torch.empty(shape, dtype=torch.uint8, device="meta")
        return PageBuffer(pages, self, codec=self.codec)

    def read(self, page_ids: PageIds, near: PageBuffer, near_pages: Pages) -> PageIds:
        slots = self.slots.slots_of(page_ids)
        is_written = self._checksums[slots] != UNWRITTEN
        if self.failure is not None:
            is_written[:] = False
        lost = [slots[~is_written]]
        self._count(PageError.UNWRITTEN, len(lost[0]))
        plan = self._plan(slots[is_written], near_pages.ids[is_written], HOLE_BYTES)
        deliver = partial(self._deliver, near, lost)
        late = self._readers.run(plan, self._bounce, move=self._read_extent, end=deliver)
        if late:
            late_slots = [plan.slots[plan.part(extent)] for extent in late]
            lost += late_slots
            self._count(PageError.LATE, sum(map(len, late_slots)))
            self._check_silence(self._readers)
        return self.slots.pages_in(np.concatenate(lost))

    def write(self, near: PageBuffer, near_ids: PageIds, page_ids: PageIds) -> None:
        slots = self.slots.slots_of(page_ids)
        self._checksums[slots] = UNWRITTEN
        if self.failure is not None:
            return
        plan = self._plan(slots, near_ids)
        checksums = new_checksums(len(page_ids))
        late = self._writers.run(
            plan,
            self._bounce,
            begin=partial(self._gather, near, checksums),
            move=self._write_extent,
            end=partial(self._publish, checksums),
        )
        if late:
            num_late = sum(len(plan.slots[plan.part(extent)]) for extent in late)
            self._count(PageError.WRITE, num_late, "the disk does not answer")
            self._check_silence(self._writers)

    def forget(self, first_page: int, num_pages: int) -> None:
        page_ids = np.arange(first_page, first_page + num_pages)
        self._checksums[self.slots.slots_of(page_ids)] = UNWRITTEN

    def close(self) -> None:
        """Close the file; pending copies lose the pages whose I/O has not begun."""
        self._file.close()
        pools = (self._readers, self._writers)
        if not all([pool.close(pool.deadline_seconds) for pool in pools]):
            logger.warning(
                "tiered: the storage under %s has not answered for %g s; its file is closed when "
                "it does",
                self.folder,
                self._readers.deadline_seconds,
            )
        self._bounce.clear()

    # Copying thread ---------------------------------------------------------------------

    def _plan(self, slots: PageIds, near_ids: PageIds, hole_bytes: int = 0) -> ScatterPlan:
        return ScatterPlan(
            self._section, slots, near_ids, extent_bytes=EXTENT_BYTES, hole_bytes=hole_bytes
        )

    def _deliver(
        self, near: PageBuffer, lost: list[PageIds], plan: ScatterPlan, extent: int, buffer: Bytes
    ) -> None:
        """Copy an extent to its near pages, and list the slots of its lost pages.

        Lost pages are copied too: their near pages may hold anything.
        """
        slots, rows = plan.slots[plan.part(extent)], plan.rows[plan.part(extent)]
        words = self._words(plan, extent, buffer)
        read_words(words, slots - slots[0], near, Pages(rows), self.codec)
        lost.append(slots[self._retire_bad_slots(plan, extent)])

    def _gather(
        self, near: PageBuffer, checksums: Checksums, plan: ScatterPlan, extent: int, buffer: Bytes
    ) -> None:
        """Copy near pages to the bounce buffer, and compute their checksums."""
        rows = plan.rows[plan.part(extent)]
        words = self._words(plan, extent, buffer)
        places = np.arange(len(rows), dtype=np.int64)
        if near.page_bytes == self.page_bytes:
            assert near.words is not None
            for start, count, first in Pages(rows).runs:
                words[start : start + count] = near.words[first : first + count]
            checksums[plan.part(extent)] = checksums_of(near.words, rows)
        else:
            write_words(near, rows, words, Pages(places, ascending=True), self.codec)
            checksums[plan.part(extent)] = checksums_of(words, places)

    def _publish(self, checksums: Checksums, plan: ScatterPlan, extent: int, buffer: Bytes) -> None:
        """Set the checksums of written pages, so that later reads find them."""
        part = plan.part(extent)
        slots = plan.slots[part]
        self._checksums[slots] = checksums[part]
        self._checksums[slots[self._retire_bad_slots(plan, extent)]] = UNWRITTEN

    def _retire_bad_slots(self, plan: ScatterPlan, extent: int) -> list[int]:
        """Count the extent's lost pages, retire their slots, and return their positions in it."""
        if not plan.errors:
            return []
        first, end = plan.cuts[extent : extent + 2]
        lost = [index for index in range(first, end) if index in plan.errors]
        for index in lost:
            self._count(plan.errors[index], 1, plan.reason)
        if not self.slots.retire(plan.slots[lost]):
            what = plan.reason or plan.errors[lost[-1]].value
            self._fail(f"{self.slots.num_retired} pages were lost, the last one by: {what}")
        return [index - first for index in lost]

    def _check_silence(self, pool: DeadlinePool) -> None:
        if pool.silent_seconds > MAX_SILENT_SECONDS:
            self._fail(f"it has not answered for {pool.silent_seconds:.0f} s")

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or f"the storage under {self.folder} fails ({reason})"

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
            if error is PageError.CHECKSUM:
                self._writers.submit(self._report_deferred_error)
        self.errors[error] += num_pages

    # Reader and writer threads ----------------------------------------------------------

    def _read_extent(self, plan: ScatterPlan, extent: int, buffer: Bytes) -> None:
        try:
            with self._file as fd:
                read_extent(fd, plan, extent, buffer.data, _record)
        except OSError as error:  # the file is closed
            plan.reason = str(error)
            first, end = plan.cuts[extent : extent + 2]
            plan.errors.update(dict.fromkeys(range(first, end), PageError.IO))

    def _write_extent(self, plan: ScatterPlan, extent: int, buffer: Bytes) -> None:
        """Write an extent; after an error page by page, so that a bad block loses only its page."""
        first, end = plan.cuts[extent : extent + 2]
        data, origin = buffer.data, plan.origins[extent]
        if self._write_pages(plan, first, end, data, origin):
            return
        for page in range(first, end):
            if plan.is_given_up:  # a failing disk takes long for each page
                return
            if not self._write_pages(plan, page, page + 1, data, origin):
                plan.errors[page] = PageError.WRITE

    def _write_pages(
        self, plan: ScatterPlan, first: int, end: int, data: memoryview, origin: int
    ) -> bool:
        """Write pages of an extent; return whether all of them were written.

        Args:
            data: the file's future bytes from ``origin`` on.
        """
        offset, num_bytes, _ = plan.span(first, end)
        begin = offset - origin
        try:
            with self._file as fd:
                blocks = data[begin : begin + num_bytes]
                return transfer(os.pwritev, fd, blocks, offset) == num_bytes
        except OSError as error:
            plan.reason = str(error)
            return False

    def _report_deferred_error(self) -> None:
        """Log the error of writes that the file system accepted, and did not do."""
        try:
            with self._file as fd:
                os.fsync(fd)
        except OSError as error:
            if error.errno != EBADF:  # not closed meanwhile
                logger.warning("tiered: %s did not keep what was written: %s", self.folder, error)

    def _words(self, plan: ScatterPlan, extent: int, buffer: Bytes) -> Words:
        """Return the slots in the extent's bounce buffer, int64 [num_slots, page_bytes / 8]."""
        num_slots = int(plan.sizes[extent]) // self.slot_bytes
        slots = buffer[: num_slots * self.slot_bytes].reshape(num_slots, self.slot_bytes)
        return slots[:, : self.page_bytes].view(np.int64)


def _record(plan: ScatterPlan, problem: Problem, is_lost: bool) -> None:
    """Record the page as lost, and the system's message."""
    plan.reason = problem.reason or plan.reason
    if is_lost:
        plan.errors[problem.indexes[0]] = problem.error
