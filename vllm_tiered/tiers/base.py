# SPDX-License-Identifier: Apache-2.0
"""The contract of a device: page buffers, and asynchronous copies ordered by events.

A copy that fails makes all later copies of its direction fail with its error.

A device has two copy queues, one per direction, and the *compute* order in which the engine
submits its kernels. Within a queue, copies run in the order of submission. Across queues and
against compute nothing is ordered except through events:

    submit(copy, after=(e1, e2))   runs when e1 and e2 are done
    wait(e)                        compute submitted later runs when e is done
    compute_event()                is done when the compute submitted so far is done
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

PageIds: TypeAlias = npt.NDArray[np.int64]


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


class Pages:
    """A list of page ids, examined once and used by many copies of a step.

    Args:
        ascending: ``ids`` are sorted, which makes this cheaper.

    Attributes:
        ids: int64 [n].
        lowest, highest: the range of ``ids``; 0 and -1 if there are none.
    """

    __slots__ = ("_runs", "highest", "ids", "lowest")

    def __init__(self, ids: PageIds, *, ascending: bool = False) -> None:
        self.ids = ids
        if not len(ids):
            self.lowest, self.highest = 0, -1
        elif ascending:
            self.lowest, self.highest = int(ids[0]), int(ids[-1])
        else:
            self.lowest, self.highest = int(ids.min()), int(ids.max())
        self._runs: list[tuple[int, int, int]] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(position in ``ids``, number, first page id) of each run of consecutive ids."""
        if self._runs is None:
            starts = np.flatnonzero(np.diff(self.ids, prepend=self.ids[:1] - 2) != 1).tolist()
            ends = [*starts[1:], len(self.ids)]
            self._runs = [
                (start, end - start, int(self.ids[start]))
                for start, end in zip(starts, ends, strict=bool(starts))
            ]
        return self._runs


class PageBuffer:
    """Pages of equal size in one tier.

    Attributes:
        data: uint8 [num_pages, page_bytes].
        words: the same memory as int64 [num_pages, page_bytes / 8] if the CPU can address it.
    """

    __slots__ = ("data", "num_pages", "page_bytes", "words")

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.num_pages, self.page_bytes = data.shape
        on_cpu = data.device.type == "cpu"
        self.words: npt.NDArray[np.int64] | None = data.numpy().view(np.int64) if on_cpu else None

    def part(self, first_page: int, num_pages: int) -> "PageBuffer":
        """The same memory, ``num_pages`` pages from ``first_page`` on."""
        return PageBuffer(self.data[first_page : first_page + num_pages])


class LinkUse(NamedTuple):
    """What one direction has carried since the start: bytes, and seconds it was busy."""

    num_bytes: int = 0
    busy_seconds: float = 0.0


class Copy(Protocol):
    """A prepared copy; what is in it is the device's affair."""


class Device(ABC):
    """Copies pages between a near and a far tier behind the computation."""

    @abstractmethod
    def far_buffer(self, num_pages: int, page_bytes: int) -> PageBuffer:
        """Far-tier memory of exactly that size.

        Raises:
            BudgetError: the tier does not have it.
        """

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
        """Queue a prepared copy, once, to run when ``after`` is done.

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

    @abstractmethod
    def compute_event(self) -> Event:
        """An event that is done when all compute submitted so far is done."""

    @abstractmethod
    def wait(self, event: Event) -> float:
        """Hold compute submitted later until ``event`` is done.

        Returns:
            Seconds for which compute stood still (0.0 if it was done already).
        """

    @abstractmethod
    def use(self, direction: Direction) -> LinkUse:
        """What ``direction`` has carried since the start."""

    @abstractmethod
    def close(self) -> None:
        """Finish all copies and release threads and memory. Idempotent."""
