# SPDX-License-Identifier: Apache-2.0
"""Tests of the power meter: joules of steps by part, their origin, and lost counters."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.power import DRAM, GB, Clock, meter_of
from tests.fakes.power import clock as clock
from tests.fixtures.powercap import SERVER, Powercap
from vllm_tiered.energy.power import IDLE_SECONDS, Constant, Known, Nvml, PowerMeter, open_meter


class DescribedNvml:
    """Fake of the parts of `pynvml` that we use: two devices with 300 J and 500 J so far."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.mj = {"GPU-a": 300_000, "GPU-b": 500_000}
        self.is_started = self.fails = False

    def nvmlInit(self):
        self.is_started = True

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert self.is_started
        if uuid not in self.mj:
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.fails:
            raise self.NVMLError("GPU is lost")
        return self.mj[handle]


@pytest.fixture
def host(tmp_path):
    return Powercap(tmp_path, SERVER)


def step(meter, clock, seconds):
    """Run a step of ``seconds`` and return the meter's result."""
    meter.begin_step()
    clock.now += seconds
    return meter.end_step()


def test_measured_where_counters_can_be_read(clock, host):
    nvml = DescribedNvml()
    meter = meter_of(clock, host.root, nvml=nvml, gpu_uuids=["GPU-a", "GPU-b"])
    assert meter.reasons == {}
    assert meter.labels == {
        "cpu": Known.RAPL,
        "dram": Known.RAPL,
        "gpu": Known.NVML,
        "ssd": Known.CONSTANTS,
    }
    meter.begin_step()
    for folder, joules in zip(SERVER, (100, 5, 60, 3), strict=True):
        host.draw(folder, joules)
    nvml.mj["GPU-b"] += 700_000
    clock.now += 2.0
    drawn = meter.end_step()
    assert drawn.joules == pytest.approx({"cpu": 160, "dram": 8, "gpu": 700, "ssd": 4})
    assert drawn.total == pytest.approx(872)
    assert drawn.assumed_joules == pytest.approx(4)


def test_constants_where_nothing_can_be_read(clock, tmp_path):
    """Constants are the paper's: 26 W for 256 GB, 2 W for the disk, none for the processor."""
    meter = meter_of(clock, tmp_path / "none")
    assert meter.labels == {"dram": Known.CONSTANTS, "ssd": Known.CONSTANTS}
    assert meter.reasons == {"cpu": f"no RAPL in {tmp_path / 'none'}"}
    drawn = step(meter, clock, 10.0)
    assert drawn.joules == pytest.approx({"dram": 6.5 * 10, "ssd": 20})
    assert drawn.assumed_joules == drawn.total


def test_a_disk_that_is_not_used_draws_nothing_of_ours(clock, tmp_path):
    assert step(meter_of(clock, tmp_path, ssd=0.0), clock, 10.0).joules["ssd"] == 0


def test_shared_parts_of_ranks_are_counted_once(clock, host, tmp_path):
    """A host's second rank counts its own GPU, and its own memory if memory is not measured."""
    nvml = DescribedNvml()
    gpu = {"nvml": nvml, "gpu_uuids": ["GPU-a"]}
    assert set(meter_of(clock, host.root, is_first=False, **gpu).labels) == {"gpu"}
    unmeasured = meter_of(clock, tmp_path / "none", is_first=False, **gpu)
    assert set(unmeasured.labels) == {"dram", "gpu"}


def test_idle_time_is_left_out(clock, host):
    meter = meter_of(clock, host.root)
    host.draw("intel-rapl:0", 1000)  # before the first step
    clock.now += 60
    meter.begin_step()
    host.draw("intel-rapl:0", 50)
    clock.now += 1.0
    assert meter.end_step().joules["cpu"] == pytest.approx(50)
    host.draw("intel-rapl:0", 5000)  # idle
    clock.now += 100
    meter.begin_step()
    host.draw("intel-rapl:0", 70)
    clock.now += 1.0
    drawn = meter.end_step()
    assert drawn.joules == pytest.approx({"cpu": 70, "dram": 0, "ssd": 2})
    assert drawn.assumed_joules == pytest.approx(2)


