# SPDX-License-Identifier: Apache-2.0
"""GPUs, links and disks as files under /sys describe them."""

import pytest

from tests.fixtures.sysfs import add_disk, add_gpu, write_files
from vllm_tiered.devices.hardware import Disk, PcieLink, find_disks, find_gpus

FULL = PcieLink(gt_per_s=16.0, lanes=16)


@pytest.mark.parametrize(
    ("gt_per_s", "lanes", "generation", "gb_per_s"),
    [
        (2.5, 16, 1, 4.0),
        (8.0, 4, 3, 3.94),
        (16.0, 16, 4, 31.5),
        (32.0, 16, 5, 63.0),
        (64.0, 16, 6, 121.0),
        (20.0, 8, None, 19.7),
    ],
)
def test_a_link_by_generation(gt_per_s, lanes, generation, gb_per_s):
    """Figures of the PCIe specifications; HeLM (II-D) has 64 and 121 GB/s for the last two."""
    link = PcieLink(gt_per_s=gt_per_s, lanes=lanes)
    assert link.generation == generation
    assert link.gb_per_s == pytest.approx(gb_per_s, rel=0.005)


def test_an_idle_gpu_and_the_slot_it_is_in(tmp_path):
    add_gpu(tmp_path, "0000:01:00.0")
    (gpu,) = find_gpus(tmp_path)
    assert (gpu.address, gpu.node) == ("0000:01:00.0", 1)
    assert gpu.now == PcieLink(gt_per_s=2.5, lanes=16)
    assert gpu.at_most == FULL, "the card could do PCIe 5.0, its slot cannot"


def test_gpus_of_others_and_other_devices_of_nvidia_are_left_out(tmp_path):
    add_gpu(tmp_path, "0000:01:00.0", vendor="0x1234")
    add_gpu(tmp_path, "0000:02:00.0", class_="0x040300")
    assert find_gpus(tmp_path) == []


@pytest.mark.parametrize(
    "figures",
    [
        pytest.param({"speed": "Unknown", "lanes": "0"}, id="down"),
        pytest.param({"speed": "16.0 GT/s PCIe", "lanes": "255"}, id="unknown-width"),
        pytest.param({"speed": "", "lanes": ""}, id="empty"),
    ],
)
def test_a_link_that_the_system_does_not_know(tmp_path, figures):
    add_gpu(tmp_path, "0000:01:00.0", numa_node="-1", **figures)
    (gpu,) = find_gpus(tmp_path)
    assert (gpu.now, gpu.node) == (None, None)
    assert gpu.at_most == FULL


def test_disks_without_partitions_and_loop_devices(tmp_path):
    nvme = add_disk(tmp_path, "nvme0n1", "2048")
    write_files(
        nvme / "device/device",
        {"current_link_speed": "8.0 GT/s PCIe", "current_link_width": "4"},
    )
    add_disk(tmp_path, "sda", "4096", spins="1")
    partition = add_disk(tmp_path, "sda1", "1024")
    write_files(partition, {"partition": "1"})
    add_disk(tmp_path, "loop0", "8", is_device="no")
    add_disk(tmp_path, "sr0", "0")
    link = PcieLink(gt_per_s=8.0, lanes=4)
    assert find_disks(tmp_path) == [
        Disk(name="nvme0n1", num_bytes=1 << 20, spins=False, link=link),
        Disk(name="sda", num_bytes=2 << 20, spins=True, link=None),
    ]


def test_a_system_that_shows_nothing(tmp_path):
    assert find_gpus(tmp_path) == []
    assert find_disks(tmp_path) == []
