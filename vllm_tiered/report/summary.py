# SPDX-License-Identifier: Apache-2.0
"""Summary of a timeline, and the rates that figures and tables share.

Rates and shares refer to the time of steps: an idle engine is neither slow nor stalled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_tiered.report.records import LayerTimeline, Window, coarsen, merge_windows

TRANSPARENT_STALL = 0.01
"""Swapping is transparent while compute waits less than this share of the step (Pie, 3.3)."""

Series = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Totals and shares of a whole timeline.

    Attributes:
        seconds: time from the first step's begin to the last one's end.
        step_seconds: time in steps; the engine was idle in the rest.
        median_tokens_per_second: median over the windows, weighted by their step time.
        tokens_per_second: all tokens divided by the time of all steps.
        stall_share, read_share, write_share: shares of step time.
        read_bytes_per_second, write_bytes_per_second: rates while that direction was copying.
        transparent_share: share of step time in windows whose stall is below 1 %.
        joules: energy in steps; ``assumed_share`` of it is from constants.
        joules_per_token: mean over all output tokens; None without tokens or without a reading.
    """

    seconds: float
    num_steps: int
    step_seconds: float
    longest_step_seconds: float
    tokens: int
    median_tokens_per_second: float
    tokens_per_second: float
    stall_share: float
    transparent_share: float
    read_bytes: int
    read_share: float
    read_bytes_per_second: float
    write_bytes: int
    write_share: float
    write_bytes_per_second: float
    mean_expansion: float
    largest_expansion: float
    level_changes: int
    num_preempted: int
    joules: float
    assumed_share: float
    joules_per_token: float | None


def summarise(windows: Sequence[Window]) -> Summary:
    """Return the summary of at least one window."""
    total = merge_windows(windows)
    seconds = series(windows, "seconds")
    stall_share = ratio(series(windows, "stall_seconds"), seconds)
    expansion = series(windows, "expansion")
    step_seconds = float(seconds.sum())
    return Summary(
        seconds=total.end - total.start,
        num_steps=total.num_steps,
        step_seconds=step_seconds,
        longest_step_seconds=total.longest_seconds,
        tokens=total.tokens,
        median_tokens_per_second=_weighted_median(
            ratio(series(windows, "tokens"), seconds), seconds
        ),
        tokens_per_second=_per(total.tokens, step_seconds),
        stall_share=_per(total.stall_seconds, step_seconds),
        transparent_share=_per(seconds[stall_share < TRANSPARENT_STALL].sum(), step_seconds),
        read_bytes=total.read_bytes,
        read_share=_per(total.read_seconds, step_seconds),
        read_bytes_per_second=_per(total.read_bytes, total.read_seconds),
        write_bytes=total.write_bytes,
        write_share=_per(total.write_seconds, step_seconds),
        write_bytes_per_second=_per(total.write_bytes, total.write_seconds),
        mean_expansion=_per((expansion * seconds).sum(), step_seconds),
        largest_expansion=float(expansion.max()),
        level_changes=total.level_changes,
        num_preempted=total.num_preempted,
        joules=total.joules,
        assumed_share=_per(total.assumed_joules, total.joules),
        joules_per_token=total.joules / total.tokens if total.tokens and total.joules else None,
    )


def series(windows: Sequence[Window], name: str) -> Series:
    """Return the values of a field, shape [windows]."""
    return np.array([getattr(window, name) for window in windows], dtype=np.float64)


def ratio(amount: Series, per: Series) -> Series:
    """Return `amount / per`, 0 where `per` is 0; shape [windows]."""
    return np.divide(amount, per, out=np.zeros_like(amount), where=per > 0)


def at_most(windows: Sequence[Window], num_windows: int) -> list[Window]:
    """Merge into at most `num_windows` windows of equal length, not counting idle time."""
    if not windows:
        return []
    span = windows[-1].end - windows[0].start
    slot_seconds = span / num_windows or 1.0
    coarse = list(windows)
    while len(coarse) > num_windows:
        coarse = coarsen(windows, slot_seconds)
        slot_seconds *= 1.1
    return coarse


def typical_step(layers: Sequence[LayerTimeline]) -> LayerTimeline | None:
    """Return the latest detailed step that read far layers, else the latest; None without any."""
    reading = [
        timeline
        for timeline in layers
        if any(span.read_start is not None for span in timeline.layers)
    ]
    return next(reversed(reading or list(layers)), None)


def _per(amount: float, per: float) -> float:
    return float(amount) / float(per) if per else 0.0


def _weighted_median(values: Series, weights: Series) -> float:
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, below[-1] / 2)])
