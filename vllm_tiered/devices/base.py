# SPDX-License-Identifier: Apache-2.0
"""Contract of a device: asynchronous copies of pages, ordered by events.

If a copy fails, all later copies of its direction fail with its error. A read does not fail if it
loses some pages because their bytes are damaged or the disk does not answer. It reports the lost
pages (:meth:`Device.failed_pages`); all other pages are intact.

A device has two copy queues, one per direction, and a *compute* queue, to which the engine submits
its kernels. Copies of one queue run in the order of submission; reads of a file that are submitted
together may overlap, so their targets differ. Copies of different queues, and copies and compute,
are ordered by events alone:

    submit(copy, after=(e1, e2))     the copy runs when e1 and e2 are done
    wait(e)                          compute submitted later runs when e is done
    compute_event()                  is done when the compute submitted so far is done
    deferred_events(n), signal(e)    the same, for copies that are submitted before that compute
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import torch

from vllm_tiered.devices.numa import BY_DISTANCE, Node, NodeUse
from vllm_tiered.devices.pages import NO_PAGES, PageBuffer, PageCodec, PageError, PageIds, Pages
from vllm_tiered.errors import UnsupportedError


class Direction(Enum):
    """Direction of a link, seen from the near tier."""

    READ = "read"  # far to near
    WRITE = "write"  # near to far


class Event(Protocol):
    """Completion of a copy or of compute."""

    def done(self) -> bool:
        """Return whether it is complete; never blocks. Raises the copy's error if it failed."""

    def wait(self) -> None:
        """Block the calling thread until it is complete. Raises the copy's error if it failed."""


class LinkUse(NamedTuple):
    """Bytes that one direction has transferred since the start, and the seconds it was busy.

    Of pages that are converted, the narrower form counts: it is what the link carries.
    """

    num_bytes: int = 0
    busy_seconds: float = 0.0


class Copy(Protocol):
    """A prepared copy, opaque to the caller."""


_PAGES_AT_ONCE = 64
"""Number of pages that are moved with one temporary copy."""


