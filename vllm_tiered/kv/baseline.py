# SPDX-License-Identifier: Apache-2.0
"""Whether far layers are worth what their copies take from compute.

Stall does not show it: a disk's pages cost CPU time and memory bandwidth even if compute never
waits for them. So throughput without far layers is noted before the first one, and compared with
the throughput at each level that lasts.

Both are of *pressed* windows only: those in which requests were blocked or, with far layers, held
more blocks than there would be without. Else the end of a batch would count for one side alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vllm_tiered.kv.windows import Record, Window

_NO_STEPS = Window()
_NO_RECORD = Record()


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineComparison:
    """Throughput without far layers, and at the present level.

    Attributes:
        base: without far layers.
        is_known: the base once had enough samples; it is not waited for again.
        here: of the present level and its neighbours, if anything is far.
        is_evaluated: and that they pay.
        sample: the windows of the next sample.
        num_unlike: samples of another load in a row.
    """

    base: Record = _NO_RECORD
    is_known: bool = False
    here: Record = _NO_RECORD
    is_evaluated: bool = False
    sample: Window = _NO_STEPS
    num_unlike: int = 0

    def at(self, level: int) -> BaselineComparison:
        """From now on the level is this one. Levels within a factor of two count as the same:
        where nothing is blocked any more the level follows the load up and down a little."""
        if level and level / 2 <= self.here.level <= 2 * level:
            return self
        return replace(self.restarted(), here=Record(level=level))

    def restarted(self) -> BaselineComparison:
        """What follows is another record, however near its level is."""
        return replace(self, here=_NO_RECORD, is_evaluated=False, sample=_NO_STEPS, num_unlike=0)

    def with_window(
        self, window: Window, level: int, record_steps: int, base_records: int
    ) -> BaselineComparison:
        """Add a pressed window; every ``record_steps`` of them are a sample.

        Another load makes the record of this level void, not the base, though it may be void too:
        whoever goes there for nothing has it anew.

        Args:
            base_records: samples after which the base is known.
        """
        sample = self.sample.merged(window)
        if sample.steps < record_steps:
            return replace(self, sample=sample)
        record = self.here if level else self.base
        worth = replace(self, sample=_NO_STEPS, num_unlike=0)
        if not record.is_like(sample):
            if not self.num_unlike:
                return replace(worth, num_unlike=1)
            record = Record(level=level)
            worth = replace(worth, is_evaluated=False) if level else worth
        record = record.with_sample(sample)
        if level:
            return replace(worth, here=record)
        return replace(worth, base=record, is_known=self.is_known or record.count >= base_records)

    def loss(self, min_records: int, same: float) -> float | None:
        """The share by which this level is slower than none; None if that is not known.

        It is after three samples if it is plain; with ``min_records`` of them the means decide.
        """
        base, here = self.base, self.here
        if self.is_evaluated or min(base.count, here.count) < 3:
            return None
        is_slower = here.count >= min_records and here.mean < base.mean
        if is_slower or here.is_worse_than(base, same):
            return 1.0 - math.exp(here.mean - base.mean)
        return None
