# SPDX-License-Identifier: Apache-2.0
"""Throughput and latency by arrival rate of requests (Pie, figures 8 and 9c).

vLLM alone, the plugin at fixed expansions and with `expansion=auto` (one or several policies) serve
the same requests in the same near-tier KV memory, a share of the workload's peak demand. Arrivals
are a Poisson process. Rates are given as loads, so that the same settings make sense on any
machine: a load is a multiple of the rate that vLLM alone serves when all requests arrive at once,
which is measured first.

At each load `auto` first runs an unmeasured round, then all systems run interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.convergence import warm_up
from benchmarks.harness.jobs import RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import EngineProcess, engines, interleave
from benchmarks.harness.summary import median_ratio, summarise_rounds
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.kv_workloads import describe, peak_demands, workload
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.workload import Request, warmup_requests
from benchmarks.suites.kv.plan import Auto, Expansion, KvPlan
from benchmarks.suites.kv.summary import BASELINE, expansion_key, plugin_label

RESULT_KEYS = (
    "throughput_ratio_vs_vllm",
    "mean_token_latency_ratio",
    "by_load",
    "saturated_requests_per_s",
    "worst_foreign_cpu_share",
    "definitions",
)

DEFINITIONS = {
    "load": "requests per second over saturated_requests_per_s; arrivals are a Poisson process",
    "saturated_requests_per_s": "what vLLM alone serves at this near-tier KV memory when all"
    " requests are there at once",
    "by_load": "per load: requests_per_s, and per system its figures (medians over rounds)",
    "tokens_per_s": "generated tokens over the time from the first arrival to the last token",
    "mean_token_latency_ms": "time from arrival to last token per output token, so queueing is in"
    " it (Pie, section 5.1); mean over requests, p99 likewise",
    "mean_ttft_ms": "time from arrival to the first token",
    "throughput_ratio_vs_vllm": "tokens/s of expansion=auto over vLLM's (median over rounds of each"
    " round's ratio); at the top the best over loads, at best_load",
    "mean_token_latency_ratio": "mean_token_latency_ms of expansion=auto over vLLM's; at the top"
    " the lowest over loads",
    "foreign_cpu_share": "share of the CPU time taken by other processes, in the worst round",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile. The budget is a share of the peak KV demand.

    `autos` are the plugins that follow the load; the ratios at the top are the first one's.
    """

    workload: str
    budget: float
    loads: tuple[float, ...]
    expansions: tuple[float, ...]
    num_requests: int
    max_repeats: int  # of rounds disturbed by other processes, per load
    rounds: int = 3
    warmup_rounds: int = 1
    seed: int = 0
    block_size: int = 32
    autos: tuple[Auto, ...] = ("auto",)

    @property
    def plugin_expansions(self) -> list[Expansion]:
        """Return the fixed expansions and those that follow the load."""
        return [*self.expansions, *self.autos]


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        workload="sharegpt",
        budget=0.25,
        loads=(1.0, 2.0),
        expansions=(2.0,),
        num_requests=14,
        max_repeats=1,
    ),
    "full": Settings(
        workload="sharegpt",
        budget=0.25,
        loads=(0.5, 0.75, 1.0, 1.5, 2.0, 3.0),
        expansions=(1.5, 2.0, 3.0),
        num_requests=48,
        max_repeats=4,
    ),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: engine starts, demand, capacity and rounds."""
    systems = 1 + len(settings.plugin_expansions)
    per_load = settings.warmup_rounds * len(settings.autos) + settings.rounds * systems
    return 2 + systems + 1 + len(settings.loads) * per_load


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    model_dir = demo_model_dir()
    source = workload(settings.workload)
    saturated = source.requests(settings.num_requests, settings.seed, model_dir)
    plan = KvPlan(
        model_dir=model_dir,
        requests=saturated,
        block_size=settings.block_size,
        prefix_caching=False,
    )
    warmup = warmup_requests(saturated)
    demand_blocks = peak_demands({settings.workload: plan}, step)[settings.workload]
    num_blocks = plan.budget_blocks(settings.budget, demand_blocks)
    expansions = settings.plugin_expansions
    specs = [plan.spec(BASELINE, num_blocks)]
    specs += [plan.spec(plugin_label(x), num_blocks, expansion=x) for x in expansions]
    with engines(specs, warmup, step) as group:
        capacity = len(saturated) / group[0].run(saturated).seconds
        step(f"vLLM alone serves {capacity:.2f} requests/s")
        measured = {}
        for load in settings.loads:
            rate = load * capacity
            requests = source.requests(settings.num_requests, settings.seed, model_dir, rate)
            for auto in group[-len(settings.autos) :]:
                warm_up(auto, requests, settings.warmup_rounds, step)
            measured[f"{load:g}"] = (rate, _rounds_at(group, requests, load, settings, step))
    return {
        **summarise(measured, expansions),
        "saturated_requests_per_s": capacity,
        "demand_blocks": demand_blocks,
        "near_blocks": num_blocks,
        "near_bytes": num_blocks * plan.block_bytes(),
        "workload": describe(settings.workload, saturated),
        "model": model_dir.name,
        "definitions": DEFINITIONS,
    }


def _rounds_at(
    group: Sequence[EngineProcess],
    requests: Sequence[Request],
    load: float,
    settings: Settings,
    step: Step,
) -> dict[str, list[RoundResult]]:
    def step_at_load(text: str) -> None:
        step(f"load {load:g}: {text}")

    return interleave(group, requests, settings.rounds, step_at_load, settings.max_repeats)


def summarise(
    measured: Mapping[str, tuple[float, Mapping[str, Sequence[RoundResult]]]],
    expansions: Sequence[Expansion],
) -> dict[str, Any]:
    """Return the figures from (requests/s, rounds by label) of each load."""
    by_load: dict[str, Any] = {}
    for load, (rate, rounds) in measured.items():
        vllm = summarise_rounds(rounds[BASELINE])
        systems = {"vllm": vllm}
        for expansion in expansions:
            summary = summarise_rounds(rounds[plugin_label(expansion)])
            summary["throughput_ratio_vs_vllm"] = median_ratio(
                summary["rounds_tokens_per_s"], vllm["rounds_tokens_per_s"]
            )
            summary["mean_token_latency_ratio"] = (
                summary["mean_token_latency_ms"] / vllm["mean_token_latency_ms"]
            )
            systems[expansion_key(expansion)] = summary
        by_load[load] = {"requests_per_s": rate, "systems": systems}
    first = next(expansion for expansion in expansions if isinstance(expansion, str))
    auto = {load: entry["systems"][first] for load, entry in by_load.items()}
    best = max(auto, key=lambda load: float(auto[load]["throughput_ratio_vs_vllm"]))
    return {
        "throughput_ratio_vs_vllm": auto[best]["throughput_ratio_vs_vllm"],
        "best_load": float(best),
        "mean_token_latency_ratio": min(
            summary["mean_token_latency_ratio"] for summary in auto.values()
        ),
        "worst_foreign_cpu_share": max(
            summary["foreign_cpu_share"]
            for entry in by_load.values()
            for summary in entry["systems"].values()
        ),
        "by_load": by_load,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return one row per load and system."""
    rows = []
    for load, entry in result["by_load"].items():
        for system, summary in entry["systems"].items():
            rows.append(
                [
                    load,
                    number(entry["requests_per_s"], 2),
                    f"x{system}" if system[0].isdigit() else system,
                    number(summary["tokens_per_s"]),
                    number(summary["mean_token_latency_ms"], 1),
                    number(summary["p99_token_latency_ms"], 1),
                    number(summary["mean_tpot_ms"], 1),
                    number(summary["mean_ttft_ms"]),
                    number(summary["p99_ttft_ms"]),
                    number(summary["preemptions"]),
                ]
            )
    headings = ["load", "requests/s", "system", "tokens/s", "ms/token mean", "p99"]
    return markdown([*headings, "TPOT ms", "TTFT ms mean", "p99", "preemptions"], rows)
