# SPDX-License-Identifier: Apache-2.0
"""Near-tier page pool: one flat pool, with the owner of each page."""

from collections import deque
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from vllm_tiered.devices.base import Event
from vllm_tiered.devices.pages import PageIds
from vllm_tiered.errors import IntegrityError


class Owner(IntEnum):
    """Holder of a page; every page has exactly one at any time."""

    FREE = 0
    RESIDENT = 1  # a released block in a resident layer
    PARTIAL = 2  # a partial block in an offloaded layer
    STAGING = 3  # a buffer of the step that runs
    DRAINING = 4  # given back, but a write to the far tier still reads it


_AVAILABLE = (Owner.FREE, Owner.DRAINING)


class PagePool:
    """Allocator of the pages 0 to num_pages - 1.

    Staging buffers get pages from the high end, all other owners from the low end. A page that was
    given back while a copy still reads it is *draining*. It becomes free when the copy's event is
    done. It may be allocated before that; the new owner must wait for the event before it writes
    to the page. The pool itself never waits.

    Attributes:
        num_available: free and draining pages, which can all be allocated. It is a counter, as
            every step reads it and counting takes 40 us.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_available = num_pages
        self._owner = np.zeros(num_pages, dtype=np.int8)
        self._draining: deque[tuple[Event, PageIds]] = deque()

    def count(self, owner: Owner) -> int:
        """Return the number of pages that ``owner`` holds."""
        return int(np.count_nonzero(self._owner == int(owner)))  # numpy is slow with enums

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return self.count(Owner.FREE)

    def allocate(self, num_pages: int, owner: Owner) -> tuple[PageIds, tuple[Event, ...]]:
        """Allocate free pages first, then the pages that have been draining the longest.

        Returns:
            The pages, int64 [num_pages], and the events that must be done before anything is
            written to them. Either a copy waits for them (``Device.submit``) or compute does
            (``Device.wait``).

        Raises:
            IntegrityError: fewer pages are available. No state changes are made.
        """
        self.settle()
        pages = self._free_pages()
        num_drains = 0
        while len(pages) < num_pages and num_drains < len(self._draining):
            pages = np.concatenate([pages, self._draining[num_drains][1]])
            num_drains += 1
        if len(pages) < num_pages:
            raise IntegrityError(
                f"{num_pages} pages asked for {owner.name}, {len(pages)} of {self.num_pages} "
                f"available ({self.describe()})"
            )
        if num_drains:
            pages.sort()
        pages = pages[len(pages) - num_pages :] if owner is Owner.STAGING else pages[:num_pages]
        after = self._hand_over(pages, num_drains)
        self._owner[pages] = int(owner)
        self.num_available -= num_pages
        return pages, after

    def owners(self, pages: PageIds) -> npt.NDArray[np.int8]:
        """Return the :class:`Owner` of each page, as its number."""
        return self._owner[pages]

    def claim_available(self, pages: PageIds, owner: Owner) -> tuple[Event, ...]:
        """Allocate exactly these free or draining pages.

        Returns:
            The events that must be done before anything is written to them.

        Raises:
            IntegrityError: one of them is neither free nor draining.
        """
        self.settle()
        if not np.isin(self._owner[pages], [int(kind) for kind in _AVAILABLE]).all():
            raise IntegrityError(f"pages {pages.tolist()} are not all available")
        after = self._hand_over(pages, len(self._draining))
        self._owner[pages] = int(owner)
        self.num_available -= len(pages)
        return after

    def claim(self, pages: PageIds, owner: Owner) -> None:
        """Allocate exactly these free pages.

        Raises:
            IntegrityError: one of them is not free.
        """
        self.transfer(pages, Owner.FREE, owner)

    def transfer(self, pages: PageIds, owner: Owner, to: Owner) -> None:
        """Change the owner of pages; their content stays."""
        self._leave(pages, owner)
        self._owner[pages] = int(to)
        self.num_available += len(pages) * ((to in _AVAILABLE) - (owner in _AVAILABLE))

    def free(self, pages: PageIds, owner: Owner) -> None:
        """Free pages of ``owner`` that nothing reads any more.

        Raises:
            IntegrityError: one of them is not ``owner``'s.
        """
        self.transfer(pages, owner, Owner.FREE)

    def drain(self, pages: PageIds, owner: Owner, done: Event) -> None:
        """Free pages of ``owner`` once ``done``, as a copy reads them until then."""
        if len(pages):
            self.transfer(pages, owner, Owner.DRAINING)
            self._draining.append((done, pages))

    def settle(self) -> None:
        """Free the draining pages whose copies are done, oldest first."""
        while self._draining and self._draining[0][0].done():
            _, pages = self._draining.popleft()
            self._owner[pages] = int(Owner.FREE)

    def describe(self) -> str:
        """Return the number of pages of each owner, for messages."""
        return ", ".join(f"{owner.name.lower()} {self.count(owner)}" for owner in Owner)

    def check_integrity(self) -> None:
        """Check that every page has one owner, and that the draining pages are the queued ones.

        Raises:
            IntegrityError: the numbers do not agree; the message states them.
        """
        queued = np.concatenate([np.empty(0, np.int64), *(pages for _, pages in self._draining)])
        if len(np.unique(queued)) != len(queued) or len(queued) != self.count(Owner.DRAINING):
            raise IntegrityError(f"{len(queued)} pages queued to drain; {self.describe()}")
        available = sum(self.count(owner) for owner in _AVAILABLE)
        if self.num_available != available:
            raise IntegrityError(f"{self.num_available} pages available; {self.describe()}")
        if not np.isin(self._owner, [int(owner) for owner in Owner]).all():
            raise IntegrityError("a page has an unknown owner")

    def _hand_over(self, pages: PageIds, num_drains: int) -> tuple[Event, ...]:
        """Remove ``pages`` from the first drains; return the events of the drains that had any."""
        after: list[Event] = []
        left: list[tuple[Event, PageIds]] = []
        for _ in range(num_drains):
            done, draining = self._draining.popleft()
            stays = ~np.isin(draining, pages)
            if not stays.all():
                after.append(done)
            if stays.any():
                left.append((done, draining[stays]))
        self._draining.extendleft(reversed(left))
        return tuple(after)

    def _free_pages(self) -> PageIds:
        return np.flatnonzero(self._owner == int(Owner.FREE))

    def _leave(self, pages: PageIds, owner: Owner) -> None:
        if not (self._owner[pages] == int(owner)).all():
            raise IntegrityError(f"pages {pages.tolist()} are not all {owner.name}'s")
