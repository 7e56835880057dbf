# SPDX-License-Identifier: Apache-2.0
"""Whether offloaded layers pay for what their copies take from compute.

Stall does not show it: pages on a disk cost CPU time and memory bandwidth even if compute never
waits for them. So the throughput without offloaded layers is recorded before the first one, and
compared with the throughput at each level that lasts.

Both come from *pressed* windows only: those in which requests were blocked or, with offloaded
layers, held more blocks than there would be without. Otherwise the end of a batch would count for
one side alone.
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
        base: without offloaded layers.
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

    def at_level(self, level_idx: int) -> BaselineComparison:
        """Return the comparison at another level.

        Levels within a factor of two count as the same: where nothing is blocked any more the
        level follows the load up and down a little.
        """
        if level_idx and level_idx / 2 <= self.here.level_idx <= 2 * level_idx:
            return self
        return replace(self.restarted(), here=Record(level_idx=level_idx))

    def restarted(self) -> BaselineComparison:
        """Return the comparison without the present level's record, however near the next is."""
        return replace(self, here=_NO_RECORD, is_evaluated=False, sample=_NO_STEPS, num_unlike=0)

    def with_window(
        self, window: Window, level_idx: int, record_steps: int, base_records: int
    ) -> BaselineComparison:
        """Add a pressed window; every ``record_steps`` steps are a sample.

        Another load voids the record of this level, not the base. The base may be outdated too, but
        it is recorded anew whenever the level is back at the base.

        Args:
            base_records: samples after which the base is known.
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
        """Return the share by which this level is slower than the base; None if that is unknown.

        Three samples suffice if the loss is plain; with ``min_records`` of them the means decide.
        """
        base, here = self.base, self.here
        if self.is_evaluated or min(base.count, here.count) < 3:
            return None
        is_slower = here.count >= min_records and here.mean < base.mean
        if is_slower or here.is_worse_than(base, same):
            return 1.0 - math.exp(here.mean - base.mean)
        return None
