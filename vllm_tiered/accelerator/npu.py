# SPDX-License-Identifier: Apache-2.0
"""Predictions for table 1, the paper's measurements of an Ascend 910B.

There are two models of the device. `ASCEND_910B` has only the paper's figures. `ASCEND_910B_FITTED`
adds overheads of its kernels, fitted to the six times of Llama3-8B in table 1. With these only the
other fifteen rows are predictions. The predictions for Phi3-small are weak, because its layers are
those of Llama3-8B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_tiered.accelerator.chip import Chip, Overheads
from vllm_tiered.accelerator.decoders import DECODERS
from vllm_tiered.accelerator.step import Load, request_s
from vllm_tiered.units import MIB

ASCEND_910B = Chip(l2_bytes=192 * MIB, hbm_bytes_per_s=1.6e12)
"""Section 4: 192 MB of L2, 800 TOPS, 1.6 TB/s, 64 GB. It gives no figures for the link (HCCS, full
mesh) and for the L2 bus, so table 2's are used."""

ASCEND_910B_FITTED = replace(
    ASCEND_910B,
    overheads=Overheads(
        layer_s=204.8e-6,
        core_bytes_per_s=0.8275e12,
        strided_s_per_token=22.22e-9,
        strided_l2_share=0.3117,
    ),
)
"""Least-squares fit to the logarithms of Llama3-8B's times on 2, 4 and 8 devices."""

FITTED_ON = "Llama3-8B"

LOAD = Load(batch=4, context_tokens=16384)

TABLE_1: Mapping[str, Mapping[int, tuple[float, float]]] = {
    "Llama3-8B": {2: (148.8, 111.3), 4: (128.2, 80.6), 8: (60.3, 54.5)},
    "Llama3-70B": {2: (596.0, 515.8), 4: (501.5, 368.7), 8: (233.8, 211.1)},
    "Qwen2-7B": {2: (130.9, 111.6), 4: (68.8, 63.0), 8: (57.6, 52.7)},
    "Qwen2-72B": {2: (700.0, 616.2), 4: (593.6, 438.4), 8: (402.8, 342.4)},
    "Phi3-small": {2: (147.8, 110.0), 4: (128.4, 79.9), 8: (59.2, 54.2)},
    "Phi3-medium": {2: (192.8, 157.3), 4: (171.8, 119.9), 8: (89.3, 80.4)},
}
"""Seconds without and with prefetch, by model and number of NPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Row of table 1 with the model's prediction; times in seconds."""

    model: str
    num_devices: int
    paper_without_s: float
    paper_with_s: float
    without_s: float
    with_s: float

    @property
    def paper_speedup(self) -> float:
        return self.paper_without_s / self.paper_with_s

    @property
    def speedup(self) -> float:
        return self.without_s / self.with_s

    @property
    def error(self) -> float:
        """Relative error of the speedup."""
        return self.speedup / self.paper_speedup - 1


def table_1(chip: Chip) -> list[Row]:
    """Return all rows of table 1 with the predictions for `chip`."""
    return [
        Row(
            model=name,
            num_devices=num_devices,
            paper_without_s=without_s,
            paper_with_s=with_s,
            without_s=request_s(chip, DECODERS[name], num_devices, LOAD, prefetch=False),
            with_s=request_s(chip, DECODERS[name], num_devices, LOAD, prefetch=True),
        )
        for name, rows in TABLE_1.items()
        for num_devices, (without_s, with_s) in rows.items()
    ]


def mean_error(rows: Sequence[Row], *, without: str | None = None) -> float:
    """Return the mean absolute error of the speedups, without the model `without`."""
    errors = [abs(row.error) for row in rows if row.model != without]
    return sum(errors) / len(errors)


def constant_error(rows: Sequence[Row]) -> float:
    """Return the baseline error: that of predicting the mean speedup for every row."""
    papers = [row.paper_speedup for row in rows]
    mean = sum(papers) / len(papers)
    return sum(abs(mean / paper - 1) for paper in papers) / len(papers)
