# SPDX-License-Identifier: Apache-2.0
"""Energy and CO2-equivalent emissions by M2Cache's model (section 2.2, formula 1; figure 13).

    energy                 = sum over parts of power * run time
    operational emissions  = energy * carbon intensity of the grid

Embodied emissions, the formula's other term, are left out: making and lifetime of the hardware are
not known here.

A prediction includes the near device, the far memory that holds weights, and a disk, but not the
host's processor. Measurement of a running engine is in :mod:`vllm_tiered.energy.power`.
"""

from __future__ import annotations

from dataclasses import dataclass

CARBON_INTENSITY = 820.0
"""Default in gCO2e per kWh: M2Cache's, figure 13 (a grid that burns coal)."""

DRAM_WATTS_PER_GB = 26 / 256
"""M2Cache's, figure 13: 26 W for 256 GB (10^9 bytes), in use or not."""

SSD_WATTS = 2.0
"""M2Cache's, figure 13: a disk, busy or not."""

_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Power:
    """Power of a machine's parts.

    Attributes:
        near_idle_watts, near_active_watts: the near device with its memory, while compute waits
            and while it runs.
        far_watts_per_gb: far memory (per 10^9 bytes), in use or not.
        storage_watts: the disk.
    """

    near_idle_watts: float
    near_active_watts: float
    far_watts_per_gb: float
    storage_watts: float

    def joules(self, seconds: float, stall_seconds: float, far_bytes: int) -> float:
        """Return the energy of a time in which compute was stalled for ``stall_seconds``."""
        near = self.near_active_watts * (seconds - stall_seconds)
        near += self.near_idle_watts * stall_seconds
        always = self.far_watts_per_gb * far_bytes / 1e9 + self.storage_watts
        return near + always * seconds


def grams_co2e(joules: float, carbon_intensity: float) -> float:
    """Return the operational emissions of ``joules``.

    Args:
        carbon_intensity: gCO2e per kWh of the grid.
    """
    return joules / _JOULES_PER_KWH * carbon_intensity
