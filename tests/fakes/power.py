# SPDX-License-Identifier: Apache-2.0
"""Clock and power meter that tests control."""

import pytest

from vllm_tiered.energy.power import open_meter

DRAM = 26 / 256


GB = 10**9


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def meter_of(clock, powercap, *, ssd=2.0, held=64 * GB, **arguments):
    return open_meter(
        dram_watts_per_gb=DRAM,
        ssd_watts=lambda: ssd,
        powercap=powercap,
        resident_bytes=lambda: held,
        clock=clock,
        **arguments,
    )
