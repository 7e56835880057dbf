# SPDX-License-Identifier: Apache-2.0
"""Measurements of engine steps at a level of expansion: signals, windows of them, records."""

import math
from dataclasses import dataclass
from typing import NamedTuple

_LONGEST_RECORD = 16
"""Samples behind a record: older ones fade, as the load drifts."""

_OTHER_LOAD = math.log(2.0)
"""From this ratio on, the running requests or the time of a step are those of another load."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """One engine step, as the scheduler and the slowest rank saw it.

    Attributes:
        level_idx: the level that the step ran at.
        is_settled: False while a change of level is on its way.
        seconds: wall time of the step, scheduling included, idle time not.
        tokens: output tokens that it made.
        stall_seconds: compute stood still for a transfer (maximum over ranks).
        link_seconds: the busier direction of the link was busy (maximum over ranks).
        is_blocked: a request could not get the blocks it asked for.
        num_preempted: requests preempted in the step.
        num_running: requests in the step.
        num_waiting: requests that wait, and might run beside the running ones if blocks sufficed.
        used_blocks: blocks that requests hold.
        num_partial: partial blocks that running requests are charged for.
        needed_blocks: what the largest live request will need in the end, beside blocks that
            no request can be made to give back.
    """

    level_idx: int
    is_settled: bool
    seconds: float
    tokens: int
    stall_seconds: float
    link_seconds: float
    is_blocked: bool
    num_preempted: int
    num_running: int
    num_waiting: int
    used_blocks: int
    num_partial: int
    needed_blocks: int


class Peak(NamedTuple):
    """Blocks in use, and the partial blocks charged beside them, in a step."""

    used: int
    partial: int


class Window(NamedTuple):
    """Sums over steps, and their peaks.

    A tuple, as one is made in every step.

    Attributes:
        peaks: those of the steps that no other step exceeds in blocks and in partial blocks.
            Requests that begin have two partial blocks each and few blocks; later one, and many
            blocks: the most of both together would be more than was ever needed.
    """

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    stall_seconds: float = 0.0
    stalled_steps: int = 0
    link_seconds: float = 0.0
    blocked_steps: int = 0
    num_preempted: int = 0
    running: int = 0
    used: int = 0
    partial: int = 0
    compute_rate: float = 0.0  # sum of 1 / seconds without stall
    peaks: tuple[Peak, ...] = ()

    def with_step(self, signals: Signals, max_stall: float) -> "Window":
        """Add a step; it stalled if it stood still for more than ``max_stall`` of its time."""
        used, partial, stall = signals.used_blocks, signals.num_partial, signals.stall_seconds
        seconds = signals.seconds or 1e-9
        return Window(
            self.steps + 1,
            self.seconds + seconds,
            self.tokens + signals.tokens,
            self.stall_seconds + stall,
            self.stalled_steps + (stall > max_stall * seconds),
            self.link_seconds + signals.link_seconds,
            self.blocked_steps + signals.is_blocked,
            self.num_preempted + signals.num_preempted,
            self.running + signals.num_running,
            self.used + used,
            self.partial + partial,
            self.compute_rate + 1.0 / (seconds - stall if stall < seconds else seconds),
            _with_peak(self.peaks, Peak(used, partial)),
        )

    def merged(self, other: "Window") -> "Window":
        """Return the window of both windows' steps."""
        sums = [mine + theirs for mine, theirs in zip(self[:-1], other[:-1], strict=True)]
        peaks = self.peaks
        for peak in other.peaks:
            peaks = _with_peak(peaks, peak)
        return Window._make((*sums, peaks))

    @property
    def max_partial(self) -> int:
        """The most partial blocks charged in any step."""
        return max((peak.partial for peak in self.peaks), default=0)

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step without its stall.

        The harmonic mean: transfers must hide behind decode steps, and a few long prefill steps
        say nothing about those.
        """
        return self.steps / self.compute_rate

    def is_blocked(self, share: float) -> bool:
        """Return whether requests lacked blocks in at least ``share`` of the steps."""
        return self.blocked_steps >= share * self.steps or self.num_preempted > 0

    def is_stalled(self, max_stall: float) -> bool:
        """Return whether compute stands still throughout, not for one hiccup of the link."""
        return self.stall_seconds > max_stall * self.seconds and 2 * self.stalled_steps > self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Output throughput at a level: samples of equal length, all taken under pressure.

    Logarithms, so that differences are shares. Mean running requests and step time tell whether
    a later sample is of the same load.
    """

    level_idx: int = 0
    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    running: float = 0.0
    step_seconds: float = 0.0

    def with_sample(self, sample: Window) -> "Record":
        """Add a sample to Welford's running mean and variance.

        Beyond ``_LONGEST_RECORD`` samples mean and variance are exponential.
        """
        rate = math.log(max(sample.tokens, 1) / sample.seconds)
        count = min(self.count + 1, _LONGEST_RECORD)
        change = rate - self.mean
        mean = self.mean + change / count
        variance = self.variance
        if self.count:
            variance += (change * change - self.variance * count / (count - 1)) / count
        running, step_seconds = _load(sample)
        return Record(
            level_idx=self.level_idx,
            count=count,
            mean=mean,
            variance=max(0.0, variance),
            running=self.running + (running - self.running) / count,
            step_seconds=self.step_seconds + (step_seconds - self.step_seconds) / count,
        )

    def is_like(self, sample: Window) -> bool:
        """Return whether the sample is of the record's load; an empty record is like any."""
        if not self.count:
            return True
        return all(
            abs(math.log(now / then)) < _OTHER_LOAD
            for now, then in zip(_load(sample), (self.running, self.step_seconds), strict=True)
        )

    def is_as_good_as(self, other: "Record", same: float) -> bool:
        """Return whether it is above ``other`` less ``same``, by two standard errors."""
        return self.mean - other.mean > 2 * self._error(other) - same

    def is_worse_than(self, other: "Record", same: float) -> bool:
        """Return whether it is below ``other`` less ``same`` by two standard errors."""
        return other.mean - self.mean > 2 * self._error(other) + same

    def _error(self, other: "Record") -> float:
        return math.sqrt(self.variance / self.count + other.variance / other.count)


def _with_peak(peaks: tuple[Peak, ...], one: Peak) -> tuple[Peak, ...]:
    used, partial = one
    for peak in peaks:
        if used <= peak.used and partial <= peak.partial:
            return peaks
    return (*(peak for peak in peaks if peak.used > used or peak.partial > partial), one)


def _load(sample: Window) -> tuple[float, float]:
    """Return mean running requests, and mean seconds of a step without its stall."""
    compute_seconds = max(sample.seconds - sample.stall_seconds, 1e-9)
    return sample.running / sample.steps, compute_seconds / sample.steps
