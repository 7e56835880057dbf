# SPDX-License-Identifier: Apache-2.0
"""Adaptive expansion on machines and loads that are not at hand: a simulation.

Each scenario (`benchmarks/simulator/scenarios.py`) runs with the controller and at fixed levels, on
the same requests. The controller, the block arithmetic and the changes between levels are the
engine's own code; the scheduler and the step times are models. `cpu_model` gives the deviation of
the model of this project's machine from what was measured there with vLLM.

`--set plot_dir=DIR` writes a plot of every scenario (extra `report`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.plots import require_matplotlib
from benchmarks.harness.progress import Step
from benchmarks.simulator import ceiling
from benchmarks.simulator.calibration import calibration
from benchmarks.simulator.compare import DEFINITIONS, compare, fixed_levels, headline, run_fixed
from benchmarks.simulator.scenarios import SCENARIOS
from benchmarks.simulator.simulation import simulate

RESULT_KEYS = (
    "fraction_of_best_fixed",
    "fraction_of_best_transparent",
    "steps_to_converge",
    "level_changes",
    "simulated_seconds_per_second",
    "cpu_model",
    "half_demand",
    "eighth_demand",
    "by_scenario",
    "definitions",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile."""

    seconds: float  # of load, per scenario
    level_stride: int  # between the fixed levels that are tried
    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    noise: float = 0.05
    seed: int = 0
    plot_dir: str = ""


PROFILES = {
    "quick": Settings(seconds=300.0, level_stride=4),
    "full": Settings(seconds=1800.0, level_stride=2),
}


def num_steps(settings: Settings) -> int:
    """Return how often `run` reports: calibration, half and an eighth of the demand, scenarios."""
    return 3 + len(settings.scenarios)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Simulate; see the module's docstring. Raises ValueError for an unknown scenario."""
    unknown = [name for name in settings.scenarios if name not in SCENARIOS]
    if unknown:
        raise ValueError(f"no scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
    if settings.plot_dir:
        require_matplotlib()  # before simulating, not after
    cpu_model = calibration()
    step(f"model of the CPU machine: at most {cpu_model['worst_error']:.1%} from what was measured")
    half_demand = ceiling.half_demand()
    shares = (f"{entry['fraction_of_ceiling']:.2f} {name}" for name, entry in half_demand.items())
    step(f"half of the demand near, of the ceiling: {'; '.join(shares)}")
    eighth_demand = ceiling.eighth_demand()
    gains = (
        f"{entry['throughput_gain']:.2f} and {entry['token_latency_gain']:.2f} {name}"
        for name, entry in eighth_demand.items()
    )
    step(f"an eighth near, times the tokens/s and times lower latency: {'; '.join(gains)}")
    by_scenario = {}
    simulated = taken = 0.0
    for name in settings.scenarios:
        scenario = SCENARIOS[name]
        case = scenario.case(seconds=settings.seconds, noise=settings.noise, seed=settings.seed)
        start = time.perf_counter()
        auto = simulate(case)
        taken += time.perf_counter() - start
        simulated += auto.seconds
        fixed = {
            level: measured
            for level in fixed_levels(case, settings.level_stride)
            if (measured := run_fixed(case, level)) is not None
        }
        entry = compare(auto, fixed, case, is_steady=scenario.is_steady)
        by_scenario[name] = entry
        if settings.plot_dir:
            from benchmarks.simulator.plot import plot_timeline

            plot_timeline(auto.timeline, name, Path(settings.plot_dir) / f"{name}.png")
        step(
            f"{name}: {entry['tokens_per_s']:.0f} tokens/s,"
            f" {entry['fraction_of_best_fixed']:.3f} of the best fixed,"
            f" {entry['fraction_of_best_transparent']:.3f} of the best transparent,"
            f" {entry['level_changes']} changes"
        )
    return {
        **headline(by_scenario),
        "simulated_seconds_per_second": simulated / taken,
        "cpu_model": cpu_model,
        "half_demand": half_demand,
        "eighth_demand": eighth_demand,
        "by_scenario": by_scenario,
        "definitions": {**DEFINITIONS, **ceiling.DEFINITIONS},
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the scenarios as Markdown."""
    head = (
        "| scenario | tokens/s | of best fixed | of best transparent | expansion | stall"
        " | steps to converge | changes (late) |"
    )
    lines = [head, "|" + "---|" * 8]
    for name, entry in result["by_scenario"].items():
        steps = entry["steps_to_converge"]
        lines.append(
            f"| {name} | {entry['tokens_per_s']:.0f} | {entry['fraction_of_best_fixed']:.3f}"
            f" | {entry['fraction_of_best_transparent']:.3f} | {entry['median_expansion']:.2f}"
            f" | {entry['stall_fraction']:.1%} | {'' if steps is None else steps}"
            f" | {entry['level_changes']} ({entry['late_level_changes']}) |"
        )
    return "\n".join(lines)
