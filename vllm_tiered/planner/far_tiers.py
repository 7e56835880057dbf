# SPDX-License-Identifier: Apache-2.0
"""Far memory as several tiers of different bandwidth: sockets, CXL, Optane as NUMA nodes (HeLM).

One copy queue reads far weights, on the CPU backend one thread and on a GPU one stream over one
PCIe link. So the reads of two tiers take turns, and their times add up. Far memory uses the tiers
in a given order, and each sublayer has the same shares in all of them:

    in order      │ fast │ fast │   slow   │   slow   │     the link idles, then compute waits
    interleaved   │ fa slow │ fa slow │ fa slow │ fa slow │ the sum is equal, and so is each part

A step lasts the sum of max(compute, transfer) over the sublayers. That is convex in the transfers,
so of all divisions with the same sum equal ones are best where sublayers are equal.
"""

from collections.abc import Sequence
from typing import NamedTuple


class FarTier(NamedTuple):
    """Part of far memory with a bandwidth of its own.

    Attributes:
        name: such as "node 2" or "CXL".
        capacity_bytes: bytes that far memory may take of it.
        gb_per_s: bandwidth of reads from it to near memory (10^9 bytes).
    """

    name: str
    capacity_bytes: int
    gb_per_s: float


def bytes_by_tier(num_bytes: int, tiers: Sequence[FarTier]) -> list[int]:
    """Return the bytes in each tier, filled in order; the last takes what exceeds the capacity."""
    found = []
    for tier in tiers[:-1]:
        found.append(min(num_bytes, tier.capacity_bytes))
        num_bytes -= found[-1]
    return [*found, num_bytes]


def mean_gb_per_s(num_bytes: int, tiers: Sequence[FarTier]) -> float:
    """Return the bandwidth at which so many bytes are read from the tiers, one after the other."""
    if not num_bytes:
        return tiers[0].gb_per_s
    parts = bytes_by_tier(num_bytes, tiers)
    if parts[0] == num_bytes:
        return tiers[0].gb_per_s  # exactly, without the rounding of the division
    seconds = sum(part / tier.gb_per_s for part, tier in zip(parts, tiers, strict=True))
    return num_bytes / seconds


def next_gb_per_s(num_bytes: int, tiers: Sequence[FarTier]) -> float:
    """Return the bandwidth of the tier that takes the next byte after so many."""
    for tier in tiers[:-1]:
        if num_bytes < tier.capacity_bytes:
            return tier.gb_per_s
        num_bytes -= tier.capacity_bytes
    return tiers[-1].gb_per_s
