# SPDX-License-Identifier: Apache-2.0
"""KV pages on an SSD instead of host memory, against vLLM's preemption and recomputation.

Each near-KV budget is a share of the workload's peak demand. At each, three systems run the same
requests, all at once, in interleaved rounds: vLLM alone, the plugin with its far pages in a file
(`tier="storage"` without far memory, read with O_DIRECT), and for comparison with them in host
memory. The SSD's traffic is given per generated token, and as a share of the disk's plain
sequential reads and writes, measured before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.cache import cache_root
from benchmarks.harness.convergence import warm_up
from benchmarks.harness.disk import probe_disk
from benchmarks.harness.jobs import EngineSpec, RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import engines, interleave, require_equal
from benchmarks.harness.summary import median_ratio, summarise_rounds
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.kv_workloads import describe, peak_demands, workload
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.workload import Request, warmup_requests
from benchmarks.suites.kv.plan import Expansion, KvPlan
from benchmarks.suites.kv.summary import BASELINE, expansion_key

RESULT_KEYS = (
    "throughput_ratio_vs_vllm",
    "fraction_of_host_memory",
    "bytes_per_token",
    "stall_fraction",
    "disk",
    "by_budget",
    "tokens_equal_fp32",
    "definitions",
)

DEFINITIONS = {
    "throughput_ratio_vs_vllm": "generated tokens/s with far pages on the SSD over vLLM's, which"
    " preempts and computes again, at the same near-tier KV bytes (median over rounds of each"
    " round's ratio); the best over budgets and expansions",
    "fraction_of_host_memory": "tokens/s with far pages on the SSD over those with far pages in"
    " host memory, same budget and expansion, where the ratio is best",
    "bytes_per_token": "KV bytes read from and written to the SSD per generated token, same place",
    "stall_fraction": "time compute waited for copies, over step time, same place",
    "disk": "plain sequential O_DIRECT reads and writes of 1 MiB, one at a time, before the rounds",
    "by_budget": "keys are near-tier KV bytes over the workload's peak KV demand; storage and host"
    " hold the figures per expansion",
    "tokens_equal_fp32": "greedy outputs in float32 with far pages on the SSD that equal vLLM's",
    "foreign_cpu_share": "share of the CPU time taken by other processes, in the worst round",
}

TIERS = {"storage": "SSD", "host": "host memory"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile. Budgets are shares of the peak KV demand.

    `path` is a folder on the SSD under test; empty, it is the benchmarks' cache folder.
    """

    workload: str
    budgets: tuple[float, ...]
    expansions: tuple[float, ...]
    num_requests: int
    control_requests: int
    max_repeats: int  # of rounds disturbed by other processes, per budget
    auto: bool = True
    auto_warmup_rounds: int = 2
    rounds: int = 3
    probe_mib: int = 256
    path: str = ""
    seed: int = 0
    block_size: int = 32

    @property
    def plugin_expansions(self) -> list[Expansion]:
        """Return the fixed expansions and the adaptive one."""
        return [*self.expansions, "auto"] if self.auto else [*self.expansions]


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        workload="sharegpt",
        budgets=(0.25,),
        expansions=(2.0,),
        num_requests=20,
        control_requests=8,
        max_repeats=2,
        auto=False,
    ),
    "full": Settings(
        workload="sharegpt",
        budgets=(0.125, 0.25, 0.5),
        expansions=(1.5, 2.0, 3.0),
        num_requests=36,
        control_requests=16,
        max_repeats=6,
        auto_warmup_rounds=8,  # it first learns the throughput without far layers
    ),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: probe, demand, control, engine starts and rounds."""
    systems = 1 + len(TIERS) * len(settings.plugin_expansions)
    warmup = len(TIERS) * settings.auto_warmup_rounds if settings.auto else 0
    budget = systems + warmup + settings.rounds * systems
    return 1 + 2 + 4 + len(settings.budgets) * budget


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises MeasurementError if float32 outputs differ."""
    with tempfile.TemporaryDirectory(dir=settings.path or cache_root(), prefix="kv-") as folder:
        return _run_in(Path(folder), settings, step)


def _run_in(folder: Path, settings: Settings, step: Step) -> dict[str, Any]:
    disk = probe_disk(folder, settings.probe_mib << 20)
    step(f"disk: reads {disk['read_gb_per_s']:.2f}, writes {disk['write_gb_per_s']:.2f} GB/s")
    model_dir = demo_model_dir()
    requests = workload(settings.workload).requests(settings.num_requests, settings.seed, model_dir)
    plan = KvPlan(
        model_dir=model_dir,
        requests=requests,
        block_size=settings.block_size,
        prefix_caching=False,
    )
    warmup = warmup_requests(requests)
    demand_blocks = peak_demands({settings.workload: plan}, step)[settings.workload]
    control = _fp32_control(plan, settings, demand_blocks, folder, warmup, step)
    by_budget = {}
    for budget in settings.budgets:
        num_blocks = plan.budget_blocks(budget, demand_blocks)
        measured = _measure_budget(plan, settings, num_blocks, folder, warmup, step)
        by_budget[str(budget)] = {
            "near_bytes": num_blocks * plan.block_bytes(),
            "near_blocks": num_blocks,
            **summarise_budget(measured, settings.plugin_expansions),
        }
    return {
        **summarise(by_budget),
        "disk": disk,
        "tokens_equal_fp32": control,
        "demand_blocks": demand_blocks,
        "workload": describe(settings.workload, requests),
        "model": model_dir.name,
        "definitions": DEFINITIONS,
    }


