# SPDX-License-Identifier: Apache-2.0
"""Tests of the choice of NUMA nodes for far memory and of the binding by the kernel."""

import ctypes
import mmap
from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vllm_tiered.devices import numa
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.far_shares import interleave
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
    assert seen == [(buffer.data.data_ptr(), 3 * 4096, {0}, numa.BY_DISTANCE)]
    assert buffer.data.data_ptr() % mmap.PAGESIZE == 0
    device.close()


# Measured rates, and extents over several nodes --------------------------------------------


@pytest.mark.parametrize(
    ("rates", "order"),
    [
        pytest.param({}, [2, 1, 0], id="by-distance"),
        pytest.param({0: 90, 1: 40, 2: 20}, [1, 2, 0], id="faster-socket-first"),
        pytest.param({0: 90, 1: 21, 2: 20}, [2, 1, 0], id="hardly-faster"),
        pytest.param({1: 40}, [2, 1, 0], id="one-unknown"),
    ],
)
def test_a_much_faster_node_before_a_nearer_one_and_the_engines_own_last(rates, order):
    found = numa.far_order({0, 1}, SOCKETS_AND_CXL, rates)
    assert [one.number for one in found] == order


def test_a_devices_node_is_no_exception_where_another_is_faster():
    found = numa.far_order_near(0, SOCKETS_AND_CXL, {0: 20, 1: 20, 2: 28})
    assert [one.number for one in found] == [2, 0, 1]
    assert numa.far_order_near(7, SOCKETS_AND_CXL, {}) == []


def test_only_one_node_and_only_what_it_has():
    use = numa.NodeUse(only=1)
    assert spread(GIB, {0}, SOCKETS_AND_CXL, use) == [(1, GIB)]
    assert spread(9 * GIB, {0}, SOCKETS_AND_CXL, use) == []
    assert spread_near(GIB, 0, SOCKETS_AND_CXL, use) == [(1, GIB)]


def test_each_extent_has_the_same_shares():
    """24 pages over nodes with 16 and 8: of 6 pages each 4 and 2, of 3 pages 2 and 1."""
    page = numa.EXTENT_UNIT
    runs = interleave(
        [6 * page, 3 * page, 6 * page, 9 * page], [(2, 16 * page), (1, 8 * page)], page
    )
    assert [(number, size // page) for number, size in runs] == [
        *[(2, 4), (1, 2)],
        *[(2, 2), (1, 1)],
        *[(2, 4), (1, 2)],
        *[(2, 6), (1, 3)],
    ]


@given(
    extents=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 800), min_size=0, max_size=3),
)
def test_interleaving_moves_no_byte_to_another_node(extents, cuts):
    """Nodes get what they were to get, whole units, and each extent its share but for a unit."""
    page, total = 4096, sum(extents)
    ends = [0, *sorted(min(cut, total) for cut in cuts), total]
    parts = [(index, (b - a) * page) for index, (a, b) in enumerate(pairwise(ends))]
    runs = interleave([extent * page for extent in extents], parts, page)
    assert all(size > 0 and size % page == 0 for _, size in runs)
    assert all(a[0] != b[0] for a, b in pairwise(runs)), "neighbours are one binding"
    for number, size in parts:
        assert sum(run for node_, run in runs if node_ == number) == size
    pages = [number for number, run in runs for _ in range(run // page)]
    begin = 0
    for extent in extents:
        for number, size in parts:
            share = extent * size / page / max(1, total)
            assert abs(pages[begin : begin + extent].count(number) - share) < len(parts) + 1
        begin += extent


class RecordedBindings:
    """libnuma that records what is bound where."""

    def __init__(self):
        self.bound = []

    def numa_tonode_memory(self, address, size, number):
        self.bound.append((address.value, size.value, number.value))


@pytest.mark.parametrize("bind_it", [partial(bind, cpus={0}), partial(bind_near, number=0)])
def test_extents_are_bound_without_gaps_at_their_addresses(bind_it, monkeypatch):
    library = RecordedBindings()
    monkeypatch.setattr(numa, "_libnuma", lambda: library)
    two = [node(0, {0}, 6 * MIB, n1=20), node(1, (), 6 * MIB, n0=20)]
    monkeypatch.setattr(numa, "nodes", lambda: two)
    begin, extents = 1 << 30, (4 * MIB, 2 * MIB, 2 * MIB)
    runs = bind_it(begin, 8 * MIB, use=numa.NodeUse(extents=extents))
    first = runs[0][0]
    assert [size for number, size in runs if number == first] == [3 * MIB, 1.5 * MIB, 1.5 * MIB]
    address = begin
    for (number, size), bound in zip(runs, library.bound, strict=True):
        assert bound == (address, size, number)
        assert address % numa.EXTENT_UNIT == 0
        address += size
    assert address == begin + 8 * MIB


@pytest.mark.parametrize(
    ("size", "rates", "parts"),
    [
        pytest.param(8 * GIB, {2: 10, 1: 30}, [(1, 6 * GIB), (2, 2 * GIB)], id="by-bandwidth"),
        pytest.param(20 * GIB, {2: 10, 1: 30}, [(1, 8 * GIB), (2, 12 * GIB)], id="one-full"),
        pytest.param(
            26 * GIB, {2: 10, 1: 30}, [(1, 8 * GIB), (2, 16 * GIB), (0, 2 * GIB)], id="all-used"
        ),
        pytest.param(29 * GIB, {2: 10, 1: 30}, [], id="too-much"),
        pytest.param(18 * GIB, {2: 10}, [(2, 16 * GIB), (0, 2 * GIB)], id="one-not-measured"),
    ],
)
def test_nodes_that_are_read_at_once_share_by_bandwidth(size, rates, parts):
    use = numa.NodeUse(rates={0: 90, **rates}, extents=(size,), at_once=True)
    assert spread(size, {0}, SOCKETS_AND_CXL, use) == parts
