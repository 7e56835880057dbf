# SPDX-License-Identifier: Apache-2.0
"""What a machine was measured to do, where one bandwidth and one throughput say too little."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """Seconds of a product by the weight's bytes and the rows that it is multiplied with.

    Attributes:
        rows: that were measured, rising.
        by_rows: for each of them (bytes, seconds) of each weight, by rising bytes.
    """

    rows: tuple[int, ...]
    by_rows: tuple[tuple[tuple[int, float], ...], ...]

    @classmethod
    def of(cls, seconds: Mapping[tuple[int, int], float]) -> GemmCurve:
        """From the seconds by (rows, bytes)."""
        rows = tuple(sorted({rows for rows, _ in seconds}))
        by_rows = tuple(
            tuple(sorted((size, value) for (at, size), value in seconds.items() if at == number))
            for number in rows
        )
        return cls(rows, by_rows)

    @property
    def points(self) -> dict[tuple[int, int], float]:
        """What was measured: seconds by (rows, bytes), in the order of both."""
        return {
            (rows, num_bytes): seconds
            for rows, points in zip(self.rows, self.by_rows, strict=True)
            for num_bytes, seconds in points
        }

    def seconds(self, num_bytes: int, rows: int) -> float:
        """Between what was measured, linear; beyond it, in proportion; nothing takes no time."""
        if not num_bytes:
            return 0.0
        times = [_at(curve, num_bytes) for curve in self.by_rows]
        if rows > self.rows[-1]:
            return times[-1] * rows / self.rows[-1]
        return float(np.interp(rows, self.rows, times))


def _at(curve: tuple[tuple[int, float], ...], num_bytes: int) -> float:
    largest, seconds = curve[-1]
    if num_bytes > largest:
        return seconds * num_bytes / largest
    sizes, times = zip((0, 0.0), *curve, strict=True)
    return float(np.interp(num_bytes, sizes, times))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCurves:
    """Measured beside the figures of a machine.

    Attributes:
        near, far: products with weights that stay near, and that pass through a staging slot.
        compute_slowdown, link_slowdown: how much longer compute and a transfer take while both run.
        layer_overhead_us: of a step for each layer: its calls, apart from its products.
        compressed: products with weights in 4 bit, by the bytes that they have in 16; None where
            they were not measured, and are taken to be as long as in 16 bit.
    """

    near: GemmCurve
    far: GemmCurve
    compute_slowdown: float
    link_slowdown: float
    layer_overhead_us: float
    compressed: GemmCurve | None = None

    def near_bytes_per_copied_byte(self, near_gb_per_s: float, read_gb_per_s: float) -> float:
        """What compute lacks of near memory's traffic while a byte is copied: what it would have
        read in the time that it loses. Both rates are those without the other."""
        lost = (1 - 1 / self.compute_slowdown) * near_gb_per_s
        return lost * self.link_slowdown / read_gb_per_s
