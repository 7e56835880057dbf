# SPDX-License-Identifier: Apache-2.0
"""Tests of a small probe run: its results, its duration, and errors of the disk."""

import dataclasses
import json
import math
import os
import random

import pytest
import torch

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fixtures.probes import TINY, FakeClock
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.throttle import Throttle
from vllm_tiered.errors import BudgetError, ConfigError
from vllm_tiered.planner.from_probe import machine_from_probe, read_probe_file
from vllm_tiered.probe import run as run_module
from vllm_tiered.probe.contention import measure_contention, pages_of
from vllm_tiered.probe.disk import Pattern, storage_curves
from vllm_tiered.probe.gemm import TORCH, far_gemm, near_gemm
from vllm_tiered.probe.links import (
    PAGE_BYTES,
    Sample,
    host_read,
    link_curve,
    median_seconds,
    stored_file,
)
from vllm_tiered.probe.run import Matrices, Scope, run_probe
from vllm_tiered.units import KIB, MIB

CPU = torch.device("cpu")


@pytest.fixture
def device():
    device = CpuDevice()
    yield device
    device.close()


def test_everything_is_measured_and_makes_a_machine(device, tmp_path):
    steps: list[str] = []
    ffn = Matrices(name="ffn", shapes=[(128, 64), (64, 128)])
    probe = run_probe(device, CPU, TINY, folder=tmp_path, sublayers=[ffn], step=steps.append)
    probe = json.loads(json.dumps(probe, allow_nan=False))
    assert [entry["num_bytes"] for entry in probe["links"]["read"]] == list(TINY.transfer_bytes)
    assert len(probe["gemms"]["far"]) == len(TINY.rows) * len(TINY.gemm_shapes)
    assert len(probe["storage"]["reads"]) == 2 * 2 * 2
    assert [read["num_bytes"] for read in probe["storage"]["weight_reads"]] == [64 * KIB, MIB]
    assert [entry["rows"] for entry in probe["sublayers"]] == [1, 4]
    assert len(steps) == 8
    assert probe["gemms_of"] == TORCH.source and probe["step_costs"] is None
    assert probe["gemms"].keys() == {"near", "far"}
    machine, figures = machine_from_probe(probe)
    (tmp_path / "probe.json").write_text(json.dumps(probe))
    assert read_probe_file(tmp_path / "probe.json")[0] == machine
    (tmp_path / "probe.json").unlink()
    assert machine.curves is not None and machine.curves.storage_slowdown is not None
    assert all(math.isfinite(float(str(figure["value"]))) for figure in figures.values())
    assert os.listdir(tmp_path) == []


def test_transfers_go_through_a_gpus_own_copies():
    """Its near memory is simulated: this shows the calls, and no figure of a GPU."""
    device = SimulatedCudaDevice(random.Random(3), haste=1.0, num_ids=4096)
    try:
        for direction in Direction:
            curve = link_curve(device, direction, CPU, TINY.transfer_bytes, seconds=0.01)
            assert [sample.num_bytes for sample in curve] == list(TINY.transfer_bytes)
    finally:
        device.close()


def test_a_read_by_the_host_is_of_half_of_the_buffer(monkeypatch):
    clock, sums = FakeClock(monkeypatch), []

    def add_up(values):
        sums.append(values.nbytes)
        clock.now += 1e-3

    monkeypatch.setattr(torch, "sum", add_up)
    read = host_read(MIB, seconds=0.01)
    assert read.num_bytes == MIB // 2 and {*sums} == {MIB // 2}
    assert read.seconds == pytest.approx(1e-3)


def test_without_a_folder_storage_is_left_out(device):
    assert run_probe(device, CPU, TINY)["storage"] is None


def test_the_default_scope_is_planned_to_take_less_than_a_minute():
    scope = Scope()
    points = (
        len(Direction) * len(scope.transfer_bytes)
        + 2 * len(scope.rows) * len(scope.gemm_shapes)
        + 2 * len(scope.request_bytes) * len(scope.readers)
    )
    # Each point's preparation takes about as long as the point; a model's sublayers, GEMMs in
    # 4 bit and a small engine are extra.
    assert 2 * (points * scope.point_seconds + scope.contention_seconds) < 60


