# SPDX-License-Identifier: Apache-2.0
"""The adaptive expansion against the best fixed one that a sweep finds (Pie, figure 9, a and b).

For each workload and near-KV budget (a share of the workload's peak KV demand), one engine per
fixed expansion and one with `expansion=auto` run the same requests (or one for each of several
policies):

1. `auto` warms up with the load (it starts without expansion and keeps its level from round to
   round). The number of engine steps until it finds its level is a figure of its own.
2. The fixed expansions run interleaved sweep rounds; the fastest of them are the finalists.
3. `auto` and the finalists run interleaved rounds. The best fixed expansion is the finalist with
   the best median of these, and `fraction_of_best_fixed` is the median of the rounds' own ratios.

The sweep only picks finalists, because the best of many noisy rounds would be too good as a
reference. `auto` may keep whole blocks or offload partial ones; so do the fixed
`block_expansions` and `partial_expansions`. With
`starts` above 1 the third part is repeated with new engines: two engines of the same program may
differ by 3 % for their whole life, because their memory is laid out differently.

All requests arrive at once but at most `max_num_seqs` run at a time, so the load is steady for most
of a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.convergence import DEFINITIONS as CONVERGENCE_DEFINITIONS
from benchmarks.harness.convergence import summarise_convergence, warm_up
from benchmarks.harness.jobs import EngineSpec, RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import Engine, engines, interleave
from benchmarks.harness.summary import median_ratio, summarise_rounds
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.kv_workloads import describe, peak_demands, workload
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.workload import warmup_requests
from benchmarks.suites.kv.plan import Auto, KvPlan
from benchmarks.suites.kv.summary import expansion_key, plugin_label

RESULT_KEYS = (
    "fraction_of_best_fixed",
    "steps_to_converge",
    "by_workload",
    "worst_foreign_cpu_share",
    "definitions",
)

DEFINITIONS = {
    "fraction_of_best_fixed": "generated tokens/s of expansion=auto over those of the best fixed"
    " expansion at the same near-tier KV bytes (median over rounds of each round's ratio); at the"
    " top the lowest over workloads and budgets, in by_workload one per case. With several"
    " policies it is the first one's; the others' are in fractions",
    "by_workload": "workload, then near-tier KV bytes over the workload's peak KV demand",
    "sweep": "each fixed expansion's tokens/s over the sweep rounds (median); 2p is expansion 2"
    " with partial blocks offloaded too, and 2b with whole blocks kept near",
    "round_spread": "(fastest - slowest) / median of the best fixed expansion's rounds: what the"
    " fraction can be trusted to",
    "foreign_cpu_share": "share of the CPU time taken by other processes, in the worst round",
    **CONVERGENCE_DEFINITIONS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile. Budgets are shares of the peak KV demand.

    Attributes:
        autos: plugins that follow the load.
        partial_expansions: fixed expansions of layers that offload partial blocks too.
        block_expansions: fixed expansions that keep whole blocks near.
        starts: number of starts of `auto` and the finalists, each with `rounds` rounds.
    """

    workloads: tuple[str, ...]
    budgets: tuple[float, ...]
    expansions: tuple[float, ...]
    num_requests: int
    max_num_seqs: int
    warmup_rounds: int
    sweep_rounds: int
    finalists: int
    max_repeats: int  # of rounds disturbed by other processes, per case
    rounds: int = 3
    starts: int = 1
    max_expansion: float = 4.0
    seed: int = 0
    block_size: int = 32
    dtype: str = "bfloat16"
    autos: tuple[Auto, ...] = ("auto",)
    partial_expansions: tuple[float, ...] = ()
    block_expansions: tuple[float, ...] = ()

    @property
    def fixed(self) -> tuple[str, ...]:
        """Return the keys of the fixed expansions."""
        partial = (f"{x:g}p" for x in self.partial_expansions)
        by_blocks = (f"{x:g}b" for x in self.block_expansions)
        return (*map(expansion_key, self.expansions), *partial, *by_blocks)


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        workloads=("alpaca_like", "sharegpt"),
        budgets=(0.25,),
        expansions=(1.0, 2.0, 3.5),
        num_requests=20,
        max_num_seqs=16,
        warmup_rounds=1,
        sweep_rounds=1,
        finalists=1,
        max_repeats=2,
    ),
    "full": Settings(
        workloads=("alpaca_like", "sharegpt"),
        budgets=(0.125, 0.25, 0.5, 1.0),
        expansions=(1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5),
        num_requests=72,
        max_num_seqs=36,
        warmup_rounds=3,
        sweep_rounds=1,
        finalists=2,
        max_repeats=6,
        partial_expansions=(2.0, 3.0, 3.5),
        block_expansions=(2.0, 3.0, 3.5),
    ),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: every engine start, demand and round."""
    num_expansions, num_autos = len(settings.fixed), len(settings.autos)
    num_finals = num_autos + min(settings.finalists, num_expansions)
    case = num_autos + num_expansions + settings.sweep_rounds * num_expansions
    case += (settings.starts - 1) * num_finals
    case += settings.starts * (settings.warmup_rounds * num_autos + settings.rounds * num_finals)
    return len(settings.workloads) * (2 + len(settings.budgets) * case)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    model_dir = demo_model_dir()
    plans = {name: _plan(name, settings, model_dir) for name in settings.workloads}
    demands = peak_demands(plans, step)
    by_workload: dict[str, Any] = {}
    for name, plan in plans.items():
        by_budget = {}
        for budget in settings.budgets:
            num_blocks = plan.budget_blocks(budget, demands[name])
            by_budget[str(budget)] = {
                "near_bytes": num_blocks * plan.block_bytes(),
                "near_blocks": num_blocks,
                **_measure_case(plan, settings, num_blocks, step),
            }
        by_workload[name] = {
            "workload": describe(name, plan.requests),
            "demand_blocks": demands[name],
            "by_budget": by_budget,
        }
    return {**summarise(by_workload), "model": model_dir.name, "definitions": DEFINITIONS}


def _plan(name: str, settings: Settings, model_dir: Path) -> KvPlan:
    return KvPlan(
        model_dir=model_dir,
        requests=workload(name).requests(settings.num_requests, settings.seed, model_dir),
        block_size=settings.block_size,
        prefix_caching=False,
        max_num_seqs=settings.max_num_seqs,
        dtype=settings.dtype,
    )


def _measure_case(plan: KvPlan, settings: Settings, num_blocks: int, step: Step) -> dict[str, Any]:
    kv = {"max_expansion": settings.max_expansion}
    specs = [plan.spec(plugin_label(x), num_blocks, expansion=x, kv=kv) for x in settings.autos]
    layers, blocks = {**kv, "policy": "interleave"}, {**kv, "policy": "blocks"}
    specs += [
        plan.spec(plugin_label(x), num_blocks, expansion=x, kv=layers) for x in settings.expansions
    ]
    specs += [
        plan.spec(
            _label(f"{x:g}p"), num_blocks, expansion="auto by layers", kv=kv, pinned_expansion=x
        )
        for x in settings.partial_expansions
    ]
    specs += [
        plan.spec(_label(f"{x:g}b"), num_blocks, expansion=x, kv=blocks)
        for x in settings.block_expansions
    ]
    with engines(specs, warmup_requests(plan.requests), step) as group:
        autos, fixed = group[: len(settings.autos)], group[len(settings.autos) :]
        warmups = [warm_up(auto, plan.requests, settings.warmup_rounds, step) for auto in autos]
        sweep = interleave(fixed, plan.requests, settings.sweep_rounds, step)
        finalists = fastest(fixed, sweep, settings.finalists)
        finals = interleave(
            [*autos, *finalists], plan.requests, settings.rounds, step, settings.max_repeats
        )
    convergence = summarise_convergence(warmups[0], finals[plugin_label(settings.autos[0])])
    specs = [engine.spec for engine in (*autos, *finalists)]
    for start in range(1, settings.starts):
        # The order of starts alternates, because the first engine may be the faster one.
        again = _measured_anew(specs[:: -1 if start % 2 else 1], plan, settings, step)
        finals = {label: [*rounds, *again[label]] for label, rounds in finals.items()}
    summary = summarise_case(sweep, finals, settings.fixed, settings.autos)
    return {**summary, "convergence": convergence}


def _label(key: str) -> str:
    return f"plugin x{key}"


def _measured_anew(
    specs: Sequence[EngineSpec], plan: KvPlan, settings: Settings, step: Step
) -> dict[str, list[RoundResult]]:
    """Run the finals' rounds with newly started engines; those that adapt are warmed up again."""
    adaptive = {plugin_label(auto) for auto in settings.autos}
    with engines(specs, warmup_requests(plan.requests), step) as group:
        for engine in group:
            if engine.spec.label in adaptive:
                warm_up(engine, plan.requests, settings.warmup_rounds, step)
        return interleave(group, plan.requests, settings.rounds, step, settings.max_repeats)


def fastest(
    fixed: Sequence[Engine], sweep: Mapping[str, Sequence[RoundResult]], count: int
) -> list[Engine]:
    """Return the engines with the highest median tokens/s in the sweep."""
    return sorted(
        fixed,
        key=lambda engine: summarise_rounds(sweep[engine.spec.label])["tokens_per_s"],
        reverse=True,
    )[:count]


def summarise_case(
    sweep: Mapping[str, Sequence[RoundResult]],
    finals: Mapping[str, Sequence[RoundResult]],
    fixed: Sequence[str],
    autos: Sequence[Auto] = ("auto",),
) -> dict[str, Any]:
    """Return one case's figures from the rounds of the sweep and the finals, by label.

    `fixed` are the keys of the fixed expansions.
    """
    adaptive = {auto: summarise_rounds(finals[plugin_label(auto)]) for auto in autos}
    finalists = {
        key: summarise_rounds(finals[_label(key)]) for key in fixed if _label(key) in finals
    }
    best = max(finalists, key=lambda key: float(finalists[key]["tokens_per_s"]))
    rates = finalists[best]["rounds_tokens_per_s"]
    fractions = {
        auto: median_ratio(summary["rounds_tokens_per_s"], rates)
        for auto, summary in adaptive.items()
    }
    return {
        "fraction_of_best_fixed": fractions[autos[0]],
        "fractions": fractions,
        "best_fixed": best,
        "round_spread": (max(rates) - min(rates)) / finalists[best]["tokens_per_s"],
        "auto": adaptive[autos[0]],
        "autos": adaptive,
        "finalists": finalists,
        "sweep": {key: summarise_rounds(sweep[_label(key)])["tokens_per_s"] for key in fixed},
    }


