# SPDX-License-Identifier: Apache-2.0
"""What is measured is what the links were made to be."""

import pytest
import torch

from vllm_tiered.tiers.base import Direction
from vllm_tiered.tiers.cpu import CpuDevice
from vllm_tiered.tiers.probe import Sample, link_curve, median_seconds, product_curve
from vllm_tiered.tiers.throttle import Throttle
from vllm_tiered.units import KIB, MIB

CPU = torch.device("cpu")


@pytest.mark.parametrize("direction", list(Direction))
def test_a_throttled_link_is_measured_as_what_it_was_set_to(direction):
    device = CpuDevice(throttles={direction: Throttle(200e6, latency_seconds=0.002)})
    try:
        small, large = link_curve(device, direction, CPU, [64 * KIB, 4 * MIB])
    finally:
        device.close()
    assert small.seconds == pytest.approx(0.002 + 64 * KIB / 200e6, rel=0.5)
    assert large.gb_per_s == pytest.approx(0.2 * 4 * MIB / (4 * MIB + 0.4e6), rel=0.2)


def test_transfers_are_real():
    device = CpuDevice()
    try:
        (sample,) = link_curve(device, Direction.READ, CPU, [16 * MIB])
    finally:
        device.close()
    assert 0.2 < sample.gb_per_s < 1000


def test_a_larger_product_takes_longer():
    small, large = product_curve([(256, 256), (2048, 2048)], 1, torch.float32, CPU)
    assert small.num_bytes == 4 * 256 * 256
    assert large.seconds > 3 * small.seconds


def test_a_median_is_not_moved_by_one_slow_run():
    import time

    calls = []

    def run(turn):
        calls.append(turn)
        time.sleep(0.2 if len(calls) == 20 else 0.002)

    assert median_seconds(run) < 0.01


def test_gb_are_decimal():
    assert Sample(2 * 10**9, 0.5).gb_per_s == 4.0
