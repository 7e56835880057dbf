# SPDX-License-Identifier: Apache-2.0
"""The contract of a device: page buffers, and asynchronous copies ordered by events.

A device has two copy queues, one per direction, and the *compute* order in which the engine
submits its kernels. Within a queue, copies run in the order of submission. Across queues and
against compute nothing is ordered except through events:

    copy(..., after=[e1, e2])   runs when e1 and e2 are done
    wait(e)                     compute submitted later runs when e is done
    compute_event()             is done when the compute submitted so far is done
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

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


@dataclass(frozen=True, slots=True)
class PageBuffer:
    """Pages of equal size in one tier: ``data`` is uint8 [num_pages, page_bytes]."""

    data: torch.Tensor

    @property
    def num_pages(self) -> int:
        return self.data.shape[0]

    @property
    def page_bytes(self) -> int:
        return self.data.shape[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkUse:
    """What one direction has carried since the start: bytes, and seconds it was busy."""

    num_bytes: int = 0
    busy_seconds: float = 0.0


class Device(ABC):
    """Copies pages between a near and a far tier behind the computation."""

    @abstractmethod
    def far_buffer(self, num_pages: int, page_bytes: int) -> PageBuffer:
        """Far-tier memory of exactly that size.

        Raises:
            BudgetError: the tier does not have it.
        """

    @abstractmethod
    def copy(
        self,
        direction: Direction,
        src: PageBuffer,
        src_pages: PageIds,
        dst: PageBuffer,
        dst_pages: PageIds,
        after: Sequence[Event] = (),
    ) -> Event:
        """Copy ``src[src_pages[i]]`` to ``dst[dst_pages[i]]`` for all i, when ``after`` is done.

        The caller leaves source and target pages alone until the event is done.
        """

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
