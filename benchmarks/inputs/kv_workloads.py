# SPDX-License-Identifier: Apache-2.0
"""The two workloads of the KV benchmarks: short (Alpaca-like) and long (ShareGPT), and their sizes.

Lengths are cut so that a small CPU serves a round in seconds; each result states them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.progress import Step
from benchmarks.harness.runner import engines
from benchmarks.inputs.workload import (
    Request,
    alpaca_like_requests,
    sharegpt_requests,
    warmup_requests,
)
from benchmarks.suites.kv.plan import KvPlan
from benchmarks.suites.kv.summary import CEILING


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Source of requests, and the longest prompt and output in tokens."""

    source: str
    draw: Callable[..., list[Request]]
    max_prompt_tokens: int
    max_output_tokens: int

    def requests(self, n: int, seed: int, model_dir: Path, rate: float = math.inf) -> list[Request]:
        """Return n requests, with the same lengths and texts at every rate (requests/s)."""
        return self.draw(
            n, seed, model_dir, self.max_prompt_tokens, self.max_output_tokens, rate=rate
        )


WORKLOADS: Mapping[str, Workload] = {
    "alpaca_like": Workload(
        source="ShareGPT_V3 prompts cut to Alpaca's mean lengths (Alpaca-like)",
        draw=alpaca_like_requests,
        max_prompt_tokens=64,
        max_output_tokens=160,
    ),
    "sharegpt": Workload(
        source="ShareGPT_V3",
        draw=sharegpt_requests,
        max_prompt_tokens=256,
        max_output_tokens=128,
    ),
}


def workload(name: str) -> Workload:
    """Return a workload by name. Raises ValueError, naming the known ones, if it is unknown."""
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def describe(name: str, requests: Sequence[Request]) -> dict[str, Any]:
    """Return a result's description of its requests."""
    return {
        "source": workload(name).source,
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "output_tokens": sum(request.num_output_tokens for request in requests),
        "longest_request_tokens": max(request.num_tokens for request in requests),
    }


def peak_demands(plans: Mapping[str, KvPlan], step: Step) -> dict[str, int]:
    """Return each plan's peak KV demand in blocks, measured by vLLM with unlimited KV.

    It reports two steps per plan: its engine's start and its demand.
    """
    specs = [plan.spec(f"{CEILING}, {name}", plan.enough_blocks()) for name, plan in plans.items()]
    demands = {}
    with engines(specs, warmup_requests(next(iter(plans.values())).requests), step) as group:
        for process, (name, plan) in zip(group, plans.items(), strict=True):
            demands[name] = process.run(plan.requests).peak_blocks + 1  # plus vLLM's null block
            step(f"peak KV demand of {name}: {demands[name]} blocks")
    return demands
