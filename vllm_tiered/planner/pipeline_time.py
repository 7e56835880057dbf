# SPDX-License-Identifier: Apache-2.0
"""Time of a step whose offloaded sublayers are prefetched (HeLM, figure 8).

    compute   │ attention 0 │   FFN 0    │·stall·│ attention 1 │ ...
    link      │   FFN 0     │     attention 1    │    FFN 1    │ ...

At prefetch depth 1, the transfer of an offloaded sublayer begins when the offloaded sublayer before
it begins to compute and the link is free. The weight buffer pool works the same way. At depth n the
transfer begins n offloaded sublayers earlier, so a long transfer also hides behind earlier compute:

    compute   │ attention 0 │   FFN 0    │ attention 1 │ ...         depth 2
    link      │ FFN 0 │  attention 1  │   FFN 1   │ ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_tiered.weights.layout import extent_bytes_of, moved_each_step
from vllm_tiered.weights.placement import Placement

_STEADY = 1e-9
_MOST_STEPS = 64
"""Number of simulated steps after which a steady state is assumed.

At depth 1, all steps after the first are equal. At a greater depth, a link that is a little too
slow falls behind a little in each step, until every transfer in the queue is late."""


class Link(NamedTuple):
    """Link between two tiers, with its bandwidth and the latency of each transfer."""

    bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds of one transfer; 0 bytes take 0 s."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0

    def slowed_by(self, times: float) -> Link:
        """Return a link whose transfers take ``times`` as long."""
        return Link(self.bytes_per_s / times, self.latency_s * times)


def fitted_link(samples: Sequence[tuple[int, float]]) -> Link:
    """Return the link of measured transfers, (bytes, seconds) each.

    Its bandwidth and latency have the least squares of relative errors.
    """
    rows = np.array([(1.0 / seconds, num_bytes / seconds) for num_bytes, seconds in samples])
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    if len(samples) < 2 or latency <= 0 or per_byte <= 0:
        # Noise, or one size: all of the time is the bytes'.
        share = rows[:, 1]
        latency, per_byte = 0.0, share.sum() / (share @ share)
    return Link(bytes_per_s=1.0 / float(per_byte), latency_s=float(latency))


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeTimes:
    """Compute times of a step.

    Attributes:
        compute: seconds of each sublayer when its weights have arrived.
        rest: seconds outside the layers: embedding, head, sampling, scheduling.
    """

    compute: tuple[float, ...]
    rest: float = 0.0


class StepTime(NamedTuple):
    """Seconds of a step, of its transfers, and of compute stalls."""

    seconds: float
    link_seconds: float
    stall_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedStep:
    """What a plan expects of a decode step.

    Attributes:
        requests: requests of the step.
        seconds: its time.
        stall_share: share of it for which compute waits for weights.
    """

    requests: int
    seconds: float
    stall_share: float


def transfer_seconds(placement: Placement, link: Link, storage: Link | None = None) -> list[float]:
    """Return the transfer time of each sublayer; 0 if all of it is near.

    Args:
        placement: tiers of the parameters.
        link: link from far to near.
        storage: link from storage to near; None if nothing is stored. The two links take turns.
    """
    assert storage or not placement.stored, "a placement on storage, and no link from it"
    return [
        link.seconds(extent_bytes_of(far))
        + (storage.seconds(extent_bytes_of(stored)) if storage else 0.0)
        for far, stored in placement.offloaded
    ]


class Slowdown(NamedTuple):
    """Factors by which compute and the link slow down while both are busy, each >= 1."""

    compute: float = 1.0
    link: float = 1.0


NO_SLOWDOWN = Slowdown()
"""Factors if compute and the link do not slow each other."""


def pipeline_step_time(
    transfers: Sequence[float],
    times: ComputeTimes,
    slowdown: Slowdown = NO_SLOWDOWN,
    prefetch_depth: int = 1,
) -> StepTime:
    """Return the time of a step in the steady state of consecutive steps.

    Args:
        transfers: transfer seconds of each sublayer, from :func:`transfer_seconds`.
        times: compute times.
        slowdown: slowdown of compute and the link while both are busy.
        prefetch_depth: offloaded sublayers in transfer while one computes.
    """
    begin, clock, waits = _steady(transfers, times, slowdown, prefetch_depth)
    return StepTime(clock.now - begin, sum(_moved(transfers, prefetch_depth)), sum(waits))


def waits_by_sublayer(
    transfers: Sequence[float],
    times: ComputeTimes,
    prefetch_depth: int = 1,
) -> list[float]:
    """Return the seconds for which each sublayer waits in a step of the steady state."""
    return _steady(transfers, times, NO_SLOWDOWN, prefetch_depth)[2]


def _steady(
    transfers: Sequence[float], times: ComputeTimes, slowdown: Slowdown, prefetch_depth: int
) -> tuple[float, _Clock, list[float]]:
    """Return the start of a steady step, the clock at its end, and the wait of each sublayer."""
    order = _moved(transfers, prefetch_depth)
    clock = _Clock(slowdown)
    begin, waits = 0.0, [0.0] * len(transfers)
    # Before the first step, all prefetched sublayers have arrived. Repeat until a step leaves as
    # much in transfer as the step before.
    for _ in range(_MOST_STEPS):
        begin, left = clock.now, clock.in_transfer
        at = 0
        for position, seconds in enumerate(times.compute):
            if transfers[position]:
                after = [
                    order[(at + further) % len(order)] for further in range(1, prefetch_depth + 1)
                ]
                waits[position] = clock.drain_to(sum(after[:-1]))
                clock.in_transfer += after[-1]
                at += 1
            clock.compute(seconds)
        clock.compute(times.rest)
        if math.isclose(clock.in_transfer, left, rel_tol=_STEADY):
            break
    return begin, clock, waits


def _moved(transfers: Sequence[float], prefetch_depth: int) -> list[float]:
    """Return the transfers of offloaded sublayers in order; 0 for one that has its own buffer."""
    far = [seconds for seconds in transfers if seconds]
    return [
        seconds if is_moved else 0.0
        for seconds, is_moved in zip(far, moved_each_step(len(far), prefetch_depth), strict=True)
    ]


def overlapped_seconds(compute: float, transfer: float, slowdown: Slowdown = NO_SLOWDOWN) -> float:
    """Return the seconds until compute and a transfer that begin together are both done."""
    clock = _Clock(slowdown)
    clock.in_transfer = transfer
    clock.compute(compute)
    clock.drain_to(0.0)
    return clock.now


class _Clock:
    """Simulated clock of compute and of consecutive transfers that overlap it.

    Attributes:
        now: seconds since the start.
        in_transfer: seconds that the remaining transfers would take without compute.
    """

    def __init__(self, slowdown: Slowdown) -> None:
        self._slowdown = slowdown
        self.now = self.in_transfer = 0.0

    def compute(self, seconds: float) -> None:
        """Advance by some compute, and by the transfers that run at the same time."""
        slower = self._slowdown
        together = min(seconds * slower.compute, self.in_transfer * slower.link)
        self.in_transfer -= together / slower.link
        self.now += together + seconds - together / slower.compute

    def drain_to(self, left: float) -> float:
        """Stall compute until at most ``left`` seconds are in transfer; return the stall."""
        waits = max(0.0, self.in_transfer - left)
        self.now += waits
        self.in_transfer -= waits
        return waits
