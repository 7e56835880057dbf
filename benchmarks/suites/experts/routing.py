# SPDX-License-Identifier: Apache-2.0
"""What a trained router's locality gives to a cache of experts, and reading ahead to its speed.

The model is the small mixture that this repository trains on ShareGPT's text; its prompts come from
conversations it was not trained on. It runs in vLLM with experts in slots, once for each number of
requests, and records which experts each step wants. The record is replayed with other slots and
other policies, with slots that all layers share, and with the best policy there can be, which knows
the future. Then the engine runs with some of those slots and policies, and has to show the hits
that the replay predicted.

Looking ahead is measured with experts in a file, in interleaved rounds: off, on, and as the trial
decides. Precision is the share of what was read ahead that the router then named.

With the fallback in 4 bit, by the share of a token's routing weight that may be computed so: the
text's perplexity, scored one token at a time as in decoding, and tokens/s.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import memory_capped
from benchmarks.harness.cache import cache_root
from benchmarks.harness.progress import Step
from benchmarks.harness.tables import markdown
from benchmarks.inputs.byte_training import byte_text
from benchmarks.inputs.trained_mixture import Mixture, trained_mixture_dir
from benchmarks.suites.experts import replay
from benchmarks.suites.experts.routed_run import Run
from vllm_tiered.experts.policy import HALF_LIFE, EvictionPolicy, Lfu, Lru

RESULT_KEYS = (
    "hit_ratio",
    "replay_error_points",
    "engine",
    "lookahead",
    "fallback",
    "num_experts",
    "top_k",
    "definitions",
)

DEFINITIONS = {
    "hit_ratio": "by requests at once, then by policy, then by slots of a layer: experts found in"
    " a slot over experts that a layer's step wanted, prompts included",
    "shared": "the policy over all layers' experts, with as many slots in all",
    "best": "a policy that knows the future (Belady): the most that any can reach",
    "replay_error_points": "largest difference between replay and engine, in percentage points",
    "lookahead": "tokens/s with experts in a file, medians of interleaved rounds; precision: share"
    " of the experts read ahead that the router then named",
    "fallback": "by share: perplexity of text that the model was not trained on, scored one token"
    " at a time; share of pairs of token and expert in 4 bit; tokens/s with experts in a file",
}

_MODES = ("off", "on", "auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        requests: requests of a run.
        timed_requests: requests of a run that is timed or scored.
        slots: slots of a layer that are replayed.
        shown: slots and policies that the engine runs with.
        lookahead_slots: slots of a layer while looking ahead and the fallback are measured.
        shares: of a token's routing weight that may be computed in 4 bit; 0 is exact.
    """

    mixture: Mixture
    requests: int
    timed_requests: int
    prompt_tokens: int
    new_tokens: int
    slots: tuple[int, ...]
    shown: tuple[tuple[int, str], ...]
    rounds: int
    batches: tuple[int, ...] = (1, 8)
    lookahead_slots: int = 16
    shares: tuple[float, ...] = (0.0, 0.1, 0.25, 0.5, 1.0)
    threads: int = 2


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        mixture=Mixture(layers=3, steps=80, tokens=128),
        requests=4,
        timed_requests=2,
        prompt_tokens=64,
        new_tokens=64,
        slots=(8, 32),
        shown=((32, "lfu"),),
        rounds=1,
        batches=(1,),
        shares=(0.0, 0.25),
    ),
    "full": Settings(
        mixture=Mixture(),
        requests=8,
        timed_requests=2,
        prompt_tokens=256,
        new_tokens=256,
        slots=(8, 12, 16, 24, 32, 48),
        shown=((8, "lru"), (32, "lru"), (16, "lfu"), (32, "lfu")),
        rounds=3,
    ),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    per_round = len(_MODES) + len(settings.shares)
    shown = len(settings.batches) * (1 + len(settings.shown))
    return 1 + shown + settings.rounds * per_round + len(settings.shares)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    model = trained_mixture_dir(settings.mixture)
    folder = cache_root() / f"experts-routing-{model.name}"  # a file of experts is of one model
    folder.mkdir(parents=True, exist_ok=True)
    step(f"the trained mixture is in {model}")
    ratios: dict[str, Any] = {}
    shown: list[dict[str, Any]] = []
    for batch in settings.batches:
        trace, first = _record(settings, model, folder, batch)
        ratios[str(batch)] = _replayed(settings, trace, first)
        step(f"{batch} at once: LRU's hits by slots {ratios[str(batch)]['lru']}")
        for slots, policy in settings.shown:
            experts = _experts(settings, slots) | {"policy": policy, "prefetch": "off"}
            measured = _measure(settings, _run(settings, model, batch, experts))
            expected = replay.hit_ratio(trace, first, settings.mixture.experts, slots, policy)
            found = _hit_ratio(measured["use"])
            shown.append(
                {"batch": batch, "slots": slots, "policy": policy}
                | {"replayed": expected, "engine": found}
            )
            step(f"{batch} at once, {slots} slots, {policy}: {found:.4f}, replayed {expected:.4f}")
    return {
        "hit_ratio": ratios,
        "engine": shown,
        "replay_error_points": max(100 * abs(one["replayed"] - one["engine"]) for one in shown),
        "lookahead": _lookahead(settings, model, folder, step),
        "fallback": _fallback(settings, model, folder, step),
        "num_experts": settings.mixture.experts,
        "top_k": settings.mixture.top_k,
        "definitions": DEFINITIONS,
    }


