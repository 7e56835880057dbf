# SPDX-License-Identifier: Apache-2.0
"""The contract of a device: page buffers, and asynchronous copies ordered by events.

A copy that fails makes all later copies of its direction fail with its error. A read that cannot
bring some of its pages, as their bytes are damaged or the disk does not answer, has not failed: it
names those pages (:meth:`Device.failed_pages`), and all others are good.

A device has two copy queues, one per direction, and the *compute* order in which the engine
submits its kernels. Within a queue, copies run in the order of submission. Across queues and
against compute nothing is ordered except through events:

    submit(copy, after=(e1, e2))   runs when e1 and e2 are done
    wait(e)                        compute submitted later runs when e is done
    compute_event()                is done when the compute submitted so far is done
    milestones(n), reach(e)        the same, for copies that are queued before that compute
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import torch

from vllm_tiered.devices.pages import NO_PAGES, PageBuffer, PageError, PageIds, Pages
from vllm_tiered.errors import UnsupportedError


class Direction(Enum):
    """A link's direction, seen from the near tier."""

    READ = "read"  # far to near
    WRITE = "write"  # near to far


class Event(Protocol):
    """Something that will have happened."""

    def done(self) -> bool:
        """Whether it has; never blocks. Raises the copy's error if it failed."""

    def wait(self) -> None:
        """Block the calling thread until it has. Raises the copy's error if it failed."""


class LinkUse(NamedTuple):
    """What one direction has carried since the start: bytes, and seconds it was busy."""

    num_bytes: int = 0
    busy_seconds: float = 0.0


class Copy(Protocol):
    """A prepared copy; what is in it is the device's affair."""


class Device(ABC):
    """Copies pages between a near and a far tier behind the computation.

    Attributes:
        is_apart: near memory is an accelerator's own, which the host reaches through copies only,
            and compute runs after it was submitted.
    """

    is_apart: ClassVar[bool] = False

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Host memory, uint8, to and from which near tensors are copied without holding the host.

        Raises:
            BudgetError: the system does not have it.
        """
        return torch.empty(num_bytes, dtype=torch.uint8)

    @abstractmethod
    def far_buffer(self, num_pages: int, page_bytes: int, verify: str = "off") -> PageBuffer:
        """Far-tier memory of exactly that size.

        Args:
            verify: "off", or a checksum a page, looked at in all reads ("full") or in each page's
                every 16th ("sample").

        Raises:
            BudgetError: the tier does not have it.
        """

    def storage_buffer(
        self,
        path: str | Path,
        num_pages: int,
        page_bytes: int,
        *,
        deadline_seconds: float = 10.0,
    ) -> PageBuffer:
        """Pages in a file without a name in folder ``path``, which goes away with the device.

        Args:
            deadline_seconds: a copy gives up what is still on its way when the storage has been
                silent for this long; for some seconds later ones much sooner, unless it answers.

        Raises:
            ConfigError: no file can be made there.
            BudgetError: the file system does not have the space.
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
        """A copy of ``src[src_pages.ids[i]]`` to ``dst[dst_pages.ids[i]]`` for all i.

        Preparing a step's copies together, before the model runs, is cheaper than doing it
        between two layers, when the caches are full of the model.

        Raises:
            IntegrityError: a page id is out of range, or the lists differ in length.
        """

    @abstractmethod
    def submit(self, copy: "Copy", after: tuple[Event, ...] = ()) -> Event:
        """Queue a prepared copy to run when ``after`` is done. It may be queued again later.

        The caller leaves source and target pages alone until the event is done.
        """

    def submit_together(self, copies: Sequence[tuple["Copy", tuple[Event, ...]]]) -> list[Event]:
        """Queue copies of one direction, in order, each with what it must wait for.

        Cheaper than one by one on a device whose copying thread must be woken.
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
        """Pages of a read that did not arrive intact; their target pages are zero.

        Valid when ``event`` is done. Empty unless the source has checksums or is a file.

        Returns:
            Ids in the numbering of the copy's source.
        """
        return NO_PAGES

    @abstractmethod
    def compute_event(self) -> Event:
        """An event that is done when all compute submitted so far is done."""

    def seconds_between(self, begin: Event, end: Event) -> float | None:
        """That compute took between two compute events; None if it is not known, or not yet."""
        return None

    @abstractmethod
    def milestones(self, count: int) -> Sequence[Event]:
        """Events that compute is going to reach; copies may wait for them before it has.

        Each is to be reached, in any order, before the device is closed; else copies that wait
        for it fail then.
        """

    @abstractmethod
    def reach(self, milestone: Event) -> None:
        """``milestone`` is done when all compute submitted so far is done. Once for each."""

    @abstractmethod
    def wait(self, event: Event) -> float:
        """Hold compute submitted later until ``event`` is done.

        Returns:
            Seconds for which compute stood still (0.0 if it was done already). Where compute runs
            after it is submitted this is not known yet: then, for which it stood still in earlier
            waits of which it has become known since the last call. The sum is the same.
        """

    @abstractmethod
    def use(self, direction: Direction) -> LinkUse:
        """What ``direction`` has carried since the start."""

    def page_errors(self) -> dict[PageError, int]:
        """Pages lost since the start, by kind."""
        return dict.fromkeys(PageError, 0)

    @abstractmethod
    def close(self) -> None:
        """Finish all copies and release threads and memory. Idempotent."""
