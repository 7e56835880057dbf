# SPDX-License-Identifier: Apache-2.0
"""Binding of far memory to NUMA nodes in order of distance: other sockets, CXL, NVM (HeLM).

vLLM's CPU backend binds a worker's memory strictly to its own node. This includes near weights and
the KV cache, which are allocated after far memory. Compute also needs that node's bandwidth. So far
memory uses that node last.
"""

import ctypes
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vllm_tiered.units import MIB, format_bytes

logger = logging.getLogger("vllm.tiered")

_SYSFS = Path("/sys/devices/system/node")
_STATUS = Path("/proc/self/status")
_RESERVED_BYTES = 512 * MIB
"""Free bytes that far memory leaves on each node."""


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


def spread(num_bytes: int, cpus: Iterable[int], among: Sequence[Node]) -> list[tuple[int, int]]:
    """Divide memory among nodes: the nearest to the CPUs first, the CPUs' own last.

    Returns:
        (node, bytes) in order. Empty if there is one node, or if all nodes together lack the
        memory; then the system decides.
    """
    if len(among) < 2:
        return []
    here = set(cpus)
    home = max(among, key=lambda node: len(node.cpus & here))
    others = sorted(
        (node for node in among if node is not home),
        key=lambda node: home.distances.get(node.number, 255),
    )
    return _fill(num_bytes, (*others, home))


def spread_near(num_bytes: int, number: int, among: Sequence[Node]) -> list[tuple[int, int]]:
    """Divide memory that a device at node ``number`` reads: that node first, then by distance.

    Returns:
        Parts as from :func:`spread`; also empty if the node is not in ``among``.
    """
    home = next((node for node in among if node.number == number), None)
    if home is None or len(among) < 2:
        return []
    by_distance = sorted(
        (node for node in among if node is not home),
        key=lambda node: home.distances.get(node.number, 255),
    )
    return _fill(num_bytes, (home, *by_distance))


def bind(address: int, num_bytes: int, cpus: Iterable[int]) -> list[tuple[int, int]]:
    """Bind unwritten memory at a page-aligned address to nodes, as :func:`spread` divides it.

    Returns:
        Parts as from :func:`spread`; empty if nothing was bound.
    """
    return _bind(address, spread(num_bytes, cpus, nodes()))


def bind_near(address: int, num_bytes: int, number: int) -> list[tuple[int, int]]:
    """Bind memory of a device that is attached to node ``number``.

    Returns:
        Parts as from :func:`spread_near`; empty if nothing was bound.
    """
    return _bind(address, spread_near(num_bytes, number, nodes()))


def _fill(num_bytes: int, in_order: Iterable[Node]) -> list[tuple[int, int]]:
    parts = []
    for node in in_order:
        part = min(num_bytes, max(0, node.free_bytes - _RESERVED_BYTES) // MIB * MIB)
        if part:
            parts.append((node.number, part))
            num_bytes -= part
    return [] if num_bytes else parts


def _bind(address: int, parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    library = _libnuma()
    if library is None:
        return []
    for node, part in parts:
        library.numa_tonode_memory(
            ctypes.c_void_p(address), ctypes.c_size_t(part), ctypes.c_int(node)
        )
        address += part
    if parts:
        stated = ", ".join(f"{format_bytes(part)} on {node}" for node, part in parts)
        logger.info("tiered: far memory by NUMA node: %s", stated)
    return parts


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
