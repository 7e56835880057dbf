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

from vllm_tiered.kv.load import Record, Window

_NO_STEPS = Window()
_NO_RECORD = Record()


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """Throughput at the lowest level that was seen under pressure, and at the present one.

    Attributes:
        base: of the lowest level.
        here: of the present level and its neighbours, if it is a higher one.
        sample: the windows of the next sample.
        num_unlike: samples of another load in a row.
    """

    base: Record = _NO_RECORD
    here: Record = _NO_RECORD
    sample: Window = _NO_STEPS
    num_unlike: int = 0

    def is_base(self, level: int) -> bool:
        """Whether samples at this level are what others are compared with."""
        return not self.base.count or level <= self.base.level

    def at(self, level: int) -> Worth:
        """From now on the level is this one. Levels within a factor of two count as the same:
        where nothing is blocked any more the level follows the load up and down a little."""
        if level and not self.is_base(level) and level / 2 <= self.here.level <= 2 * level:
            return self
        return replace(self, here=Record(level=level), sample=_NO_STEPS, num_unlike=0)

    def judged(self) -> Worth:
        """The level is left: what follows is another record, however near it is."""
        return replace(self, here=_NO_RECORD, sample=_NO_STEPS, num_unlike=0)

    def with_window(self, window: Window, level: int, record_steps: int) -> Worth:
        """Add a pressed window; every ``record_steps`` of them are a sample.

        Another load makes the record of this level void, not that of the lowest, though it may be
        too: whoever goes there for nothing has it anew.
        """
        sample = self.sample.merged(window)
        if sample.steps < record_steps:
            return replace(self, sample=sample)
        is_base = self.is_base(level)
        record = self.base if is_base else self.here
        if is_base and level != record.level:
            record = Record(level=level)
        if not record.is_like(sample):
            if not self.num_unlike:
                return replace(self, sample=_NO_STEPS, num_unlike=1)
            record = Record(level=level)
        record = record.with_sample(sample)
        worth = replace(self, sample=_NO_STEPS, num_unlike=0)
        return replace(worth, base=record) if is_base else replace(worth, here=record)

    def loss(self, min_records: int, same: float) -> float | None:
        """The share by which this level is slower than the lowest; None if that is not known.

        It is after three samples if it is plain; with ``min_records`` of them the means decide.
        """
        base, here = self.base, self.here
        if not base.count or not 3 <= here.count <= min_records:
            return None
        is_slower = here.count == min_records and here.mean < base.mean
        if is_slower or here.is_worse_than(base, same):
            return 1.0 - math.exp(here.mean - base.mean)
        return None
