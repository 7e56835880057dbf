# SPDX-License-Identifier: Apache-2.0
"""How long a step takes whose far sublayers arrive one ahead (HeLM, figure 8), or more.

    compute   │ attention 0 │   FFN 0    │·stall·│ attention 1 │ ...
    link      │   FFN 0     │     attention 1    │    FFN 1    │ ...

The transfer of a far sublayer begins when the far one before it begins to compute, as the ring of
staging slots does it, and not before the link is free. With more slots it begins so many far
sublayers earlier, and a long transfer also hides behind what computes before the one before it:

    compute   │ attention 0 │   FFN 0    │ attention 1 │ ...         two ahead
    link      │ FFN 0 │  attention 1  │   FFN 1   │ ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_tiered.weights.layout import extent_bytes_of, moved_each_step
from vllm_tiered.weights.placement import Placement

_STEADY = 1e-9
_MOST_STEPS = 64
"""One ahead the second step is like all that follow. With more, a link that is a little too slow
falls behind by a little each step, until it has fallen behind by all that may be on its way."""


class Link(NamedTuple):
    """A link as a transfer sees it."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Of one transfer; none takes no time."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0

    def slowed_by(self, times: float) -> Link:
        """One that takes so many times as long."""
        return Link(self.bytes_per_s / times, self.latency_s * times)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeTimes:
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
        link.seconds(extent_bytes_of(far))
        + (storage.seconds(extent_bytes_of(stored)) if storage else 0.0)
        for far, stored in placement.offloaded
    ]


class Slowdown(NamedTuple):
    """How much longer compute and the link take while both are busy, at least 1 each."""

    compute: float = 1.0
    link: float = 1.0


NO_SLOWDOWN = Slowdown()
"""A link that takes nothing from compute."""


def pipeline_step_time(
    transfers: Sequence[float],
    times: ComputeTimes,
    slowdown: Slowdown = NO_SLOWDOWN,
    prefetch_depth: int = 1,
) -> StepTime:
    """A step in the steady state: its first far sublayers were queued by the step before.

    Args:
        transfers: of each sublayer, from :func:`transfer_seconds`.
        slowdown: what the two do to each other.
        ahead: far sublayers on their way while one computes.
    """
    begin, clock, waits = _steady(transfers, times, slowdown, prefetch_depth)
    return StepTime(clock.now - begin, sum(_moved(transfers, prefetch_depth)), sum(waits))


def waits_by_sublayer(
    transfers: Sequence[float],
    times: ComputeTimes,
    slowdown: Slowdown = NO_SLOWDOWN,
    prefetch_depth: int = 1,
) -> list[float]:
    """Seconds for which each sublayer waits in such a step."""
    return _steady(transfers, times, slowdown, prefetch_depth)[2]


def _steady(
    transfers: Sequence[float], times: ComputeTimes, slowdown: Slowdown, prefetch_depth: int
) -> tuple[float, _Clock, list[float]]:
    """When the step began, the clock at its end, and what each sublayer waited."""
    order = _moved(transfers, prefetch_depth)
    clock = _Clock(slowdown)
    begin, waits = 0.0, [0.0] * len(transfers)
    # At first all is there that may be on its way; until as much of it is left after a step as was
    # before.
    for _ in range(_MOST_STEPS):
        begin, left = clock.now, clock.on_the_way
        at = 0
        for position, seconds in enumerate(times.compute):
            if transfers[position]:
                after = [
                    order[(at + further) % len(order)] for further in range(1, prefetch_depth + 1)
                ]
                waits[position] = clock.drain_to(sum(after[:-1]))
                clock.on_the_way += after[-1]
                at += 1
            clock.compute(seconds)
        clock.compute(times.rest)
        if math.isclose(clock.on_the_way, left, rel_tol=_STEADY):
            break
    return begin, clock, waits


def _moved(transfers: Sequence[float], prefetch_depth: int) -> list[float]:
    """Of the far sublayers, in their order; 0 for one that has a slot for itself."""
    far = [seconds for seconds in transfers if seconds]
    return [
        seconds if is_moved else 0.0
        for seconds, is_moved in zip(far, moved_each_step(len(far), prefetch_depth), strict=True)
    ]


def overlapped_seconds(compute: float, transfer: float, slowdown: Slowdown = NO_SLOWDOWN) -> float:
    """Until both are done, which begin together."""
    clock = _Clock(slowdown)
    clock.on_the_way = transfer
    clock.compute(compute)
    clock.drain_to(0.0)
    return clock.now


class _Clock:
    """Compute, and the transfers on the way beside it, one after the other.

    Attributes:
        now: seconds since the start.
        on_the_way: what is left of them, in seconds that they would take alone.
    """

    def __init__(self, slowdown: Slowdown) -> None:
        self._slowdown = slowdown
        self.now = self.on_the_way = 0.0

    def compute(self, seconds: float) -> None:
        """Both run until one is done, then compute alone."""
        slower = self._slowdown
        together = min(seconds * slower.compute, self.on_the_way * slower.link)
        self.on_the_way -= together / slower.link
        self.now += together + seconds - together / slower.compute

    def drain_to(self, left: float) -> float:
        """Compute stands still until no more than that is on the way; for how long."""
        waits = max(0.0, self.on_the_way - left)
        self.now += waits
        self.on_the_way -= waits
        return waits
