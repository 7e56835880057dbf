# SPDX-License-Identifier: Apache-2.0
"""KV swapping on a GPU against vLLM in the same KV memory, with Pie's models and loads (section 5).

The models have OPT-13B's and Llama-13B's shapes and random weights; requests have ShareGPT's
lengths and all arrive at once. As `kv_swap` does on the CPU, vLLM with unlimited KV first gives the
demand and the ceiling. Then, at each budget, vLLM alone and the plugin run the same requests in
interleaved rounds. float32 outputs are compared first, and nothing is reported unless all are
equal. A budget of 0 is the whole demand, where the plugin must cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.convergence import warm_up
from benchmarks.harness.jobs import RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import engines, interleave, require_equal
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.shapes import PLANNED_SHAPES, planned_model_dir
from benchmarks.inputs.workload import warmup_requests
from benchmarks.suites.gpu import load
from benchmarks.suites.kv.plan import Expansion, KvPlan
from benchmarks.suites.kv.summary import (
    BASELINE,
    CEILING,
    DEFINITIONS,
    expansion_key,
    plugin_label,
    summarise_budget,
)

RESULT_KEYS = ("device", "by_shape", "paper", "targets", "tokens_equal_fp32", "definitions")

PAPER = {
    "source": "Pie, section 5.3, GH200 (96 GB of HBM, NVLink-C2C at 900 GB/s both ways together)",
    "opt-13b": {"throughput_ratio": 1.54, "workload": "ShareGPT, best over KV of 3 to 12 GB"},
    "llama-13b": {"throughput_ratio": 1.27, "workload": "Alpaca, best over KV of 3 to 12 GB"},
    "any": {"throughput_ratio": 1.9, "workload": "ShareGPT, the most over models and KV sizes"},
}
TARGETS = {"constrained_ratio": 1.5, "stall_fraction": 0.02, "ratio_where_all_fits": 0.98}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        kv_gib: the KV memory that both have; 0 is the load's own demand.
        expansions: fixed expansions, in addition to `auto`.
        device: "cpu" runs the same on vLLM's CPU backend.
        eager: disable all CUDA graphs. The full profile keeps them: where everything fits, both
            replay graphs of whole steps.
    """

    shapes: tuple[str, ...] = ("opt-13b",)
    kv_gib: tuple[float, ...] = (3.0, 0.0)
    expansions: tuple[float, ...] = (0.0,)
    num_requests: int = 48
    max_prompt_tokens: int = 1024
    max_output_tokens: int = 256
    rounds: int = 2
    warmup_rounds: int = 2
    control_requests: int = 8
    control_kv_share: float = 0.4
    control_shape: str = "opt-tiny"
    device: str = "cuda"
    eager: bool = True
    seed: int = 0

    @property
    def all_expansions(self) -> list[Expansion]:
        """Return the fixed expansions (0 is none) and the adaptive one."""
        return [*(expansion for expansion in self.expansions if expansion), "auto"]


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(),
    "full": Settings(
        shapes=("opt-13b", "llama-13b"),
        kv_gib=(3.0, 5.0, 7.0, 12.0, 0.0),
        expansions=(1.5,),
        num_requests=96,
        rounds=3,
        eager=False,
    ),
}


