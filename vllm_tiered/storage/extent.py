# SPDX-License-Identifier: Apache-2.0
"""Pages of a file that lie close together and travel in one system call."""

from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from vllm_tiered.devices.pages import PageError, PageIds, Pages
from vllm_tiered.storage.io_pool import Bytes

_NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)


class Extent:
    """Pages on their way between bounce buffer and file.

    Attributes:
        page_ids: int64 [n], ascending.
        slots: int64 [n], where the pages lie in the buffer, which holds the file's slots from the
            first page to the last.
        near_pages: n pages.
        checksums: n, of what is or will be in the file.
        errors: n; None for a page that made it.
        reason: what the system said to the last page that did not.
        buffer: bounce buffer, uint8 [at least num_slots * slot_bytes].
        is_given_up: nobody waits for it any more.
        failure: a bug's exception in the thread that carried it.
    """

    __slots__ = (
        "buffer",
        "checksums",
        "errors",
        "failure",
        "is_given_up",
        "near_pages",
        "page_ids",
        "reason",
        "slots",
    )

    def __init__(self, page_ids: PageIds, near_pages: Pages) -> None:
        self.page_ids = page_ids
        self.slots: PageIds = page_ids - page_ids[0]
        self.near_pages = near_pages
        self.checksums: list[int] = []
        self.errors: list[PageError | None] = [None] * len(page_ids)
        self.reason = ""
        self.buffer: Bytes = _NO_BYTES
        self.is_given_up = False
        self.failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self.page_ids)

    @property
    def num_slots(self) -> int:
        """Slots that travel, those between the pages included."""
        return int(self.slots[-1]) + 1

    def run(self, work: "Callable[[Extent], None]", done: "SimpleQueue[Extent]") -> None:
        """Let ``work`` carry it; ``done`` hears of it whatever happens."""
        try:
            if not self.is_given_up:
                work(self)
        except BaseException as failure:
            self.failure = failure
        done.put(self)


def cut_extents(
    page_ids: PageIds, near_ids: PageIds, *, max_slots: int, max_hole: int
) -> list[Extent]:
    """Pages in as few extents as possible.

    Args:
        page_ids: of the file, in any order; one that is there twice goes to two near pages.
        near_ids: where each of them goes, or comes from.
        max_slots: that an extent may span.
        max_hole: slots between two of its pages that may travel with it for nothing.
    """
    order = np.argsort(page_ids, kind="stable")
    page_ids, near_ids = page_ids[order], near_ids[order]
    starts = np.flatnonzero(np.diff(page_ids, prepend=page_ids[:1] - max_hole - 2) > max_hole + 1)
    extents = []
    for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(page_ids)], strict=False):
        while start < end:
            limit = page_ids[start] + max_slots
            cut = min(end, int(np.searchsorted(page_ids, limit)))
            extents.append(Extent(page_ids[start:cut], Pages(near_ids[start:cut])))
            start = cut
    return extents
