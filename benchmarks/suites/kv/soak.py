# SPDX-License-Identifier: Apache-2.0
"""Soak test: minutes of random load with every check on, to find leaks, failures and wrong answers.

One engine with the plugin, adaptive expansion, prefix caching and too little near-tier KV serves
random rounds (`benchmarks.inputs.soak_load`): bursts, lulls, long requests, shared prefixes,
dialogs and clients that disconnect. Some rounds begin with a reset of the prefix cache. Bits are
flipped in far pages, whose requests are then computed anew. The plugin's structures are checked
after each planned and each executed step. The engine computes in float32. A random sample of its
requests runs again on vLLM alone with ample memory and must give the same tokens; for an aborted
request, those that it had given.

Any error ends the run without a result: an exception, an error in the log, or a differing token.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness.jobs import RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import Engine, MeasurementError, engines
from benchmarks.harness.summary import CHECKSUM_ERRORS, LEVEL_CHANGES, PREEMPTIONS
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.soak_load import MAX_REQUEST_TOKENS, soak_rounds
from benchmarks.inputs.workload import Request, sharegpt_requests, warmup_requests
from benchmarks.suites.kv.plan import Expansion, KvPlan

RESULT_KEYS = (
    "minutes",
    "requests",
    "damaged_pages",
    "rss_slope_mib_per_minute",
    "integrity_checks",
    "tokens_equal_fp32",
    "definitions",
)

DEFINITIONS = {
    "minutes": "time under load",
    "requests": "requests served, those of them that were aborted, and tokens generated",
    "damaged_pages": "pages in far memory or storage in which a bit was flipped before a read",
    "found_damages": "pages whose checksum was wrong when they were read",
    "integrity_checks": "calls of the plugin's check_integrity(), all passed: one after each"
    " planned and one after each executed step",
    "rss_slope_mib_per_minute": "least-squares slope of the engine process's resident memory over"
    " the second half of the time, read when it is idle between rounds",
    "rss_growth_mib": "median resident memory of the last quarter minus that of the third",
    "tokens_equal_fp32": "sampled requests whose float32 tokens equal those of vLLM alone with"
    " ample memory",
    "expansions": "lowest, highest and number of expansions that the engine ran at",
    "counters": "increases over the whole time, by metric",
}

_SAMPLE_TEXTS = 1024  # ShareGPT prompts to draw from


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile. `near_blocks` counts float32 blocks.

    `damaged_reads` is the share of reads from far tiers before which a page is damaged (and before
    the first one, unless it is 0); `expansion` is a number, "auto", or "off": vLLM alone, to
    compare its memory. `tier` is "far" or "storage" (in the folder `path`, beyond `far_gib`). A
    file system that is smaller than what expansion 3 takes beyond `far_gib` (some 120 MiB) shows
    what a full disk does.
    """

    minutes: float
    control_requests: int
    expansion: str = "auto"
    tier: str = "far"
    path: str = ""
    far_gib: float = 0.0
    damaged_reads: float = 0.0005
    reset_every: int = 7  # rounds; the first is not reset
    near_blocks: int = 40
    max_num_seqs: int = 24
    seed: int = 0
    block_size: int = 32

    @property
    def kv(self) -> dict[str, Any]:
        """Return the plugin's section `kv` without the expansion."""
        kv: dict[str, Any] = {"verify": "full"} if self.damaged_reads else {}
        if self.tier != "far":
            kv |= {"tier": self.tier, "path": self.path, "far_gib": self.far_gib}
        return kv


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(minutes=3.0, control_requests=48),
    "full": Settings(minutes=30.0, control_requests=400),
}


