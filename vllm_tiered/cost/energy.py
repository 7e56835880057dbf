# SPDX-License-Identifier: Apache-2.0
"""Joules and grams of CO2 equivalent, as M2Cache counts them (section 2.2, formula 1; figure 13).

    energy                 = sum over parts of power * run time
    operational emissions  = energy * carbon intensity of the grid

The parts are the near device, the far memory that the weights take, and a disk. The host's
processor is not among them, nor are emissions of making the hardware.
"""

from __future__ import annotations

from dataclasses import dataclass

CARBON_INTENSITY = 820.0
"""gCO2e per kWh where nothing else is said: M2Cache's, figure 13 (a grid that burns coal)."""

_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True, slots=True)
class Power:
    """What a machine draws.

    Attributes:
        near_idle_watts, near_active_watts: of the near device with its memory, while compute waits
            and while it runs.
        far_watts_per_gb: of far memory (10^9 bytes), in use or not.
        storage_watts: of the disk.
    """

    near_idle_watts: float
    near_active_watts: float
    far_watts_per_gb: float
    storage_watts: float

    def joules(self, seconds: float, stall_seconds: float, far_bytes: int) -> float:
        """Of a time in which compute waited for ``stall_seconds``, beside ``far_bytes``."""
        near = self.near_active_watts * (seconds - stall_seconds)
        near += self.near_idle_watts * stall_seconds
        always = self.far_watts_per_gb * far_bytes / 1e9 + self.storage_watts
        return near + always * seconds


def grams_co2e(joules: float, carbon_intensity: float) -> float:
    """Operational emissions.

    Args:
        carbon_intensity: of the grid, in gCO2e per kWh.
    """
    return joules / _JOULES_PER_KWH * carbon_intensity
