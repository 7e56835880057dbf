# SPDX-License-Identifier: Apache-2.0
"""How long a step takes whose far sublayers arrive one ahead (HeLM, figure 8).

    compute   │ attention 0 │   FFN 0    │·stall·│ attention 1 │ ...
    link      │   FFN 0     │     attention 1    │    FFN 1    │ ...

The transfer of a far sublayer begins when the far one before it begins to compute, as the ring of
staging slots does it, and not before the link is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_tiered.cost.weights import Placement, extent_of


class Link(NamedTuple):
    """A link as a transfer sees it."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Of one transfer; none takes no time."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0

    def slowed(self, times: float) -> Link:
        """One that takes so many times as long."""
        return Link(self.bytes_per_s / times, self.latency_s * times)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """What a step is made of.

    Attributes:
        compute: seconds of each sublayer, if all its weights were near.
        rest: seconds of what is not a layer: embedding, head, sampling, scheduling.
    """

    compute: tuple[float, ...]
    rest: float = 0.0


class StepTime(NamedTuple):
    """Seconds of a step, of the link, and of compute standing still."""

    seconds: float
    link_seconds: float
    stall_seconds: float


def transfer_seconds(placement: Placement, link: Link, storage: Link | None = None) -> list[float]:
    """Of each sublayer; 0 where all is near.

    Args:
        link: far to near.
        storage: storage to near, for placements that use it. The two take turns.
    """
    assert storage or not placement.stored, "a placement on storage, and no link from it"
    return [
        link.seconds(extent_of(far)) + (storage.seconds(extent_of(stored)) if storage else 0.0)
        for far, stored in placement.staged
    ]


class Slowdown(NamedTuple):
    """How much longer compute and the link take while both are busy, at least 1 each."""

    compute: float = 1.0
    link: float = 1.0


ALONE = Slowdown()
"""A link that takes nothing from compute."""


def step_time(transfers: Sequence[float], times: StepTimes, slowdown: Slowdown = ALONE) -> StepTime:
    """A step in the steady state: its first far sublayer was queued by the step before.

    Args:
        transfers: of each sublayer, from :func:`transfer_seconds`.
        slowdown: what the two do to each other.
    """
    far = [position for position, seconds in enumerate(transfers) if seconds]
    compute = sum(times.compute) + times.rest
    link = sum(transfers)
    if len(far) < 3:
        return StepTime(compute, 0.0, 0.0)  # each has a slot for itself, and stays there
    following = dict(zip(far, [*far[1:], far[0]], strict=True))
    clock = _Clock(slowdown)
    begin = stalled_before = 0.0
    # Two steps: the first may begin with the first sublayer there already.
    for _ in range(2):
        begin, stalled_before = clock.now, clock.stalled
        for position, seconds in enumerate(times.compute):
            if transfers[position]:
                clock.drain()
                clock.on_the_way = transfers[following[position]]
            clock.compute(seconds)
        clock.compute(times.rest)
    return StepTime(clock.now - begin, link, clock.stalled - stalled_before)


def seconds_beside(compute: float, transfer: float, slowdown: Slowdown = ALONE) -> float:
    """Until both are done, which begin together."""
    clock = _Clock(slowdown)
    clock.on_the_way = transfer
    clock.compute(compute)
    clock.drain()
    return clock.now


class _Clock:
    """Compute, and the one transfer on the way beside it.

    Attributes:
        now: seconds since the start.
        on_the_way: what is left of the transfer, in seconds that it would take alone.
        stalled: for how long compute stood still.
    """

    def __init__(self, slowdown: Slowdown) -> None:
        self._slowdown = slowdown
        self.now = self.on_the_way = self.stalled = 0.0

    def compute(self, seconds: float) -> None:
        """Both run until one is done, then compute alone."""
        slower = self._slowdown
        together = min(seconds * slower.compute, self.on_the_way * slower.link)
        self.on_the_way -= together / slower.link
        self.now += together + seconds - together / slower.compute

    def drain(self) -> None:
        """Compute stands still until the transfer is over."""
        self.now += self.on_the_way
        self.stalled += self.on_the_way
        self.on_the_way = 0.0
