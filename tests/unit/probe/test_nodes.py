# SPDX-License-Identifier: Apache-2.0
"""Reads of each NUMA node, on an emulated machine with two nodes beside the engine's own."""

import json

import pytest
import torch

from tests.fakes.far_nodes import EmulatedDevice, emulate_nodes, home_node, node_with
from tests.fixtures.probes import TINY
from vllm_tiered.devices import numa
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.throttle import Throttle
from vllm_tiered.planner.far_tiers import NO_TIERS
from vllm_tiered.planner.from_probe import machine_from_probe
from vllm_tiered.probe.nodes import measure_nodes
from vllm_tiered.probe.run import run_probe
from vllm_tiered.units import GIB, MIB

CPU = torch.device("cpu")
MB_PER_S = 1e6


@pytest.fixture
def device():
    device = EmulatedDevice()
    yield device
    device.close()


def test_each_node_is_read_at_its_own_speed(monkeypatch, device):
    throttles = {1: Throttle(100 * MB_PER_S), 2: Throttle(400 * MB_PER_S)}
    bindings = emulate_nodes(
        monkeypatch, [home_node(), node_with(1, GIB), node_with(2, 4 * MIB)], throttles
    )
    assert [node.number for node in device.far_nodes()] == [1, 2, 0], "equally near"
    reads = measure_nodes(device, CPU, 8 * MIB)
    assert [read.node for read in reads] == [2, 1, 0], "the engine's own last, if it is fastest"
    assert [read.num_bytes for read in reads] == [2 * MIB, 8 * MIB, 8 * MIB], "half of a node"
    assert [read.capacity_bytes for read in reads][:2] == [4 * MIB, GIB]
    fast, slow = reads[0].bytes_per_s, reads[1].bytes_per_s
    # No read is faster. Other processes may make it slower.
    assert 200 * MB_PER_S < fast <= 400 * MB_PER_S
    assert 70 * MB_PER_S < slow <= 100 * MB_PER_S
    assert bindings.read_bytes[1] >= 8 * MIB
    # What is allocated later is where it is read fastest.
    assert set(bindings.nodes_of_pages(device.far_buffer(16, 4096))) == {2}


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([home_node()], id="one"),
        pytest.param([home_node(), node_with(1, 0)], id="one-with-memory"),
    ],
)
def test_with_one_node_nothing_is_measured(monkeypatch, device, nodes):
    emulate_nodes(monkeypatch, nodes, {})
    assert measure_nodes(device, CPU, MIB) == []
    assert device.node_use == numa.BY_DISTANCE


def test_without_libnuma_nodes_are_not_told_apart(monkeypatch, device):
    emulate_nodes(monkeypatch, [home_node(), node_with(1, GIB)], {})
    monkeypatch.setattr(numa, "_libnuma", lambda: None)
    assert measure_nodes(device, CPU, MIB) == []


def test_a_probe_lists_the_nodes_and_a_plan_reads_them(monkeypatch, device):
    throttles = {1: Throttle(50 * MB_PER_S), 2: Throttle(200 * MB_PER_S)}
    nodes = [home_node(), node_with(1, GIB), node_with(2, GIB)]
    emulate_nodes(monkeypatch, nodes, throttles)
    steps: list[str] = []
    probe = json.loads(json.dumps(run_probe(device, CPU, TINY, step=steps.append)))
    assert "reads from each memory node" in steps
    machine, figures = machine_from_probe(probe)
    assert [tier.name for tier in machine.far_tiers] == ["node 2", "node 1", "node 0"]
    assert machine.far_tiers.tiers[0].capacity_bytes == GIB
    assert machine.far_tiers.at_once
    assert figures["node 1: read_gb_per_s"]["value"] == pytest.approx(0.05, rel=0.3)
    assert "4.00 MiB of the node" in str(figures["node 1: read_gb_per_s"]["source"])
    assert machine.read_gb_per_s == pytest.approx(0.2, rel=0.3), "links use the fastest node"


def test_with_one_node_a_probe_has_no_list():
    device = CpuDevice()
    try:
        if device.far_nodes():
            pytest.skip("this machine has several nodes")
        probe = run_probe(device, CPU, TINY)
    finally:
        device.close()
    assert "far_tiers" not in probe
    assert machine_from_probe(probe)[0].far_tiers == NO_TIERS
