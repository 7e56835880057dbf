# SPDX-License-Identifier: Apache-2.0
"""Comparison with the baseline: whether offloaded layers gain more than their copies cost.

Stall alone does not show the cost: pages on a disk take CPU time and memory bandwidth even if
compute never waits for them. So the throughput is recorded before the first layer is offloaded, and
compared with the throughput at each level that lasts.

Both records use *pressed* windows only. In a pressed window requests were blocked or, with
offloaded layers, held more blocks than exist without them. Otherwise the end of a batch would count
on one side only.

Of these windows the steps count that compute no prompt for the first time. A long prompt takes as
long as hundreds of other steps, at each level, so a few prompts more on one side would decide. What
is computed again after a preemption counts: fewer preemptions are a gain of far layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vllm_tiered.kv.windows import Record, Window

_NO_STEPS = Window()
_NO_RECORD = Record()


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineComparison:
    """Throughput without offloaded layers, and at the present level.

    Attributes:
        base: record without offloaded layers.
        is_known: the base has had enough samples once; the controller does not wait for it again.
        here: record of the present level and its neighbours, if any layer is offloaded.
        is_evaluated: the present level was found to be worth its cost.
        sample: the windows of the next sample.
        num_unlike: number of samples in a row with another load.
    """

    base: Record = _NO_RECORD
    is_known: bool = False
    here: Record = _NO_RECORD
    is_evaluated: bool = False
    sample: Window = _NO_STEPS
    num_unlike: int = 0

    def at_level(self, level_idx: int) -> BaselineComparison:
        """Return the comparison at another level.

        Levels within a factor of two count as the same, as the level follows small changes of the
        load while nothing is blocked.
        """
        if level_idx and level_idx / 2 <= self.here.level_idx <= 2 * level_idx:
            return self
        return replace(self.restarted(), here=Record(level_idx=level_idx))

    def restarted(self) -> BaselineComparison:
        """Return the comparison without the present level's record, however close the next is."""
        return replace(self, here=_NO_RECORD, is_evaluated=False, sample=_NO_STEPS, num_unlike=0)

    def with_window(
        self, window: Window, level_idx: int, record_steps: int, base_records: int
    ) -> BaselineComparison:
        """Add a pressed window's steps; every ``record_steps`` steps make a sample.

        If the load changes, the present level's record is dropped. The base is kept although it may
        be outdated, as it is recorded again whenever no layer is offloaded.

        Args:
            base_records: number of samples after which the base is known.
        """
        sample = self.sample.merged(window)
        if sample.steps < record_steps:
            return replace(self, sample=sample)
        record = self.here if level_idx else self.base
        comparison = replace(self, sample=_NO_STEPS, num_unlike=0)
        if not record.is_like(sample):
            if not self.num_unlike:
                return replace(comparison, num_unlike=1)
            record = Record(level_idx=level_idx)
            comparison = replace(comparison, is_evaluated=False) if level_idx else comparison
        record = record.with_sample(sample)
        if level_idx:
            return replace(comparison, here=record)
        return replace(
            comparison, base=record, is_known=self.is_known or record.count >= base_records
        )

    def loss(self, min_records: int, same: float) -> float | None:
        """Return the share by which this level is slower than the base; None if it is faster.

        None is also returned while that is unknown, and once the level was accepted. In doubt a
        level is not faster: far layers that gain nothing are only a risk. Three samples suffice if
        the level is slower, or as fast at most, by two standard errors; with ``min_records``
        samples it has to be faster by one. A gain within the error is a loss of 0.
        """
        base, here = self.base, self.here
        if self.is_evaluated or min(base.count, here.count) < 3:
            return None
        gain, error = here.mean - base.mean, here.error_to(base)
        is_slower = here.count >= min_records and gain < same + error
        if is_slower or gain < same - 2 * error:
            return max(0.0, 1.0 - math.exp(gain))
        return None
