# SPDX-License-Identifier: Apache-2.0
"""Tests of energy counters: the zones counted, wrap-around, and unreadable files."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.powercap import DESKTOP, RANGE_UJ, SERVER, Powercap
from vllm_tiered.energy.rapl import RaplZone, open_rapl


def taken(zones):
    return sum(zone.read_joules() for zone in zones)


def test_packages_and_memory_are_counted_of_every_socket(tmp_path):
    host = Powercap(tmp_path, SERVER)
    zones, reason = open_rapl(tmp_path)
    assert reason is None and set(zones) == {"cpu", "dram"}
    for folder, joules in zip(SERVER, (10, 2, 30, 4), strict=True):
        host.draw(folder, joules)
    assert taken(zones["cpu"]) == pytest.approx(40)
    assert taken(zones["dram"]) == pytest.approx(6)
    assert taken(zones["cpu"]) == 0


def test_nested_and_enclosing_domains_are_not_counted_twice(tmp_path):
    host = Powercap(tmp_path, DESKTOP)
    zones, _ = open_rapl(tmp_path)
    for folder in DESKTOP:
        host.draw(folder, 7)
    assert set(zones) == {"cpu"}
    assert taken(zones["cpu"]) == pytest.approx(7)


def test_dies_that_show_their_sockets_counter_are_one(tmp_path):
    folders = [f"intel-rapl:{die}" for die in range(4)]
    host = Powercap(tmp_path, {each: f"package-0-die-{k}" for k, each in enumerate(folders)})
    for k, folder in enumerate(folders):
        host.set(folder, 5_000_000_000 + 1000 * k)  # the counters are read one after the other
    zones, _ = open_rapl(tmp_path)
    for folder in folders:
        host.draw(folder, 7)
    assert taken(zones["cpu"]) == pytest.approx(7)


def test_sockets_that_have_drawn_nothing_yet_are_not_taken_for_one(tmp_path):
    host = Powercap(tmp_path, SERVER)
    for folder in SERVER:
        host.set(folder, 0)
    zones, _ = open_rapl(tmp_path)
    assert {part: len(found) for part, found in zones.items()} == {"cpu": 2, "dram": 2}


@given(st.lists(st.integers(0, RANGE_UJ - 1), max_size=20), st.integers(0, RANGE_UJ - 1))
def test_a_counter_runs_on_where_it_wraps_around(steps, start):
    with tempfile.TemporaryDirectory() as folder:
        host = Powercap(Path(folder), {"intel-rapl:0": "package-0"})
        host.set("intel-rapl:0", start)
        zone = RaplZone(Path(folder) / "intel-rapl:0")
        found = 0.0
        for step in steps:
            host.set("intel-rapl:0", (host.get("intel-rapl:0") + step) % RANGE_UJ)
            found += zone.read_joules()
        assert found == pytest.approx(sum(steps) / 1e6)


def test_a_machine_without_counters_says_so(tmp_path):
    zones, reason = open_rapl(tmp_path / "powercap")
    assert zones == {} and reason == f"no RAPL in {tmp_path / 'powercap'}"


@pytest.mark.parametrize("file", ["energy_uj", "max_energy_range_uj"])
def test_a_sum_without_a_socket_is_no_sum(tmp_path, file):
    Powercap(tmp_path, SERVER)
    (tmp_path / "intel-rapl:1" / file).unlink()
    zones, reason = open_rapl(tmp_path)
    assert set(zones) == {"dram"}
    assert reason is not None and f"intel-rapl:1/{file}: No such file" in reason


def test_values_that_are_no_numbers_are_named(tmp_path):
    Powercap(tmp_path, SERVER)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("a lot\n")
    _, reason = open_rapl(tmp_path)
    assert reason is not None and "intel-rapl:0/energy_uj: holds 'a lot', no number" in reason


def test_counters_that_only_root_may_read(monkeypatch):
    """This is Linux's default. A test that runs as root changes its user while it reads them."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        Powercap(Path(folder), SERVER)
        for zone in SERVER:
            os.chmod(Path(folder) / zone / "energy_uj", 0o400 if os.geteuid() == 0 else 0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            zones, reason = open_rapl(Path(folder))
        finally:
            os.seteuid(user)
        assert zones == {}
        assert reason == (
            f"{folder}/intel-rapl:0/energy_uj: Permission denied (readable by root, or after chmod)"
        )
