# SPDX-License-Identifier: Apache-2.0
"""What is far, and when it is read: the policies side by side (section 5.7).

At one near-KV budget the plugin runs the same requests at the same expansions under each policy.
`interleave` reads whole layers ahead while other layers compute. `blocks` reads ahead, too, but
keeps whole blocks near, and reads only what does not fit. With `on_demand` each far layer waits for
its own reads, as in FlexGen-style swapping. vLLM alone is the baseline. Rounds are interleaved.
With `--set dtype=float32` nothing is reported unless all tokens are vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.jobs import RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import engines, interleave, require_equal
from benchmarks.harness.summary import median_ratio, summarise_rounds
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.kv_workloads import describe, peak_demands, workload
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.workload import warmup_requests
from benchmarks.suites.kv.plan import KvPlan
from benchmarks.suites.kv.summary import BASELINE, expansion_key, plugin_label

RESULT_KEYS = (
    "throughput_ratio_vs_on_demand",
    "blocks_over_interleave",
    "by_expansion",
    "tokens_equal_fp32",
    "worst_foreign_cpu_share",
    "definitions",
)

DEFINITIONS = {
    "throughput_ratio_vs_on_demand": "generated tokens/s of a policy over those of on_demand at the"
    " same expansion and near-tier KV bytes (median over rounds of each round's ratio); at the top"
    " interleave's, the best over expansions, at best_expansion",
    "throughput_ratio_vs_vllm": "the same over vLLM alone",
    "blocks_over_interleave": "tokens/s of blocks over those of interleave, each at its best"
    " expansion (median over rounds of each round's ratio; both picked from these rounds)",
    "by_expansion": "per expansion: the figures of each policy (medians over rounds)",
    "stall_fraction": "time compute waited for copies, over step time",
    "foreign_cpu_share": "share of the CPU time taken by other processes, in the worst round",
}

ON_DEMAND = "on_demand"
POLICIES = ("interleave", "blocks", ON_DEMAND)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile. The budget is a share of the peak KV demand.

    `dtype` is that of the engines: without AVX-512, vLLM's bfloat16 is many times slower than
    float32.
    """

    budget: float
    expansions: tuple[float, ...]
    num_requests: int
    max_repeats: int  # of rounds disturbed by other processes
    rounds: int = 3
    workload: str = "sharegpt"
    seed: int = 0
    block_size: int = 32
    dtype: str = "bfloat16"


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(budget=0.25, expansions=(2.0,), num_requests=20, max_repeats=1),
    "full": Settings(budget=0.25, expansions=(1.5, 2.0, 3.0), num_requests=36, max_repeats=4),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: engine starts, demand and rounds."""
    systems = 1 + len(settings.expansions) * len(POLICIES)
    return 2 + systems * (1 + settings.rounds)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    model_dir = demo_model_dir()
    requests = workload(settings.workload).requests(settings.num_requests, settings.seed, model_dir)
    plan = KvPlan(
        model_dir=model_dir,
        requests=requests,
        block_size=settings.block_size,
        prefix_caching=False,
        dtype=settings.dtype,
    )
    demand_blocks = peak_demands({settings.workload: plan}, step)[settings.workload]
    num_blocks = plan.budget_blocks(settings.budget, demand_blocks)
    specs = [plan.spec(BASELINE, num_blocks)]
    specs += [
        plan.spec(policy_label(policy, x), num_blocks, expansion=x, kv={"policy": policy})
        for x in settings.expansions
        for policy in POLICIES
    ]
    with engines(specs, warmup_requests(requests), step) as group:
        measured = interleave(group, requests, settings.rounds, step, settings.max_repeats)
    return {
        **summarise(measured, settings.expansions),
        "tokens_equal_fp32": _equal_tokens(measured) if settings.dtype == "float32" else None,
        "demand_blocks": demand_blocks,
        "near_blocks": num_blocks,
        "near_bytes": num_blocks * plan.block_bytes(),
        "workload": describe(settings.workload, requests),
        "model": model_dir.name,
        "definitions": DEFINITIONS,
    }


def _equal_tokens(measured: Mapping[str, Sequence[RoundResult]]) -> dict[str, int]:
    """Count the outputs that equal vLLM's. Raises MeasurementError unless all do."""
    theirs = measured[BASELINE][0]
    counts = [require_equal(rounds[0], theirs) for rounds in measured.values()]
    return {key: sum(count[key] for count in counts) for key in ("equal", "total")}


def policy_label(policy: str, expansion: float) -> str:
    """Return the label of the plugin's engine with this policy."""
    return f"{plugin_label(expansion)}, {policy}"


def summarise(
    measured: Mapping[str, Sequence[RoundResult]], expansions: Sequence[float]
) -> dict[str, Any]:
    """Return the figures from the rounds by label."""
    vllm = summarise_rounds(measured[BASELINE])
    by_expansion: dict[str, dict[str, Any]] = {}
    for expansion in expansions:
        policies = {
            policy: summarise_rounds(measured[policy_label(policy, expansion)])
            for policy in POLICIES
        }
        for summary in policies.values():
            for name, other in (("on_demand", policies[ON_DEMAND]), ("vllm", vllm)):
                summary[f"throughput_ratio_vs_{name}"] = median_ratio(
                    summary["rounds_tokens_per_s"], other["rounds_tokens_per_s"]
                )
        by_expansion[expansion_key(expansion)] = policies
    ratios = {
        key: float(policies["interleave"]["throughput_ratio_vs_on_demand"])
        for key, policies in by_expansion.items()
    }
    best = max(ratios, key=ratios.__getitem__)
    best_rounds = {
        name: max((p[name] for p in by_expansion.values()), key=lambda s: float(s["tokens_per_s"]))
        for name in POLICIES
    }
    return {
        "blocks_over_interleave": median_ratio(
            best_rounds["blocks"]["rounds_tokens_per_s"],
            best_rounds["interleave"]["rounds_tokens_per_s"],
        ),
        "throughput_ratio_vs_on_demand": ratios[best],
        "best_expansion": float(best),
        "worst_foreign_cpu_share": max(
            summary["foreign_cpu_share"]
            for summary in (vllm, *(s for p in by_expansion.values() for s in p.values()))
        ),
        "vllm": vllm,
        "by_expansion": by_expansion,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return one row per expansion and policy."""
    rows = [["-", "vLLM alone", number(result["vllm"]["tokens_per_s"]), *["-"] * 5]]
    for expansion, policies in result["by_expansion"].items():
        rows += [
            [
                f"x{expansion}",
                policy,
                number(summary["tokens_per_s"]),
                number(summary["throughput_ratio_vs_vllm"], 2),
                number(summary["throughput_ratio_vs_on_demand"], 2),
                number(summary["mean_tpot_ms"], 1),
                number(100 * summary["stall_fraction"], 1),
                number(summary["read_bytes_per_step"] / 1e6, 1),
            ]
            for policy, summary in policies.items()
        ]
    headings = ["expansion", "policy", "tokens/s", "over vLLM", "over on_demand"]
    return markdown([*headings, "TPOT ms", "stall %", "MB read/step"], rows)
