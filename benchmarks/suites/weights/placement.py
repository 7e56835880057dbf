# SPDX-License-Identifier: Apache-2.0
"""HeLM's comparison on the real engine: token rate by weight placement (section V, table IV).

The model is OPT-1.3B's shape with random weights, on one core. The paper's machine is scaled, not
copied. Matmuls are held to `gweights_per_s`, because expanding 4-bit weights limits those of the
paper: an A100 expands and multiplies some 45 G weights/s at any batch. Links are then held to the
speed that gives table IV's ratios of compute to transfer (`placement_plan`).

The time between tokens is measured at one request. The throughput is measured at as many requests
as one near budget holds, in which FlexGen's placement has `flexgen_batch`. Our `throughput` divides
that budget between layers and KV by its own plan. It also runs with a second budget, in which
HeLM's placement has as many requests.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.jobs import EngineSpec, RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import EngineProcess, engines, interleave
from benchmarks.harness.throttled_engine import COMPUTE_SECONDS
from benchmarks.inputs.workload import Request
from benchmarks.suites.papers.helm_figures import LINK_GB_PER_S, OUTPUT_TOKENS
from benchmarks.suites.weights import placement_plan as plan
from benchmarks.suites.weights.placement_contenders import (
    FIXED,
    PLACED,
    SHARING,
    Contender,
    Load,
    fixed_placement,
    planned_batch,
)
from benchmarks.suites.weights.placement_summary import DEFINITIONS, TARGETS, summarise, table
from vllm_tiered.planner.latency_placement import place_for_latency
from vllm_tiered.planner.model_shape import ModelShape, model_shape
from vllm_tiered.planner.pipeline_time import Link
from vllm_tiered.weights.layout import Kind

__all__ = ["PROFILES", "RESULT_KEYS", "num_steps", "run", "table"]

BLOCK_TOKENS = 32
"""Smallest block that vLLM's CPU attention takes.

A request fills one block, so the KV of 44 requests is 0.09 of the weights, as in the paper (149
tokens of OPT-175B).
"""

NEAR = "near"
"""The engine without the plugin; links are scaled to its compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a run.

    Attributes:
        layers: number of the model's layers; OPT-1.3B has 24.
        gweights_per_s: matmuls are held to this many 10^9 weights a second; 0: not held.
        links: names from `helm_figures.LINK_GB_PER_S`.
        flexgen_batch: number of requests that fit in the near budget with FlexGen's placement.
        gaps: number of times between tokens in a round at one request.
    """

    layers: int = 24
    gweights_per_s: float = 2.0
    links: tuple[str, ...] = ("nvdram", "dram", "cxl_asic", "cxl_fpga")
    flexgen_batch: int = 7
    gaps: int = 3
    rounds: int = 3
    throughput_rounds: int = 1
    max_repeats: int = 2
    seed: int = 0


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(layers=6, links=("nvdram", "dram"), gaps=4),
    "full": Settings(gweights_per_s=1.0),
}
"""Profile `full`: a round at all requests takes 21 steps of 1.4 to 6 s; expected 45 min in all.

At 2 G weights/s it took 30 min, but the matmuls of all requests no longer fitted into their time.
"""

RESULT_KEYS = (
    "helm_tbt_gain",
    "all_far_throughput_ratio",
    "helm_of_dram",
    "all_far_of_dram",
    "latency_over_helm",
    "latency_card_over_helm",
    "latency_over_flexgen",
    "throughput_over_all_far",
    "throughput_over_flexgen",
    "throughput_helm_over_all_far",
    "throughput_helm_over_helm",
    "by_link",
    "compute",
    "targets",
    "missed",
)


def num_steps(settings: Settings) -> int:
    """Return how often `run` reports progress."""
    per_link = settings.rounds * len(FIXED)
    per_link += len(SHARING) + settings.throughput_rounds * (len(FIXED) + len(SHARING))
    per_link += len(PLACED) * (1 + 2 * settings.rounds)
    return 1 + settings.rounds + len(FIXED) + len(settings.links) * per_link


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure all placements on all links. Raises MeasurementError or ValueError."""
    _check(settings)
    with tempfile.TemporaryDirectory(prefix="vllm-tiered-bench-") as folder:
        config = plan.opt_config(settings.layers)
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return _Comparison(settings, Path(folder), model_shape(config), step).run()


