# SPDX-License-Identifier: Apache-2.0
"""Constants of the expansion controller, and the reasons for their values."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Constants of the controller: lengths in engine steps (10 to 60 ms each), limits as shares.

    Attributes:
        ramp_steps: steps of a window while the strides double; few, as a cold start wastes
            throughput.
        window_steps: steps of any other window: half a second, longer than a hiccup of the link.
        record_steps: steps of a throughput sample; it spans several prefills and ends of requests.
        min_records: samples of a level before their mean decides a comparison.
        max_stall: the largest share of stall; Pie calls swapping transparent below 1 % of a step.
        heavy_stall: from this share of stall on, the controller gives up as many layers as the link
            requires; below it, one layer.
        mild_windows: stalled windows in a row before the controller gives up a layer; a shorter
            series is noise around 1 %.
        ramp_link: the highest predicted use of the link while strides double; far below 1, as the
            prediction is rough over a long stride.
        max_link: the highest predicted use of the link for single-layer steps; below 1, as engine
            steps vary.
        freer_link: the ceiling is lifted when a transfer takes at most this share of its time at
            the stall.
        pressure: a window counts as blocked from this share of blocked steps on.
        same: throughputs that differ by at most this share count as equal.
        slack: growth asks for at least this share of the used blocks in addition, as running
            requests have only begun.
        headroom: share of the limit that stays free when the level falls. It is small: under
            pressure the used blocks are always close to the limit. And where nothing was blocked
            for long, growth overshot by its slack at most, and one layer is quickly added again.
        patience: steps without a blocked one before the level falls, and steps before a ceiling is
            tried again (both at first).
        trial_every: steps before a lower level is tried (at first); a trial costs some 500 steps.
        max_backoff: the largest factor by which repeated failures stretch patience, ceilings and
            trials.
        base_records: samples under pressure that are taken before the first layer is offloaded, as
            a baseline; 0 takes none, for transfers that cost compute almost nothing.
        plain_loss: from this loss on, all layers are given up at once; below it half of them, which
            may gain where copies compete with each other.
    """

    ramp_steps: int = 8
    window_steps: int = 16
    record_steps: int = 64
    min_records: int = 8
    max_stall: float = 0.01
    heavy_stall: float = 0.05
    mild_windows: int = 6
    ramp_link: float = 0.75
    max_link: float = 0.9
    freer_link: float = 0.75
    pressure: float = 0.25
    same: float = 0.01
    slack: float = 0.2
    headroom: float = 0.02
    patience: int = 512
    trial_every: int = 4096
    max_backoff: int = 64
    base_records: int = 0
    plain_loss: float = 0.1


DEFAULT_TUNING = Tuning()

BLOCKS_TO_GROW = 4
"""Number of spare blocks that a level must have beyond the longest live request."""

STORAGE_TUNING = Tuning(base_records=4)
"""Tuning for far pages on storage, which cost CPU time and memory bandwidth even without stall."""

NEAR_TUNING = replace(STORAGE_TUNING, plain_loss=0.0)
"""Tuning for models much of whose KV cache stays near, so that offloaded layers gain less."""
