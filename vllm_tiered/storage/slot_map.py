# SPDX-License-Identifier: Apache-2.0
"""Map from pages to slots of a file or of memory, in which spare slots replace bad ones.

A bad block of a disk stays bad, and so does a bad row of DRAM. Without the map a page in it would
be lost each time it is used, and each loss costs the recomputation of a request.
"""

import threading

import numpy as np

from vllm_tiered.devices.pages import PageIds

_MIN_SPARES = 16
_PAGES_PER_SPARE = 64


def count_spares(num_pages: int) -> int:
    """Return how many spare slots go with so many pages: one for every 64, and at least 16."""
    return max(_MIN_SPARES, num_pages // _PAGES_PER_SPARE) if num_pages else 0


class SlotMap:
    """Slots of pages: page p is in slot p, until that slot is retired.

    Args:
        num_pages: number of pages.
        num_spares: number of spare slots; they follow the pages' slots.

    Attributes:
        num_slots: number of slots, spare ones included.
        num_retired: number of retired slots.
    """

    def __init__(self, num_pages: int, num_spares: int) -> None:
        self.num_slots = num_pages + num_spares
        self.num_retired = 0
        self._first_spare = num_pages
        self._slot_of = np.arange(num_pages)
        self._page_in = np.arange(self.num_slots)
        self._lock = threading.Lock()  # a reading and a writing thread retire slots

    @property
    def num_spares(self) -> int:
        """Number of spare slots that are left."""
        return self.num_slots - self._first_spare - self.num_retired

    def slots_of(self, page_ids: PageIds) -> PageIds:
        """Return the slot of each page, int64 [n]."""
        slots: PageIds = self._slot_of[page_ids]
        return slots

    def pages_in(self, slots: PageIds) -> PageIds:
        """Return the page that is or was in each slot, int64 [n]."""
        pages: PageIds = self._page_in[slots]
        return pages

    def retire(self, slots: PageIds) -> bool:
        """Give the pages in these slots spare ones, in which nothing is written yet.

        Returns:
            Whether there were enough spare slots. The other pages keep their bad slots.
        """
        with self._lock:
            for slot in slots.tolist():
                page = self._page_in[slot]
                if self._slot_of[page] != slot:
                    continue  # retired before
                if not self.num_spares:
                    return False
                spare = self._first_spare + self.num_retired
                self._slot_of[page], self._page_in[spare] = spare, page
                self.num_retired += 1
        return True
