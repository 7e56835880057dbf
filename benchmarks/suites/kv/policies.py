# SPDX-License-Identifier: Apache-2.0
"""Policies of reading far KV, each at its best fixed expansion: a simulation.

The policies (`benchmarks/simulator/policies/table.py`) run the same requests in the same near
memory, under the same scheduler. The product's are `interleave`, `blocks` and `on_demand`. `pie` is
the protocol of Pie's section 3.3. The others are what could be built. Step times are a model, see
`benchmarks/simulator`; docs/notes/kv-policies.md says what it leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.progress import Step
from benchmarks.simulator.policies.table import POLICIES
from benchmarks.simulator.policy_figures import (
    DEFINITIONS,
    LOADS,
    NUM_MACHINES,
    SHARE_OF_LOADS,
    best_figures,
    figures_at,
    over_interleave,
    policy_cases,
)

RESULT_KEYS = ("over_interleave", "by_machine", "by_load", "at_expansion", "definitions")

_BASE = "interleave"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        divisors: the near memory is the demand divided by these.
        stride: between the expansions that are tried first.
        loads: other loads, at a quarter of the demand.
        expansions: those at which all policies are compared, at a quarter of the demand.
    """

    divisors: tuple[int, ...]
    stride: int
    loads: tuple[str, ...]
    expansions: tuple[float, ...]
    policies: tuple[str, ...] = tuple(POLICIES)


PROFILES = {
    "quick": Settings(divisors=(4,), stride=16, loads=(), expansions=(2.0,)),
    "full": Settings(
        divisors=(2, 4, 8), stride=8, loads=LOADS, expansions=(1.1, 1.25, 1.5, 2.0, 3.0)
    ),
}


def num_steps(settings: Settings) -> int:
    """Return how often `run` reports: once for each machine, and each share, load and expansion."""
    parts = len(settings.divisors) + len(settings.loads) + len(settings.expansions)
    return NUM_MACHINES * parts


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Simulate; see the module's docstring. Raises ValueError for an unknown policy or load."""
    policies = (_BASE, *(name for name in settings.policies if name != _BASE))
    for kind, names, known in (("policy", policies, POLICIES), ("load", settings.loads, LOADS)):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"no {kind} {unknown[0]!r}; there are {', '.join(known)}")
    by_machine: dict[str, Any] = {name: {"by_share": {}} for name in policy_cases()}
    entries = []
    for divisor in settings.divisors:
        for name, case in policy_cases().items():
            entry = best_figures(case, divisor, policies, settings.stride)
            by_machine[name]["by_share"][f"1/{divisor}"] = entry
            entries.append(entry)
            step(f"{name}, 1/{divisor}: {_ratios(entry)}")
    by_load: dict[str, Any] = {load: {} for load in settings.loads}
    for load in settings.loads:
        for name, case in policy_cases(load).items():
            entry = best_figures(case, SHARE_OF_LOADS, policies, settings.stride)
            by_load[load][name] = entry
            entries.append(entry)
            step(f"{name}, {load}: {_ratios(entry)}")
    at_expansion: dict[str, Any] = {name: {} for name in by_machine}
    for expansion in settings.expansions:
        for name, case in policy_cases().items():
            figures = figures_at(case, SHARE_OF_LOADS, policies, expansion)
            at_expansion[name][f"{expansion:g}"] = figures
            step(f"{name}, expansion {expansion:g}")
    return {
        "over_interleave": over_interleave(entries),
        "by_machine": by_machine,
        "by_load": by_load,
        "at_expansion": at_expansion,
        "definitions": DEFINITIONS,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the figures as Markdown, a row for each machine, share or load, and policy."""
    head = "| case | policy | tokens/s | expansion | MB read, written a step | stall |"
    lines = [head, "|" + "---|" * 6]
    for name, machine in result["by_machine"].items():
        for share, entry in machine["by_share"].items():
            lines += _rows(f"{name}, {share}", entry["by_policy"])
    for load, machines in result["by_load"].items():
        for name, entry in machines.items():
            lines += _rows(f"{name}, {load}", entry["by_policy"])
    for name, expansions in result["at_expansion"].items():
        for expansion, by_policy in expansions.items():
            lines += _rows(f"{name}, at expansion {expansion}", by_policy)
    return "\n".join(lines)


def _rows(case: str, by_policy: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"| {case} | {name} | {figures['throughput_ratio']:.3f} | {figures['expansion']:.2f}"
        f"{'' if figures['partial_blocks'] == 'near' else ', partial blocks too'}"
        f" | {figures['read_mb_per_step']:.0f}, {figures['written_mb_per_step']:.0f}"
        f" | {figures['stall_share']:.1%} |"
        for name, figures in by_policy.items()
    ]


def _ratios(entry: Mapping[str, Any]) -> str:
    by_policy = entry["by_policy"]
    return ", ".join(f"{name} {by_policy[name]['throughput_ratio']:.2f}" for name in by_policy)
