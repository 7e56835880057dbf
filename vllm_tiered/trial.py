# SPDX-License-Identifier: Apache-2.0
"""Trial that measures in decode steps whether reading ahead is faster: off, on, off (A/B/A).

The functions are pure; :class:`StepTrial` keeps their state for a rank that decides alone. Ranks
that count the same steps are in the same phase. Where they have to agree, the verdict needs the
other ranks' times.

    batch 4 ─ warm ─┬─ off ─┬─ on ─┬─ off ─┬─ verdict for batches of 2 to 8
                    └ 16 steps ┘           batch 9: another trial
"""

import time
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal

WARM_STEPS = 8
PHASE_STEPS = 16
LONG_PHASE_STEPS = 48
"""Steps of a phase where what is missing differs from step to step more than it does on average."""

MIN_GAIN = 0.01
"""Least gain of "on" over the mean of the "off" phases; smaller gains are within the noise. "on"
must also be faster than each "off" phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Median seconds of a decode step in each of the three phases, for one batch size."""

    batch_size: int
    off_before: float
    on: float
    off_after: float

    @property
    def ratio(self) -> float:
        """Time of "on" divided by time of "off"."""
        return 2 * self.on / (self.off_before + self.off_after)

    @property
    def is_kept(self) -> bool:
        is_fastest = self.on < min(self.off_before, self.off_after)
        return is_fastest and self.ratio < 1 - MIN_GAIN

    def to_dict(self) -> dict[str, Any]:
        """Return the figures and what follows from them, JSON-safe."""
        return asdict(self) | {"ratio": self.ratio, "kept": self.is_kept}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """State of the trials.

    Attributes:
        batch_size: batch size of the current trial; None without one.
        seconds: times of its decode steps, warm-up included.
        verdicts: results of finished trials, oldest first.
        phase_steps: steps of each of the three phases.
    """

    batch_size: int | None = None
    seconds: tuple[float, ...] = ()
    verdicts: tuple[Measured, ...] = field(default=())
    phase_steps: int = PHASE_STEPS


def is_on(trial: Trial, batch_size: int) -> bool:
    """Return whether the next decode step of that batch size reads ahead."""
    if trial.batch_size is not None and _is_near(trial.batch_size, batch_size):
        return (len(trial.seconds) - WARM_STEPS) // trial.phase_steps == 1
    verdict = verdict_for(trial, batch_size)
    return verdict is not None and verdict.is_kept


def verdict_for(trial: Trial, batch_size: int) -> Measured | None:
    """Return the verdict that applies to a batch size; None if there is none."""
    near = [found for found in trial.verdicts if _is_near(found.batch_size, batch_size)]
    return min(near, key=lambda found: abs(found.batch_size - batch_size), default=None)


def step(trial: Trial, batch_size: int, seconds: float) -> tuple[Trial, Measured | None]:
    """Add the time of a decode step.

    Returns:
        The new state; and this rank's measurement for :func:`conclude` at the end of the last
        phase, otherwise None.
    """
    if trial.batch_size is None or not _is_near(trial.batch_size, batch_size):
        if verdict_for(trial, batch_size) is not None:
            return replace(trial, batch_size=None, seconds=()), None
        trial = replace(trial, batch_size=batch_size, seconds=())
    trial = replace(trial, seconds=(*trial.seconds, seconds))
    if len(trial.seconds) < WARM_STEPS + 3 * trial.phase_steps:
        return trial, None
    assert trial.batch_size is not None
    phases = [
        median(trial.seconds[start : start + trial.phase_steps])
        for start in range(WARM_STEPS, len(trial.seconds), trial.phase_steps)
    ]
    off_before, on, off_after = phases
    return trial, Measured(
        batch_size=trial.batch_size, off_before=off_before, on=on, off_after=off_after
    )


def conclude(trial: Trial, measured: Measured) -> Trial:
    """End the trial; ``measured`` has the slowest rank's time in each phase."""
    return Trial(verdicts=(*trial.verdicts, measured), phase_steps=trial.phase_steps)


def _is_near(size: int, other: int) -> bool:
    """Return whether two batch sizes are within a factor of two."""
    return size <= 2 * other and other <= 2 * size


class StepTrial:
    """Whether a rank's layers read ahead: always, or as its decode steps have shown.

    Args:
        is_always_on: no trial is made.
        most_tokens: most tokens of a step that reads ahead.

    Attributes:
        is_on: whether the present step reads ahead.
    """

    def __init__(self, *, is_always_on: bool, most_tokens: int) -> None:
        self.is_on = is_always_on
        self._most_tokens = most_tokens
        self._trial = None if is_always_on else Trial(phase_steps=LONG_PHASE_STEPS)
        self._last: tuple[int, float] | None = None

    @property
    def state(self) -> Literal["on", "off", "trying"]:
        """What was decided: "on" always or for some batch sizes, "off" for those tried so far."""
        if self._trial is None:
            return "on"
        if not self.verdicts:
            return "trying"
        return "on" if any(found.is_kept for found in self.verdicts) else "off"

    @property
    def verdicts(self) -> tuple[Measured, ...]:
        """Results of the finished trials, oldest first."""
        return () if self._trial is None else self._trial.verdicts

    def begin_step(self, num_tokens: int) -> Measured | None:
        """Time the step before, if both are of this size, and decide for this one.

        Returns:
            The verdict of a trial that has just ended.
        """
        if self._trial is None:
            return None
        now = time.perf_counter()
        before, self._last = self._last, (num_tokens, now)
        measured = None
        if before is not None and before[0] == num_tokens <= self._most_tokens:
            self._trial, measured = step(self._trial, num_tokens, now - before[1])
            if measured is not None:
                self._trial = conclude(self._trial, measured)
        self.is_on = num_tokens <= self._most_tokens and is_on(self._trial, num_tokens)
        return measured

    def interrupt(self) -> None:
        """Leave out the time from the step before until the next one, between which others come."""
        self._last = None
