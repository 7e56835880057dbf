# SPDX-License-Identifier: Apache-2.0
"""Prefetch budget: a rank's share of its CPUs' last-level cache."""

from dataclasses import dataclass
from pathlib import Path

from vllm_tiered.errors import UnsupportedError

SYSFS = Path("/sys/devices/system/cpu")

SHARE = 0.5
"""Share of the cache for prefetches.

Hidden states, the step's KV and the other operands of matmuls pass through it too.
"""

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """Last-level cache, shared by ``cpus``."""

    level: int
    num_bytes: int
    cpus: frozenset[int]


def last_level_cache(cpu: int, root: Path = SYSFS) -> Cache:
    """Return the last-level cache of one processor, as Linux reports it.

    Raises:
        UnsupportedError: Linux does not report it.
    """
    caches = [_read(index) for index in sorted((root / f"cpu{cpu}" / "cache").glob("index*"))]
    known = [cache for cache in caches if cache is not None]
    if not known:
        raise UnsupportedError(
            f"{root}/cpu{cpu}/cache does not say how large the processor's caches are: set "
            "tiered.l2.budget_mib, or tiered.l2.prefetch to off"
        )
    return max(known, key=lambda cache: cache.level)


def auto_budget_bytes(cache: Cache, num_ranks: int) -> int:
    """Return the budget of one of the ranks that share the cache."""
    return int(cache.num_bytes * SHARE / num_ranks)


def _read(index: Path) -> Cache | None:
    try:
        kind, level, size, cpus = (
            (index / name).read_text().strip()
            for name in ("type", "level", "size", "shared_cpu_list")
        )
        num_bytes = int(size[:-1]) * _UNITS[size[-1]] if size[-1] in _UNITS else int(size)
        shared = frozenset(_cpus(cpus))
    except (OSError, ValueError):
        return None
    if kind == "Instruction":
        return None
    return Cache(level=int(level), num_bytes=num_bytes, cpus=shared)


def _cpus(text: str) -> list[int]:
    """Parse a list of CPUs: "0-2,8" is [0, 1, 2, 8]."""
    cpus: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus
