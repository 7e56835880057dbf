# SPDX-License-Identifier: Apache-2.0
"""Tests of the choice of NUMA nodes for far memory and of the binding by the kernel."""

import ctypes
import mmap
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_tiered.devices import numa
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.numa import Node, bind, bind_near, nodes, spread, spread_near
from vllm_tiered.units import GIB, MIB

RESERVED = numa._RESERVED_BYTES


def node(number, cpus=(), free=0, **distances):
    of_each = {int(name[1:]): distance for name, distance in distances.items()}
    return Node(
        number=number,
        cpus=frozenset(cpus),
        total_bytes=max(0, free) + RESERVED,
        free_bytes=free + RESERVED,
        distances={number: 10} | of_each,
    )


SOCKETS_AND_CXL = [
    node(0, range(8), 4 * GIB, n1=21, n2=14),
    node(1, range(8, 16), 8 * GIB, n0=21, n2=24),
    node(2, (), 16 * GIB, n0=14, n1=24),
]


@pytest.mark.parametrize(
    ("size", "cpus", "expected"),
    [
        (2 * GIB, {0, 1}, [(2, 2 * GIB)]),
        (20 * GIB, {0, 1}, [(2, 16 * GIB), (1, 4 * GIB)]),
        (10 * GIB, {9}, [(0, 4 * GIB), (2, 6 * GIB)]),
        (28 * GIB, {3}, [(2, 16 * GIB), (1, 8 * GIB), (0, 4 * GIB)]),
        (29 * GIB, {3}, []),
    ],
)
def test_the_nearest_node_first_and_the_engines_own_last(size, cpus, expected):
    assert spread(size, cpus, SOCKETS_AND_CXL) == expected


@pytest.mark.parametrize(
    ("size", "number", "expected"),
    [
        (2 * GIB, 0, [(0, 2 * GIB)]),
        (6 * GIB, 0, [(0, 4 * GIB), (2, 2 * GIB)]),
        (26 * GIB, 1, [(1, 8 * GIB), (0, 4 * GIB), (2, 14 * GIB)]),
        (29 * GIB, 1, []),
        (1 * GIB, 7, []),
    ],
)
def test_a_devices_own_node_first_and_then_the_nearest(size, number, expected):
    assert spread_near(size, number, SOCKETS_AND_CXL) == expected


@given(
    size=st.integers(1, 64 * GIB),
    free=st.lists(st.integers(-GIB, 20 * GIB), min_size=2, max_size=5),
)
def test_all_of_it_or_none_and_never_more_than_a_node_has(size, free):
    among = [node(number, {number}, room) for number, room in enumerate(free)]
    parts = spread(size, {0}, among)
    if parts:
        assert sum(part for _, part in parts) == size
        assert all(part <= free[number] for number, part in parts)
        assert all(part % MIB == 0 for _, part in parts[:-1])
    else:
        assert sum(max(0, room) // MIB * MIB for room in free) < size


def test_one_node_is_left_to_the_system():
    assert spread(GIB, {0}, SOCKETS_AND_CXL[:1]) == []
    assert spread_near(GIB, 0, SOCKETS_AND_CXL[:1]) == []


def test_nodes_are_read_from_the_system(tmp_path):
    write = {
        "online": "0-2",
        "has_memory": "0,2",
        "node0/cpulist": "0-3,8",
        "node0/distance": "10 21 14",
        "node0/meminfo": "Node 0 MemTotal: 4096 kB\nNode 0 MemFree: 1000 kB\n"
        "Node 0 Inactive(file): 24 kB\n",
        "node2/cpulist": "",
        "node2/distance": "14 24 10",
        "node2/meminfo": "Node 2 MemFree: 2048 kB\n",
    }
    for name, text in write.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    status = tmp_path / "status"
    status.write_text("Mems_allowed_list:\t0-7\n")
    first, second = nodes(tmp_path, status)
    assert (first.number, first.free_bytes, first.total_bytes) == (0, 1 * MIB, 4 * MIB)
    assert first.cpus == {0, 1, 2, 3, 8}
    assert first.distances == {0: 10, 1: 21, 2: 14}
    assert (second.number, second.cpus, second.free_bytes) == (2, frozenset(), 2 * MIB)
    status.write_text("Mems_allowed_list:\t2\n")
    assert [found.number for found in nodes(tmp_path, status)] == [2]


def test_a_system_that_does_not_say(tmp_path):
    assert nodes(tmp_path, tmp_path / "status") == []


@pytest.mark.skipif(numa._libnuma() is None, reason="no libnuma, or a kernel without NUMA")
@pytest.mark.parametrize("bind_it", [partial(bind, cpus={1}), partial(bind_near, number=0)])
def test_the_kernel_gets_the_setting(bind_it, monkeypatch):
    """The kernel's get_mempolicy reports that the address is bound to node 0."""
    two = [node(0, {0}, GIB), node(1, {1}, GIB, n0=20)]
    monkeypatch.setattr(numa, "nodes", lambda: two)
    memory = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = (ctypes.c_char * MIB).from_buffer(memory)
    address = ctypes.addressof(view)
    assert bind_it(address, MIB) == [(0, MIB)]
    mode, mask = ctypes.c_int(-1), ctypes.c_ulong(0)
    MPOL_F_ADDR, MPOL_BIND = 2, 2
    refused = numa._libnuma().get_mempolicy(
        ctypes.byref(mode), ctypes.byref(mask), 64, ctypes.c_void_p(address), MPOL_F_ADDR
    )
    assert not refused
    assert (mode.value & 7, mask.value) == (MPOL_BIND, 1)


def test_far_buffers_are_bound(monkeypatch):
    seen = []
    monkeypatch.setattr(numa, "bind", lambda *args: seen.append(args))
    device = CpuDevice(cpus={0})
    buffer = device.far_buffer(3, 4096)
    assert seen == [(buffer.data.data_ptr(), 3 * 4096, {0})]
    assert buffer.data.data_ptr() % mmap.PAGESIZE == 0
    device.close()
