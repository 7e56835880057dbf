# SPDX-License-Identifier: Apache-2.0
"""Far memory by NUMA node: the other sockets', CXL's, NVM's, in the order of distance (HeLM).

vLLM's CPU backend binds a worker's memory strictly to its own node, near weights and KV cache too,
which come after far memory. So that node is the last one that far memory is bound to; its bandwidth
is compute's besides.
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
_KEPT_BYTES = 512 * MIB
"""Of a node that far memory leaves to others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A NUMA node with memory.

    Attributes:
        cpus: of the node; none for CXL and NVM expanders.
        free_bytes: that nobody uses, or that hold files which can be read again.
        distances: to each node, by its number (10 is itself).
    """

    number: int
    cpus: frozenset[int]
    free_bytes: int
    distances: dict[int, int]


def nodes(sysfs: Path = _SYSFS, status: Path = _STATUS) -> list[Node]:
    """Those with memory that this process may use; empty where the system does not say."""
    found = []
    online = _numbers(_read(sysfs / "has_memory") or _read(sysfs / "online"))
    allowed = _allowed(status)
    order = sorted(_numbers(_read(sysfs / "online")))
    for number in sorted(online & allowed if allowed else online):
        folder = sysfs / f"node{number}"
        distances = [int(word) for word in _read(folder / "distance").split()]
        found.append(
            Node(
                number=number,
                cpus=frozenset(_numbers(_read(folder / "cpulist"))),
                free_bytes=_free_bytes(_read(folder / "meminfo")),
                distances=dict(zip(order, distances, strict=False)),
            )
        )
    return found


def spread(num_bytes: int, cpus: Iterable[int], among: Sequence[Node]) -> list[tuple[int, int]]:
    """Nodes for that much memory: the nearest to the CPUs first, their own last.

    Returns:
        (node, bytes) in order; empty with one node, or if all together do not have it: then the
        system decides.
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
    """Nodes for memory that a device at node ``number`` reads: that one, then the nearest.

    Returns:
        As :func:`spread`; empty also if the node is not among them.
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
    """Bind memory that nobody has written to yet, at a page's address.

    Returns:
        As :func:`spread`; empty if nothing was bound.
    """
    return _bind(address, spread(num_bytes, cpus, nodes()))


def bind_near(address: int, num_bytes: int, number: int) -> list[tuple[int, int]]:
    """The same for memory of a device that is attached to node ``number``.

    Returns:
        As :func:`spread_near`; empty if nothing was bound.
    """
    return _bind(address, spread_near(num_bytes, number, nodes()))


def _fill(num_bytes: int, in_order: Iterable[Node]) -> list[tuple[int, int]]:
    parts = []
    for node in in_order:
        part = min(num_bytes, max(0, node.free_bytes - _KEPT_BYTES) // MIB * MIB)
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
    """None without the library, or where the kernel has no NUMA."""
    try:
        library = ctypes.CDLL("libnuma.so.1")
    except OSError:
        return None
    return library if library.numa_available() >= 0 else None


def _allowed(status: Path) -> set[int]:
    """Nodes of the control group; empty for all."""
    for line in _read(status).splitlines():
        if line.startswith("Mems_allowed_list:"):
            return _numbers(line.partition(":")[2])
    return set()


def _numbers(text: str) -> set[int]:
    """Of a list like "0-3,8"."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _free_bytes(meminfo: str) -> int:
    total = 0
    for line in meminfo.splitlines():
        words = line.split()  # Node 0 MemFree: 123 kB
        if len(words) >= 4 and words[2] in ("MemFree:", "Inactive(file):"):
            total += int(words[3]) * 1024
    return total


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
