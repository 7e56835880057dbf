# SPDX-License-Identifier: Apache-2.0
"""Cost of copies for the model that computes meanwhile: the limit of hiding them on this machine.

vLLM alone, with unlimited KV memory, runs the workload while a thread copies unused pages at a
given rate. Near and far tier are the same DRAM here, so a copy takes a core, caches and memory
bandwidth from the model. On a machine with a link and copy engines of its own it does not. Any
swapping loses at least what is lost here, however well it hides its copies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.background_copier import idle_gb_per_s
from benchmarks.harness.jobs import RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import engines, interleave
from benchmarks.harness.summary import COPIED_BYTES, median_ratio, summarise_rounds
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.kv_workloads import describe, workload
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.workload import warmup_requests
from benchmarks.suites.kv.bound import seconds_per_gb
from benchmarks.suites.kv.plan import KvPlan

RESULT_KEYS = (
    "idle_gb_per_s",
    "gb_per_s_while_computing",
    "fraction_of_speed",
    "seconds_per_gb",
    "by_rate",
    "definitions",
)

DEFINITIONS = {
    "idle_gb_per_s": "copy rate while nothing computes, one thread",
    "gb_per_s_while_computing": "copy rate left while vLLM computes, if copies are not held back",
    "fraction_of_speed": "vLLM's tokens/s under those copies over those without (median over"
    " rounds of each round's ratio)",
    "seconds_per_gb": "time that a round takes longer, per GB copied; the median over the rates"
    " that are held back",
    "by_rate": "keys are GB/s at most; inf is not held back",
    "foreign_cpu_share": "share of the CPU time taken by other processes, in the worst round",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile. Rates are in GB/s; unlimited copies are always added."""

    num_requests: int
    rates: tuple[float, ...]
    max_repeats: int  # of rounds disturbed by other processes
    rounds: int = 3
    workload: str = "sharegpt"
    seed: int = 0
    block_size: int = 32

    @property
    def all_rates(self) -> list[float]:
        """Return the rates with the unlimited one."""
        return [*self.rates, math.inf]


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(num_requests=24, rates=(1.0,), max_repeats=2),
    "full": Settings(num_requests=36, rates=(0.5, 1.0, 2.0, 4.0), max_repeats=6),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: every engine start and every round."""
    return (1 + len(settings.all_rates)) * (1 + settings.rounds)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    model_dir = demo_model_dir()
    source = workload(settings.workload)
    requests = source.requests(settings.num_requests, settings.seed, model_dir)
    plan = KvPlan(
        model_dir=model_dir, requests=requests, block_size=settings.block_size, prefix_caching=False
    )
    idle = idle_gb_per_s()
    base = plan.spec(_label(0.0), plan.enough_blocks())
    specs = [base] + [
        replace(base, label=_label(rate), copies_gb_per_s=rate) for rate in settings.all_rates
    ]
    with engines(specs, warmup_requests(requests), step) as group:
        measured = interleave(group, requests, settings.rounds, step, settings.max_repeats)
    return {
        "idle_gb_per_s": idle,
        **summarise(measured, settings.all_rates),
        "workload": describe(settings.workload, requests),
        "model": model_dir.name,
        "definitions": DEFINITIONS,
    }


def summarise(
    measured: Mapping[str, Sequence[RoundResult]], rates: Sequence[float]
) -> dict[str, Any]:
    """Return the figures from the rounds by label."""
    alone = summarise_rounds(measured[_label(0.0)])
    by_rate: dict[str, Any] = {}
    for rate in rates:
        rounds = measured[_label(rate)]
        summary = summarise_rounds(rounds)
        copied_gb = [result.counters[COPIED_BYTES] / 1e9 for result in rounds]
        by_rate[f"{rate:g}"] = {
            **summary,
            "fraction_of_speed": median_ratio(
                summary["rounds_tokens_per_s"], alone["rounds_tokens_per_s"]
            ),
            "gb_per_s": statistics.median(
                gb / result.seconds for gb, result in zip(copied_gb, rounds, strict=True)
            ),
            "seconds_per_gb": seconds_per_gb(rounds, measured[_label(0.0)]),
        }
    fastest = by_rate[f"{max(rates):g}"]
    held_back = [entry["seconds_per_gb"] for rate, entry in by_rate.items() if rate != "inf"]
    return {
        "gb_per_s_while_computing": fastest["gb_per_s"],
        "fraction_of_speed": fastest["fraction_of_speed"],
        "seconds_per_gb": statistics.median(held_back or [fastest["seconds_per_gb"]]),
        "by_rate": {"0": alone, **by_rate},
    }


def table(result: Mapping[str, Any]) -> str:
    """Return one row per rate."""
    rows = [
        [
            rate,
            number(entry.get("gb_per_s", 0.0), 2),
            number(entry["tokens_per_s"]),
            number(entry.get("fraction_of_speed", 1.0), 3),
            number(entry.get("seconds_per_gb"), 3),
        ]
        for rate, entry in result["by_rate"].items()
    ]
    return markdown(
        ["GB/s at most", "GB/s copied", "tokens/s", "of the speed", "seconds per GB"], rows
    )


def _label(rate: float) -> str:
    return "no copies" if not rate else f"copies, {rate:g} GB/s"
