# SPDX-License-Identifier: Apache-2.0
"""Joules and grams of CO2 equivalent, as M2Cache counts them (section 2.2, formula 1; figure 13).

    energy                 = sum over parts of power * run time
    operational emissions  = energy * carbon intensity of the grid
    embodied emissions     = emissions of making the hardware * run time / its lifetime
    carbon footprint       = operational + embodied

The parts of a prediction are the near device, the far memory that the weights take, and a disk; the
host's processor is not among them. What an engine measures is in :mod:`vllm_tiered.energy.power`.
"""

from __future__ import annotations

from dataclasses import dataclass

CARBON_INTENSITY = 820.0
"""gCO2e per kWh where nothing else is said: M2Cache's, figure 13 (a grid that burns coal)."""

DRAM_WATTS_PER_GB = 26 / 256
"""M2Cache's, figure 13: 26 W for 256 GB (10^9 bytes), in use or not."""

SSD_WATTS = 2.0
"""M2Cache's, figure 13: of a disk, busy or not."""

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


def embodied_grams(making_grams: float, seconds: float, lifetime_seconds: float) -> float:
    """The share of a run in the emissions of making what it runs on (M2Cache, section 2.2).

    The paper gives no lifetimes, and of making only an A100's 150 kg (section 3.1), so neither has
    a default. Hardware that is there anyway may be counted as 0, which is the paper's point.

    Args:
        making_grams: gCO2e of making and packaging the hardware.
        seconds: of the run.
        lifetime_seconds: for which the hardware is expected to be used.

    Raises:
        ValueError: the lifetime is not above 0, or shorter than the run.
    """
    if lifetime_seconds <= 0 or not 0 <= seconds <= lifetime_seconds:
        raise ValueError(
            f"a run of {seconds:g} s in a lifetime of {lifetime_seconds:g} s: give a lifetime that "
            "holds the run"
        )
    return making_grams * seconds / lifetime_seconds


def carbon_footprint(joules: float, carbon_intensity: float, embodied: float = 0.0) -> float:
    """gCO2e in all: operational emissions, and the embodied share of the same run."""
    return grams_co2e(joules, carbon_intensity) + embodied