def num_steps(settings: Settings) -> int:
    """Return how often `run` reports."""
    systems = 1 + len(settings.all_expansions)
    budget = systems + settings.warmup_rounds + settings.rounds * systems
    shape = 1 + settings.rounds + len(settings.kv_gib) * budget
    return 4 + 1 + len(settings.shapes) * shape


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises MeasurementError if outputs differ."""
    device = load.describe_device("gpu_kv", settings.device)
    control = _control(settings, device, step)
    by_shape = {
        shape: _Comparison(shape, settings, device, step).run() for shape in settings.shapes
    }
    return {
        "device": device,
        "by_shape": by_shape,
        "paper": PAPER,
        "targets": targets_met(by_shape),
        "tokens_equal_fp32": control,
        "definitions": DEFINITIONS,
    }


def _plan(shape: str, settings: Settings, num_requests: int) -> KvPlan:
    given = load.requests(
        num_requests,
        settings.max_prompt_tokens,
        settings.max_output_tokens,
        int(PLANNED_SHAPES[shape]["vocab_size"]),
        settings.seed,
    )
    return KvPlan(
        model_dir=planned_model_dir(shape),
        requests=given,
        block_size=load.BLOCK_TOKENS[settings.device],
        prefix_caching=False,
        random_weights=True,
    )


def _control(settings: Settings, device: Mapping[str, Any], step: Step) -> dict[str, int]:
    """Compare greedy tokens in float32, vLLM's with the plugin's."""
    plan = _plan(settings.control_shape, settings, settings.control_requests)
    num_blocks = plan.budget_blocks(settings.control_kv_share, plan.enough_blocks())
    vllm = plan.spec(f"{BASELINE}, float32", num_blocks, dtype="float32")
    plugin = plan.spec("plugin x2, float32", num_blocks, dtype="float32", expansion=2.0)
    arguments = load.engine_args(
        settings.device, 2 << 30, device.get("memory_bytes", 0), eager=True
    )
    specs = [replace(spec, engine_args=arguments) for spec in (vllm, plugin)]
    with engines(specs, warmup_requests(plan.requests), step) as group:
        results = interleave(group, plan.requests, 1, step)
    equal = require_equal(results[plugin.label][0], results[vllm.label][0])
    step(f"float32: {equal['equal']} of {equal['total']} outputs equal vLLM's")
    return equal


class _Comparison:
    """Comparison of one shape at every budget."""

    def __init__(
        self, shape: str, settings: Settings, device: Mapping[str, Any], step: Step
    ) -> None:
        self._name, self._settings, self._step = shape, settings, step
        sizes = load.shape_of(shape)
        self._weight_bytes = sizes.layer_bytes + sizes.other_bytes
        self._device_bytes = int(device.get("memory_bytes", 0))
        self._plan = _plan(shape, settings, settings.num_requests)
        self._warmup = warmup_requests(self._plan.requests)

    def run(self) -> dict[str, Any]:
        settings, plan = self._settings, self._plan
        at_most = self._with_memory(plan.enough_blocks())
        with engines([at_most.spec(CEILING, plan.enough_blocks())], self._warmup, self._step) as (
            ceiling,
        ):
            rounds = interleave([ceiling], plan.requests, settings.rounds, self._step)[CEILING]
        demand_blocks = 1 + max(result.peak_blocks for result in rounds)
        by_budget = {}
        for kv_gib in settings.kv_gib:
            wanted = int(kv_gib * 2**30) // plan.block_bytes() if kv_gib else demand_blocks
            num_blocks = max(wanted, plan.max_model_len() // plan.block_size + 1)
            by_budget[f"{kv_gib:g} GiB" if kv_gib else "all"] = {
                "near_bytes": num_blocks * plan.block_bytes(),
                "of_demand": num_blocks / demand_blocks,
                **self._budget(num_blocks, rounds),
            }
        return {
            "demand_bytes": demand_blocks * plan.block_bytes(),
            "by_budget": by_budget,
            "workload": load.workload_stamp(self._name, plan.requests),
        }

    def _budget(self, num_blocks: int, ceiling: Sequence[RoundResult]) -> dict[str, Any]:
        settings = self._settings
        plan = self._with_memory(num_blocks)
        expansions = settings.all_expansions
        specs = [plan.spec(BASELINE, num_blocks)]
        specs += [plan.spec(plugin_label(x), num_blocks, expansion=x) for x in expansions]
        with engines(specs, self._warmup, self._step) as group:
            warm_up(group[-1], plan.requests, settings.warmup_rounds, self._step)
            measured = interleave(group, plan.requests, settings.rounds, self._step)
        return summarise_budget({**measured, CEILING: ceiling}, expansions)

    def _with_memory(self, num_blocks: int) -> KvPlan:
        """Return the plan with the share of the GPU's memory that an engine takes."""
        near_bytes = self._weight_bytes + num_blocks * self._plan.block_bytes()
        arguments = load.engine_args(
            self._settings.device, near_bytes, self._device_bytes, eager=self._settings.eager
        )
        return replace(self._plan, engine_args=arguments)


def targets_met(by_shape: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return each target with the result: that of `auto` on the worst shape."""
    short, whole, stalls = [], [], []
    for entry in by_shape.values():
        ratios = []
        for name, budget in entry["by_budget"].items():
            auto = budget["plugin"]["auto"]
            if name == "all" or budget["of_demand"] >= 1:
                whole.append(auto["throughput_ratio"])
            else:
                ratios.append(auto["throughput_ratio"])
                stalls.append(auto["stall_fraction"])
        short += [max(ratios)] if ratios else []
    found = {
        "constrained_ratio": min(short, default=None),
        "stall_fraction": max(stalls, default=None),
        "ratio_where_all_fits": min(whole, default=None),
    }
    met = {
        name: None
        if value is None
        else (value <= TARGETS[name] if name == "stall_fraction" else value >= TARGETS[name])
        for name, value in found.items()
    }
    return {
        name: {"target": TARGETS[name], "found": found[name], "is_met": met[name]} for name in found
    }


def table(result: Mapping[str, Any]) -> str:
    """Return tokens/s by shape and budget."""
    rows = []
    for shape, entry in result["by_shape"].items():
        for name, budget in entry["by_budget"].items():
            auto = budget["plugin"][expansion_key("auto")]
            rows.append(
                [
                    shape,
                    name,
                    number(budget["of_demand"], 2),
                    number(budget["vllm"]["tokens_per_s"]),
                    number(auto["tokens_per_s"]),
                    number(auto["throughput_ratio"], 2),
                    number(100 * auto["stall_fraction"], 1),
                    number(budget["ceiling"]["tokens_per_s"]),
                ]
            )
    headings = ["shape", "KV", "of demand", "vLLM", "auto", "ratio", "stall, %", "unlimited"]
    return markdown(headings, rows)
