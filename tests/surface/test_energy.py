# SPDX-License-Identifier: Apache-2.0
"""Energy in metrics, report and log: units, sums and labels."""

import pytest

from tests.fakes.power import Clock, meter_of
from tests.fixtures.powercap import SERVER, Powercap
from vllm_tiered.adapter.kv.steps import StepReport
from vllm_tiered.adapter.telemetry import energy
from vllm_tiered.adapter.telemetry.energy import EngineEnergy
from vllm_tiered.adapter.telemetry.figures import COUNTERS
from vllm_tiered.adapter.telemetry.metrics import TieredStats
from vllm_tiered.config.report import ReportConfig


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def host(tmp_path):
    return Powercap(tmp_path, SERVER)


def test_a_kilowatt_hour_is_the_grids_grams(clock, host):
    counted = EngineEnergy(meter_of(clock, host.root, ssd=0.0), 820.0, log=False)
    counted.begin_step()
    assert counted.drain_metrics() == {}  # no time has passed
    for _ in range(36):
        host.draw("intel-rapl:0", 100_000)
        clock.now += 1000
        use = counted.drain_metrics()
    assert use == pytest.approx(
        {"energy_joules": 1e5, "energy_assumed_joules": 0, "co2e_grams": 820 / 36}
    )
    assert use.keys() <= COUNTERS.keys()
    assert counted.drain_for_report() == pytest.approx((3.6e6, 0.0))
    assert counted.drain_for_report() == (0.0, 0.0)


def test_a_machines_making_is_spread_over_its_life(clock, host):
    """Pauses between steps are not counted, as for energy."""
    report = ReportConfig(embodied_kg=1000.0, lifetime_years=4.0)
    rate = 1e6 / (4 * 365.25 * 86400)
    assert energy.embodied_rate(report) == pytest.approx(rate)
    counted = EngineEnergy(meter_of(clock, host.root, ssd=0.0), 820.0, embodied=rate, log=False)
    for pause in (0.0, 500.0):
        clock.now += pause
        counted.begin_step()
        clock.now += 10
        assert counted.drain_metrics()["embodied_co2e_grams"] == pytest.approx(10 * rate)
    assert counted.total_metrics()["embodied_co2e_grams"] == pytest.approx(20 * rate)


def test_ranks_and_steps_add_up():
    ranks = [TieredStats(data={"energy_joules": 5.0, "co2e_grams": 0.1}) for _ in range(2)]
    assert ranks[0].aggregate(ranks[1]).data == {"energy_joules": 10.0, "co2e_grams": 0.2}
    report = StepReport(joules=3.0, assumed_joules=1.0)
    for both in (report.aggregate(report), report.followed_by(report)):
        assert (both.joules, both.assumed_joules) == (6.0, 2.0)


def test_the_log_line_says_how_each_part_is_known(clock, host, tmp_path, caplog_vllm):
    EngineEnergy(meter_of(clock, host.root), 400.0, log=True)
    EngineEnergy(meter_of(clock, tmp_path / "none"), 400.0, log=True)
    EngineEnergy(meter_of(clock, tmp_path / "none"), 400.0, log=False)
    assert [record.getMessage() for record in caplog_vllm.records] == [
        "tiered energy: cpu measured: rapl, dram measured: rapl, gpu not counted, ssd assumed: "
        "constants; at 400 gCO2e per kWh",
        f"tiered energy: cpu not counted (no RAPL in {tmp_path / 'none'}), dram assumed: "
        "constants, gpu not counted, ssd assumed: constants; at 400 gCO2e per kWh",
    ]


def test_labels_of_this_machine():
    assert list(energy.labels()) == list(energy.PARTS)
    assert energy.labels()["dram"] in ("measured: rapl", "assumed: constants")
