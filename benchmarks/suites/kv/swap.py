# SPDX-License-Identifier: Apache-2.0
"""Throughput when the KV cache does not fit: vLLM alone, the plugin, and vLLM with unlimited KV.

vLLM with unlimited KV first runs the workload (ShareGPT or Alpaca-like, all requests at once),
which gives its peak KV demand. At each budget, a share of that demand, these run the same requests
in interleaved rounds: vLLM alone, the plugin at each fixed expansion and with the adaptive one
(`auto`), and the unlimited vLLM as the ceiling. They differ only in `additional_config` and in the
ceiling's KV size. Pie's figures 6 and 7.

Choices:

* Prefix caching is off, because every round runs the same prompts and a cache would carry work
  over. (When on, and reset between rounds, it gives vLLM alone 3 % at a quarter of the demand:
  preempted requests find some of their blocks again. Medians of 3 rounds, 2 cores, November 2026.)
* Block size 32 for both systems does not handicap vLLM: at a quarter of the demand vLLM alone ran
  at 292, 282 and 290 tokens/s with 32, 64 and 128, and unlimited at 709, 713 and 682 (same
  machine). Its CPU backend refuses 16.
* `auto` runs the load before it is measured, as a server would have, and keeps its level.
* Exactness is checked in a separate float32 run, since in bfloat16 a request's outputs depend on
  the batch that it is in, in vLLM alone too. It comes first, and nothing is reported unless all
  its outputs equal vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.convergence import summarise_convergence, warm_up
from benchmarks.harness.jobs import RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import Engine, engines, interleave, require_equal
from benchmarks.harness.summary import summarise_rounds
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.kv_workloads import workload
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.workload import Request, warmup_requests
from benchmarks.suites.kv import bound
from benchmarks.suites.kv.plan import Auto, Expansion, KvPlan
from benchmarks.suites.kv.summary import (
    BASELINE,
    BESIDE_COPIES,
    CEILING,
    DEFINITIONS,
    expansion_key,
    plugin_label,
    summarise,
    summarise_budget,
)

RESULT_KEYS = (
    "throughput_ratio_vs_vllm",
    "by_budget",
    "fraction_of_ceiling",
    "fraction_of_bound",
    "seconds_per_gb",
    "mean_tpot_ratio",
    "mean_token_latency_ratio",
    "memory_ratio_for_equal_throughput",
    "stall_fraction",
    "bookkeeping_fraction",
    "bytes_per_step",
    "tokens_equal_fp32",
    "definitions",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile. Budgets are shares of the peak KV demand.

    `dtype` is that of the timed engines: without AVX-512, vLLM's bfloat16 is many times slower than
    float32. `autos` are the plugins that follow the load: "auto", "auto by layers" and "auto by
    blocks"; the first one's convergence is reported. With `drafts` above 0 all systems decode
    speculatively, with so many drafts a step from n-grams of the text.
    """

    num_requests: int
    max_prompt_tokens: int
    max_output_tokens: int
    budgets: tuple[float, ...]
    expansions: tuple[float, ...]
    control_requests: int
    max_repeats: int  # of rounds disturbed by other processes, per budget
    autos: tuple[Auto, ...] = ("auto",)
    auto_warmup_rounds: int = 2
    rounds: int = 3
    seed: int = 0
    block_size: int = 32
    prefix_caching: bool = False
    control_budget: float = 0.25
    control_expansion: float = 2.0
    workload: str = "sharegpt"
    dtype: str = "bfloat16"
    copy_gb_per_s: float = 1.0  # of the copies whose cost is measured
    drafts: int = 0

    @property
    def engine_args(self) -> dict[str, Any]:
        """Return further arguments of vLLM's, the same for all systems."""
        if not self.drafts:
            return {}
        lookup = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2}
        return {"speculative_config": {**lookup, "num_speculative_tokens": self.drafts}}

    @property
    def plugin_expansions(self) -> list[Expansion]:
        """Return the fixed expansions and those that follow the load."""
        return [*self.expansions, *self.autos]

    @property
    def control_expansions(self) -> list[Expansion]:
        """Return the expansions whose float32 outputs are compared with vLLM's."""
        return [self.control_expansion, *self.autos]


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        num_requests=24,
        max_prompt_tokens=128,
        max_output_tokens=64,
        budgets=(0.25, 1.0),
        expansions=(1.0, 2.0),
        control_requests=12,
        max_repeats=4,
        auto_warmup_rounds=1,
    ),
    "full": Settings(
        num_requests=36,
        max_prompt_tokens=256,
        max_output_tokens=128,
        budgets=(0.125, 0.25, 0.5, 1.0),
        expansions=(1.0, 1.25, 1.5, 2.0, 2.5, 3.0),
        control_requests=24,
        max_repeats=8,
        auto_warmup_rounds=3,
    ),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: every engine start and every round."""
    ceiling_and_control = 2 + 2 * (1 + len(settings.control_expansions))
    cost = 1 + 2 * settings.rounds
    starts = 1 + len(settings.plugin_expansions)
    rounds = settings.rounds * (starts + 1)
    warmup = settings.auto_warmup_rounds * len(settings.autos)
    return ceiling_and_control + cost + len(settings.budgets) * (starts + warmup + rounds)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises MeasurementError if outputs differ."""
    model_dir = demo_model_dir()
    source = workload(settings.workload)
    requests = source.draw(
        settings.num_requests,
        settings.seed,
        model_dir,
        settings.max_prompt_tokens,
        settings.max_output_tokens,
    )
    plan = KvPlan(
        model_dir=model_dir,
        requests=requests,
        block_size=settings.block_size,
        prefix_caching=settings.prefix_caching,
        dtype=settings.dtype,
        engine_args=settings.engine_args,
    )
    warmup = warmup_requests(requests)
    with engines([plan.spec(CEILING, plan.enough_blocks())], warmup, step) as (ceiling,):
        demand_blocks = ceiling.run(requests).peak_blocks + 1  # plus vLLM's null block
        demand_bytes = demand_blocks * plan.block_bytes()
        step(f"peak KV demand: {demand_blocks} blocks, {demand_bytes / 2**20:.0f} MiB")
        control = _fp32_control(plan, settings, demand_blocks, warmup, step)
        cost = _copy_cost(plan, settings, ceiling, warmup, step)
        by_budget = {}
        for budget in settings.budgets:
            num_blocks = plan.budget_blocks(budget, demand_blocks)
            measured, convergence = _measure_budget(
                plan, settings, num_blocks, ceiling, warmup, step
            )
            entry = summarise_budget(measured, settings.plugin_expansions)
            by_budget[str(budget)] = {
                "near_bytes": num_blocks * plan.block_bytes(),
                "near_blocks": num_blocks,
                **entry,
                "bound": bound.summarise_bound(
                    measured[plugin_label(entry["best_expansion"])],
                    measured[BASELINE],
                    measured[CEILING],
                    near_blocks=num_blocks - 1,  # one is vLLM's null block
                    block_bytes=plan.block_bytes(),
                    cost=cost,
                ),
                "convergence": convergence,
            }
    return {
        **summarise(by_budget),
        "fraction_of_bound": {
            budget: entry["bound"]["fraction_of_bound"] for budget, entry in by_budget.items()
        },
        "seconds_per_gb": cost,
        "tokens_equal_fp32": control,
        "demand_blocks": demand_blocks,
        "demand_bytes": demand_bytes,
        "workload": {
            "source": source.source,
            "model": model_dir.name,
            "dtype": settings.dtype,
            "requests": len(requests),
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
            "output_tokens": sum(request.num_output_tokens for request in requests),
            "arrivals": "all at once",
            "drafts": settings.drafts,
        },
        "definitions": DEFINITIONS | bound.DEFINITIONS,
    }


def _copy_cost(
    plan: KvPlan, settings: Settings, ceiling: Engine, warmup: Sequence[Request], step: Step
) -> float:
    """Return the seconds that a GB copied beside unlimited vLLM costs on this machine."""
    spec = plan.spec(BESIDE_COPIES, plan.enough_blocks())
    with engines([replace(spec, copies_gb_per_s=settings.copy_gb_per_s)], warmup, step) as (
        copying,
    ):
        measured = interleave(
            [ceiling, copying], plan.requests, settings.rounds, step, settings.max_repeats
        )
    return bound.seconds_per_gb(measured[BESIDE_COPIES], measured[CEILING])


def _measure_budget(
    plan: KvPlan,
    settings: Settings,
    num_blocks: int,
    ceiling: Engine,
    warmup: Sequence[Request],
    step: Step,
) -> tuple[dict[str, list[RoundResult]], dict[str, Any] | None]:
    """Run vLLM alone, the plugin at every expansion, and the ceiling, interleaved.

    Returns the rounds by label, and the convergence of the first that follows the load.
    """
    expansions = settings.plugin_expansions
    specs = [plan.spec(BASELINE, num_blocks)]
    specs += [plan.spec(plugin_label(x), num_blocks, expansion=x) for x in expansions]
    with engines(specs, warmup, step) as group:
        adapted: dict[Expansion, list[RoundResult]] = {}
        for expansion, engine in zip(expansions, group[1:], strict=True):
            if expansion in settings.autos:
                adapted[expansion] = warm_up(
                    engine, plan.requests, settings.auto_warmup_rounds, step
                )
        measured = interleave(
            [*group, ceiling], plan.requests, settings.rounds, step, settings.max_repeats
        )
    if not settings.autos:
        return measured, None
    first = settings.autos[0]
    return measured, summarise_convergence(adapted[first], measured[plugin_label(first)])


