# SPDX-License-Identifier: Apache-2.0
"""Throughput when the KV cache does not fit: vLLM alone, with the plugin, and with all it wants.

The workload (ShareGPT lengths, all requests at once) is first run by vLLM with unlimited KV, which
gives its peak KV demand. Then, at each budget (a share of that demand), vLLM alone, the plugin at
each expansion and the unlimited vLLM, the ceiling, run the same requests in interleaved rounds.
They differ in nothing but `additional_config` and the ceiling's KV size.

Choices:

* Prefix caching is off: every round runs the same prompts, so a cache would carry work over.
  (Reset between rounds and on, it gives vLLM alone 3 % at a quarter of the demand: preempted
  requests find some of their blocks again. Medians of 3 rounds, 2 cores, November 2026.)
* Block size 32 for both systems, as it does not handicap vLLM: at a quarter of the demand vLLM
  alone ran at 292, 282 and 290 tokens/s with 32, 64 and 128, and unlimited at 709, 713 and 682
  (same machine). Its CPU backend refuses 16.
* Exactness is a separate float32 run, since in bfloat16 the outputs of a request differ with the
  batch it is in, in vLLM alone too. It comes first, and nothing is reported unless all its outputs
  equal vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.jobs import RoundResult
from benchmarks.kv_plan import KvPlan
from benchmarks.kv_summary import (
    BASELINE,
    CEILING,
    DEFINITIONS,
    plugin_label,
    summarise,
    summarise_budget,
)
from benchmarks.model import demo_model_dir
from benchmarks.progress import Step
from benchmarks.runner import Engine, MeasurementError, engines, interleave
from benchmarks.summary import count_equal, summarise_rounds
from benchmarks.workload import Request, sharegpt_requests, warmup_requests

RESULT_KEYS = (
    "throughput_ratio_vs_vllm",
    "by_budget",
    "fraction_of_ceiling",
    "mean_tpot_ratio",
    "stall_fraction",
    "bookkeeping_fraction",
    "bytes_per_step",
    "tokens_equal_fp32",
    "definitions",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What one profile runs. Budgets are shares of the peak KV demand."""

    num_requests: int
    max_prompt_tokens: int
    max_output_tokens: int
    budgets: tuple[float, ...]
    expansions: tuple[float, ...]
    control_requests: int
    max_repeats: int  # of disturbed rounds, per budget
    rounds: int = 3
    seed: int = 0
    block_size: int = 32
    prefix_caching: bool = False
    control_budget: float = 0.25
    control_expansion: float = 2.0


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        num_requests=24,
        max_prompt_tokens=128,
        max_output_tokens=64,
        budgets=(0.25, 1.0),
        expansions=(1.0, 2.0, 3.0),
        control_requests=12,
        max_repeats=4,
    ),
    "full": Settings(
        num_requests=36,
        max_prompt_tokens=256,
        max_output_tokens=128,
        budgets=(0.125, 0.25, 0.5, 1.0),
        expansions=(1.0, 1.25, 1.5, 2.0, 2.5, 3.0),
        control_requests=24,
        max_repeats=8,
    ),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: every engine start and every round."""
    ceiling_and_control = 2 + 4
    starts = 1 + len(settings.expansions)
    rounds = settings.rounds * (starts + 1)
    return ceiling_and_control + len(settings.budgets) * (starts + rounds)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises MeasurementError if outputs differ."""
    model_dir = demo_model_dir()
    requests = sharegpt_requests(
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
    )
    warmup = warmup_requests(requests)
    with engines([plan.spec(CEILING, plan.enough_blocks())], warmup, step) as (ceiling,):
        demand_blocks = ceiling.run(requests).peak_blocks + 1  # and vLLM's null block
        demand_bytes = demand_blocks * plan.block_bytes()
        step(f"peak KV demand: {demand_blocks} blocks, {demand_bytes / 2**20:.0f} MiB")
        control = _fp32_control(plan, settings, demand_blocks, warmup, step)
        by_budget = {}
        for budget in settings.budgets:
            num_blocks = plan.budget_blocks(budget, demand_blocks)
            measured = _measure_budget(plan, settings, num_blocks, ceiling, warmup, step)
            by_budget[str(budget)] = {
                "near_bytes": num_blocks * plan.block_bytes(),
                "near_blocks": num_blocks,
                **summarise_budget(measured, settings.expansions),
            }
    return {
        **summarise(by_budget),
        "tokens_equal_fp32": control,
        "demand_blocks": demand_blocks,
        "demand_bytes": demand_bytes,
        "workload": {
            "source": "ShareGPT_V3",
            "model": model_dir.name,
            "dtype": "bfloat16",
            "requests": len(requests),
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
            "output_tokens": sum(request.num_output_tokens for request in requests),
            "arrivals": "all at once",
        },
        "definitions": DEFINITIONS,
    }


def _measure_budget(
    plan: KvPlan,
    settings: Settings,
    num_blocks: int,
    ceiling: Engine,
    warmup: Sequence[Request],
    step: Step,
) -> dict[str, list[RoundResult]]:
    """Run vLLM alone, the plugin at every expansion, and the ceiling, interleaved."""
    specs = [plan.spec(BASELINE, num_blocks)]
    specs += [plan.spec(plugin_label(x), num_blocks, expansion=x) for x in settings.expansions]
    with engines(specs, warmup, step) as group:
        return interleave(
            [*group, ceiling], plan.requests, settings.rounds, step, settings.max_repeats
        )


def _fp32_control(
    plan: KvPlan, settings: Settings, demand_blocks: int, warmup: Sequence[Request], step: Step
) -> dict[str, Any]:
    """Compare greedy tokens in float32. Raises MeasurementError unless all are equal."""
    requests = plan.requests[: settings.control_requests]
    num_blocks = plan.budget_blocks(settings.control_budget, demand_blocks)
    expansion = settings.control_expansion
    vllm = plan.spec(f"{BASELINE}, float32", num_blocks, dtype="float32")
    plugin = plan.spec(
        f"{plugin_label(expansion)}, float32", num_blocks, dtype="float32", expansion=expansion
    )
    with engines([vllm, plugin], warmup, step) as group:
        results = interleave(group, requests, 1, step)
    (theirs,), (ours,) = results[vllm.label], results[plugin.label]
    counted = require_equal(ours, theirs)
    return {
        **counted,
        "expansion": expansion,
        "near_bytes": plugin.kv_cache_memory_bytes,
        "vllm": summarise_rounds([theirs]),
        "plugin": summarise_rounds([ours]),
    }


def require_equal(ours: RoundResult, theirs: RoundResult) -> dict[str, int]:
    """Return {"equal", "total"}. Raises MeasurementError unless all outputs are equal."""
    counted = count_equal(ours, theirs)
    if counted["equal"] != counted["total"]:
        raise MeasurementError(
            f"float32 control: only {counted['equal']} of {counted['total']} outputs of"
            f" {ours.label!r} equal those of {theirs.label!r}; nothing is reported"
        )
    return counted