@dataclass(kw_only=True, slots=True)
class Soak:
    """State of the soak: every request with its tokens, and the figures after each round."""

    requests: list[Request] = field(default_factory=list)
    tokens: list[Sequence[int]] = field(default_factory=list)
    rounds: list[RoundResult] = field(default_factory=list)
    minutes: list[float] = field(default_factory=list)

    def add(self, requests: Sequence[Request], result: RoundResult, minutes: float) -> None:
        """Add the outcome of one round, which ended after these minutes."""
        self.requests.extend(requests)
        self.tokens.extend(result.output_token_ids)
        # Tokens are kept only once, in `tokens`: half an hour makes some 100,000.
        self.rounds.append(replace(result, output_token_ids=[], token_gaps_s=[]))
        self.minutes.append(minutes)

    def describe(self) -> str:
        """Return a line on the last round."""
        last = self.rounds[-1]
        levels = [level.expansion for level in last.expansions] or [1.0]
        return (
            f"{len(self.requests)} requests, {sum(map(len, self.tokens))} tokens,"
            f" expansion {min(levels):.2f} to {max(levels):.2f}, {last.integrity_checks} checks,"
            f" {last.rss_bytes / 2**20:.0f} MiB resident"
        )


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: two engine starts, each minute begun, the control."""
    return 2 + math.ceil(settings.minutes) + 1


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Soak; see the module's docstring. Raises MeasurementError for any error or wrong token."""
    model_dir = demo_model_dir()
    texts = [request.prompt_token_ids for request in sharegpt_requests(_SAMPLE_TEXTS, 0, model_dir)]
    plan = _plan(model_dir, settings)
    expansion = parse_expansion(settings.expansion)
    label = "vLLM alone" if expansion is None else f"plugin, expansion {settings.expansion}"
    spec = replace(
        plan.spec(
            f"{label}, float32",
            settings.near_blocks,
            dtype="float32",
            expansion=expansion,
            kv=settings.kv,
        ),
        resets_prefix_cache=False,
        checks_integrity=expansion is not None,
        damaged_reads=settings.damaged_reads if expansion is not None else 0.0,
    )
    warmup = warmup_requests(plan.requests)
    with engines([spec], warmup, step) as (process,):
        load = soak_rounds(texts, settings.seed)
        done = soak(process, load, settings.minutes, step, reset_every=settings.reset_every)
        require_quiet_log(process.log_path)
    if spec.tiered and not done.rounds[-1].integrity_checks:
        raise MeasurementError("no integrity check was made: the plugin stepped aside")
    if spec.damaged_reads and not found_damages(done):
        raise MeasurementError(
            f"{done.rounds[-1].damaged_pages} pages were damaged, and none was found"
        )
    control = _control(plan, settings, done, warmup, step)
    return {
        **summarise(done),
        "tokens_equal_fp32": control,
        "near_bytes": spec.kv_cache_memory_bytes,
        "model": model_dir.name,
        "definitions": DEFINITIONS,
    }


def _plan(model_dir: Path, settings: Settings) -> KvPlan:
    longest = Request(
        request_id="longest",
        prompt_token_ids=tuple(range(100, 100 + MAX_REQUEST_TOKENS - 1)),
        num_output_tokens=1,
    )
    return KvPlan(
        model_dir=model_dir,
        requests=[longest],
        block_size=settings.block_size,
        prefix_caching=True,
        max_num_seqs=settings.max_num_seqs,
    )


def parse_expansion(text: str) -> Expansion | None:
    """Return "auto", the number, or None for "off". Raises ValueError for anything else."""
    if text == "auto":
        return "auto"
    if text == "off":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"setting expansion={text!r}: expected a number, auto or off") from None


class ResettableEngine(Engine, Protocol):
    """Engine whose prefix cache can be emptied between rounds."""

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""


