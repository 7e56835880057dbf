# SPDX-License-Identifier: Apache-2.0
"""Measurements of engine steps at one level: signals of a step, windows of steps, records."""

import math
from dataclasses import dataclass
from typing import NamedTuple

_LONGEST_RECORD = 16
"""Number of samples that a record averages; older samples fade, as the load drifts."""

_OTHER_LOAD = math.log(2.0)
"""The load counts as another if its running requests or step time change by this ratio (log)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """Measurements of one engine step, by the scheduler and the slowest rank.

    Attributes:
        level_idx: the level that the step ran at.
        is_settled: False while the level is changing.
        seconds: wall time of the step, with scheduling and without idle time.
        tokens: output tokens of the step.
        stall_seconds: time for which compute waited for a transfer (maximum over ranks).
        link_seconds: busy time of the link's busier direction (maximum over ranks).
        is_blocked: a request could not get the blocks that it asked for.
        num_preempted: requests preempted in the step.
        num_running: requests in the step.
        num_waiting: waiting requests that could run too if there were enough blocks.
        used_blocks: blocks that requests hold.
        num_partial: partial blocks that running requests are charged for.
        needed_blocks: blocks that the largest live request will need at its end, plus the blocks
            that no request can be made to give back.
        num_resident: blocks of resident groups that requests hold.
        needed_resident: of the needed blocks, those of resident groups.
        is_prefill: prompts are computed for the first time, in this step or the one before it.
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
    num_resident: int = 0
    needed_resident: int = 0
    is_prefill: bool = False


class Peak(NamedTuple):
    """Used blocks of one step, its charged partial blocks, and its blocks of resident groups."""

    used: int
    partial: int
    resident: int = 0


class Window(NamedTuple):
    """Sums over steps, and the peaks of the block use.

    It is a tuple because one is made in every step.

    Attributes:
        peaks: the peaks of the steps that no other step exceeds in all numbers. A request has two
            partial blocks and few blocks when it begins, and one partial block and many blocks
            later. So the maximum of each number taken alone would be more than was ever needed.
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
    resident: int = 0
    compute_rate: float = 0.0  # sum of 1 / seconds without stall
    peaks: tuple[Peak, ...] = ()

    def with_step(self, signals: Signals, max_stall: float) -> "Window":
        """Add a step; it counts as stalled if its stall exceeds ``max_stall`` of its time."""
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
            self.resident + signals.num_resident,
            self.compute_rate + 1.0 / (seconds - stall if stall < seconds else seconds),
            _with_peak(self.peaks, Peak(used, partial, signals.num_resident)),
        )

    def merged(self, other: "Window") -> "Window":
        """Return a window over the steps of both windows."""
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
    def max_resident(self) -> int:
        """The most blocks of resident groups held in any step."""
        return max((peak.resident for peak in self.peaks), default=0)

    @property
    def compute_seconds(self) -> float:
        """Harmonic mean of the seconds of a step without its stall.

        Transfers must overlap decode steps. The harmonic mean keeps a few long prefill steps from
        dominating the result.
        """
        return self.steps / self.compute_rate

    def is_blocked(self, share: float) -> bool:
        """Return whether requests lacked blocks in at least ``share`` of the steps."""
        return self.blocked_steps >= share * self.steps or self.num_preempted > 0

    def is_stalled(self, max_stall: float) -> bool:
        """Return whether most steps stalled, rather than a few during a hiccup of the link."""
        return self.stall_seconds > max_stall * self.seconds and 2 * self.stalled_steps > self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Output throughput at a level, from samples of equal length taken under pressure.

    ``mean`` and ``variance`` are of logarithms, so that differences are shares. The means of
    running requests and step time show whether a later sample is of the same load.
    """

    level_idx: int = 0
    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    running: float = 0.0
    step_seconds: float = 0.0

    def with_sample(self, sample: Window) -> "Record":
        """Add a sample to Welford's running mean and variance.

        Beyond ``_LONGEST_RECORD`` samples they are exponentially weighted.
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
        """Return whether the sample is of the record's load; True for an empty record."""
        if not self.count:
            return True
        return all(
            abs(math.log(now / then)) < _OTHER_LOAD
            for now, then in zip(_load(sample), (self.running, self.step_seconds), strict=True)
        )

    def is_as_good_as(self, other: "Record", same: float) -> bool:
        """Return whether this mean exceeds ``other``'s less ``same`` by two standard errors."""
        return self.mean - other.mean > 2 * self.error_to(other) - same

    def is_worse_than(self, other: "Record", same: float) -> bool:
        """Return whether this mean is below ``other``'s less ``same`` by two standard errors."""
        return other.mean - self.mean > 2 * self.error_to(other) + same

    def error_to(self, other: "Record") -> float:
        """Return the standard error of the difference of the means."""
        return math.sqrt(self.variance / self.count + other.variance / other.count)


def _with_peak(peaks: tuple[Peak, ...], one: Peak) -> tuple[Peak, ...]:
    if any(_exceeds_nowhere(one, peak) for peak in peaks):
        return peaks
    return (*(peak for peak in peaks if not _exceeds_nowhere(peak, one)), one)


def _exceeds_nowhere(peak: Peak, other: Peak) -> bool:
    return (
        peak.used <= other.used
        and peak.partial <= other.partial
        and peak.resident <= other.resident
    )


def _load(sample: Window) -> tuple[float, float]:
    """Return the mean running requests and the mean seconds of a step without its stall."""
    compute_seconds = max(sample.seconds - sample.stall_seconds, 1e-9)
    return sample.running / sample.steps, compute_seconds / sample.steps
