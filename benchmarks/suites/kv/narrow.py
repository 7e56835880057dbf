# SPDX-License-Identifier: Apache-2.0
"""Narrow far pages (`kv.far_dtype`): their quality, and their speed by the link's bandwidth.

*Quality.* All layers but one are far, and real conversations are scored: the model gives each token
of a text a probability, and the perplexity follows from these. Prompts are computed in short
chunks, so that nearly all that a token sees has been in the far tier. The same texts with far pages
as they are give the reference.

*Speed.* On each link, three systems run the same requests at a fixed expansion, in interleaved
rounds: far pages as they are, in int8 and in fp8; and vLLM alone. A link is held to a bandwidth in
each direction, as of a machine with slower far memory; 0 leaves the memory's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.harness.jobs import EngineSpec, RoundResult, Score
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import engines, interleave
from benchmarks.harness.summary import median_ratio, summarise_rounds
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.kv_workloads import describe, peak_demands, workload
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.turns import turn_requests
from benchmarks.inputs.workload import Request, warmup_requests
from benchmarks.suites.kv.plan import KvPlan
from benchmarks.suites.kv.summary import BASELINE

REFERENCE = "auto"
FAR_DTYPES = (REFERENCE, "int8", "fp8")

_LEAST_TOKENS = 160
"""Tokens of a conversation that can be counted on, on average: with fewer the texts run out."""

RESULT_KEYS = (
    "throughput_ratio_vs_auto",
    "bytes_per_step_ratio",
    "quality",
    "by_link",
    "definitions",
)

DEFINITIONS = {
    "throughput_ratio_vs_auto": "generated tokens/s with narrow far pages over those with far pages"
    " as they are, same expansion and link: median over rounds of each round's ratio; on the"
    " slowest link",
    "bytes_per_step_ratio": "KV bytes read and written per step, over those with far pages as they"
    " are, same link",
    "quality": "perplexity of the texts with all layers but one far; nll_difference is the mean"
    " difference of a token's negative log-probability (in nats) to far pages as they are, and"
    " mean_abs_difference that of its magnitude; agreement is the share of tokens for which the"
    " likeliest is the same",
    "by_link": "keys are GB/s in each direction; 0 is the memory's own",
    "foreign_cpu_share": "share of the CPU time taken by other processes, in the worst round",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    `links_gb_per_s` are bandwidths of the link, 0 for the memory's own; without any, only the
    quality is measured. `budget` is a share of the peak KV demand. Texts are cut to `text_tokens`;
    without texts, only the speed is measured.
    """

    links_gb_per_s: tuple[float, ...]
    num_requests: int
    texts: int
    max_repeats: int  # of rounds disturbed by other processes, per link
    budget: float = 0.25
    expansion: float = 3.0
    rounds: int = 3
    text_tokens: int = 960
    chunk_tokens: int = 64
    text_dtype: str = "bfloat16"
    workload: str = "sharegpt"
    seed: int = 0
    block_size: int = 32


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(links_gb_per_s=(0.5,), num_requests=20, texts=4, max_repeats=1, rounds=1),
    "full": Settings(links_gb_per_s=(0.0, 2.0, 1.0, 0.5), num_requests=36, texts=24, max_repeats=4),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: demand, engine starts, rounds and scored systems."""
    systems = 1 + len(FAR_DTYPES)
    speed = len(settings.links_gb_per_s) * systems * (1 + settings.rounds)
    quality = 2 * len(FAR_DTYPES) if settings.texts else 0
    return quality + speed + (2 if settings.links_gb_per_s else 0)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    quality = _quality(settings, step) if settings.texts else {}
    by_link: dict[str, Any] = {}
    about: dict[str, Any] = {}
    if settings.links_gb_per_s:
        model_dir = demo_model_dir()
        load = workload(settings.workload)
        requests = load.requests(settings.num_requests, settings.seed, model_dir)
        plan = KvPlan(
            model_dir=model_dir,
            requests=requests,
            block_size=settings.block_size,
            prefix_caching=False,
        )
        demand = peak_demands({settings.workload: plan}, step)[settings.workload]
        num_blocks = plan.budget_blocks(settings.budget, demand)
        for link in settings.links_gb_per_s:
            rounds = _measure(plan, settings, num_blocks, link, step)
            by_link[f"{link:g}"] = summarise(rounds)
        about = {
            "near_bytes": num_blocks * plan.block_bytes(),
            "workload": describe(settings.workload, requests),
        }
    slowest = list(by_link.values())[-1] if by_link else {}
    return {
        "throughput_ratio_vs_auto": slowest.get("throughput_ratio_vs_auto"),
        "bytes_per_step_ratio": slowest.get("bytes_per_step_ratio"),
        "quality": quality,
        "by_link": by_link,
        **about,
        "model": demo_model_dir().name,
        "definitions": DEFINITIONS,
    }


def summarise(measured: Mapping[str, Sequence[RoundResult]]) -> dict[str, Any]:
    """Return the figures of one link from its rounds by label."""
    systems = {label: summarise_rounds(rounds) for label, rounds in measured.items()}
    reference = systems[REFERENCE]
    narrow = [name for name in FAR_DTYPES if name != REFERENCE]

    def ratios(base: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
        rates = base["rounds_tokens_per_s"]
        return {name: median_ratio(systems[name]["rounds_tokens_per_s"], rates) for name in names}

    return {
        "throughput_ratio_vs_auto": ratios(reference, narrow),
        "throughput_ratio_vs_vllm": ratios(systems[BASELINE], FAR_DTYPES),
        "bytes_per_step_ratio": {
            name: _bytes_per_step(systems[name]) / _bytes_per_step(reference) for name in narrow
        },
        "stall_fraction": {name: systems[name]["stall_fraction"] for name in FAR_DTYPES},
        "systems": systems,
    }


def compare(scores: Mapping[str, Sequence[Score]]) -> dict[str, dict[str, float]]:
    """Return the figures of quality by type of far pages, from the scores of the same texts."""
    found = {}
    reference = scores[REFERENCE]
    for name, own in scores.items():
        pairs = list(zip(own, reference, strict=True))
        differences = [
            theirs - ours
            for score, other in pairs
            for ours, theirs in zip(score.logprobs, other.logprobs, strict=True)
        ]
        agreement = [
            ours == theirs
            for score, other in pairs
            for ours, theirs in zip(score.likeliest, other.likeliest, strict=True)
        ]
        nll = -fmean(logprob for score in own for logprob in score.logprobs)
        found[name] = {
            "perplexity": math.exp(nll),
            "nll": nll,
            "nll_difference": fmean(differences),
            "mean_abs_difference": fmean(map(abs, differences)),
            "agreement": fmean(agreement),
            "tokens": float(len(differences)),
        }
    return found


def table(result: Mapping[str, Any]) -> str:
    """Return two tables: quality by type, and speed by link and type."""
    parts = []
    if result["quality"]:
        rows = [
            [
                name,
                number(entry["perplexity"], 3),
                f"{entry['nll_difference']:+.5f}",
                number(entry["mean_abs_difference"], 4),
                f"{100 * entry['agreement']:.2f} %",
            ]
            for name, entry in result["quality"].items()
        ]
        head = ["far pages", "perplexity", "nll difference", "mean abs", "same likeliest token"]
        parts.append(markdown(head, rows))
    if result["by_link"]:
        rows = [
            [
                f"{link} GB/s" if link != "0" else "memory's own",
                label,
                number(system["tokens_per_s"]),
                number(_bytes_per_step(system) / 1e6, 2) if label != BASELINE else "-",
                number(100 * system["stall_fraction"], 1) if label != BASELINE else "-",
            ]
            for link, entry in result["by_link"].items()
            for label, system in entry["systems"].items()
        ]
        head = ["link", "far pages", "tokens/s", "MB/step", "stall, %"]
        parts.append(markdown(head, rows))
    return "\n\n".join(parts)


def _bytes_per_step(system: Mapping[str, Any]) -> float:
    return float(system["read_bytes_per_step"] + system["write_bytes_per_step"])


def _measure(
    plan: KvPlan, settings: Settings, num_blocks: int, link: float, step: Step
) -> dict[str, list[RoundResult]]:
    specs = [plan.spec(BASELINE, num_blocks)]
    for name in FAR_DTYPES:
        spec = plan.spec(
            name,
            num_blocks,
            expansion=settings.expansion,
            kv={"far_dtype": name, "far_gib": 2.0},
            link_bytes_per_s=1e9 * link,
        )
        specs.append(spec)
    with engines(specs, warmup_requests(plan.requests), step) as group:
        return interleave(group, plan.requests, settings.rounds, step, settings.max_repeats)


def _quality(settings: Settings, step: Step) -> dict[str, dict[str, float]]:
    texts = _texts(settings)
    warmup = [Request(request_id="warm", prompt_token_ids=texts[0][:64], num_output_tokens=2)]
    scores: dict[str, list[Score]] = {}
    for name in FAR_DTYPES:
        spec = _scoring_spec(settings, name)
        with engines([spec], warmup, step) as (engine,):
            scores[name] = engine.score(texts)
        step(f"scored {len(texts)} texts: {name}")
    return compare(scores)


def _texts(settings: Settings) -> list[tuple[int, ...]]:
    """Return real conversations, one behind the other, in pieces of `text_tokens`."""
    count = settings.texts * -(-settings.text_tokens // _LEAST_TOKENS)
    requests = turn_requests(
        count,
        2,
        settings.seed,
        demo_model_dir(),
        longest=settings.text_tokens,
        max_output_tokens=4,
    )
    tokens = [token for request in requests[count:] for token in request.prompt_token_ids]
    ends = range(settings.text_tokens, len(tokens) + 1, settings.text_tokens)
    found = [tuple(tokens[end - settings.text_tokens : end]) for end in ends]
    if len(found) < settings.texts:
        raise ValueError(f"{len(found)} texts, {settings.texts} wanted: lower texts")
    return found[: settings.texts]


def _scoring_spec(settings: Settings, far_dtype: str) -> EngineSpec:
    """Return an engine with all layers far but one, for one text at a time."""
    model_len = settings.text_tokens + settings.block_size
    return EngineSpec(
        label=far_dtype,
        model_dir=str(demo_model_dir()),
        dtype=settings.text_dtype,
        block_size=settings.block_size,
        kv_cache_memory_bytes=32 << 20,
        max_num_seqs=1,
        max_model_len=model_len // settings.block_size * settings.block_size,
        enable_prefix_caching=False,
        # 29 of 30 layers with two staging buffers: 30 / (30 - 29 + 2)
        tiered={"kv": {"expansion": 10.0, "far_dtype": far_dtype, "far_gib": 2.0}},
        engine_args={"max_num_batched_tokens": settings.chunk_tokens},
    )
