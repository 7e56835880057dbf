# SPDX-License-Identifier: Apache-2.0
"""Binding of far memory to NUMA nodes, nearest or fastest first: other sockets, CXL, NVM (HeLM).

vLLM's CPU backend binds a worker's memory strictly to its own node. This includes near weights and
the KV cache, which are allocated after far memory. Compute also needs that node's bandwidth. So far
memory uses that node last.
"""

import ctypes
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from vllm_tiered.devices.far_shares import divide_at_once, interleave
from vllm_tiered.units import KIB, MIB, format_bytes

logger = logging.getLogger("vllm.tiered")

_SYSFS = Path("/sys/devices/system/node")
_STATUS = Path("/proc/self/status")
_RESERVED_BYTES = 512 * MIB
"""Free bytes that far memory leaves on each node."""

EXTENT_UNIT = 64 * KIB
"""Unit of interleaved extents; the largest page of the systems that Linux runs on."""

_MUCH_FASTER = 1.1
"""Ratio of measured rates from which a farther node is used before a nearer one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """NUMA node with memory.

    Attributes:
        cpus: CPUs of the node; none for CXL and NVM expanders.
        total_bytes: memory of the node.
        free_bytes: unused memory and reclaimable page cache.
        distances: distance to each node, by its number (10 to itself).
    """

    number: int
    cpus: frozenset[int]
    total_bytes: int
    free_bytes: int
    distances: dict[int, int]

    @property
    def usable_bytes(self) -> int:
        """Bytes that far memory may take of the node."""
        return max(0, self.free_bytes - _RESERVED_BYTES) // MIB * MIB


def nodes(sysfs: Path = _SYSFS, status: Path = _STATUS) -> list[Node]:
    """List the nodes whose memory this process may use; empty if the system reports none."""
    found = []
    online = _numbers(_read(sysfs / "has_memory") or _read(sysfs / "online"))
    allowed = _allowed(status)
    order = sorted(_numbers(_read(sysfs / "online")))
    for number in sorted(online & allowed if allowed else online):
        folder = sysfs / f"node{number}"
        distances = [int(word) for word in _read(folder / "distance").split()]
        meminfo = _read(folder / "meminfo")
        found.append(
            Node(
                number=number,
                cpus=frozenset(_numbers(_read(folder / "cpulist"))),
                total_bytes=_sum_bytes(meminfo, "MemTotal:"),
                free_bytes=_sum_bytes(meminfo, "MemFree:", "Inactive(file):"),
                distances=dict(zip(order, distances, strict=False)),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUse:
    """Choice of nodes for a buffer of far memory.

    Attributes:
        rates: bytes/s at which the device reads each node; a much faster node comes before a nearer
            one. Nodes without a rate are used by distance.
        extents: bytes of the buffer's consecutive extents, each of which is spread over all nodes
            that are used. Empty to fill one node after the other.
        at_once: whether extents are read from all nodes at once, so that nodes take them by
            bandwidth. Otherwise a node is used when those before it are full.
        only: the one node to use; None for all.
    """

    rates: Mapping[int, float] = field(default_factory=dict)
    extents: tuple[int, ...] = ()
    at_once: bool = False
    only: int | None = None


BY_DISTANCE = NodeUse()
"""One node after the other, in the order of distance."""


def far_order(cpus: Iterable[int], among: Sequence[Node], rates: Mapping[int, float]) -> list[Node]:
    """Return the nodes in the order in which far memory uses them: the CPUs' own last."""
    here = set(cpus)
    home = max(among, key=lambda node: len(node.cpus & here))
    others = [node for node in among if node is not home]
    return [*_faster_first(_by_distance(home, others), rates), home]


def far_order_near(number: int, among: Sequence[Node], rates: Mapping[int, float]) -> list[Node]:
    """Return the nodes in the order of a device at node ``number``; empty if that is not there."""
    home = next((node for node in among if node.number == number), None)
    return [] if home is None else _faster_first(_by_distance(home, among), rates)


def spread(
    num_bytes: int, cpus: Iterable[int], among: Sequence[Node], use: NodeUse = BY_DISTANCE
) -> list[tuple[int, int]]:
    """Divide memory among nodes: the nearest or fastest first, the CPUs' own last.

    Returns:
        (node, bytes) in order. Empty if there is one node, or if all nodes together lack the
        memory; then the system decides.
    """
    if len(among) < 2:
        return []
    order = far_order(cpus, among, use.rates)
    if use.extents and use.at_once:
        return _divide(num_bytes, order, use.rates)
    return _fill(num_bytes, order, use.only)