class Device(ABC):
    """Device that copies pages between a near and a far tier while the model computes.

    Attributes:
        has_device_memory: whether near memory belongs to an accelerator. Then the host accesses it
            only through copies, and compute runs after its submission.
        reads_nodes_at_once: whether a copy from several NUMA nodes reads them at once, and not in
            turn. The last of ``far_nodes`` is then used only when all others are full.
        node_use: NUMA nodes that far buffers take memory of from now on.
    """

    has_device_memory: ClassVar[bool] = False
    reads_nodes_at_once: ClassVar[bool] = False
    node_use: NodeUse = BY_DISTANCE

    def far_nodes(self) -> Sequence[Node]:
        """Return the nodes in the order in which far buffers use them.

        Returns:
            Empty if memory has one node, or cannot be bound to nodes; the system then decides.
        """
        return ()

    @contextmanager
    def with_nodes(self, use: NodeUse) -> Iterator[None]:
        """Take memory of these nodes for the far buffers that are allocated inside."""
        before, self.node_use = self.node_use, use
        try:
            yield
        finally:
            self.node_use = before

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate host memory, uint8, for asynchronous copies from and to near tensors.

        Raises:
            BudgetError: the system lacks the memory.
        """
        return torch.empty(num_bytes, dtype=torch.uint8)

    @abstractmethod
    def far_buffer(
        self,
        num_pages: int,
        page_bytes: int,
        verify: str = "off",
        codec: PageCodec | None = None,
    ) -> PageBuffer:
        """Allocate far-tier pages of exactly that size.

        Args:
            verify: "off" for no checksums. Otherwise each page has a checksum, which is checked at
                every read ("full") or at every 16th read of a page ("sample").
            codec: copies to and from near pages convert them with it; ``page_bytes`` is the size
                of its far pages.

        Raises:
            BudgetError: the tier lacks the memory.
        """

    def far_buffer_to_fill(self, num_pages: int, page_bytes: int) -> PageBuffer:
        """Allocate far-tier pages that take memory as they are written, for :meth:`pin` later.

        What is to be copied there may fill most of host memory, so that both would not fit.

        Raises:
            BudgetError: the tier lacks the memory.
        """
        return self.far_buffer(num_pages, page_bytes)

    def pin(self, pages: PageBuffer) -> None:  # noqa: B027 - most devices have nothing to do
        """Make pages of :meth:`far_buffer_to_fill` ready for copies; others are, already.

        Raises:
            BudgetError: the system lacks the memory, or refuses to lock it.
        """

    def storage_buffer(
        self,
        path: str | Path,
        num_pages: int,
        page_bytes: int,
        *,
        codec: PageCodec | None = None,
        deadline_seconds: float = 10.0,
    ) -> PageBuffer:
        """Allocate pages in a temporary file without a name (O_TMPFILE) in folder ``path``.

        Args:
            codec: as for :meth:`far_buffer`.
            deadline_seconds: a copy gives up its outstanding requests if the storage does not
                answer for this time. For some seconds after that, copies give up much sooner unless
                the storage answers.

        Raises:
            ConfigError: no file can be created there.
            BudgetError: the file system lacks the space.
            UnsupportedError: this device has no storage tier.
        """
        raise UnsupportedError(f"{type(self).__name__} has no storage tier: set kv.tier=far")

    @abstractmethod
    def prepare(
        self,
        direction: Direction,
        src: PageBuffer,
        src_pages: Pages,
        dst: PageBuffer,
        dst_pages: Pages,
    ) -> "Copy":
        """Prepare a copy of ``src[src_pages.ids[i]]`` to ``dst[dst_pages.ids[i]]`` for all i.

        Prepare a step's copies together before the model runs. Between two layers it is slower,
        because the CPU's caches then hold the model's data.

        Raises:
            IntegrityError: a page id is out of range, or the lists differ in length.
        """

    def move_pages(self, buffer: PageBuffer, src: PageIds, dst: PageIds) -> None:
        """Copy near pages ``src[i]`` to ``dst[i]`` as a part of compute, in its order.

        No page may be both a source and a target.
        """
        sources, targets = _on_device_of(buffer, src), _on_device_of(buffer, dst)
        # In parts, as each makes a temporary copy.
        for first in range(0, len(src), _PAGES_AT_ONCE):
            part = slice(first, first + _PAGES_AT_ONCE)
            buffer.data.index_copy_(0, targets[part], buffer.data.index_select(0, sources[part]))

    def clear_pages(self, buffer: PageBuffer, pages: PageIds) -> None:
        """Fill near pages with zeros as a part of compute, in its order."""
        buffer.data.index_fill_(0, _on_device_of(buffer, pages), 0)

    @abstractmethod
    def submit(self, copy: "Copy", after: tuple[Event, ...] = ()) -> Event:
        """Queue a prepared copy to run when ``after`` are done; it may be queued again later.

        The caller must not touch source and target pages until the returned event is done.
        """

    def submit_together(self, copies: Sequence[tuple["Copy", tuple[Event, ...]]]) -> list[Event]:
        """Queue copies of one direction, in order, each with the events it waits for.

        This is cheaper than single calls if each has to wake a copy thread.
        """
        return [self.submit(copy, after) for copy, after in copies]

    def copy(
        self,
        direction: Direction,
        src: PageBuffer,
        src_pages: Pages,
        dst: PageBuffer,
        dst_pages: Pages,
        after: tuple[Event, ...] = (),
    ) -> Event:
        """Prepare a copy and submit it."""
        return self.submit(self.prepare(direction, src, src_pages, dst, dst_pages), after)

    def failed_pages(self, event: Event) -> PageIds:
        """Return the pages of a read that did not arrive intact; their target pages are zero.

        Valid when ``event`` is done. Empty unless the source has checksums or is a file.

        Returns:
            Ids in the numbering of the copy's source.
        """
        return NO_PAGES

    @abstractmethod
    def compute_event(self) -> Event:
        """Return an event that is done when all compute submitted so far is done."""

    def seconds_between(self, begin: Event, end: Event) -> float | None:
        """Return the seconds from one compute event to another; None if not known, or not yet."""
        return None

    @abstractmethod
    def deferred_events(self, count: int) -> Sequence[Event]:
        """Create events for :meth:`signal`; copies may wait for them before they are signalled.

        Each must be signalled before the device is closed, in any order. Otherwise the copies that
        wait for it fail when the device is closed.
        """

    @abstractmethod
    def signal(self, deferred_event: Event) -> None:
        """Complete an event when all compute submitted so far is done; call once for each event."""

    @abstractmethod
    def wait(self, event: Event) -> float:
        """Hold compute submitted later until ``event`` is done.

        Returns:
            Seconds for which compute was stalled; 0.0 if the event was done. If compute runs after
            its submission, this stall is not known yet. The result is then the stalls of earlier
            waits that became known since the last call. The sum over all calls is the same.
        """

    @abstractmethod
    def use(self, direction: Direction) -> LinkUse:
        """Return the bytes and busy seconds of ``direction`` since the start."""

    def page_errors(self) -> dict[PageError, int]:
        """Count the pages lost since the start, by kind."""
        return dict.fromkeys(PageError, 0)

    def storage_failure(self) -> str | None:
        """Return why a storage buffer keeps no page any more; None while all of them work."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Finish all copies and release threads and memory. Idempotent."""


def _on_device_of(buffer: PageBuffer, pages: PageIds) -> torch.Tensor:
    """Return page ids where compute on the buffer reads them, without waiting for it."""
    ids = torch.from_numpy(pages)
    if buffer.data.is_cuda:
        return ids.pin_memory().to(buffer.data.device, non_blocking=True)
    return ids
