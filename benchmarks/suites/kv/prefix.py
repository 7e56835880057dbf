# SPDX-License-Identifier: Apache-2.0
"""Requests whose prefixes were computed before, and have left the near KV memory since.

Three workloads: turns of ShareGPT conversations, each with everything said before; questions on a
few long texts; and more requests at once than the memory holds, which share nothing and are
preempted, so that vLLM computes their prefixes again. In interleaved rounds these run with prefix
caching: vLLM alone, the plugin, the plugin without its prefix store, and vLLM with its
ExampleConnector, in the same KV memory; and vLLM with memory for everything. All requests of a
round are there at its beginning, and each round begins with an empty cache.

The ExampleConnector keeps KV in files. It finds a prompt that it has had as a whole, not one that
begins as another did. Preempted requests end its engine (it looks for files that it has not written
yet), so it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.harness.jobs import EngineSpec, RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import engines, interleave, require_equal
from benchmarks.harness.summary import median_ratio, summarise_rounds
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.kv_workloads import workload
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.turns import question_requests, turn_requests
from benchmarks.inputs.workload import Request, warmup_requests
from benchmarks.suites.kv.summary import BASELINE, CEILING

PLUGIN = "plugin"
NO_STORE = "plugin without its prefix store"
FILES = "vLLM with its ExampleConnector"

RESULT_KEYS = (
    "ttft_ratio_vs_vllm",
    "throughput_ratio_vs_vllm",
    "by_workload",
    "tokens_equal_fp32",
    "definitions",
)

DEFINITIONS = {
    "throughput_ratio_vs_vllm": "generated tokens/s, plugin over vLLM in the same KV memory, on the"
    " conversations: median over rounds of each round's ratio",
    "ttft_ratio_vs_vllm": "the same for the mean time from a round's beginning to a request's first"
    " token, which includes queueing; below 1 is faster",
    "fraction_of_ceiling": "throughput over vLLM's with memory for everything",
    "tokens_computed": "prompt tokens that were neither cached near nor read from far memory, over"
    " all prompt tokens",
    "preemptions": "of requests, in the last round",
    "tokens_equal_fp32": "outputs equal to vLLM's in float32, all workloads",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests on shared prefixes.

    `groups` are conversations or texts, and `turns` the requests on each. At most `at_once` run at
    a time.
    """

    name: str
    groups: int
    turns: int
    near_mib: int
    longest: int
    output_tokens: int
    at_once: int = 4

    def requests(self, seed: int) -> list[Request]:
        """Return the requests in their order of arrival."""
        model_dir = demo_model_dir()
        if self.name == "conversations":
            return turn_requests(
                self.groups,
                self.turns,
                seed,
                model_dir,
                longest=self.longest,
                max_output_tokens=self.output_tokens,
            )
        if self.name == "preempted":
            longest_output = self.output_tokens
            return workload("sharegpt").draw(
                self.groups, seed, model_dir, self.longest - longest_output, longest_output
            )
        return question_requests(
            self.groups,
            self.turns,
            seed,
            model_dir,
            text_tokens=self.longest,
            output_tokens=self.output_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile. `only` is the one workload to measure ("" for both)."""

    workloads: tuple[Workload, ...]
    max_repeats: int  # of rounds disturbed by other processes
    rounds: int = 3
    enough_mib: int = 1024
    far_gib: float = 1.0
    seed: int = 0
    dtype: str = "bfloat16"
    only: str = ""

    @property
    def chosen(self) -> tuple[Workload, ...]:
        """Return the workloads to measure."""
        return tuple(load for load in self.workloads if self.only in ("", load.name))


_CONVERSATIONS = Workload(
    name="conversations", groups=24, turns=4, near_mib=96, longest=1400, output_tokens=32
)
_TEXTS = Workload(name="texts", groups=8, turns=5, near_mib=96, longest=1200, output_tokens=32)
_PREEMPTED = Workload(
    name="preempted", groups=48, turns=1, near_mib=64, longest=640, output_tokens=256, at_once=24
)

PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        workloads=(
            replace(_CONVERSATIONS, groups=8, turns=3, near_mib=64, longest=600, output_tokens=24),
            replace(_TEXTS, groups=4, turns=3, near_mib=64),
            replace(_PREEMPTED, groups=12, near_mib=24, longest=320, output_tokens=128, at_once=12),
        ),
        max_repeats=1,
        rounds=1,
    ),
    "full": Settings(workloads=(_CONVERSATIONS, _TEXTS, _PREEMPTED), max_repeats=2),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: every engine start and every round."""
    systems = sum(len(systems_of(load)) for load in settings.chosen)
    return len(settings.chosen) * (2 + 2) + systems * (1 + settings.rounds)


def systems_of(load: Workload) -> tuple[str, ...]:
    """Return the labels of the systems that run a workload."""
    peers = () if load.name == "preempted" else (FILES,)
    return (BASELINE, PLUGIN, NO_STORE, *peers, CEILING)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    by_workload: dict[str, Any] = {}
    for load in settings.chosen:
        requests = load.requests(settings.seed)
        control = _control(load, requests, settings, step)
        measured = _measure(load, requests, settings, step)
        by_workload[load.name] = {
            **summarise(measured),
            "tokens_equal_fp32": control,
            "near_bytes": load.near_mib << 20,
            "requests": len(requests),
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        }
    counts = [entry["tokens_equal_fp32"] for entry in by_workload.values()]
    first = next(iter(by_workload.values()))
    return {
        "ttft_ratio_vs_vllm": first["ttft_ratio_vs_vllm"],
        "throughput_ratio_vs_vllm": first["throughput_ratio_vs_vllm"],
        "by_workload": by_workload,
        "tokens_equal_fp32": {key: sum(c[key] for c in counts) for key in ("equal", "total")},
        "dtype": settings.dtype,
        "definitions": DEFINITIONS,
    }


def summarise(measured: Mapping[str, Sequence[RoundResult]]) -> dict[str, Any]:
    """Return the figures of one workload from its rounds by label."""
    systems = {label: summarise_rounds(rounds) for label, rounds in measured.items()}
    rates = {label: entry["rounds_tokens_per_s"] for label, entry in systems.items()}
    waits = {label: [_mean_ttft(r) for r in rounds] for label, rounds in measured.items()}
    beside: dict[str, float] = {}
    if FILES in measured:
        beside = {
            "throughput_ratio_vs_example_connector": median_ratio(rates[PLUGIN], rates[FILES]),
            "ttft_ratio_vs_example_connector": median_ratio(waits[PLUGIN], waits[FILES]),
        }
    return {
        **beside,
        "throughput_ratio_vs_vllm": median_ratio(rates[PLUGIN], rates[BASELINE]),
        "ttft_ratio_vs_vllm": median_ratio(waits[PLUGIN], waits[BASELINE]),
        "throughput_ratio_without_store": median_ratio(rates[NO_STORE], rates[BASELINE]),
        "fraction_of_ceiling": median_ratio(rates[PLUGIN], rates[CEILING]),
        "mean_ttft_s": {label: sorted(w)[len(w) // 2] for label, w in waits.items()},
        "preemptions": {
            label: rounds[-1].counters.get("vllm:num_preemptions", 0.0)
            for label, rounds in measured.items()
        },
        "tokens_computed": {label: _computed(rounds[-1]) for label, rounds in measured.items()},
        "systems": systems,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return one row per workload and system."""
    rows = []
    for name, entry in result["by_workload"].items():
        for label, system in entry["systems"].items():
            rows.append(
                [
                    name,
                    label,
                    number(system["tokens_per_s"]),
                    number(entry["mean_ttft_s"][label], 2),
                    f"{100 * entry['tokens_computed'][label]:.0f} %",
                    number(entry["preemptions"][label]),
                ]
            )
    head = ["workload", "system", "tokens/s", "time to first token, s", "prompt tokens computed"]
    return markdown([*head, "preemptions"], rows)


def _mean_ttft(result: RoundResult) -> float:
    return fmean(times.first_token_s - times.arrival_s for times in result.requests)


def _computed(result: RoundResult) -> float:
    """Return the share of prompt tokens that the round computed."""
    hits = result.counters["vllm:prefix_cache_hits"]
    hits += result.counters.get("vllm:external_prefix_cache_hits", 0.0)  # with a connector
    return 1.0 - hits / result.num_prompt_tokens


def _measure(
    load: Workload, requests: Sequence[Request], settings: Settings, step: Step
) -> dict[str, list[RoundResult]]:
    far = {"far_gib": settings.far_gib}
    made = {
        BASELINE: _spec(load, requests, settings, BASELINE),
        PLUGIN: _spec(load, requests, settings, PLUGIN, tiered={"kv": far}),
        NO_STORE: _spec(
            load, requests, settings, NO_STORE, tiered={"kv": {**far, "prefix_store": False}}
        ),
        FILES: replace(_spec(load, requests, settings, FILES), stores_in_files=True),
        CEILING: _spec(load, requests, settings, CEILING, near_mib=settings.enough_mib),
    }
    specs = [made[label] for label in systems_of(load)]
    with engines(specs, warmup_requests(requests), step) as group:
        return interleave(group, requests, settings.rounds, step, settings.max_repeats)


def _control(
    load: Workload, requests: Sequence[Request], settings: Settings, step: Step
) -> dict[str, int]:
    """Compare with vLLM on a part of the requests; both run one request at a time.

    Then the batches are the same, whatever is hit.
    """
    count = load.groups // 2
    few = [
        replace(request, num_output_tokens=16)
        for at, request in enumerate(requests)
        if at % load.groups < count
    ]
    load, settings = replace(load, at_once=1), replace(settings, dtype="float32")
    tiered = {"kv": {"far_gib": settings.far_gib, "prefix_store": True}}
    specs = [
        _spec(load, few, settings, f"{BASELINE}, float32"),
        _spec(load, few, settings, "plugin, float32", tiered=tiered),
    ]
    with engines(specs, warmup_requests(few), step) as group:
        results = interleave(group, few, 1, step)
    (theirs,), (ours,) = results[specs[0].label], results[specs[1].label]
    return require_equal(ours, theirs)


def _spec(
    load: Workload,
    requests: Sequence[Request],
    settings: Settings,
    label: str,
    *,
    near_mib: int = 0,
    tiered: Mapping[str, Any] | None = None,
) -> EngineSpec:
    return EngineSpec(
        label=label,
        model_dir=str(demo_model_dir()),
        dtype=settings.dtype,
        block_size=32,
        kv_cache_memory_bytes=(near_mib or load.near_mib) << 20,
        max_num_seqs=load.at_once,
        max_model_len=max(request.num_tokens for request in requests) + 64,
        enable_prefix_caching=True,
        tiered=tiered,
    )