def soak(
    engine: ResettableEngine,
    load: Generator[list[Request], Sequence[Sequence[int]] | None, None],
    minutes: float,
    step: Step,
    clock: Callable[[], float] = time.monotonic,
    reset_every: int = 0,
) -> Soak:
    """Run rounds until the time is over, at least one; report each minute begun as a step.

    The prefix cache is emptied before each `reset_every`-th round; 0: never.
    """
    done = Soak()
    start = clock()
    reported = 0
    requests = next(load)
    while True:
        if reset_every and len(done.rounds) % reset_every == reset_every - 1:
            engine.reset_prefix_cache()
        result = engine.run(requests)
        passed = (clock() - start) / 60
        done.add(requests, result, passed)
        is_over = passed >= minutes
        while reported < (math.ceil(minutes) if is_over else min(passed // 1, minutes // 1)):
            reported += 1
            step(f"minute {reported}: {done.describe()}")
        if is_over:
            return done
        requests = load.send(result.output_token_ids)


def require_quiet_log(log_path: Path) -> None:
    """Raise MeasurementError if the engine's log holds an error line."""
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    # vLLM warns of optional packages that fail to import and includes their traceback.
    errors = [
        line
        for line in lines
        if re.search(r"\b(ERROR|CRITICAL|Traceback)\b", line) and " WARNING " not in line
    ]
    if errors:
        raise MeasurementError(
            f"{len(errors)} error lines in the engine's log, the first: {errors[0]}"
        )


def _control(
    plan: KvPlan, settings: Settings, done: Soak, warmup: Sequence[Request], step: Step
) -> dict[str, int]:
    """Run a sample again with vLLM alone and ample memory; all tokens must be equal."""
    chosen = control_sample(done, settings.control_requests, settings.seed)
    requests = [
        replace(done.requests[index], arrival_s=0.0, abort_after_tokens=None) for index in chosen
    ]
    ample = settings.max_num_seqs * (MAX_REQUEST_TOKENS // settings.block_size + 1) + 1
    spec = replace(
        plan.spec("vLLM alone, unlimited KV, float32", ample, dtype="float32"),
        enable_prefix_caching=False,
    )
    with engines([spec], warmup, step) as (process,):
        result = process.run(requests)
    require_same_tokens(requests, [done.tokens[index] for index in chosen], result.output_token_ids)
    step(f"{len(chosen)} sampled requests equal vLLM's")
    return {"equal": len(chosen), "total": len(chosen)}


def control_sample(done: Soak, count: int, seed: int) -> list[int]:
    """Return the indices, ascending, of randomly chosen requests that gave tokens."""
    answered = [index for index, tokens in enumerate(done.tokens) if tokens]
    return sorted(random.Random(seed).sample(answered, min(count, len(answered))))


def require_same_tokens(
    requests: Sequence[Request],
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
) -> None:
    """Raise MeasurementError unless each of ours begins theirs (or equals it, if not aborted)."""
    different = []
    for request, mine, full in zip(requests, ours, theirs, strict=True):
        if list(mine) != list(full[: len(mine)]):
            at = next(
                (i for i, (a, b) in enumerate(zip(mine, full, strict=False)) if a != b), len(full)
            )
            different.append(f"{request.request_id} from token {at} of {len(mine)}")
    if different:
        raise MeasurementError(
            f"float32 control: {len(different)} of {len(requests)} sampled requests differ from"
            f" vLLM's: {', '.join(different[:8])}"
        )


def found_damages(done: Soak) -> int:
    """Return how many pages failed their checksum."""
    return int(sum(result.counters.get(CHECKSUM_ERRORS, 0) for result in done.rounds))


def summarise(done: Soak) -> dict[str, Any]:
    """Return the figures of a soak."""
    levels = {level.expansion for result in done.rounds for level in result.expansions} or {1.0}
    counters: dict[str, float] = {}
    for result in done.rounds:
        for name, value in result.counters.items():
            counters[name] = counters.get(name, 0.0) + value
    rss_mib = [result.rss_bytes / 2**20 for result in done.rounds]
    return {
        "minutes": done.minutes[-1],
        "requests": {
            "served": len(done.requests),
            "aborted": sum(len(result.aborted_ids) for result in done.rounds),
            "tokens": sum(map(len, done.tokens)),
        },
        "rounds": len(done.rounds),
        "steps": sum(result.num_steps for result in done.rounds),
        "preemptions": counters.get(PREEMPTIONS, 0.0),
        "level_changes": counters.get(LEVEL_CHANGES, 0.0),
        "expansions": {"lowest": min(levels), "highest": max(levels), "number": len(levels)},
        "integrity_checks": done.rounds[-1].integrity_checks,
        "damaged_pages": done.rounds[-1].damaged_pages,
        "found_damages": found_damages(done),
        "descriptors": [result.num_descriptors for result in done.rounds],
        **rss_figures(done.minutes, rss_mib),
        "counters": counters,
    }


def rss_figures(minutes: Sequence[float], rss_mib: Sequence[float]) -> dict[str, Any]:
    """Return slope and growth of the resident memory; None with fewer than 4 samples per half."""
    samples = list(zip(minutes, rss_mib, strict=True))
    half = [sample for sample in samples if sample[0] >= minutes[-1] / 2]
    series = [[round(minute, 2), round(mib, 1)] for minute, mib in samples]
    if len(half) < 4:
        return {"rss_slope_mib_per_minute": None, "rss_growth_mib": None, "rss_mib": series}
    third, last = half[: len(half) // 2], half[len(half) // 2 :]
    return {
        "rss_slope_mib_per_minute": statistics.linear_regression(
            [minute for minute, _ in half], [mib for _, mib in half]
        ).slope,
        "rss_growth_mib": statistics.median(mib for _, mib in last)
        - statistics.median(mib for _, mib in third),
        "rss_mib": series,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the figures, one a row."""
    requests, levels = result["requests"], result["expansions"]
    rows = [
        ["minutes", number(result["minutes"], 1)],
        ["requests (aborted)", f"{number(requests['served'])} ({number(requests['aborted'])})"],
        ["tokens", number(requests["tokens"])],
        ["engine steps", number(result["steps"])],
        ["preemptions", number(result["preemptions"])],
        ["level changes", number(result["level_changes"])],
        ["expansions", f"{levels['lowest']:.2f} to {levels['highest']:.2f}"],
        [
            "damaged pages (found)",
            f"{number(result['damaged_pages'])} ({number(result['found_damages'])})",
        ],
        [
            "open descriptors, first and last round",
            f"{result['descriptors'][0]}, {result['descriptors'][-1]}",
        ],
        ["integrity checks", number(result["integrity_checks"])],
        ["resident memory, slope (MiB/min)", number(result["rss_slope_mib_per_minute"], 2)],
        ["resident memory, growth (MiB)", number(result["rss_growth_mib"], 1)],
        ["float32 sample equal to vLLM's", str(result["tokens_equal_fp32"]["equal"])],
    ]
    return markdown(["", ""], rows)