def _fp32_control(
    plan: KvPlan, settings: Settings, demand_blocks: int, warmup: Sequence[Request], step: Step
) -> dict[str, Any]:
    """Compare greedy tokens in float32. Raises MeasurementError unless all are equal."""
    requests = plan.requests[: settings.control_requests]
    num_blocks = plan.budget_blocks(settings.control_budget, demand_blocks)
    vllm = plan.spec(f"{BASELINE}, float32", num_blocks, dtype="float32")
    plugin = {
        expansion: plan.spec(
            f"{plugin_label(expansion)}, float32", num_blocks, dtype="float32", expansion=expansion
        )
        for expansion in settings.control_expansions
    }
    with engines([vllm, *plugin.values()], warmup, step) as group:
        results = interleave(group, requests, 1, step)
    (theirs,) = results[vllm.label]
    ours = {expansion: results[spec.label][0] for expansion, spec in plugin.items()}
    counted = [require_equal(result, theirs) for result in ours.values()]
    return {
        "equal": sum(count["equal"] for count in counted),
        "total": sum(count["total"] for count in counted),
        "near_bytes": vllm.kv_cache_memory_bytes,
        "vllm": summarise_rounds([theirs]),
        "plugin": {expansion_key(x): summarise_rounds([result]) for x, result in ours.items()},
    }


def table(result: Mapping[str, Any]) -> str:
    """Return tokens/s by budget and system, as in the documentation."""
    by_budget: Mapping[str, Any] = result["by_budget"]
    keys = list(next(iter(by_budget.values()))["plugin"])
    headings = ["near KV", "vLLM", *(key if key.startswith("auto") else f"x{key}" for key in keys)]
    fractions = result.get("fraction_of_bound", {})
    rows = []
    for budget, entry in by_budget.items():
        cells = [
            f"{number(entry['plugin'][key]['tokens_per_s'])}"
            f" ({entry['plugin'][key]['throughput_ratio']:.2f})"
            for key in keys
        ]
        memory = result["memory_ratios"].get(budget)
        rows.append(
            [
                budget,
                number(entry["vllm"]["tokens_per_s"]),
                *cells,
                number(entry["ceiling"]["tokens_per_s"]),
                number(memory, 2),
                number(fractions.get(budget), 2),
            ]
        )
    return markdown([*headings, "ceiling", "memory ratio", "of the bound"], rows)
