# SPDX-License-Identifier: Apache-2.0
"""Machine with several NUMA nodes, each with a throttle, on a machine with one.

All code of the plugin runs as it is. Only the system's answers are replaced: its list of nodes, and
libnuma, which here records what is bound where. The copy thread of the emulated device holds each
read to the throttles of the nodes that its bytes were bound to.
"""

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from vllm_tiered.devices import numa
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.copy_thread import CopyJob, CopyThread, CpuCopy
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.numa import Node
from vllm_tiered.devices.pages import PageBuffer, PageIds
from vllm_tiered.devices.spread_pages import NodePart
from vllm_tiered.devices.throttle import Throttle
from vllm_tiered.units import GIB


def node_with(number: int, free_bytes: int, cpus: Sequence[int] = ()) -> Node:
    """Return a node that far memory may take ``free_bytes`` of, as far from others as a CXL one."""
    total = free_bytes + numa._RESERVED_BYTES
    return Node(
        number=number,
        cpus=frozenset(cpus),
        total_bytes=total,
        free_bytes=total,
        distances={other: 10 if other == number else 20 for other in range(8)},
    )


def home_node(free_bytes: int = 64 * GIB) -> Node:
    """Return node 0, which has all CPUs, so that it is used last."""
    return node_with(0, free_bytes, range(1024))


class Bindings:
    """Bindings of address ranges to nodes; a later one replaces an earlier one, as in the system.

    Attributes:
        read_bytes: bytes read of each node.
    """

    def __init__(self, throttles: Mapping[int, Throttle]) -> None:
        self.throttles = throttles
        self.read_bytes: Counter[int] = Counter()
        self._begins: list[int] = []
        self._ends_and_nodes: list[tuple[int, int]] = []

    def numa_available(self) -> int:
        return 0

    def numa_tonode_memory(self, address, size, node) -> None:
        begin, end = address.value, address.value + size.value
        assert begin % 4096 == 0, "mbind refuses an address inside a page"
        kept = [
            piece
            for old, (old_end, number) in zip(self._begins, self._ends_and_nodes, strict=True)
            for piece in ((old, min(old_end, begin), number), (max(old, end), old_end, number))
            if piece[0] < piece[1]
        ]
        ranges = sorted([*kept, (begin, end, node.value)])
        self._begins = [one[0] for one in ranges]
        self._ends_and_nodes = [one[1:] for one in ranges]

    def node_of(self, address: int) -> int:
        """Return the node that an address was bound to; 0 for none."""
        index = bisect_right(self._begins, address) - 1
        if index >= 0:
            end, node = self._ends_and_nodes[index]
            if address < end:
                return node
        return 0

    def nodes_of(self, buffer: PageBuffer, pages: PageIds) -> set[int]:
        """Return the nodes of some pages of a buffer."""
        nodes = self.nodes_of_pages(buffer)
        return {nodes[page] for page in pages}

    def nodes_of_pages(self, buffer: PageBuffer) -> list[int]:
        """Return the node of each page of a buffer, none of which may lie on two."""
        begin, page_bytes = buffer.data.data_ptr(), buffer.page_bytes
        found = []
        for page in range(buffer.num_pages):
            first = begin + page * page_bytes
            found.append(self.node_of(first))
            assert self.node_of(first + page_bytes - 1) == found[-1], "a page on two nodes"
        return found


class InTurn(Throttle):
    """Throttle of a transfer that reads one node after the other."""

    def __init__(self, throttles: Mapping[int, Throttle], sizes: Mapping[int, int]) -> None:
        seconds = sum(
            size / throttles[node]._bytes_per_second
            for node, size in sizes.items()
            if node in throttles
        )
        super().__init__(sum(sizes.values()) / seconds if seconds else math.inf)


class _NodeThread(CopyThread):
    """Copy thread that reads each node's bytes at the speed of its throttle."""

    bindings: Bindings

    def run(self, job: CopyJob) -> None:
        copy = job.copy
        self.throttle = None
        if self.name.endswith(Direction.READ.value) and copy.src.store is None and not copy.parts:
            nodes = self.bindings.nodes_of_pages(copy.src)
            pages = Counter(nodes[page] for page in copy.src_pages.ids)
            sizes = {node: count * copy.src.page_bytes for node, count in pages.items()}
            self.bindings.read_bytes.update(sizes)
            self.throttle = InTurn(self.bindings.throttles, sizes)
        super().run(job)

    def copy_part(self, copy: CpuCopy, part: NodePart) -> None:
        start = time.perf_counter()
        assert self.bindings.nodes_of(copy.src, part.sources.ids) == {part.node}
        num_bytes = len(part.sources) * copy.src.page_bytes
        self.bindings.read_bytes[part.node] += num_bytes
        throttle = self.bindings.throttles.get(part.node)
        ticket = throttle.admit(num_bytes, start) if throttle else 0.0
        super().copy_part(copy, part)
        if throttle:
            throttle.hold(ticket)


class EmulatedDevice(CpuDevice):
    """CPU device on the emulated machine; keeps its far buffers for the tests."""

    thread_class = _NodeThread

    def __init__(self) -> None:
        super().__init__()
        self.far_buffers: list[PageBuffer] = []

    def far_buffer(self, *args, **kwargs) -> PageBuffer:
        self.far_buffers.append(super().far_buffer(*args, **kwargs))
        return self.far_buffers[-1]


def emulate_nodes(
    monkeypatch: pytest.MonkeyPatch, nodes: Sequence[Node], throttles: Mapping[int, Throttle]
) -> Bindings:
    """Replace the system's nodes by these until the test ends."""
    bindings = Bindings(throttles)
    monkeypatch.setattr(numa, "nodes", lambda: list(nodes))
    monkeypatch.setattr(numa, "_libnuma", lambda: bindings)
    monkeypatch.setattr(_NodeThread, "bindings", bindings, raising=False)
    return bindings
