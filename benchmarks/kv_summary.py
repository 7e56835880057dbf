# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the KV benchmark, from rounds by label to its result: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.jobs import RoundResult
from benchmarks.summary import median_ratio, summarise_rounds

CEILING = "vLLM, unlimited KV"
BASELINE = "vLLM alone"

DEFINITIONS = {
    "throughput_ratio_vs_vllm": "generated tokens/s, plugin over vLLM at the same near-tier KV"
    " bytes: median over rounds of each round's ratio; the best over budgets and expansions",
    "by_budget": "keys are near-tier KV bytes over the workload's peak KV demand",
    "fraction_of_ceiling": "plugin tokens/s over those of vLLM with unlimited KV in the same rounds"
    " (median of ratios), at each budget's best expansion; from_half_demand is the lowest over"
    " budgets of at least half the demand",
    "mean_tpot_ratio": "plugin's mean time per output token over vLLM's, where the throughput"
    " ratio is best; below 1 is faster",
    "stall_fraction": "time compute waited for copies, over step time, where the ratio is best",
    "bookkeeping_fraction": "Python time of planning and translation, over step time, same place",
    "bytes_per_step": "KV bytes copied per step in each direction, same place",
    "foreign_cpu_share": "share of the CPU time taken by other processes, in the worst round:"
    " above 0.05 the round was disturbed and, if repeating did not help, is not to be trusted",
}


def plugin_label(expansion: float) -> str:
    """Return the label of the plugin's engine at this expansion."""
    return f"plugin x{expansion:g}"


def summarise_budget(
    measured: Mapping[str, Sequence[RoundResult]], expansions: Sequence[float]
) -> dict[str, Any]:
    """Return one budget's figures from the rounds of all its systems, by label."""
    vllm = summarise_rounds(measured[BASELINE])
    ceiling = summarise_rounds(measured[CEILING])
    plugin: dict[float, dict[str, Any]] = {}
    for expansion in expansions:
        summary = summarise_rounds(measured[plugin_label(expansion)])
        rates = summary["rounds_tokens_per_s"]
        summary["throughput_ratio"] = median_ratio(rates, vllm["rounds_tokens_per_s"])
        summary["fraction_of_ceiling"] = median_ratio(rates, ceiling["rounds_tokens_per_s"])
        plugin[expansion] = summary
    best = max(plugin, key=lambda expansion: float(plugin[expansion]["throughput_ratio"]))
    return {
        "vllm": vllm,
        "ceiling": ceiling,
        "plugin": {f"{expansion:g}": summary for expansion, summary in plugin.items()},
        "best_expansion": best,
        "throughput_ratio": plugin[best]["throughput_ratio"],
        "fraction_of_ceiling": plugin[best]["fraction_of_ceiling"],
        "vllm_fraction_of_ceiling": median_ratio(
            vllm["rounds_tokens_per_s"], ceiling["rounds_tokens_per_s"]
        ),
        "preemptions": {
            "vllm": vllm["preemptions"],
            "plugin": plugin[best]["preemptions"],
        },
    }


def summarise(by_budget: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the headline figures: those of the budget and expansion with the best ratio."""
    best = max(by_budget, key=lambda budget: float(by_budget[budget]["throughput_ratio"]))
    at_best = by_budget[best]
    plugin = at_best["plugin"][f"{at_best['best_expansion']:g}"]
    from_half = [
        entry["fraction_of_ceiling"] for budget, entry in by_budget.items() if float(budget) >= 0.5
    ]
    return {
        "throughput_ratio_vs_vllm": at_best["throughput_ratio"],
        "best": {"budget": float(best), "expansion": at_best["best_expansion"]},
        "fraction_of_ceiling": {
            "at_best": at_best["fraction_of_ceiling"],
            "from_half_demand": min(from_half) if from_half else None,
        },
        "mean_tpot_ratio": plugin["mean_tpot_ms"] / at_best["vllm"]["mean_tpot_ms"],
        "stall_fraction": plugin["stall_fraction"],
        "bookkeeping_fraction": plugin["bookkeeping_fraction"],
        "bytes_per_step": {
            "far_to_near": plugin["read_bytes_per_step"],
            "near_to_far": plugin["write_bytes_per_step"],
        },
        "worst_foreign_cpu_share": max(
            summary["foreign_cpu_share"]
            for entry in by_budget.values()
            for summary in (entry["vllm"], entry["ceiling"], *entry["plugin"].values())
        ),
        "by_budget": dict(by_budget),
    }
