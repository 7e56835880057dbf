# SPDX-License-Identifier: Apache-2.0
"""Figures of the policies that read far KV, each at its best fixed expansion, on the same loads.

The machines and loads are those of `ceiling.py`, with all requests at once, and an SSD.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.simulator.case import Case
from benchmarks.simulator.ceiling import demand_cases, with_all_near, with_share
from benchmarks.simulator.policy_search import Setting, at_expansion, best_of
from benchmarks.simulator.simulation import Run, simulate
from benchmarks.simulator.trace import LENGTHS, Trace, all_at_once
from vllm_tiered.planner.machine import load_profile

SSD = "cpu-2core-ssd"

DEFINITIONS = {
    "throughput_ratio": "output tokens/s over those of vLLM without far layers in the same near"
    " memory, at the policy's best fixed expansion; 1 with expansion 1 if every other one is worse",
    "over_interleave": "the same over interleave's at its own best fixed expansion; the least, the"
    " median and the most over all machines, shares and loads of the run",
    "expansion": "near pages' blocks over those without far layers, before partial blocks: n/(n-m)"
    " for pie, n/(n-m+buffers) for interleave, and the limit of the blocks for blocks",
    "partial_blocks": "whether the last, partial block of a request stays near in far layers",
    "read_mb_per_step": "MB (10^6 bytes) per step from far to near, of all layers",
    "written_mb_per_step": "the same from near to far",
    "stall_share": "share of the time for which compute waits for layers",
    "by_share": "near memory over the most KV that the load uses with unlimited memory",
    "ceiling_ratio": "tokens/s with unlimited near memory over those without far layers",
    "same_blocks_share": "share of interleave's steps whose blocks are those of the step before",
    "by_load": "the same at a quarter of the demand with assumed loads: long prompts (1,000 tokens,"
    " 48 generated), long outputs (48 and 800), far pages of half the bytes, no time between"
    " the layers of two steps, and prompts of which three quarters are read from the far tier"
    " (1,000 and 200; vLLM without far layers computes them)",
    "hits_alone": "tokens/s with these reads and no far layer over those without either",
    "at_expansion": "all policies at the first expansion that is at least the key, a quarter of the"
    " demand, partial blocks moved if the policy can (blocks cannot)",
}


NUM_MACHINES = 6
"""Number of cases, for the display of progress."""

LOADS = ("long prompts", "long outputs", "narrow pages", "no overhead", "prefix hits")

SHARE_OF_LOADS = 4
"""Divisor of the demand for other loads, and for policies at one expansion."""


def policy_cases(load: str | None = None) -> dict[str, Case]:
    """Return the cases by machine and model, of ShareGPT's lengths or of a load of `LOADS`.

    The near memory is set later.
    """
    found = {
        name: dataclasses.replace(case, partial_blocks_resident=False)
        for name, case in demand_cases().items()
    }
    found[SSD] = dataclasses.replace(
        found["cpu-2core"], machine=load_profile(SSD), uses_storage=True
    )
    if load is None:
        return found
    return {name: _with_load(case, load) for name, case in found.items()}


def _with_load(case: Case, load: str) -> Case:
    if load == "narrow pages":
        return dataclasses.replace(case, far_page_share=0.5)
    if load == "no overhead":
        machine = dataclasses.replace(case.machine, step_overhead_ms=0.0, request_overhead_us=0.0)
        return dataclasses.replace(case, machine=machine)
    arrivals = all_at_once(LENGTHS[load], case.max_num_seqs, seed=0)
    trace = Trace(arrivals=arrivals, horizon_s=1e6)
    return dataclasses.replace(case, trace=trace, reads_hits=load == "prefix hits")


def best_figures(case: Case, divisor: int, policies: Sequence[str], stride: int) -> dict[str, Any]:
    """Return the figures of each policy at its best expansion, JSON-safe."""
    ceiling = with_all_near(case)
    limited = with_share(case, ceiling, divisor)
    none = simulate(dataclasses.replace(limited, reads_hits=False), 0)
    by_policy = {}
    same_blocks_share = 0.0
    for name in policies:
        best = best_of(dataclasses.replace(limited, policy=name), none, stride)
        by_policy[name] = _figures(best.setting, best.run, none)
        if name == "interleave":
            same_blocks_share = best.run.steps_with_same_blocks / best.run.steps
    return {
        "ceiling_ratio": ceiling.tokens_per_s / none.tokens_per_s,
        "tokens_per_s_without_far_layers": none.tokens_per_s,
        "same_blocks_share": same_blocks_share,
        "hits_alone": (
            simulate(limited, 0).tokens_per_s / none.tokens_per_s if case.reads_hits else None
        ),
        "by_policy": by_policy,
    }


def figures_at(
    case: Case, divisor: int, policies: Sequence[str], expansion: float
) -> dict[str, Any]:
    """Return the figures of each policy at one expansion, JSON-safe."""
    limited = with_share(case, with_all_near(case), divisor)
    none = simulate(limited, 0)
    by_policy = {}
    for name in policies:
        found = at_expansion(dataclasses.replace(limited, policy=name), expansion)
        if found is not None:
            by_policy[name] = _figures(*found, none)
    return by_policy


def over_interleave(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return for each policy the least, median and most tokens/s over interleave's."""
    ratios: dict[str, list[float]] = {}
    for entry in entries:
        figures = entry["by_policy"]
        for name, of_policy in figures.items():
            ratio = of_policy["throughput_ratio"] / figures["interleave"]["throughput_ratio"]
            ratios.setdefault(name, []).append(ratio)
    return {
        name: {"least": min(values), "median": statistics.median(values), "most": max(values)}
        for name, values in ratios.items()
    }


def _figures(setting: Setting | None, run: Run, none: Run) -> dict[str, Any]:
    return {
        "throughput_ratio": run.tokens_per_s / none.tokens_per_s,
        "expansion": setting.expansion if setting else 1.0,
        "partial_blocks": "near" if setting is None or setting.is_partial_resident else "moved",
        "read_mb_per_step": run.read_bytes / run.steps / 1e6,
        "written_mb_per_step": run.written_bytes / run.steps / 1e6,
        "stall_share": run.stall_seconds / run.busy_seconds,
    }
