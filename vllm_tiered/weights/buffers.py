# SPDX-License-Identifier: Apache-2.0
"""The staging slots through which far sublayers pass, one ahead of compute (FlexGen's overlap), or
more.

enter(k)     compute of sublayer k is next: wait until it has arrived
             the slot of k - 1 is free when its compute is over: k + ahead is queued for it
leave(k)     compute submitted so far is all that uses the slot of k

Where compute runs after it is submitted, as on a GPU, neither call waits for it: what is queued for
a slot waits for events of its users, and compute for the event of what it needs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_tiered.devices.base import Copy, Device, Direction, Event
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.errors import IntegrityError
from vllm_tiered.weights.placement import SLOT_ALIGNMENT, slot_bytes, slot_of

_MANY_USES = 16
"""Of a slot that keeps its sublayer for long: those that are over are let go."""


class Extent(NamedTuple):
    """A sublayer's parameters, in pages of ``SLOT_ALIGNMENT`` bytes.

    Its far pages are in a row, its stored ones too; in the slot the stored come after the far.
    """

    far_page: int
    num_far: int
    stored_page: int
    num_stored: int
    slot_page: int
    slot: int

    @property
    def num_pages(self) -> int:
        return self.num_far + self.num_stored


def lay_out(sizes: Sequence[tuple[int, int]], ahead: int = 1) -> list[Extent]:
    """Sublayers one after the other in far memory and in the file; slots one after the other.

    Args:
        sizes: far and stored bytes of each, multiples of ``SLOT_ALIGNMENT``, in the order of
            computation.
        ahead: how many are on their way while one computes.
    """
    slots = slot_bytes([far + stored for far, stored in sizes], ahead)
    slot_pages = [sum(slots[:slot]) // SLOT_ALIGNMENT for slot in range(len(slots))]
    extents: list[Extent] = []
    far_page = stored_page = 0
    for position, size in enumerate(sizes):
        slot = slot_of(position, len(sizes), ahead)
        num_far, num_stored = (num_bytes // SLOT_ALIGNMENT for num_bytes in size)
        extents.append(Extent(far_page, num_far, stored_page, num_stored, slot_pages[slot], slot))
        far_page += num_far
        stored_page += num_stored
    return extents


class _Slot:
    """What is in a slot or on its way, what comes next, and who uses it.

    Attributes:
        num_users: modules between ``enter`` and ``leave``.
        uses: done when compute does not need what is in it; of each module, as they may compute in
            streams of their own.
    """

    __slots__ = ("arrival", "next", "num_users", "resident", "uses")

    def __init__(self) -> None:
        self.resident: int | None = None
        self.next: int | None = None
        self.arrival: Event | None = None
        self.num_users = 0
        self.uses: list[Event] = []


class WeightRing:
    """Brings each sublayer into its slot before it computes.

    Any order of computation gives right weights; the order of ``extents``, again and again, gives
    them early. A module says when it begins and when it is done, as a compiler may put other work
    in between.

    Args:
        device: copies, and knows what compute has done.
        far, stored: all sublayers, pages of ``SLOT_ALIGNMENT`` bytes.
        near: the slots.
        extents: where each is, from :func:`lay_out`.
        ahead: what they were laid out for.

    Attributes:
        stall_seconds: for which compute stood still.
        num_misses: sublayers that compute came to before they were queued.
    """

    def __init__(
        self,
        *,
        device: Device,
        far: PageBuffer,
        near: PageBuffer,
        extents: Sequence[Extent],
        stored: PageBuffer | None = None,
        ahead: int = 1,
    ) -> None:
        self._device = device
        self._ahead = ahead
        self._copies = [_prepare(device, far, stored, near, extent) for extent in extents]
        num_slots = 1 + max((extent.slot for extent in extents), default=-1)
        self._slots = [_Slot() for _ in range(num_slots)]
        self._slot_of = [self._slots[extent.slot] for extent in extents]
        self.stall_seconds = 0.0
        self.num_misses = 0

    def start(self) -> None:
        """Queue the first sublayers, which the first step would come to in vain.

        A loader that wrote to the slots did so by compute that was submitted before.
        """
        for slot in self._slots:
            slot.uses.append(self._device.compute_event())
        for position in range(min(self._ahead, len(self._copies))):
            self._queue(position)

    def enter(self, position: int) -> None:
        """A module of the sublayer computes next: what it needs is in the slot.

        Raises:
            IntegrityError: a module of another sublayer still uses the slot.
            The copy's error, if it failed.
        """
        slot = self._slot_of[position]
        if slot.resident != position:
            if slot.num_users:
                raise IntegrityError(
                    f"sublayer {position} computes while sublayer {slot.resident} still uses its "
                    "slot: this model's layers overlap; set weights.placement=off"
                )
            self.num_misses += 1
            self._queue(position)
        slot.num_users += 1
        assert slot.arrival is not None
        self.stall_seconds += self._device.wait(slot.arrival)
        for further in range(1, self._ahead + 1):
            following = (position + further) % len(self._slot_of)
            into = self._slot_of[following]
            if into is not slot and into.resident != following:
                into.next = following
                self._fill(into)

    def leave(self, position: int) -> None:
        """The module is done: compute that was submitted so far is all that uses the slot."""
        slot = self._slot_of[position]
        if slot.resident != position or not slot.num_users:
            raise IntegrityError(f"sublayer {position} is done, but it was not computing")
        slot.num_users -= 1
        if len(slot.uses) >= _MANY_USES:
            slot.uses = [use for use in slot.uses if not use.done()]
        slot.uses.append(self._device.compute_event())
        self._fill(slot)

    def check_integrity(self) -> None:
        """A slot holds a sublayer that passes through it, or nothing.

        Raises:
            IntegrityError: with the slot.
        """
        for index, slot in enumerate(self._slots):
            if slot.resident is None:
                if slot.arrival is not None or slot.num_users:
                    raise IntegrityError(f"slot {index} is empty, but in use")
            elif self._slot_of[slot.resident] is not slot or slot.arrival is None:
                raise IntegrityError(f"slot {index} holds sublayer {slot.resident} of another slot")

    def _fill(self, slot: _Slot) -> None:
        """Queue what is next for the slot, unless a module still uses what is in it."""
        if slot.next is not None and not slot.num_users:
            self._queue(slot.next)

    def _queue(self, position: int) -> None:
        slot = self._slot_of[position]
        after, slot.uses = tuple(slot.uses), []
        events = self._device.submit_together([(copy, after) for copy in self._copies[position]])
        slot.arrival = events[-1]  # copies of a direction run in order
        slot.resident, slot.next = position, None


def _prepare(
    device: Device, far: PageBuffer, stored: PageBuffer | None, near: PageBuffer, extent: Extent
) -> list[Copy]:
    sources = (
        (far, extent.far_page, extent.slot_page, extent.num_far),
        (stored, extent.stored_page, extent.slot_page + extent.num_far, extent.num_stored),
    )
    copies = []
    for source, source_page, slot_page, count in sources:
        if count:
            assert source is not None, "stored weights, and no file"
            pages, slots = _pages(source_page, count), _pages(slot_page, count)
            copies.append(device.prepare(Direction.READ, source, pages, near, slots))
    return copies


def _pages(first: int, count: int) -> Pages:
    return Pages(np.arange(first, first + count, dtype=np.int64), ascending=True)
