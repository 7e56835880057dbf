# SPDX-License-Identifier: Apache-2.0
"""Energy and CO2-equivalent emissions by M2Cache's model (section 2.2, formula 1; figure 13).

    energy                 = sum over parts of power * run time
    operational emissions  = energy * carbon intensity of the grid
    embodied emissions     = emissions of making the machine * run time / its lifetime

Making and lifetime of the hardware are the user's figures; without them embodied emissions are not
counted, and predictions leave them out.

A prediction includes the near device, the far memory that holds weights, and a disk, but not the
host's processor. :mod:`vllm_tiered.energy.power` measures a running engine.
"""

from __future__ import annotations

from dataclasses import dataclass

CARBON_INTENSITY = 820.0
"""Default carbon intensity in gCO2e per kWh: M2Cache's, figure 13 (a coal-fired grid)."""

DRAM_WATTS_PER_GB = 26 / 256
"""Power of DRAM in M2Cache's figure 13: 26 W for 256 GB (10^9 bytes), in use or not."""

SSD_WATTS = 2.0
"""Power of a disk in M2Cache's figure 13, busy or not."""

_JOULES_PER_KWH = 3.6e6
_SECONDS_PER_YEAR = 365.25 * 24 * 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Power:
    """Power of a machine's parts.

    Attributes:
        near_idle_watts, near_active_watts: power of the near device with its memory, while compute
            waits and while it runs.
        far_watts_per_gb: power of far memory (per 10^9 bytes), in use or not.
        storage_watts: power of the disk.
    """

    near_idle_watts: float
    near_active_watts: float
    far_watts_per_gb: float
    storage_watts: float

    def joules(
        self, seconds: float, stall_seconds: float, far_bytes: int, num_ranks: int = 1
    ) -> float:
        """Return the energy of ``seconds`` in which compute was stalled for ``stall_seconds``.

        Args:
            far_bytes: far memory of a rank.
            num_ranks: near devices; all of them share a disk.
        """
        near = self.near_active_watts * (seconds - stall_seconds)
        near += self.near_idle_watts * stall_seconds
        far = self.far_watts_per_gb * far_bytes / 1e9 * seconds
        return num_ranks * (near + far) + self.storage_watts * seconds


def grams_co2e(joules: float, carbon_intensity: float) -> float:
    """Return the operational emissions of ``joules``.

    Args:
        carbon_intensity: the grid's, in gCO2e per kWh.
    """
    return joules / _JOULES_PER_KWH * carbon_intensity


def embodied_grams(embodied_kg: float, lifetime_years: float, seconds: float) -> float:
    """Return the part of a machine's embodied emissions that falls on ``seconds``.

    Args:
        embodied_kg: of making the machine, in kgCO2e.
        lifetime_years: years over which they are spread.
        seconds: run time.
    """
    return 1e3 * embodied_kg * seconds / (lifetime_years * _SECONDS_PER_YEAR)
