# SPDX-License-Identifier: Apache-2.0
"""Host memory under cgroup limits, from made-up /proc and /sys/fs/cgroup trees."""

import psutil
import pytest

from vllm_tiered.devices.available_memory import HostMemory, read_host_memory
from vllm_tiered.units import GIB, MIB


@pytest.fixture
def plant(tmp_path):
    """`plant("/proc/self/cgroup text", {path: text})` -> HostMemory read from there."""

    def read(membership, files):
        proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "self" / "cgroup").write_text(membership)
        for name, text in files.items():
            (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
            (cgroup / name).write_text(text)
        return read_host_memory(proc=proc, cgroup=cgroup)

    return read


def test_without_a_limit_the_host_counts(plant):
    memory = plant("0::/\n", {})
    assert memory.limit_bytes is None
    assert memory.usable_bytes == memory.available_bytes
    assert 0 < memory.available_bytes <= memory.total_bytes == psutil.virtual_memory().total


def test_v2_limit_counts_without_reclaimable_cache(plant):
    memory = plant(
        "0::/app\n",
        {
            "app/memory.max": f"{512 * MIB}\n",
            "app/memory.current": f"{300 * MIB}\n",
            "app/memory.stat": f"anon 5\ninactive_file {100 * MIB}\nactive_file 7\n",
        },
    )
    assert (memory.limit_bytes, memory.limit_used_bytes) == (512 * MIB, 200 * MIB)
    assert memory.usable_bytes == min(312 * MIB, memory.available_bytes)


def test_v2_max_is_no_limit(plant):
    files = {"memory.max": "max\n", "memory.current": "5\n"}
    assert plant("0::/\n", files).limit_bytes is None


def test_the_tightest_ancestor_counts(plant):
    memory = plant(
        "0::/pod/app\n",
        {
            "pod/memory.max": f"{300 * MIB}\n",
            "pod/memory.current": f"{250 * MIB}\n",
            "pod/app/memory.max": f"{200 * MIB}\n",
            "pod/app/memory.current": f"{50 * MIB}\n",
        },
    )
    assert (memory.limit_bytes, memory.limit_used_bytes) == (300 * MIB, 250 * MIB)


def test_v1_limit_and_its_word_for_none(plant):
    memory = plant(
        "9:name=systemd:/\n4:memory:/job\n0::/\n",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "1\n",
            "memory/job/memory.limit_in_bytes": f"{256 * MIB}\n",
            "memory/job/memory.usage_in_bytes": f"{100 * MIB}\n",
            "memory/job/memory.stat": f"cache 3\ntotal_inactive_file {40 * MIB}\n",
        },
    )
    assert (memory.limit_bytes, memory.limit_used_bytes) == (256 * MIB, 60 * MIB)


def test_a_container_sees_only_the_mounted_root_of_its_hosts_path(plant):
    memory = plant(
        "4:memory,hugetlb:/docker/0123\n",
        {
            "memory/memory.limit_in_bytes": f"{128 * MIB}\n",
            "memory/memory.usage_in_bytes": f"{28 * MIB}\n",
        },
    )
    assert memory.limit_bytes == 128 * MIB
    assert memory.usable_bytes == 100 * MIB


def test_a_limit_that_is_exceeded_leaves_nothing():
    memory = HostMemory(total_bytes=GIB, available_bytes=GIB, limit_bytes=5, limit_used_bytes=9)
    assert memory.usable_bytes == 0
