# SPDX-License-Identifier: Apache-2.0
"""Long contexts in too little KV memory, on models that mix kinds of attention.

For each model these run the same requests in interleaved rounds: vLLM alone and the plugin
(`expansion=auto`, one or several policies) with the same KV memory, and vLLM with enough of it.
Gemma 3 270M is trained: 15 of its 18 layers have a window of 512 tokens. The others are small
random models of a form: latent attention, and Mamba in every other layer. Their throughput is that
of vLLM's Python as much as of their arithmetic, so it is a hint.

The float32 control gives both engines memory for all requests, so that they run the same batches.
With preemption vLLM's own tokens change on some of these models, as its kernels compute a prefill
and a decode of one token differently.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.jobs import EngineSpec, RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import engines, interleave, require_equal
from benchmarks.harness.summary import median_ratio, summarise_rounds
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.model import gemma_model_dir
from benchmarks.inputs.shapes import random_model_dir
from benchmarks.inputs.workload import Request, sharegpt_requests, warmup_requests
from benchmarks.suites.kv.plan import POLICY_OF, Auto
from benchmarks.suites.kv.summary import BASELINE, CEILING, plugin_label

RESULT_KEYS = ("throughput_ratio_vs_vllm", "by_model", "tokens_equal_fp32", "definitions")

DEFINITIONS = {
    "throughput_ratio_vs_vllm": "generated tokens/s, plugin over vLLM in the same KV memory, on the"
    " trained model: median over rounds of each round's ratio. With several policies it is the"
    " first one's; the others' are in throughput_ratios",
    "requests_at_once": "the most requests between their first and last token at once",
    "fraction_of_ceiling": "the same over vLLM with memory for all requests",
    "tokens_equal_fp32": "outputs equal to vLLM's in float32 with all layers of full attention that"
    " the expansion allows far, over all models",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model and its load. Prompts have `shortest` to `longest` tokens; sizes in MiB."""

    model: str
    near_mib: int
    enough_mib: int
    num_requests: int
    shortest: int
    longest: int
    output_tokens: int
    expansion: float
    block_size: int = 32

    @property
    def model_dir(self) -> Path:
        """Return the model's folder; it is made on first use."""
        return gemma_model_dir() if self.model == "gemma3-270m" else random_model_dir(self.model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile. `only` is the one model to measure ("" for all).

    `autos` are the plugins that follow the load; the first one's ratio is at the top.
    """

    cases: tuple[Case, ...]
    max_repeats: int  # of rounds disturbed by other processes
    rounds: int = 3
    warmup_rounds: int = 1
    seed: int = 0
    dtype: str = "bfloat16"
    only: str = ""
    autos: tuple[Auto, ...] = ("auto",)

    @property
    def chosen(self) -> tuple[Case, ...]:
        """Return the cases to measure."""
        return tuple(case for case in self.cases if self.only in ("", case.model))


_GEMMA = Case(
    model="gemma3-270m",
    near_mib=80,
    enough_mib=256,
    num_requests=8,
    shortest=2500,
    longest=3500,
    output_tokens=256,
    expansion=3.0,
)
_LATENT = Case(
    model="latent",
    near_mib=16,
    enough_mib=128,
    num_requests=16,
    shortest=200,
    longest=600,
    output_tokens=96,
    expansion=2.0,
    block_size=16,
)
_MAMBA = Case(
    model="granite_hybrid",
    near_mib=8,
    enough_mib=64,
    num_requests=16,
    shortest=200,
    longest=1200,
    output_tokens=96,
    expansion=2.0,
)

PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        cases=(
            replace(_GEMMA, num_requests=4, near_mib=40, output_tokens=64),
            replace(_LATENT, num_requests=8, near_mib=12),
            replace(_MAMBA, num_requests=8, near_mib=6),
        ),
        max_repeats=1,
        rounds=1,
    ),
    # It takes three rounds until a model with windows has compared far layers with none.
    "full": Settings(cases=(_GEMMA, _LATENT, _MAMBA), max_repeats=2, warmup_rounds=4),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: every engine start and every round."""
    num_autos = len(settings.autos)
    control = 2 * (1 + num_autos)
    measured = 2 + num_autos + settings.warmup_rounds * num_autos
    measured += settings.rounds * (2 + num_autos)
    return len(settings.chosen) * (control + measured)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    by_model: dict[str, Any] = {}
    for case in settings.chosen:
        requests = long_requests(case, settings.seed)
        control = _control(case, requests, settings, step)
        by_model[case.model] = {
            **summarise(_measure(case, requests, settings, step), settings.autos),
            "tokens_equal_fp32": control,
            "near_bytes": case.near_mib << 20,
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
            "output_tokens": sum(request.num_output_tokens for request in requests),
            "requests": len(requests),
        }
    counts = [entry["tokens_equal_fp32"] for entry in by_model.values()]
    first = next(iter(by_model.values()))
    return {
        "throughput_ratio_vs_vllm": first["throughput_ratio"],
        "by_model": by_model,
        "tokens_equal_fp32": {key: sum(c[key] for c in counts) for key in ("equal", "total")},
        "dtype": settings.dtype,
        "definitions": DEFINITIONS,
    }


def long_requests(case: Case, seed: int) -> list[Request]:
    """Return requests whose prompts are ShareGPT prompts, joined until they are long enough."""
    rng = random.Random(seed)
    drawn = [list(r.prompt_token_ids) for r in sharegpt_requests(200, seed, case.model_dir)]
    requests = []
    for index in range(case.num_requests):
        wanted = rng.randint(case.shortest, case.longest)
        prompt: list[int] = []
        while len(prompt) < wanted:
            prompt += rng.choice(drawn)
        requests.append(
            Request(
                request_id=f"r{index:04d}",
                prompt_token_ids=tuple(prompt[:wanted]),
                num_output_tokens=case.output_tokens,
                arrival_s=0.0,
            )
        )
    return requests


def summarise(
    measured: Mapping[str, Sequence[RoundResult]], autos: Sequence[Auto] = ("auto",)
) -> dict[str, Any]:
    """Return the figures of one model from its rounds by label."""
    systems = {label: summarise_rounds(rounds) for label, rounds in measured.items()}
    rates = {label: entry["rounds_tokens_per_s"] for label, entry in systems.items()}
    at_once = {label: max(r.peak_in_flight for r in rounds) for label, rounds in measured.items()}
    ratios = {auto: median_ratio(rates[plugin_label(auto)], rates[BASELINE]) for auto in autos}
    return {
        "throughput_ratio": ratios[autos[0]],
        "throughput_ratios": ratios,
        "fraction_of_ceiling": median_ratio(rates[plugin_label(autos[0])], rates[CEILING]),
        "requests_at_once": at_once,
        "systems": systems,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return one row per model and plugin."""
    rows = []
    for model, entry in result["by_model"].items():
        systems, at_once = entry["systems"], entry["requests_at_once"]
        for auto, ratio in entry["throughput_ratios"].items():
            rows.append(
                [
                    model,
                    f"{entry['near_bytes'] >> 20} MiB",
                    auto,
                    *(
                        f"{number(systems[label]['tokens_per_s'])} ({at_once[label]})"
                        for label in (BASELINE, plugin_label(auto), CEILING)
                    ),
                    number(ratio, 2),
                ]
            )
    head = ["model", "near KV", "plugin", "vLLM, tokens/s (at once)", "its tokens/s", "enough KV"]
    return markdown([*head, "ratio"], rows)


def _measure(
    case: Case, requests: Sequence[Request], settings: Settings, step: Step
) -> dict[str, list[RoundResult]]:
    near = [_spec(case, requests, BASELINE, case.near_mib, settings.dtype)]
    near += [
        _spec(
            case,
            requests,
            plugin_label(auto),
            case.near_mib,
            settings.dtype,
            tiered={"kv": _policy(auto)},
        )
        for auto in settings.autos
    ]
    ceiling = _spec(case, requests, CEILING, case.enough_mib, settings.dtype)
    with engines([*near, ceiling], warmup_requests(requests), step) as group:
        interleave(group[1:-1], requests, settings.warmup_rounds, step)
        return interleave(group, requests, settings.rounds, step, settings.max_repeats)


def _policy(auto: Auto) -> dict[str, Any]:
    return {"policy": POLICY_OF[auto]} if auto in POLICY_OF else {}


def _control(
    case: Case, requests: Sequence[Request], settings: Settings, step: Step
) -> dict[str, int]:
    few = [replace(request, num_output_tokens=32) for request in requests[:6]]
    specs = [_spec(case, few, f"{BASELINE}, float32", 2 * case.enough_mib, "float32")]
    specs += [
        _spec(
            case,
            few,
            f"{plugin_label(auto)}, float32",
            2 * case.enough_mib,
            "float32",
            tiered={"kv": {"expansion": case.expansion, **_policy(auto)}},
        )
        for auto in settings.autos
    ]
    with engines(specs, warmup_requests(few), step) as group:
        results = interleave(group, few, 1, step)
    theirs, *ours = (results[spec.label][0] for spec in specs)
    counts = [require_equal(result, theirs) for result in ours]
    return {key: sum(count[key] for count in counts) for key in ("equal", "total")}


def _spec(
    case: Case,
    requests: Sequence[Request],
    label: str,
    near_mib: int,
    dtype: str,
    tiered: Mapping[str, Any] | None = None,
) -> EngineSpec:
    return EngineSpec(
        label=label,
        model_dir=str(case.model_dir),
        dtype=dtype,
        block_size=case.block_size,
        kv_cache_memory_bytes=near_mib << 20,
        max_num_seqs=len(requests),
        max_model_len=max(request.num_tokens for request in requests) + 64,
        enable_prefix_caching=False,
        tiered=tiered,
        engine_args={"max_num_batched_tokens": 512},
    )