def _check(settings: Settings) -> None:
    unknown = [link for link in settings.links if link not in LINK_GB_PER_S]
    if unknown or not {"nvdram", "dram"} <= set(settings.links):
        raise ValueError(
            f"links={','.join(settings.links)}: name nvdram and dram, and others of"
            f" {', '.join(LINK_GB_PER_S)}"
        )


class _Comparison:
    def __init__(self, settings: Settings, folder: Path, shape: ModelShape, step: Step) -> None:
        self._settings = settings
        self._folder = folder
        self._shape = shape
        self._step = step
        self._fixed = {c.name: fixed_placement(c, shape) for c in FIXED}
        flexgen = self._fixed["flexgen"]
        self._budget = plan.near_budget(shape, flexgen, settings.flexgen_batch, BLOCK_TOKENS)
        self._batches = {
            name: plan.largest_batch(shape, placement, self._budget, BLOCK_TOKENS)
            for name, placement in self._fixed.items()
        }
        # HeLM's does not fit FlexGen's budget; its own budget holds as many requests.
        self._most = {**self._batches, "helm": settings.flexgen_batch}

    def run(self) -> dict[str, Any]:
        settings = self._settings
        compute, near_rounds = self._measure_compute()
        links = plan.scaled_links(self._shape, compute)
        by_link: dict[str, Any] = {}
        with engines(
            [self._spec(c.name, c.weights) for c in FIXED], self._requests(1, 1), self._step
        ) as group:
            by_name = {process.spec.label: process for process in group}
            for link in settings.links:
                for process in group:
                    process.set_link(links[link])
                by_link[link] = {
                    "bytes_per_s": links[link],
                    "single": self._single(group, link),
                    "throughput": self._throughput(by_name, link, links[link]),
                    "pairs": {c.name: self._pair(c, by_name, link, links[link]) for c in PLACED},
                    "expected": self._expected(compute, links[link]),
                    "ratios": {
                        name: plan.ratios(placement, compute, links[link])
                        for name, placement in self._fixed.items()
                    },
                }
        return {
            **summarise(by_link, near_rounds, compute, self._batches, TARGETS),
            "near_budget_bytes": self._budget,
            "near_bytes": {name: p.near_bytes for name, p in self._fixed.items()},
            "card_near_bytes": plan.card_near_bytes(self._shape),
            "kv_bytes_per_request": BLOCK_TOKENS * self._shape.kv_bytes_per_token,
            "definitions": DEFINITIONS,
        }

    def _measure_compute(self) -> tuple[plan.Compute, list[RoundResult]]:
        settings = self._settings
        requests = self._requests(1, settings.gaps)
        with engines([self._spec(NEAR, None)], self._requests(1, 1), self._step) as group:
            rounds = interleave(group, requests, settings.rounds, self._step, settings.max_repeats)[
                NEAR
            ]
        seconds = {
            kind: statistics.median(r.counters[name] for r in rounds)
            for kind, name in COMPUTE_SECONDS.items()
        }
        tbt = statistics.median(gap for r in rounds for gap in r.token_gaps_s)
        layers = settings.layers * sum(seconds.values())
        return plan.Compute(
            attention=seconds[Kind.ATTENTION], ffn=seconds[Kind.FFN], rest=max(0.0, tbt - layers)
        ), rounds

    def _single(self, group: Sequence[EngineProcess], link: str) -> dict[str, list[RoundResult]]:
        settings = self._settings
        requests = self._requests(1, settings.gaps)
        return interleave(group, requests, settings.rounds, self._at(link), settings.max_repeats)

    def _throughput(
        self, group: Mapping[str, EngineProcess], link: str, speed: float
    ) -> dict[str, list[RoundResult]]:
        """Run every fixed placement, and ours, each with all the requests it can hold."""
        settings = self._settings
        with ExitStack() as stack:
            batches = {name: (process, self._most[name]) for name, process in group.items()}
            for contender in SHARING:
                weights = {**contender.weights, "near_gib": _gib(self._shared_bytes(contender))}
                spec = self._spec(contender.name, weights, speed, shares=True)
                # These run one after the other, because each measures the machine before it plans.
                (ours,) = stack.enter_context(engines([spec], self._requests(1, 1), self._at(link)))
                batches[contender.name] = (ours, planned_batch(ours, self._requests(1, 1)))
            loads = [
                Load(process, self._requests(count, OUTPUT_TOKENS - 1))
                for process, count in batches.values()
            ]
            rounds = interleave(
                loads, (), settings.throughput_rounds, self._at(link), settings.max_repeats
            )
        for load in loads:
            load.check(rounds[load.spec.label])
        return rounds

    def _shared_bytes(self, contender: Contender) -> int:
        """Return the near bytes for layers and KV together, with vLLM's null block."""
        placement = self._fixed[contender.memory_of]
        requests = self._settings.flexgen_batch + 1
        return plan.near_budget(self._shape, placement, requests, BLOCK_TOKENS)

    def _near_bytes(self, contender: Contender) -> int:
        """Return the near bytes for layers and weight buffers of a contender placed by link."""
        if contender.fills_card:
            return plan.card_near_bytes(self._shape)
        return self._fixed[contender.memory_of].near_bytes

    def _pair(
        self, contender: Contender, group: Mapping[str, EngineProcess], link: str, speed: float
    ) -> dict[str, list[RoundResult]]:
        """Run a contender placed for the link against the one whose near memory it gets."""
        settings = self._settings
        weights = {**contender.weights, "near_gib": _gib(self._near_bytes(contender))}
        spec = self._spec(contender.name, weights, speed)
        with engines([spec], self._requests(1, 1), self._at(link)) as (ours,):
            return interleave(
                [group[contender.memory_of], ours],
                self._requests(1, settings.gaps),
                settings.rounds,
                self._at(link),
                settings.max_repeats,
            )

    def _expected(self, compute: plan.Compute, speed: float) -> dict[str, float]:
        placements = dict(self._fixed)
        for contender in PLACED:
            placements[contender.name] = place_for_latency(
                self._shape.sublayers,
                compute.times(self._shape),
                Link(bytes_per_s=speed),
                self._near_bytes(contender),
            )
        for contender in SHARING:
            placements[contender.name] = plan.planned_split(
                self._shape,
                compute,
                speed,
                self._shared_bytes(contender),
                self._most["all_far"],
                BLOCK_TOKENS,
            ).placement
        return {
            name: plan.expected_seconds(self._shape, placement, compute, speed)
            for name, placement in placements.items()
        }

    def _at(self, link: str) -> Step:
        return lambda text: self._step(f"{link}: {text}")

    def _spec(
        self,
        name: str,
        weights: Mapping[str, Any] | None,
        link_bytes_per_s: float = 0.0,
        *,
        shares: bool = False,
    ) -> EngineSpec:
        # An engine that shares near memory with the KV cache has the requests that it plans for, at
        # most those that All-CPU holds.
        batch = self._most["all_far"] if shares else max(1, self._most.get(name, 1))
        block_bytes = BLOCK_TOKENS * self._shape.kv_bytes_per_token
        tiered = {"kv": {"enabled": False}, "weights": dict(weights)} if weights else None
        return EngineSpec(
            label=name,
            model_dir=str(self._folder),
            dtype="bfloat16",
            block_size=BLOCK_TOKENS,
            # vLLM keeps one block for itself (the null block).
            kv_cache_memory_bytes=None if shares else (batch + 1) * block_bytes,
            max_num_seqs=batch,
            max_model_len=BLOCK_TOKENS,
            enable_prefix_caching=False,
            tiered=tiered,
            random_weights=True,
            cpus=str(min(os.sched_getaffinity(0))),
            is_timed=True,
            weights_per_s=self._settings.gweights_per_s * 1e9,
            link_bytes_per_s=link_bytes_per_s,
        )

    def _requests(self, count: int, gaps: int) -> list[Request]:
        """Return random prompts, all present at once; a prompt and 21 tokens fill a block."""
        rng = random.Random(self._settings.seed)
        length = BLOCK_TOKENS - OUTPUT_TOKENS
        return [
            Request(
                request_id=f"request-{index}",
                prompt_token_ids=tuple(rng.randrange(100, 10_000) for _ in range(length)),
                num_output_tokens=gaps + 1,
            )
            for index in range(count)
        ]


def _gib(num_bytes: int) -> float:
    """Round up, so that a placement of exactly this many bytes fits."""
    return (num_bytes + 1024) / 2**30
