# SPDX-License-Identifier: Apache-2.0
"""Weight buffers in near memory, to which offloaded sublayers are prefetched (FlexGen's overlap).

    acquire(k)    sublayer k computes next: wait until its weights are in its buffer, and queue the
                  loads up to k + prefetch_depth. The load of k + prefetch_depth overwrites the
                  buffer of k - 1, so it waits for the compute of k - 1.
    release(k)    only compute that was submitted so far reads the buffer of k.

On a GPU, compute runs after it is submitted, so neither call blocks the host. A load to a buffer
waits for the events of the compute that reads it, and compute waits for the event of its load.
"""

from collections.abc import Sequence

import numpy as np

from vllm_tiered.devices.base import Copy, Device, Direction, Event
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.errors import IntegrityError
from vllm_tiered.weights.layout import Extent

_MANY_USES = 16
"""Number of compute events of a buffer at which completed events are dropped."""


class _Buffer:
    """State of one buffer.

    Attributes:
        holds: position of the sublayer whose weights are in the buffer or in transfer to it.
        next: position of the sublayer to load next.
        loaded: event of the transfer.
        num_users: number of modules between ``acquire`` and ``release``.
        uses: compute events of released modules. Modules may compute in different streams. The
            buffer may be overwritten when all events are done.
    """

    __slots__ = ("holds", "loaded", "next", "num_users", "uses")

    def __init__(self) -> None:
        self.holds: int | None = None
        self.next: int | None = None
        self.loaded: Event | None = None
        self.num_users = 0
        self.uses: list[Event] = []


class WeightBufferPool:
    """Pool of weight buffers that loads each sublayer before it computes.

    The weights are correct in any order of computation. They arrive early if the sublayers compute
    in the order of ``extents``, step after step. A module calls ``acquire`` when it begins and
    ``release`` when it ends, because a compiler may put other work in between.

    Args:
        device: the device that copies and records compute events.
        far: memory of all far sublayers, in pages of ``BUFFER_ALIGNMENT`` bytes.
        near: memory of all buffers, in such pages.
        extents: position of each sublayer, from :func:`~vllm_tiered.weights.layout.assign_extents`.
        stored: memory of all stored sublayers, in such pages; None if there are none.
        prefetch_depth: the depth that the extents were assigned for.

    Attributes:
        stall_seconds: time for which compute waited for weights.
        num_steps: number of steps, seen by their return to an earlier sublayer.
        num_misses: number of sublayers whose load was not queued yet when compute reached them.
    """

    def __init__(
        self,
        *,
        device: Device,
        far: PageBuffer,
        near: PageBuffer,
        extents: Sequence[Extent],
        stored: PageBuffer | None = None,
        prefetch_depth: int = 1,
    ) -> None:
        self._device = device
        self._prefetch_depth = prefetch_depth
        self._copies = [_prepare_load(device, far, stored, near, extent) for extent in extents]
        num_buffers = 1 + max((extent.buffer_idx for extent in extents), default=-1)
        self._buffers = [_Buffer() for _ in range(num_buffers)]
        self._buffer_of = [self._buffers[extent.buffer_idx] for extent in extents]
        self.stall_seconds = 0.0
        self.num_misses = 0
        self.num_steps = 0
        self._position = 0

    def start(self) -> None:
        """Queue the loads of the first sublayers, so that the first step does not miss them.

        The loads wait for compute submitted before this call: a loader may have written to the
        buffers.
        """
        for buffer in self._buffers:
            buffer.uses.append(self._device.compute_event())
        for position in range(min(self._prefetch_depth, len(self._copies))):
            self._submit_load(position)

    def acquire(self, position: int) -> None:
        """Wait until the sublayer's weights are in its buffer, and queue the next sublayers.

        Raises:
            IntegrityError: a module of another sublayer still uses the buffer.
            Exception: the error of the copy, if it failed.
        """
        buffer = self._buffer_of[position]
        if buffer.holds != position:
            if buffer.num_users:
                raise IntegrityError(
                    f"sublayer {position} computes while sublayer {buffer.holds} still uses its "
                    "weight buffer: this model's layers overlap; set weights.placement=off"
                )
            self.num_misses += 1
            self._submit_load(position)
        if position < self._position:
            self.num_steps += 1
        self._position = position
        buffer.num_users += 1
        assert buffer.loaded is not None
        self.stall_seconds += self._device.wait(buffer.loaded)
        for further in range(1, self._prefetch_depth + 1):
            following = (position + further) % len(self._buffer_of)
            target = self._buffer_of[following]
            if target is not buffer and target.holds != following:
                target.next = following
                self._load_next(target)

    def release(self, position: int) -> None:
        """Record that no compute submitted after this call reads the sublayer's buffer.

        Raises:
            IntegrityError: the sublayer was not acquired.
        """
        buffer = self._buffer_of[position]
        if buffer.holds != position or not buffer.num_users:
            raise IntegrityError(f"sublayer {position} is done, but it was not computing")
        buffer.num_users -= 1
        if len(buffer.uses) >= _MANY_USES:
            buffer.uses = [use for use in buffer.uses if not use.done()]
        buffer.uses.append(self._device.compute_event())
        self._load_next(buffer)

    def check_integrity(self) -> None:
        """Check that each buffer is empty or holds a sublayer that is assigned to it.

        Raises:
            IntegrityError: a buffer is not; the message has its index.
        """
        for index, buffer in enumerate(self._buffers):
            if buffer.holds is None:
                if buffer.loaded is not None or buffer.num_users:
                    raise IntegrityError(f"weight buffer {index} is empty, but in use")
            elif self._buffer_of[buffer.holds] is not buffer or buffer.loaded is None:
                raise IntegrityError(
                    f"weight buffer {index} holds sublayer {buffer.holds}, which is assigned to "
                    "another buffer"
                )

    def _load_next(self, buffer: _Buffer) -> None:
        """Queue the load of the buffer's next sublayer, unless a module still uses the buffer."""
        if buffer.next is not None and not buffer.num_users:
            self._submit_load(buffer.next)

    def _submit_load(self, position: int) -> None:
        buffer = self._buffer_of[position]
        after, buffer.uses = tuple(buffer.uses), []
        events = self._device.submit_together([(copy, after) for copy in self._copies[position]])
        buffer.loaded = events[-1]  # copies in one direction run in order
        buffer.holds, buffer.next = position, None


def _prepare_load(
    device: Device, far: PageBuffer, stored: PageBuffer | None, near: PageBuffer, extent: Extent
) -> list[Copy]:
    """Prepare the copies of one sublayer: first its far pages, then its stored pages."""
    sources = (
        (far, extent.far_page, extent.buffer_page, extent.num_far_pages),
        (
            stored,
            extent.stored_page,
            extent.buffer_page + extent.num_far_pages,
            extent.num_stored_pages,
        ),
    )
    copies = []
    for source, source_page, buffer_page, count in sources:
        if count:
            assert source is not None, "stored weights, and no file"
            pages, targets = _pages(source_page, count), _pages(buffer_page, count)
            copies.append(device.prepare(Direction.READ, source, pages, near, targets))
    return copies


def _pages(first: int, count: int) -> Pages:
    return Pages(np.arange(first, first + count, dtype=np.int64), ascending=True)
