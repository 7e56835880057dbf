# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of reads from each NUMA node to near memory, through the device's own copies.

On Optane, bandwidth falls where a buffer exceeds 4 GB (HeLM, figure 3a), so a probe reads up to
8 GiB of each node. What is read includes the link: behind a GPU's PCIe link, no node is faster.
"""

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered.devices.available_memory import read_host_memory
from vllm_tiered.devices.base import Device, Direction
from vllm_tiered.devices.pages import PageBuffer, Pages
from vllm_tiered.probe.links import PAGE_BYTES, SIZES
from vllm_tiered.units import GIB

MOST_BYTES = 8 * GIB

_TRANSFER_BYTES = max(SIZES)
_SHARE = 2
"""A buffer takes at most one in so many bytes of a node's memory, and of all that is available."""


class NodeRead(NamedTuple):
    """Measured reads of a node's memory.

    Attributes:
        node: number of the node.
        capacity_bytes: bytes of the node that far memory may take.
        num_bytes: size of the buffer that was read once from end to end.
        seconds: time of that.
    """

    node: int
    capacity_bytes: int
    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds


def measure_nodes(
    device: Device, near_device: torch.device, most_bytes: int = MOST_BYTES
) -> list[NodeRead]:
    """Measure each node, and let the device place far memory by their rates from now on.

    Args:
        device: the device; its ``node_use`` gets the rates.
        near_device: torch device of near memory.
        most_bytes: size of the buffer, where a node has twice the memory.

    Returns:
        The nodes in the order in which far memory uses them. Empty, and nothing changes, if memory
        has one node or cannot be bound, or if fewer than two nodes have enough memory.
    """
    found: dict[int, NodeRead] = {}
    for node in device.far_nodes():
        available = min(node.usable_bytes, read_host_memory().usable_bytes)
        num_bytes = min(most_bytes, available // _SHARE) // PAGE_BYTES * PAGE_BYTES
        if num_bytes:
            with device.with_nodes(replace(device.node_use, only=node.number)):
                seconds = _read_seconds(device, near_device, num_bytes)
            found[node.number] = NodeRead(node.number, available, num_bytes, seconds)
    if len(found) < 2:
        return []
    rates = {number: read.bytes_per_s for number, read in found.items()}
    use = replace(device.node_use, rates=rates, at_once=device.reads_nodes_at_once)
    device.node_use = use
    return [found[node.number] for node in device.far_nodes() if node.number in found]


def _read_seconds(device: Device, near_device: torch.device, num_bytes: int) -> float:
    """Return the seconds in which a new far buffer of so many bytes is read once."""
    at_once = min(_TRANSFER_BYTES, num_bytes) // PAGE_BYTES
    far = device.far_buffer(num_bytes // PAGE_BYTES, PAGE_BYTES)
    near = PageBuffer(torch.empty((at_once, PAGE_BYTES), dtype=torch.uint8, device=near_device))
    for buffer in (far, near):
        buffer.data.fill_(1)  # the system allocates memory at the first write
    copies = []
    for first in range(0, far.num_pages, at_once):
        count = min(at_once, far.num_pages - first)
        pages = Pages(np.arange(first, first + count, dtype=np.int64), ascending=True)
        targets = Pages(np.arange(count, dtype=np.int64), ascending=True)
        copies.append(device.prepare(Direction.READ, far, pages, near, targets))
    device.submit(copies[0]).wait()  # warm-up
    start = time.perf_counter()
    # One at a time, as the transfers have the same target.
    for copy in copies:
        device.submit(copy).wait()
    return time.perf_counter() - start
