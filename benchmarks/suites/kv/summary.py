# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the KV benchmarks, from rounds by label to results: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.harness.jobs import RoundResult
from benchmarks.harness.summary import median_ratio, summarise_rounds
from benchmarks.suites.kv.plan import Expansion

CEILING = "vLLM, unlimited KV"
BASELINE = "vLLM alone"
BESIDE_COPIES = "vLLM, unlimited KV, beside copies"

DEFINITIONS = {
    "throughput_ratio_vs_vllm": "generated tokens/s, plugin over vLLM at the same near-tier KV"
    " bytes: median over rounds of each round's ratio; the best over budgets and expansions",
    "by_budget": "keys are near-tier KV bytes over the workload's peak KV demand",
    "auto": "the expansion follows the load (`expansion=auto`); its rounds come after a warm-up"
    " with the same load. fraction_of_best_fixed is over the fixed expansion with the best ratio in"
    " the same rounds (picked from them, so slightly flattered; kv_adaptive picks beforehand)",
    "fraction_of_ceiling": "plugin tokens/s over those of vLLM with unlimited KV in the same rounds"
    " (median of ratios), at each budget's best expansion; from_half_demand is the lowest over"
    " budgets of at least half the demand",
    "mean_tpot_ratio": "plugin's mean time per output token over vLLM's, where the throughput"
    " ratio is best; below 1 is faster",
    "mean_token_latency_ratio": "the same for the time from arrival to last token per output token,"
    " which includes queueing (Pie, section 5.1)",
    "memory_ratio_for_equal_throughput": "near-tier KV bytes that vLLM alone needs, by linear"
    " interpolation between its measured budgets and at most the largest of them, for the tokens/s"
    " of the plugin's best expansion, over the plugin's bytes; the best over budgets",
    "stall_fraction": "time compute waited for copies, over step time, where the ratio is best",
    "bookkeeping_fraction": "time of the plugin's hooks (planning, translation, waits without the"
    " standstill), over step time, same place",
    "bytes_per_step": "KV bytes copied per step in each direction, same place",
    "foreign_cpu_share": "share of the CPU time taken by other processes, in the worst round:"
    " above 0.05 the round was disturbed and, if repeating did not help, is not to be trusted",
}


def expansion_key(expansion: Expansion) -> str:
    """Return the expansion as a key of the results: itself if it adapts, or the number."""
    return expansion if isinstance(expansion, str) else f"{expansion:g}"


def plugin_label(expansion: Expansion) -> str:
    """Return the label of the plugin's engine at this expansion."""
    return f"plugin {expansion}" if isinstance(expansion, str) else f"plugin x{expansion:g}"


def summarise_budget(
    measured: Mapping[str, Sequence[RoundResult]], expansions: Sequence[Expansion]
) -> dict[str, Any]:
    """Return one budget's figures from the rounds of all its systems, by label."""
    vllm = summarise_rounds(measured[BASELINE])
    ceiling = summarise_rounds(measured[CEILING])
    plugin: dict[Expansion, dict[str, Any]] = {}
    for expansion in expansions:
        summary = summarise_rounds(measured[plugin_label(expansion)])
        rates = summary["rounds_tokens_per_s"]
        summary["throughput_ratio"] = median_ratio(rates, vllm["rounds_tokens_per_s"])
        summary["fraction_of_ceiling"] = median_ratio(rates, ceiling["rounds_tokens_per_s"])
        plugin[expansion] = summary
    best = _best(plugin, expansions)
    return {
        "vllm": vllm,
        "ceiling": ceiling,
        "plugin": {expansion_key(expansion): summary for expansion, summary in plugin.items()},
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
        **_auto_figures(plugin),
    }


def _best(plugin: Mapping[Expansion, Mapping[str, Any]], among: Sequence[Expansion]) -> Expansion:
    return max(among, key=lambda expansion: float(plugin[expansion]["throughput_ratio"]))


def _auto_figures(plugin: Mapping[Expansion, Mapping[str, Any]]) -> dict[str, Any]:
    """Return {"auto": ...} of the first that follows the load, if fixed ones were measured too."""
    fixed = [expansion for expansion in plugin if not isinstance(expansion, str)]
    autos = [expansion for expansion in plugin if isinstance(expansion, str)]
    if not autos or not fixed:
        return {}
    auto = plugin[autos[0]]
    best = _best(plugin, fixed)
    return {
        "auto": {
            "throughput_ratio": auto["throughput_ratio"],
            "fraction_of_ceiling": auto["fraction_of_ceiling"],
            "best_fixed": best,
            "fraction_of_best_fixed": median_ratio(
                auto["rounds_tokens_per_s"], plugin[best]["rounds_tokens_per_s"]
            ),
        }
    }


def summarise(by_budget: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the headline figures: those of the budget and expansion with the best ratio."""
    best = max(by_budget, key=lambda budget: float(by_budget[budget]["throughput_ratio"]))
    at_best = by_budget[best]
    plugin = at_best["plugin"][expansion_key(at_best["best_expansion"])]
    from_half = [
        entry["fraction_of_ceiling"] for budget, entry in by_budget.items() if float(budget) >= 0.5
    ]
    memory = memory_ratios(by_budget)
    return {
        "throughput_ratio_vs_vllm": at_best["throughput_ratio"],
        "best": {"budget": float(best), "expansion": at_best["best_expansion"]},
        "auto": {budget: entry["auto"] for budget, entry in by_budget.items() if "auto" in entry},
        "fraction_of_ceiling": {
            "at_best": at_best["fraction_of_ceiling"],
            "from_half_demand": min(from_half) if from_half else None,
        },
        "mean_tpot_ratio": plugin["mean_tpot_ms"] / at_best["vllm"]["mean_tpot_ms"],
        "mean_token_latency_ratio": (
            plugin["mean_token_latency_ms"] / at_best["vllm"]["mean_token_latency_ms"]
        ),
        "memory_ratio_for_equal_throughput": max(memory.values()) if memory else None,
        "memory_ratios": memory,
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


def memory_ratios(by_budget: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return, per budget, vLLM's near bytes for the plugin's throughput over the plugin's.

    Returns nothing for a single budget: there is no curve to interpolate on (Pie, section 5.2).
    """
    if len(by_budget) < 2:
        return {}
    curve = [
        (float(entry["near_bytes"]), float(entry["vllm"]["tokens_per_s"]))
        for entry in by_budget.values()
    ]
    ratios = {}
    for budget, entry in by_budget.items():
        rate = entry["plugin"][expansion_key(entry["best_expansion"])]["tokens_per_s"]
        ratios[budget] = bytes_for_rate(curve, rate) / entry["near_bytes"]
    return ratios


def bytes_for_rate(curve: Sequence[tuple[float, float]], rate: float) -> float:
    """Return the fewest bytes at which the curve of (bytes, tokens/s) reaches the rate.

    The curve is linear between the points; the result is never outside their range.
    """
    ordered = sorted(curve)
    if rate <= ordered[0][1]:
        return ordered[0][0]
    for (below_bytes, below), (above_bytes, above) in pairwise(ordered):
        if below < rate <= above:
            return below_bytes + (above_bytes - below_bytes) * (rate - below) / (above - below)
    return ordered[-1][0]
