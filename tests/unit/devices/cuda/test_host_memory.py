# SPDX-License-Identifier: Apache-2.0
"""Tests of a GPU's far memory: it has the exact size and is pinned while it is used."""

import gc
import mmap
import random
import resource
from dataclasses import replace

import pytest

from tests.fakes.cuda import SimulatedCudaDevice
from tests.fakes.far_nodes import emulate_nodes, node_with
from tests.fixtures.page_buffers import contents, copy, make_buffer, pages_of
from vllm_tiered.devices import numa
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cuda.runtime import numa_node_of
from vllm_tiered.errors import BudgetError, IntegrityError
from vllm_tiered.units import KIB, MIB


@pytest.fixture
def device():
    device = SimulatedCudaDevice(random.Random(0), haste=0.0)
    yield device
    device.close()


def test_exactly_its_size_is_pinned(device):
    far = device.far_buffer(3, 5000)
    assert device.cuda.compiled_for == {1250}, "the first copy of a step would wait for Triton"
    begin = far.data.data_ptr()
    assert device.cuda.pinned == {begin: begin + 15000}
    assert begin % mmap.PAGESIZE == 0
    assert device.far_buffer(0, 5000).num_pages == 0
    assert len(device.cuda.pinned) == 1


def test_it_is_unpinned_when_no_tensor_is_left(device):
    far = device.far_buffer(3, 4096)
    part = far.part(1, 1)
    del far
    gc.collect()
    assert len(device.cuda.pinned) == 1, "a part is still there"
    del part
    gc.collect()
    assert not device.cuda.pinned


def test_a_copy_under_way_keeps_it_pinned(device):
    far, near = device.far_buffer(3, 64), make_buffer(3, value=-1)
    event = copy(device, Direction.READ, far, pages_of(0), near, pages_of(1))
    del far
    gc.collect()
    device.cuda.run_all()
    assert event.done() and contents(near) == [-1, 0, -1]
    device.use(Direction.READ)  # this notices that the copy is done
    gc.collect()
    assert len(device.cuda.pinned) == 1, "the page id buffer, and not the pages"


def test_close_unpins_all(device):
    far = device.far_buffer(3, 64)
    near = make_buffer(3)
    copy(device, Direction.WRITE, near, pages_of(2), far, pages_of(1))
    device.close()
    assert not device.cuda.pinned
    assert contents(far) == [0, 2, 0], "its pages are still memory"


def test_it_cannot_be_released(device):
    """After a release the CPU would use new memory, but the GPU would still use the old memory."""
    far = device.far_buffer(8, 4096)
    far.data.fill_(7)
    assert far.discard(0, 8) == 0
    assert far.part(2, 4).discard(0, 4) == 0
    assert (far.data == 7).all()
    with pytest.raises(IntegrityError, match="out of 4"):
        far.part(2, 4).discard(3, 2)


def test_memory_that_cuda_refuses(device, monkeypatch):
    device.cuda.refuses_to_pin = True
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    with pytest.raises(BudgetError, match=r"1\.00 MiB.*error 2.*kv\.far_gib.*64\.00 KiB.*ulimit"):
        device.far_buffer(256, 4096)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    with pytest.raises(BudgetError, match=r"1\.00 MiB.*lower kv\.far_gib") as refused:
        device.far_buffer(256, 4096)
    assert "ulimit" not in str(refused.value)
    assert not device.cuda.pinned


def test_memory_that_no_machine_has(device):
    with pytest.raises(BudgetError, match=r"4096\.00 TiB .*lower kv\.far_gib"):
        device.far_buffer(2**40, 2**12)


def test_it_is_bound_to_the_gpus_node(device, monkeypatch):
    seen = []
    monkeypatch.setattr(numa, "bind_near", lambda *args: seen.append(args))
    device.far_buffer(3, 4096)
    assert not seen, "the system does not say where the GPU is"
    device.cuda.node = 1
    far = device.far_buffer(3, 4096)
    assert seen == [(far.data.data_ptr(), 3 * 4096, 1, numa.BY_DISTANCE)]


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None), (None, None)])
def test_the_node_of_a_pci_device(tmp_path, text, node):
    address = "0000:3b:00.0"
    if text is not None:
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(text)
    assert numa_node_of(address, tmp_path) == node


def test_weights_fill_the_fastest_node_and_each_extent_has_the_same_shares(device, monkeypatch):
    """One stream reads the nodes in turn: node 1 is filled first, and no thread is added."""
    bindings = emulate_nodes(monkeypatch, [node_with(0, MIB), node_with(1, MIB)], {})
    assert device.far_nodes() == (), "the system does not say where the GPU is"
    device.cuda.node = 0
    assert [node.number for node in device.far_nodes()] == [0, 1]
    rates = {0: 10e9, 1: 20e9}
    device.node_use = numa.NodeUse(rates=rates, at_once=device.reads_nodes_at_once)
    assert [node.number for node in device.far_nodes()] == [1, 0]
    extents = (512 * KIB, MIB)
    with device.with_nodes(replace(device.node_use, extents=extents)):
        far = device.far_buffer(24, 64 * KIB)
    nodes = bindings.nodes_of_pages(far)
    assert nodes.count(1) * 64 * KIB == MIB, "the fast node is full"
    assert (nodes[:8].count(1), nodes[8:].count(1)) == (5, 11)  # two thirds of 8 and of 16
    assert bindings.nodes_of_pages(device.far_buffer(4, 64 * KIB)) == [1] * 4