def _record(settings: Settings, model: Path, folder: Path, batch: int) -> tuple[replay.Trace, int]:
    trace = folder / f"trace-{batch}.json"
    experts = _experts(settings, settings.lookahead_slots) | {"prefetch": "off"}
    _measure(settings, _run(settings, model, batch, experts, trace=str(trace)))
    return replay.read(trace)


def _replayed(settings: Settings, trace: replay.Trace, first: int) -> dict[str, dict[str, float]]:
    experts, layers = settings.mixture.experts, settings.mixture.layers
    by_policy: dict[str, dict[str, float]] = {
        name: {str(n): replay.hit_ratio(trace, first, experts, n, name) for n in settings.slots}
        for name in replay.REPLAYED
    }
    for n in settings.slots:
        shared: dict[str, EvictionPolicy] = {
            "lru, shared": Lru(layers * experts),
            "lfu, shared": Lfu(layers * experts, HALF_LIFE * layers),
        }
        for name, policy in shared.items():
            ratio = replay.shared_hit_ratio(trace, first, experts, n, policy)
            by_policy.setdefault(name, {})[str(n)] = ratio
    by_policy["best"] = {
        str(n): replay.best_hit_ratio(trace, first, experts, n) for n in settings.slots
    }
    by_policy["uniform"] = {str(n): n / experts for n in settings.slots}
    return by_policy


def _lookahead(settings: Settings, model: Path, folder: Path, step: Step) -> dict[str, Any]:
    stored = {"storage_path": str(folder / "store"), "far_gib": 0}
    (folder / "store").mkdir(exist_ok=True)
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in _MODES}
    for index in range(settings.rounds):
        for mode in memory_capped.rotated(list(_MODES), index):
            experts = _experts(settings, settings.lookahead_slots, 2) | stored
            run = _run(settings, model, 1, experts | {"prefetch": mode}, is_timed=True)
            measured = _measure(settings, run)
            runs[mode].append(measured)
            rate = memory_capped.tokens_per_s(measured)
            step(f"reading ahead {mode}: {rate:.1f} tokens/s")
    rates = {mode: [memory_capped.tokens_per_s(one) for one in runs[mode]] for mode in _MODES}
    ahead = runs["on"][-1]["use"]
    return {
        "tokens_per_s": {mode: statistics.median(values) for mode, values in rates.items()},
        "tokens_per_s_by_round": rates,
        "ratio": {
            mode: statistics.median(a / b for a, b in zip(rates[mode], rates["off"], strict=True))
            for mode in ("on", "auto")
        },
        "precision": ahead["experts_ahead_used"] / max(1.0, ahead["experts_ahead"]),
        "ahead_per_layer_step": ahead["experts_ahead"] / ahead["experts_layer_steps"],
        "hit_ratio": {mode: _hit_ratio(runs[mode][-1]["use"]) for mode in _MODES},
        "bytes": {mode: runs[mode][-1]["use"]["experts_storage_bytes"] for mode in _MODES},
    }


