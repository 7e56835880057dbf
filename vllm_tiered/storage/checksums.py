# SPDX-License-Identifier: Apache-2.0
"""Checksums of pages, which find a damaged page before attention reads it.

A checksum is computed from the near page when it is written, and compared with the near page after
it is read back. So it covers both copies and the time in between. Of pages that a codec converts,
it is that of the far form, and covers the time in between. Checksums are in the memory of
this process, indexed by page id. So a page that was swapped with another one, or overwritten by an
older write, does not match either.

Memory that has damaged a page is not used again (slot_map.py). A bad row of DRAM stays bad, and
each page that it damages costs the recomputation of a request.
"""

import logging
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

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
from vllm_tiered.errors import ConfigError
from vllm_tiered.storage.slot_map import SlotMap, count_spares

logger = logging.getLogger("vllm.tiered")

UNWRITTEN = 0
"""Checksum of a page that has not been written."""

SAMPLE_EVERY = 16
"""``verify="sample"`` verifies every 16th read of each page."""


Checksums: TypeAlias = npt.NDArray[np.uint64]


def checksum(data: bytes | memoryview) -> int:
    """Return the 64-bit xxh3 of contiguous bytes; never ``UNWRITTEN``."""
    return xxh3_64_intdigest(data) or 1


def checksums_of(words: Words, page_ids: PageIds) -> list[int]:
    """Return the checksum of each page; ``words`` is [num_pages, page_bytes / 8]."""
    return [checksum(words[page_id].data) for page_id in page_ids.tolist()]


def new_checksums(num_pages: int) -> Checksums:
    """Return the checksums of unwritten pages, uint64 [num_pages]."""
    return np.zeros(num_pages, dtype=np.uint64)


class CheckedPages(PageStore):
    """Page store in memory that verifies pages when they are read.

    A damaged page is lost once: it gets a spare slot, in which nothing is written yet. When there
    is none left, pages keep their slots, and later ones may be damaged there too.

    Args:
        words: the slots, spare ones last, int64 [num_slots, page_bytes / 8].
        num_spares: number of spare slots among them.
        every: verify every ``every``-th read of each page. Pages start at different counts, so
            each read verifies about that share of its pages, and no page is left out.
        codec: see :class:`PageStore`.

    Attributes:
        slots: the slot of each page.
    """

    def __init__(
        self, words: Words, num_spares: int, every: int, codec: PageCodec | None = None
    ) -> None:
        super().__init__(codec)
        self.slots = SlotMap(len(words) - num_spares, num_spares)
        self._keeps_bad_slots = False
        self._words = words
        self._every = every
        self._checksums = new_checksums(len(words))
        self._num_reads = np.arange(len(words), dtype=np.int64) % every

    def read(self, page_ids: PageIds, near: PageBuffer, near_pages: Pages) -> PageIds:
        slots = self.slots.slots_of(page_ids)
        read_words(self._words, slots, near, near_pages, self.codec)
        expected = self._checksums[slots]
        is_lost = expected == UNWRITTEN
        self.errors[PageError.UNWRITTEN] += int(np.count_nonzero(is_lost))
        due = np.flatnonzero(~is_lost & self._is_due(slots))
        sums = self._sums(near, near_pages.ids[due], slots[due])
        arrived = np.array(sums, dtype=np.uint64)
        damaged = due[arrived != expected[due]]
        self.errors[PageError.CHECKSUM] += len(damaged)
        if len(damaged):
            self._retire(slots[damaged])
        is_lost[damaged] = True
        lost: PageIds = page_ids[is_lost]
        return lost

    def write(self, near: PageBuffer, near_ids: PageIds, page_ids: PageIds) -> None:
        slots = self.slots.slots_of(page_ids)
        write_words(near, near_ids, self._words, Pages(slots), self.codec)
        self._checksums[slots] = self._sums(near, near_ids, slots)

    def forget(self, first_page: int, num_pages: int) -> None:
        page_ids = np.arange(first_page, first_page + num_pages)
        self._checksums[self.slots.slots_of(page_ids)] = UNWRITTEN

    def _retire(self, slots: PageIds) -> None:
        """Give the pages in damaged slots spare ones; say so when there are none left."""
        if self.slots.retire(slots) or self._keeps_bad_slots:
            return
        self._keeps_bad_slots = True
        logger.warning(
            "tiered: far memory damaged pages in more than %d places, and no spare ones are left: "
            "further bad places are used again. See the host's log for memory errors",
            self.slots.num_retired,
        )

    def _sums(self, near: PageBuffer, near_ids: PageIds, slots: PageIds) -> list[int]:
        """Return the checksums of near pages; if they are converted, of the store's."""
        if near.page_bytes != self._words.shape[1] * 8:
            return checksums_of(self._words, slots)
        assert near.words is not None
        return checksums_of(near.words, near_ids)

    def _is_due(self, slots: PageIds) -> npt.NDArray[np.bool_]:
        self._num_reads[slots] += 1
        is_due: npt.NDArray[np.bool_] = self._num_reads[slots] % self._every == 0
        return is_due


def count_verified_slots(num_pages: int, verify: str) -> int:
    """Return the pages to allocate for a buffer of :func:`checked`: spare ones count."""
    return num_pages if verify == "off" else num_pages + count_spares(num_pages)


def checked(buffer: PageBuffer, num_pages: int, verify: str) -> PageBuffer:
    """Return pages with the verification that ``kv.verify`` asks for.

    Args:
        buffer: the pages of :func:`count_verified_slots`. Spare ones take memory when they are
            written.
        num_pages: number of pages to return.
        verify: "off", "sample" (every 16th read of each page) or "full" (every read).

    Raises:
        ConfigError: ``verify`` has another value.
    """
    every = {"off": 0, "sample": SAMPLE_EVERY, "full": 1}.get(verify)
    if every is None:
        raise ConfigError(f'kv.verify is "{verify}": set it to "off", "sample" or "full"')
    if not every:
        return buffer
    assert buffer.words is not None
    num_spares = buffer.num_pages - num_pages
    store = CheckedPages(buffer.words, num_spares, every, buffer.codec)
    return PageBuffer(buffer.data[:num_pages], store, codec=buffer.codec)
