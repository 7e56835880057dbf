# SPDX-License-Identifier: Apache-2.0
"""A probe's file of a machine with round numbers, a scope that is measured in a second, and a clock
that stands still between calls."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_tiered.probe import links as probe
from vllm_tiered.probe.survey import Scope
from vllm_tiered.units import KIB, MIB

TINY = Scope(
    transfer_bytes=(64 * KIB, 256 * KIB),
    product_shapes=((64, 64), (128, 128)),
    rows=(1, 4),
    dtype=torch.float32,
    beside_shape=(128, 128),
    request_bytes=(4 * KIB, 64 * KIB),
    readers=(1, 2),
    file_bytes=4 * MIB,
    point_seconds=0.005,
    beside_seconds=0.1,
)


class FakeClock:
    """What probes measure by: no other process can make a call slower.

    Attributes:
        now: seconds.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def call(self, seconds: float) -> Callable[[int], None]:
        """A call that takes so long."""

        def run(turn: int) -> None:
            self.now += seconds

        return run


def sample_probe() -> dict[str, Any]:
    """Links of 5 GB/s, products at 10 GB/s in one row, at 4 in 64."""
    sizes = (1_000_000, 10_000_000)
    products = [
        {"rows": rows, "num_bytes": size, "seconds": size / rate}
        for rows, rate in ((1, 10e9), (64, 4e9))
        for size in sizes
    ]
    link = [{"num_bytes": size, "seconds": size / 5e9} for size in (1000, *sizes)]
    return {
        "format": "vllm-tiered probe",
        "version": 1,
        "date": "2026-11-22T00:00:00+00:00",
        "machine": {"name": "abacus", "device": "cpu", "cores": 2, "threads": 1, "torch": "2"},
        "dtype": "bfloat16",
        "links": {"read": link, "write": [dict(sample) for sample in link]},
        "products": {
            "near": products,
            "far": [{**entry, "seconds": 2 * entry["seconds"]} for entry in products],
        },
        "beside": {"compute_slowdown": 1.25, "link_slowdown": 1.5},
        "call_seconds": 2e-6,
        "storage": None,
        "sublayers": [],
        "seconds": 1.0,
        "foreign_cpu_share": 0.0,
    }