def summarise(by_workload: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the headline figures: the worst case of the fraction and of the steps."""
    cases = {
        (name, budget): case
        for name, entry in by_workload.items()
        for budget, case in entry["by_budget"].items()
    }
    worst = min(cases, key=lambda case: float(cases[case]["fraction_of_best_fixed"]))
    steps = [case["convergence"]["steps_to_converge"] for case in cases.values()]
    return {
        "fraction_of_best_fixed": cases[worst]["fraction_of_best_fixed"],
        "worst_case": {"workload": worst[0], "budget": float(worst[1])},
        # null if one case never converged: a maximum over the others would hide that.
        "steps_to_converge": None if None in steps else max(steps),
        "worst_foreign_cpu_share": max(
            summary["foreign_cpu_share"]
            for case in cases.values()
            for summary in (*case["autos"].values(), *case["finalists"].values())
        ),
        "by_workload": dict(by_workload),
    }


def table(result: Mapping[str, Any]) -> str:
    """Return one row per case."""
    rows = []
    for name, entry in result["by_workload"].items():
        for budget, case in entry["by_budget"].items():
            convergence = case["convergence"]
            for index, (auto, summary) in enumerate(case["autos"].items()):
                cells = [
                    name,
                    budget,
                    auto,
                    number(summary["tokens_per_s"]),
                    f"{number(case['finalists'][case['best_fixed']]['tokens_per_s'])}"
                    f" (x{case['best_fixed']})",
                    number(case["fractions"][auto], 3),
                    number(case["round_spread"], 3),
                ]
                if index:
                    rows.append([*cells, "", "", ""])
                    continue
                rows.append(
                    [
                        *cells,
                        number(convergence["working_expansion"], 2),
                        number(convergence["steps_to_converge"]),
                        number(convergence["level_changes_per_round"]),
                    ]
                )
    headings = ["workload", "near KV", "plugin", "tokens/s", "best fixed", "fraction", "spread"]
    return markdown([*headings, "expansion", "steps to converge", "changes a round"], rows)