def test_a_counter_not_read_before_a_pause_gets_its_share_of_the_time(clock, tmp_path):
    """The last step ends 50 ms after a reading, too early for another; then a pause follows."""
    meter = meter_of(clock, tmp_path, held=0)
    step(meter, clock, 1.0)
    assert step(meter, clock, 0.05) is None
    clock.now += 9.95
    assert step(meter, clock, 1.0).joules["ssd"] == pytest.approx(2 * 1.05)


def test_short_steps_share_a_reading(clock, tmp_path):
    meter = meter_of(clock, tmp_path, held=0)
    found = [step(meter, clock, 0.03) for _ in range(40)]
    read = [drawn for drawn in found if drawn]
    assert 8 <= len(read) <= 12
    assert sum(drawn.total for drawn in read) == pytest.approx(2 * 1.2, rel=0.1)


@given(
    st.lists(st.tuples(st.floats(0.001, 30), st.floats(0, 60)), min_size=1, max_size=40),
    st.floats(0, 500),
)
def test_a_steady_draw_is_counted_for_the_time_of_steps(steps, watts):
    """For any steps and pauses, the energy is watts times the time of steps and short pauses."""
    clock = Clock()
    meter = PowerMeter({"x": Constant(lambda: watts, clock)}, clock=clock)
    total = counted = 0.0
    for seconds, pause in steps:
        drawn = step(meter, clock, seconds)
        counted += seconds
        total += drawn.total if drawn else 0.0
        clock.now += pause
        counted += pause if pause <= IDLE_SECONDS else 0.0
    last = step(meter, clock, 0.2)
    assert last is not None
    assert total + last.total == pytest.approx(watts * (counted + 0.2), rel=1e-6, abs=1e-6)


def test_a_counter_that_goes_away_leaves_constants_and_one_line(clock, host, caplog):
    meter = meter_of(clock, host.root)
    step(meter, clock, 1.0)
    for folder in SERVER:
        (host.root / folder / "energy_uj").unlink()
    with caplog.at_level(logging.WARNING, "vllm.tiered"):
        logging.getLogger("vllm.tiered").addHandler(caplog.handler)
        try:
            later = [step(meter, clock, 1.0) for _ in range(3)]
        finally:
            logging.getLogger("vllm.tiered").removeHandler(caplog.handler)
    assert meter.labels == {"dram": Known.CONSTANTS, "ssd": Known.CONSTANTS}
    assert later[0].joules == pytest.approx({"ssd": 2})
    assert later[1].joules == pytest.approx({"ssd": 2, "dram": 6.5})
    assert later[1].assumed_joules == later[1].total
    lines = {record.getMessage() for record in caplog.records}
    assert len(lines) == 2
    assert any("dram can no longer be measured" in line and "assumed" in line for line in lines)
    assert any("cpu can no longer" in line and "not counted from now on" in line for line in lines)


def test_a_gpu_that_does_not_count_is_not_counted(clock, host):
    meter = meter_of(clock, host.root, nvml=DescribedNvml(), gpu_uuids=["MIG-x"])
    assert "gpu" not in meter.labels
    assert meter.reasons == {"gpu": "NVML: Not Found"}


def test_a_gpu_that_is_lost_is_an_oserror():
    nvml = DescribedNvml()
    source = Nvml(nvml, ["GPU-a"])
    nvml.fails = True
    with pytest.raises(OSError, match="NVML: GPU is lost"):
        source.read_joules()


def test_constants_count_only_our_own_memory(clock, tmp_path):
    meter = open_meter(
        dram_watts_per_gb=DRAM, ssd_watts=lambda: 0.0, powercap=tmp_path, clock=clock
    )
    before = step(meter, clock, 1.0).joules["dram"]
    held = np.ones(400 * 10**6, dtype=np.uint8)
    after = step(meter, clock, 1.0).joules["dram"]
    assert before > 0
    assert after - before == pytest.approx(DRAM * held.nbytes / GB, rel=0.1)
