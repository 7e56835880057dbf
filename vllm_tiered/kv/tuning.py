# SPDX-License-Identifier: Apache-2.0
"""The constants of the expansion controller, and why they are what they are."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Lengths in engine steps (10 to 60 ms each), and thresholds as shares.

    Attributes:
        ramp_steps: a window while the strides double; short, as a cold start wastes throughput.
        window_steps: a window otherwise: half a second, longer than a hiccup of the link.
        record_steps: a throughput sample: spans several prefills and ends of requests.
        min_records: samples of a level before their mean decides a comparison.
        max_stall: Pie's transparency: swapping adds less than 1 % to a step.
        heavy_stall: from here on the controller gives back as many layers as the link asks for, not
            one.
        mild_windows: stalled windows in a row before it gives one back: fewer are noise about 1 %.
        ramp_link: use of the link that doubling strides may lead to; far from 1, as a stride ahead
            the prediction is rough.
        max_link: use of the link that single layers may lead to; below 1, as steps vary.
        freer_link: a transfer this much shorter than when a level stalled lifts the ceiling.
        pressure: share of blocked steps from which a window counts as blocked.
        same: a throughput this close counts as equal.
        slack: growth asks for this share of the blocks in use at least, as running requests have
            only begun.
        headroom: spare blocks (share of the limit) left when the level falls: a little. Under
            pressure blocks in use are close to the limit by nature; and where nothing was blocked
            for long, growth went too far by up to its slack, and one layer more is soon back.
        patience: steps without a blocked one before the level falls, and before a ceiling is
            tried again (at first).
        trial_every: steps before a lower level is tried (at first); a trial costs some 500 steps.
        max_backoff: how far repeated failures stretch patience, ceilings and trials.
        base_records: samples under pressure before the first layer is offloaded, to compare others
            with; 0: none, as where transfers take next to nothing from compute.
        plain_loss: from here on all layers are given up at once, not half of them.
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
"""A level must hold the longest live request with this many blocks to spare."""

STORAGE_TUNING = Tuning(base_records=4)
"""For far pages on storage, which take CPU time and memory bandwidth even without a stall."""