def spread_near(
    num_bytes: int, number: int, among: Sequence[Node], use: NodeUse = BY_DISTANCE
) -> list[tuple[int, int]]:
    """Divide memory that a device at node ``number`` reads: that node first, then by distance.

    Returns:
        Parts as from :func:`spread`; also empty if the node is not in ``among``.
    """
    if len(among) < 2:
        return []
    return _fill(num_bytes, far_order_near(number, among, use.rates), use.only)


def bind(
    address: int, num_bytes: int, cpus: Iterable[int], use: NodeUse = BY_DISTANCE
) -> list[tuple[int, int]]:
    """Bind unwritten memory at a page-aligned address to nodes, as :func:`spread` divides it.

    Returns:
        (node, bytes) in the order of addresses; empty if nothing was bound.
    """
    return _bind(address, spread(num_bytes, cpus, nodes(), use), use)


def bind_near(
    address: int, num_bytes: int, number: int, use: NodeUse = BY_DISTANCE
) -> list[tuple[int, int]]:
    """Bind memory of a device that is attached to node ``number``.

    Returns:
        (node, bytes) in the order of addresses; empty if nothing was bound.
    """
    return _bind(address, spread_near(num_bytes, number, nodes(), use), use)


def can_bind() -> bool:
    """Return whether memory can be bound to nodes here."""
    return _libnuma() is not None


def _by_distance(home: Node, among: Iterable[Node]) -> list[Node]:
    return sorted(among, key=lambda node: home.distances.get(node.number, 255))


def _faster_first(by_distance: Sequence[Node], rates: Mapping[int, float]) -> list[Node]:
    """Move each node before the first nearer one that is much slower."""
    order: list[Node] = []
    for node in by_distance:
        rate = rates.get(node.number, 0.0)
        slower = (
            index
            for index, other in enumerate(order)
            if rate > _MUCH_FASTER * rates.get(other.number, math.inf)
        )
        order.insert(next(slower, len(order)), node)
    return order


def _fill(num_bytes: int, in_order: Iterable[Node], only: int | None) -> list[tuple[int, int]]:
    parts = []
    for node in in_order:
        part = min(num_bytes, node.usable_bytes)
        if part and only in (None, node.number):
            parts.append((node.number, part))
            num_bytes -= part
    return [] if num_bytes else parts


def _divide(
    num_bytes: int, in_order: Sequence[Node], rates: Mapping[int, float]
) -> list[tuple[int, int]]:
    """Divide memory by the rates of the nodes; the last gets what the others lack memory for."""
    *others, home = in_order
    measured = [node for node in others if node.number in rates]
    tiers = [(node.usable_bytes, rates[node.number]) for node in measured]
    shares = divide_at_once(num_bytes, tiers, MIB)
    rest = num_bytes - sum(shares)
    if rest > home.usable_bytes:
        return []
    parts = [(node.number, share) for node, share in zip(measured, shares, strict=True)]
    return [(number, part) for number, part in (*parts, (home.number, rest)) if part]


def _bind(address: int, parts: list[tuple[int, int]], use: NodeUse) -> list[tuple[int, int]]:
    library = _libnuma()
    if library is None:
        return []
    runs = interleave(use.extents, parts, EXTENT_UNIT) if use.extents else parts
    for node, run in runs:
        library.numa_tonode_memory(
            ctypes.c_void_p(address), ctypes.c_size_t(run), ctypes.c_int(node)
        )
        address += run
    if parts and use.only is None:
        stated = ", ".join(f"{format_bytes(part)} on {node}" for node, part in parts)
        how = ", each sublayer over all of them" if len(runs) > len(parts) else ""
        logger.info("tiered: far memory by NUMA node: %s%s", stated, how)
    return runs


@cache
def _libnuma() -> Any:
    """Load libnuma; None without the library or without NUMA in the kernel."""
    try:
        library = ctypes.CDLL("libnuma.so.1")
    except OSError:
        return None
    return library if library.numa_available() >= 0 else None


def _allowed(status: Path) -> set[int]:
    """Read the nodes that the cgroup allows; the empty set means all."""
    for line in _read(status).splitlines():
        if line.startswith("Mems_allowed_list:"):
            return _numbers(line.partition(":")[2])
    return set()


def _numbers(text: str) -> set[int]:
    """Parse a list like "0-3,8"."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _sum_bytes(meminfo: str, *names: str) -> int:
    total = 0
    for line in meminfo.splitlines():
        words = line.split()  # such as "Node 0 MemFree: 123 kB"
        if len(words) >= 4 and words[2] in names:
            total += int(words[3]) * 1024
    return total


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
