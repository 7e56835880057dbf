# SPDX-License-Identifier: Apache-2.0
"""Hits over slots, and the bytes that a step then has to load: what a plan needs of a mixture.

A curve says where it comes from. Nothing is known of a model that has never run, so a plan for it
*assumes* uniform routing, which no cache can beat or miss by much: its hits are its share of slots.
A trace that was *recorded* and replayed, or a running engine that *measured*, knows better.
"""

import itertools
from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

Source = Literal["assumed", "recorded", "measured"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HitCurve:
    """Share of the wanted experts that are in slots, by the share of experts that have slots.

    Attributes:
        source: where it comes from.
        about: what was assumed, recorded or measured, for messages.
        points: pairs of both shares, ascending; (0, 0) and (1, 1) are understood.
    """

    source: Source
    about: str
    points: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        flat = [(0.0, 0.0), *self.points, (1.0, 1.0)]
        if any(a[0] > b[0] or a[1] > b[1] for a, b in itertools.pairwise(flat)):
            raise ValueError(f"shares and hits must ascend from 0 to 1: {self.points}")

    def hit_ratio(self, share: float) -> float:
        """Return the hit ratio with slots for a share of the experts, linear between points."""
        if share >= 1:
            return 1.0
        points = [(0.0, 0.0), *self.points, (1.0, 1.0)]
        at = max(1, bisect_left([x for x, _ in points], share))
        (x0, y0), (x1, y1) = points[at - 1], points[at]
        return y0 if x1 == x0 else y0 + (y1 - y0) * (share - x0) / (x1 - x0)


UNIFORM = HitCurve(source="assumed", about="uniform routing, without locality")


def measured(slots: int, num_experts: int, hits: float, misses: float) -> HitCurve:
    """Return the curve through what an engine counted with its slots."""
    return HitCurve(
        source="measured",
        about=f"{hits + misses:.0f} experts wanted with {slots} of {num_experts} slots",
        points=((slots / num_experts, hits / (hits + misses)),),
    )


def wanted_experts(num_experts: int, top_k: int, batch_size: int) -> float:
    """Return how many experts of a layer a step of ``batch_size`` tokens wants, if uniform."""
    return num_experts * (1 - (1 - top_k / num_experts) ** batch_size)


def loaded_bytes(
    curve: HitCurve,
    *,
    slots: int,
    num_experts: int,
    top_k: int,
    batch_size: int,
    num_layers: int,
    bundle_bytes: int,
) -> float:
    """Return the bytes of experts that a decode step loads in all layers.

    Args:
        curve: hits over slots.
        slots: slots of a layer.
        bundle_bytes: bytes of an expert (:class:`~vllm_tiered.experts.layout.ExpertBundle`).
    """
    missing = 1 - curve.hit_ratio(slots / num_experts)
    return wanted_experts(num_experts, top_k, batch_size) * missing * num_layers * bundle_bytes