def _fallback(settings: Settings, model: Path, folder: Path, step: Step) -> dict[str, Any]:
    stored = {"storage_path": str(folder / "store"), "far_gib": 0, "prefetch": "off"}
    slots = _experts(settings, settings.lookahead_slots, 2)
    copies = _copies_gib(settings)
    exact: dict[str, Any] = {**slots, **stored}
    by_share: dict[float, dict[str, Any]] = {
        share: {
            **exact,
            "near_gib": slots["near_gib"] + copies,
            "fallback": "int4",
            "fallback_share": share,
        }
        if share
        else exact
        for share in settings.shares
    }
    found: dict[str, dict[str, Any]] = {}
    for share, experts in by_share.items():
        run = _run(settings, model, 1, experts, is_timed=True, step_tokens=1, scores=True)
        measured = _measure(settings, dataclasses.replace(run, new_tokens=1, temperature=0.0))
        use = measured["use"]
        found[str(share)] = {
            "perplexity": math.exp(measured["nll"]),
            "in_4_bit": use["experts_fallback_pairs"] / use["experts_pairs"],
            "tokens_per_s": [],
        }
        step(f"share {share:g} in 4 bit: perplexity {found[str(share)]['perplexity']:.4f}")
    for index in range(settings.rounds):
        for share in memory_capped.rotated(list(settings.shares), index):
            run = _run(settings, model, 1, by_share[share], is_timed=True)
            rate = memory_capped.tokens_per_s(_measure(settings, run))
            found[str(share)]["tokens_per_s"].append(rate)
            step(f"share {share:g} in 4 bit: {rate:.1f} tokens/s")
    for one in found.values():
        one["tokens_per_s"] = statistics.median(one["tokens_per_s"])
    return found


def _copies_gib(settings: Settings) -> float:
    """Return the bytes of all experts in 4 bit, with a scale of 2 bytes for 32 weights, in GiB."""
    of = settings.mixture
    return 3 * of.hidden * of.inner * of.experts * of.layers * (0.5 + 2 / 32) / 2**30


def _run(
    settings: Settings,
    model: Path,
    batch: int,
    experts: Mapping[str, Any],
    *,
    is_timed: bool = False,
    **values: Any,
) -> Run:
    # Conversations that the training leaves out begin at 0.
    text = byte_text(0, settings.requests * 4 * settings.prompt_tokens)
    prompts = [
        list(text[4 * i * settings.prompt_tokens :][: settings.prompt_tokens])
        for i in range(settings.timed_requests if is_timed else settings.requests)
    ]
    # In float32 the tokens do not depend on slots, so that runs want the same experts.
    values = {"dtype": "bfloat16" if is_timed else "float32"} | values
    return Run(
        model=str(model),
        prompts=prompts,
        new_tokens=settings.new_tokens,
        at_once=batch,
        experts=dict(experts),
        **values,
    )


def _measure(settings: Settings, run: Run) -> dict[str, Any]:
    return memory_capped.measure("vllm-tiered", run.command(), None, settings.threads)


def _experts(settings: Settings, slots: int, item_bytes: int = 4) -> dict[str, Any]:
    of = settings.mixture
    expert_bytes = 3 * of.hidden * of.inner * item_bytes
    return {"near_gib": (slots + 0.1) * of.layers * expert_bytes / 2**30}


def _hit_ratio(use: Mapping[str, float]) -> float:
    return use["experts_hits"] / (use["experts_hits"] + use["experts_misses"])


def table(result: Mapping[str, Any]) -> str:
    """Return Markdown: a row for each policy, by requests at once."""
    rows = []
    for batch, by_policy in result["hit_ratio"].items():
        for policy, by_slots in by_policy.items():
            rows.append([batch, policy, *(f"{100 * ratio:.1f}" for ratio in by_slots.values())])
    slots = next(iter(next(iter(result["hit_ratio"].values())).values()))
    return markdown(["at once", "policy", *(f"{count} slots, %" for count in slots)], rows)
