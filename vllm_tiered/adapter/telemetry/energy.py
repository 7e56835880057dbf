# SPDX-License-Identifier: Apache-2.0
"""Energy and emissions of one rank, for ``/metrics``, the report and the log."""

import logging
from typing import Any

from vllm_tiered.adapter.telemetry import manifest, totals
from vllm_tiered.config.report import ReportConfig
from vllm_tiered.energy.carbon import DRAM_WATTS_PER_GB, SSD_WATTS, embodied_grams, grams_co2e
from vllm_tiered.energy.power import Known, PowerMeter, open_meter

logger = logging.getLogger("vllm.tiered")

PARTS = ("cpu", "dram", "gpu", "ssd")


class EngineEnergy:
    """Meter of one rank's joules and grams of CO2e, read step by step.

    Args:
        meter: what is read.
        carbon_intensity: of the grid, in gCO2e per kWh.
        embodied: gCO2e a second of making the machine; 0 if it is not counted, or by other ranks.
        log: whether this rank logs how each part is known.
    """

    def __init__(
        self, meter: PowerMeter, carbon_intensity: float, *, embodied: float = 0.0, log: bool
    ) -> None:
        self._meter, self._embodied = meter, embodied
        self._carbon_intensity = carbon_intensity
        self._for_report = (0.0, 0.0)
        self._total: dict[str, float] = {}
        totals.publish("energy", self.total_metrics)
        if log:
            parts = ", ".join(f"{part} {how}" for part, how in labels(meter).items())
            logger.info("tiered energy: %s; at %g gCO2e per kWh", parts, carbon_intensity)

    def begin_step(self) -> None:
        self._meter.begin_step()

    def drain_metrics(self) -> dict[str, float]:
        """Return what was drawn since the last call, by metric; empty if nothing was read since."""
        drawn = self._meter.end_step()
        if drawn is None:
            return {}
        joules, assumed = self._for_report
        self._for_report = (joules + drawn.total, assumed + drawn.assumed_joules)
        metrics = {
            "energy_joules": drawn.total,
            "energy_assumed_joules": drawn.assumed_joules,
            "co2e_grams": grams_co2e(drawn.total, self._carbon_intensity),
        }
        if self._embodied:
            metrics["embodied_co2e_grams"] = self._embodied * drawn.seconds
        for name, value in metrics.items():
            self._total[name] = self._total.get(name, 0.0) + value
        return metrics

    def total_metrics(self) -> dict[str, float]:
        """Return what :meth:`drain_metrics` gave in all, by metric."""
        return self._total

    def drain_for_report(self) -> tuple[float, float]:
        """Return the joules :meth:`drain_metrics` gave since the last call: all, and assumed."""
        joules, self._for_report = self._for_report, (0.0, 0.0)
        return joules


def open_energy(report: ReportConfig, *, is_first_engine: bool = True) -> EngineEnergy:
    """Open the meter of this process's rank; vLLM's parallel groups exist already.

    Args:
        report: what emissions are computed with.
        is_first_engine: whether the rank's engine is the first on this host. One rank counts what
            the host draws.
    """
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    is_first = is_first_engine and group.local_rank == 0
    return EngineEnergy(
        _meter(is_first=is_first),
        report.carbon_intensity,
        embodied=embodied_rate(report) if is_first else 0.0,
        log=not group.rank,
    )


def embodied_rate(report: ReportConfig) -> float:
    """Return the gCO2e of making the machine that fall on a second of its life."""
    return embodied_grams(report.embodied_kg, report.lifetime_years, 1.0)


def labels(meter: PowerMeter | None = None) -> dict[str, str]:
    """Return how each part is known, by `meter` or else by one that is opened for this."""
    meter = meter or _meter(is_first=True)
    stated = {}
    for part in PARTS:
        known = meter.labels.get(part, Known.NOT_COUNTED).value
        reason = meter.reasons.get(part)
        stated[part] = f"{known} ({reason})" if reason else known
    return stated


def _meter(*, is_first: bool) -> PowerMeter:
    return open_meter(
        dram_watts_per_gb=DRAM_WATTS_PER_GB,
        ssd_watts=lambda: SSD_WATTS if manifest.uses_storage() else 0.0,
        is_first=is_first,
        **_gpus(),
    )


def _gpus() -> dict[str, Any]:
    """Return this rank's GPU if it computes on one, without initializing CUDA elsewhere.

    The scheduler's process must not create a CUDA context.
    """
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    from vllm.third_party import pynvml

    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return {"nvml": pynvml, "gpu_uuids": [f"GPU-{uuid}"]}
