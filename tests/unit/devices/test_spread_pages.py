# SPDX-License-Identifier: Apache-2.0
"""Copies of far pages on several nodes: divided by node, run at once, and complete or failed."""

import threading
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.copy_thread import CopyThread
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.devices.spread_pages import SpreadPages, parts_by_node, spread_pages

PAGE = 64


def numbered(num_pages):
    """Return uint8 [num_pages, PAGE]; each page has its own number in all bytes."""
    return torch.arange(num_pages, dtype=torch.uint8)[:, None].expand(-1, PAGE).contiguous()


def pages(ids):
    return Pages(np.array(ids, dtype=np.int64))


def test_runs_of_whole_pages_make_spread_pages():
    data = numbered(6)
    far = spread_pages(data, [(2, 3 * PAGE), (1, PAGE), (2, 2 * PAGE)])
    assert isinstance(far, SpreadPages)
    assert far.nodes.tolist() == [2, 2, 2, 1, 2, 2]
    assert far.part(2, 3).nodes.tolist() == [2, 1, 2]


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([], id="not-bound"),
        pytest.param([(1, 6 * PAGE)], id="one-node"),
        pytest.param([(1, 3 * PAGE + 32), (2, 3 * PAGE - 32)], id="a-page-on-two-nodes"),
    ],
)
def test_other_memory_is_copied_as_a_whole(runs):
    far = spread_pages(numbered(6), runs)
    assert type(far) is PageBuffer
    assert parts_by_node(far, pages([0, 1]), pages([0, 1])) == []


@given(data=st.data())
def test_a_divided_copy_is_the_copy(data):
    """For any nodes, sources (with repetition) and distinct targets."""
    count = data.draw(st.integers(1, 20))
    nodes = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    sources = data.draw(st.lists(st.integers(0, count - 1), max_size=30))
    targets = data.draw(st.permutations(range(30)))[: len(sources)]
    far = SpreadPages(numbered(count), np.array(nodes))
    near = PageBuffer(torch.full((30, PAGE), 255, dtype=torch.uint8))
    expected = near.data.clone()
    expected[targets] = far.data[sources]
    parts = parts_by_node(far, pages(sources), pages(targets))
    assert not parts or sorted(i for part in parts for i in part.targets.ids) == sorted(targets)
    device = CpuDevice()
    try:
        device.copy(Direction.READ, far, pages(sources), near, pages(targets)).wait()
    finally:
        device.close()
    assert torch.equal(near.data, expected)


def make_device(copy_part):
    class Thread(CopyThread):
        def copy_part(self, copy, part):
            copy_part(super().copy_part, copy, part)

    class Device(CpuDevice):
        thread_class = Thread

    return Device()


def test_all_nodes_are_read_at_once():
    """Each part waits for both others, so that they could not run in turn."""
    all_run = threading.Barrier(3)

    def wait_for_others(run, copy, part):
        all_run.wait(timeout=60)
        run(copy, part)

    device = make_device(wait_for_others)
    far = SpreadPages(numbered(6), np.array([0, 1, 2, 0, 1, 2]))
    near = PageBuffer(torch.zeros((6, PAGE), dtype=torch.uint8))
    for _ in range(2):  # the threads are used again
        device.copy(Direction.READ, far, pages(range(6)), near, pages(range(6))).wait()
    device.close()
    assert torch.equal(near.data, far.data)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_part_that_fails_fails_the_copy_when_no_part_runs_any_more(failing):
    running: list[int] = []

    def fail_one(run, copy, part):
        if part.node == failing:
            raise OSError("the node is gone")
        running.append(part.node)
        time.sleep(0.05)
        run(copy, part)
        running.remove(part.node)

    device = make_device(fail_one)
    far = SpreadPages(numbered(3), np.array([0, 1, 2]))
    near = PageBuffer(torch.zeros((3, PAGE), dtype=torch.uint8))
    event = device.copy(Direction.READ, far, pages(range(3)), near, pages(range(3)))
    with pytest.raises(OSError, match="the node is gone"):
        event.wait()
    assert running == []
    with pytest.raises(OSError, match="the node is gone"):
        device.copy(Direction.READ, far, pages([0]), near, pages([0])).wait()
    device.close()


def test_only_weights_are_read_at_once(monkeypatch):
    """KV pages, whose copies are prepared in each step, stay plain buffers."""
    from vllm_tiered.devices import numa

    runs = [(1, 2 * 4096), (2, 4096)]
    monkeypatch.setattr(numa, "bind", lambda *args: runs)
    device = CpuDevice()
    assert type(device.far_buffer(3, 4096)) is PageBuffer
    with device.with_nodes(numa.NodeUse(extents=(3 * 4096,))):
        assert type(device.far_buffer(3, 4096)) is SpreadPages
        assert type(device.far_buffer(3, 4096, "full")) is PageBuffer
    assert device.node_use == numa.BY_DISTANCE
    device.close()
