# SPDX-License-Identifier: Apache-2.0
"""What `vllm-tiered doctor` says of memory nodes, GPUs and disks."""

from functools import partial

import pytest

from tests.fixtures.sysfs import add_disk, add_gpu, write_files
from vllm_tiered.cli import doctor, doctor_hardware
from vllm_tiered.cli.check import Status
from vllm_tiered.devices import hardware, numa
from vllm_tiered.units import GIB


@pytest.fixture
def sys(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "find_gpus", partial(hardware.find_gpus, tmp_path))
    monkeypatch.setattr(hardware, "find_disks", partial(hardware.find_disks, tmp_path))
    nodes = tmp_path / "nodes"
    monkeypatch.setattr(numa, "nodes", partial(numa.nodes, nodes, tmp_path / "status"))
    monkeypatch.setattr(doctor_hardware, "_video_memory", lambda: {"0000:01:00.0": 80 * GIB})
    return tmp_path


def test_the_checks_are_part_of_the_report():
    names = {check().name for check in doctor.CHECKS if "hardware" in check.__module__}
    assert names == {"memory nodes", "gpus", "disks"}


def test_a_node_without_cpus_is_named(sys):
    write_files(
        sys / "nodes",
        {
            "online": "0,2",
            "has_memory": "0,2",
            "node0/cpulist": "0-15",
            "node0/distance": "10 14",
            "node0/meminfo": "Node 0 MemTotal: 134217728 kB\nNode 0 MemFree: 67108864 kB",
            "node2/cpulist": "",
            "node2/distance": "14 10",
            "node2/meminfo": "Node 2 MemTotal: 536870912 kB\nNode 2 MemFree: 536870912 kB",
        },
    )
    found = doctor_hardware.check_numa_nodes().found
    near, far = found.split("; ")
    assert near == "node 0: 128.00 GiB, 64.00 GiB free, CPUs 0-15, distance 14 to node 2"
    assert far.startswith("node 2: 512.00 GiB, 512.00 GiB free, no CPUs (CXL, NVM")


def test_an_idle_gpus_link(sys):
    add_gpu(sys, "0000:01:00.0")
    check = doctor_hardware.check_gpu_links()
    assert check.status is Status.OK, "an idle GPU lowers its speed, which is no fault"
    assert check.found == (
        "0000:01:00.0, 80.00 GiB, PCIe up to 4.0 x16 (31.5 GB/s), 1.0 x16 (4.0 GB/s) now "
        "(idle GPUs lower it), at node 1"
    )


def test_missing_lanes_are_warned_about(sys):
    add_gpu(sys, "0000:01:00.0", lanes="8")
    check = doctor_hardware.check_gpu_links()
    assert check.status is Status.WARN
    assert check.advice.startswith("0000:01:00.0: fewer lanes")


def test_a_gpu_whose_bus_is_hidden_keeps_its_memory(sys):
    assert doctor_hardware.check_gpu_links().found == "80.00 GiB; links not reported"


def test_disks_and_none(sys):
    assert doctor_hardware.check_disks().found == "none reported by this system"
    add_disk(sys, "sda", "4194304", spins="1")
    assert doctor_hardware.check_disks().found == "sda 2.00 GiB, spins (or is virtual)"