def tier_label(tier: str, expansion: Expansion) -> str:
    """Return the label of the plugin's engine with its far pages in this tier."""
    return f"{TIERS[tier]}, {'' if expansion == 'auto' else 'x'}{expansion_key(expansion)}"


def tier_spec(
    plan: KvPlan,
    tier: str,
    expansion: Expansion,
    num_blocks: int,
    folder: Path,
    dtype: str = "bfloat16",
) -> EngineSpec:
    """Return the specification of the plugin with its far pages in this tier."""
    storage = {"tier": "storage", "path": str(folder), "far_gib": 0.0}
    return plan.spec(
        tier_label(tier, expansion) + ("" if dtype == "bfloat16" else f", {dtype}"),
        num_blocks,
        dtype=dtype,
        expansion=expansion,
        kv=storage if tier == "storage" else None,
    )


def _measure_budget(
    plan: KvPlan,
    settings: Settings,
    num_blocks: int,
    folder: Path,
    warmup: Sequence[Request],
    step: Step,
) -> dict[str, list[RoundResult]]:
    specs = [plan.spec(BASELINE, num_blocks)]
    specs += [
        tier_spec(plan, tier, expansion, num_blocks, folder)
        for expansion in settings.plugin_expansions
        for tier in TIERS
    ]
    with engines(specs, warmup, step) as group:
        if settings.auto:
            for adaptive in group[-len(TIERS) :]:
                warm_up(adaptive, plan.requests, settings.auto_warmup_rounds, step)
        return interleave(group, plan.requests, settings.rounds, step, settings.max_repeats)


def _fp32_control(
    plan: KvPlan,
    settings: Settings,
    demand_blocks: int,
    folder: Path,
    warmup: Sequence[Request],
    step: Step,
) -> dict[str, int]:
    requests = plan.requests[: settings.control_requests]
    num_blocks = plan.budget_blocks(settings.budgets[0], demand_blocks)
    vllm = plan.spec(f"{BASELINE}, float32", num_blocks, dtype="float32")
    ours = tier_spec(plan, "storage", settings.expansions[0], num_blocks, folder, "float32")
    with engines([vllm, ours], warmup, step) as group:
        results = interleave(group, requests, 1, step)
    return require_equal(results[ours.label][0], results[vllm.label][0])


def summarise_budget(
    measured: Mapping[str, Sequence[RoundResult]], expansions: Sequence[Expansion]
) -> dict[str, Any]:
    """Return one budget's figures from the rounds of all its systems, by label."""
    vllm = summarise_rounds(measured[BASELINE])
    tiers: dict[str, dict[str, Any]] = {tier: {} for tier in TIERS}
    for tier, by_expansion in tiers.items():
        for expansion in expansions:
            summary = summarise_rounds(measured[tier_label(tier, expansion)])
            summary["throughput_ratio"] = median_ratio(
                summary["rounds_tokens_per_s"], vllm["rounds_tokens_per_s"]
            )
            by_expansion[expansion_key(expansion)] = summary
    best = max(tiers["storage"], key=lambda key: float(tiers["storage"][key]["throughput_ratio"]))
    return {
        "vllm": vllm,
        **tiers,
        "best_expansion": best,
        "throughput_ratio": tiers["storage"][best]["throughput_ratio"],
        "fraction_of_host_memory": median_ratio(
            tiers["storage"][best]["rounds_tokens_per_s"],
            tiers["host"][best]["rounds_tokens_per_s"],
        ),
    }


def summarise(by_budget: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the headline figures: those of the budget and expansion with the best ratio."""
    best = max(by_budget, key=lambda budget: float(by_budget[budget]["throughput_ratio"]))
    entry = by_budget[best]
    storage = entry["storage"][entry["best_expansion"]]
    return {
        "throughput_ratio_vs_vllm": entry["throughput_ratio"],
        "best": {"budget": float(best), "expansion": entry["best_expansion"]},
        "fraction_of_host_memory": entry["fraction_of_host_memory"],
        "bytes_per_token": {
            "read": storage["read_bytes_per_token"],
            "written": storage["write_bytes_per_token"],
        },
        "stall_fraction": storage["stall_fraction"],
        "worst_foreign_cpu_share": max(
            summary["foreign_cpu_share"]
            for entry in by_budget.values()
            for summary in (entry["vllm"], *entry["storage"].values(), *entry["host"].values())
        ),
        "by_budget": dict(by_budget),
    }


def table(result: Mapping[str, Any]) -> str:
    """Return one row per budget, tier and expansion."""
    rows = []
    for budget, entry in result["by_budget"].items():
        rows.append([budget, "vLLM alone", number(entry["vllm"]["tokens_per_s"]), *["-"] * 6])
        for tier, title in TIERS.items():
            for key, summary in entry[tier].items():
                rows.append(
                    [
                        budget,
                        f"{title}, {key if key == 'auto' else f'x{key}'}",
                        number(summary["tokens_per_s"]),
                        number(summary["throughput_ratio"], 2),
                        number(summary["read_bytes_per_token"] / 1e3),
                        number(summary["write_bytes_per_token"] / 1e3),
                        number(summary["read_gb_per_s"], 2),
                        number(summary["write_gb_per_s"], 2),
                        number(100 * summary["stall_fraction"], 1),
                    ]
                )
    headings = ["near KV", "system", "tokens/s", "ratio", "kB read/token", "kB written/token"]
    return markdown([*headings, "read GB/s", "write GB/s", "stall %"], rows)