def test_a_point_takes_its_time_and_no_more(monkeypatch):
    """A slow call runs three times: as a warm-up, to determine the count, and as a sample."""
    clock = FakeClock(monkeypatch)
    assert median_seconds(clock.call(0.05), seconds=0.01) == pytest.approx(0.05)
    assert clock.now == pytest.approx(3 * 0.05)
    clock.now = 0.0
    median_seconds(clock.call(1e-4), seconds=0.05)
    assert 0.04 < clock.now < 6 * 0.05


def test_reads_of_a_file_are_what_compute_contends_with(device, tmp_path):
    shape = (256, 256)
    with stored_file(tmp_path, 4 * pages_of(shape, torch.float32), knob="--path") as file:
        found = measure_contention(
            device, CPU, shape, torch.float32, seconds=0.2, source=file.buffer()
        )
        # Twice in each of five repeats, at least six reads of a weight.
        assert file._reader.stats.num_bytes >= 60 * 4 * 256 * 256
    assert found.compute_slowdown >= 1 and found.link_slowdown >= 1


@pytest.mark.parametrize(("gb_per_s", "rows"), [(20.0, 4096), (1.0, 2048), (0.001, 8)])
def test_a_slow_disk_reads_less_while_compute_runs(gb_per_s, rows):
    sample = Sample(64 * MIB, 64 * MIB / gb_per_s / 1e9)
    shape = run_module._read_shape(Scope(), sample)
    assert shape == (rows, 4096)
    assert rows * 4096 * 2 % PAGE_BYTES == 0


def test_a_link_without_contention_is_as_fast_during_compute():
    device = CpuDevice(throttles={Direction.READ: Throttle(100e6)})
    try:
        # Other processes can only make it slower, so take the best of a few.
        found = [
            measure_contention(device, CPU, (256, 256), torch.float32, seconds=0.5)
            for _ in range(3)
        ]
    finally:
        device.close()
    assert 1 <= min(each.link_slowdown for each in found) < 2
    assert min(each.compute_slowdown for each in found) >= 1


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("gemm_of", [near_gemm, far_gemm])
def test_gemms_multiply(gemm_of, rows):
    weight, x = torch.randn(128, 64), torch.randn(rows, 64)
    torch.testing.assert_close(gemm_of(weight)(x), x @ weight.t())


def test_storage_reads_all_ways_and_leaves_nothing(tmp_path):
    curves = storage_curves(tmp_path, [4 * KIB, MIB], [1, 4], file_bytes=8 * MIB, seconds=0.01)
    assert {(read.pattern, read.request_bytes, read.readers) for read in curves.reads} == {
        (pattern, size, readers)
        for pattern in Pattern
        for size in (4 * KIB, MIB)
        for readers in (1, 4)
    }
    for read in curves.reads:
        in_flight = read.gb_per_s * 1e9 * read.latency_s / read.request_bytes
        assert in_flight == pytest.approx(read.readers)
    assert curves.write_gb_per_s > 0
    assert os.listdir(tmp_path) == []


def test_the_error_of_a_full_disk_has_its_numbers(device, tmp_path):
    scope = dataclasses.replace(TINY, file_bytes=1 << 60)
    with pytest.raises(BudgetError, match=r"file takes 1048576.00 TiB in .* are free.*--path"):
        run_probe(device, CPU, scope, folder=tmp_path)


def test_a_path_that_is_no_folder_is_reported(device, tmp_path):
    with pytest.raises(ConfigError, match=r"no file can be made in .*--path"):
        run_probe(device, CPU, TINY, folder=tmp_path / "absent")


def test_an_error_of_the_disk_is_reported(monkeypatch, tmp_path):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ConfigError, match="failed while it was measured: Input/output error"):
        storage_curves(tmp_path, [4 * KIB], [2], file_bytes=4 * MIB, seconds=0.01)
