# SPDX-License-Identifier: Apache-2.0
"""Tests that measurements of links and GEMMs agree with known rates."""

import pytest
import torch

from tests.fixtures.probes import FakeClock
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.throttle import Throttle
from vllm_tiered.probe.links import (
    Sample,
    gemm_curve,
    link_curve,
    median_seconds,
    stored_reads,
)
from vllm_tiered.units import KIB, MIB

CPU = torch.device("cpu")


@pytest.mark.parametrize("direction", list(Direction))
def test_a_throttled_link_is_measured_at_its_limit(direction):
    """No transfer is faster. Other processes may make it slower, so take the best of a few."""
    device = CpuDevice(throttles={direction: Throttle(200e6, latency_seconds=0.002)})
    try:
        curves = [link_curve(device, direction, CPU, [64 * KIB, 4 * MIB]) for _ in range(3)]
    finally:
        device.close()
    for num_bytes, samples in zip((64 * KIB, 4 * MIB), zip(*curves, strict=True), strict=True):
        set_to = 0.002 + num_bytes / 200e6
        assert set_to <= min(sample.seconds for sample in samples) < 1.3 * set_to


def test_transfers_are_real():
    device = CpuDevice()
    try:
        (sample,) = link_curve(device, Direction.READ, CPU, [16 * MIB])
    finally:
        device.close()
    assert 0.2 < sample.gb_per_s < 1000


def test_reads_from_storage_are_as_long_as_the_device_takes(tmp_path):
    """The link of a device on the CPU limits its reads of files, too."""
    device = CpuDevice(throttles={Direction.READ: Throttle(200e6, latency_seconds=0.002)})
    try:
        tries = [
            stored_reads(device, tmp_path, CPU, [64 * KIB, 2 * MIB], knob="--path")
            for _ in range(3)
        ]
    finally:
        device.close()
    assert not list(tmp_path.iterdir())
    for num_bytes, samples in zip((64 * KIB, 2 * MIB), zip(*tries, strict=True), strict=True):
        assert {sample.num_bytes for sample in samples} == {num_bytes}
        assert min(sample.seconds for sample in samples) >= 0.002 + num_bytes / 200e6


def test_a_larger_product_takes_longer():
    small, large = gemm_curve([(256, 256), (2048, 2048)], 1, torch.float32, CPU)
    assert small.num_bytes == 4 * 256 * 256
    assert large.seconds > 3 * small.seconds


def test_a_median_is_not_moved_by_one_slow_run(monkeypatch):
    clock = FakeClock(monkeypatch)
    usual, slow = clock.call(0.002), clock.call(0.2)
    turns = iter(range(1 << 30))
    found = median_seconds(lambda turn: (slow if next(turns) == 20 else usual)(turn))
    assert found == pytest.approx(0.002)


def test_gb_are_decimal():
    assert Sample(2 * 10**9, 0.5).gb_per_s == 4.0
