# SPDX-License-Identifier: Apache-2.0
"""Far memory as several tiers of different bandwidth: sockets, CXL, Optane as NUMA nodes (HeLM).

The CPU backend's device reads all tiers of a sublayer at once, each with a thread. Tiers then hold
far weights by bandwidth, as far as capacity allows, so that the reads end together. A GPU's reads
share a stream and a PCIe link, so tiers are read in turn and their times add up. Then the fastest
tier is filled first. In both cases each sublayer has the same shares in all tiers:

    in order      │ fast │ fast │   slow   │   slow   │     the link idles, then compute waits
    interleaved   │ fa slow │ fa slow │ fa slow │ fa slow │ the sum is equal, and so is each part

A step lasts the sum of max(compute, transfer) over the sublayers. That is convex in the transfers,
so of all divisions with the same sum equal ones are best where sublayers are equal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from vllm_tiered.devices.far_shares import divide_at_once


class FarTier(NamedTuple):
    """Part of far memory with a bandwidth of its own.

    Attributes:
        name: such as "node 2" or "CXL".
        capacity_bytes: bytes that far memory may take of it.
        gb_per_s: bandwidth of reads from it alone to near memory (10^9 bytes).
    """

    name: str
    capacity_bytes: int
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class FarTiers:
    """Tiers of far memory in the order of use; false if all of it is equally fast.

    Attributes:
        tiers: the tiers.
        at_once: whether they are read at once; the last is then used when all others are full, as
            it is the memory that compute reads too.
    """

    tiers: tuple[FarTier, ...] = ()
    at_once: bool = False

    def __bool__(self) -> bool:
        return bool(self.tiers)

    def __iter__(self) -> Iterator[FarTier]:
        return iter(self.tiers)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all tiers."""
        return sum(tier.capacity_bytes for tier in self.tiers)

    def bytes_by_tier(self, num_bytes: int) -> list[int]:
        """Return the bytes in each tier; the last takes what exceeds the capacity."""
        *first, _ = self.tiers
        if self.at_once:
            found = divide_at_once(num_bytes, [(t.capacity_bytes, t.gb_per_s) for t in first])
            return [*found, num_bytes - sum(found)]
        found = []
        for tier in first:
            found.append(min(num_bytes - sum(found), tier.capacity_bytes))
        return [*found, num_bytes - sum(found)]

    def gb_per_s(self, num_bytes: int) -> float:
        """Return the bandwidth at which so many bytes are read."""
        parts = self.bytes_by_tier(num_bytes)
        read = [(part, tier) for part, tier in zip(parts, self.tiers, strict=True) if part]
        if len(read) < 2:  # exactly its bandwidth, without the rounding of a division
            return (read[0][1] if read else self.tiers[0]).gb_per_s
        seconds = [part / tier.gb_per_s for part, tier in read]
        return num_bytes / (max(seconds) if self.at_once else sum(seconds))

    def next_gb_per_s(self, num_bytes: int) -> float:
        """Return the bandwidth of the tier that takes what is far beside so many bytes."""
        parts = self.bytes_by_tier(num_bytes)
        for part, tier in zip(parts, self.tiers, strict=True):
            if part < tier.capacity_bytes:
                return tier.gb_per_s
        return self.tiers[-1].gb_per_s


NO_TIERS = FarTiers()
"""Far memory that is equally fast everywhere."""
