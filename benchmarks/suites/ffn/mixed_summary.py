# SPDX-License-Identifier: Apache-2.0
"""Figures and table of `ffn_mixed`, from its contenders' runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.memory_capped import tokens_per_s
from benchmarks.harness.tables import markdown, number
from vllm_tiered.energy.carbon import CARBON_INTENSITY, Power, grams_co2e

OURS = "mixed, near + far + storage"
FULL = "without mixed precision"
UNCACHED = "without the cache"
LAYERS = "layer streaming"
DENSE = "vLLM, all in memory"
LLAMA_CPP = "llama_cpp"

POLICIES = {"atu": OURS, "window": "cache: window"}
"""Name of the contender that runs each policy."""

DEFINITIONS = {
    "tokens_per_s": "of decoding one request: over the median time of a token, median over rounds",
    "speedup_vs_layer_streaming": "tokens/s of the mixed sparse FFN over those of all layers'"
    " weights streamed from the disk (ZeRO-Infinity's way), same limit; median of rounds' ratios",
    "speedup_vs_llama_cpp": "the same over llama.cpp with a mapped file (null: not installed)",
    "ratio_to_dense": "the same over vLLM with all weights in memory and no limit",
    "mixed_precision_gain": "the same over all neurons in full precision (M2Cache: 1.47)",
    "cache_gain": "the same over no neuron cache (M2Cache: 2.15)",
    "policies": "with the same near memory: hit ratio, and a token's bytes read from far memory and"
    " from the disk, seconds waited for neurons, and tokens/s",
    "carbon_ratio": "gCO2e a token of layer streaming over ours: of memory and disk alone, with"
    " M2Cache's constants (26 W for 256 GB, 2 W), 820 g a kWh; computed from measured times and"
    " peak memory",
    "limit_bytes": "half of the weights and what vLLM with a model of next to nothing has resident;"
    " for a contender's whole process, page cache included",
    "synthetic_sparsity": "the weights are random and built to be sparse; see"
    " benchmarks/inputs/synthetic_sparsity/model.py",
}

_POWER = Power(
    near_idle_watts=0.0, near_active_watts=0.0, far_watts_per_gb=26 / 256, storage_watts=2.0
)
"""M2Cache, 6.1, without the GPU: the host's processor computes, and its energy is not counted."""


def summarise(
    rounds: Sequence[Mapping[str, Mapping[str, Any]]], skipped: Mapping[str, str]
) -> dict[str, Any]:
    """Return the figures of all rounds."""
    rates = {name: [tokens_per_s(r[name]) for r in rounds] for name in rounds[0]}

    def ratio(other: str) -> float | None:
        if other not in rates:
            return None
        return statistics.median(a / b for a, b in zip(rates[OURS], rates[other], strict=True))

    by_contender = {
        name: {
            "tokens_per_s": statistics.median(rates[name]),
            "tokens_per_s_by_round": rates[name],
            "load_seconds": statistics.median(r[name]["load_seconds"] for r in rounds),
            "peak_bytes": max((r[name]["peak_bytes"] or 0) for r in rounds) or None,
            "milligrams_co2e": _milligrams(rounds, name, statistics.median(rates[name])),
        }
        for name in rates
    }
    grams = {name: figures["milligrams_co2e"] for name, figures in by_contender.items()}
    return {
        "speedup_vs_layer_streaming": ratio(LAYERS),
        "speedup_vs_llama_cpp": ratio(LLAMA_CPP),
        "ratio_to_dense": ratio(DENSE),
        "mixed_precision_gain": ratio(FULL),
        "cache_gain": ratio(UNCACHED),
        "carbon_ratio": grams[LAYERS] / grams[OURS],
        "policies": {policy: _policy(rounds, name) for policy, name in POLICIES.items()},
        "by_contender": by_contender,
        "manifest": rounds[-1][OURS]["manifest"],
        "skipped": dict(skipped),
    }


def table(result: Mapping[str, Any]) -> str:
    """Return Markdown: a row for each contender, then the policies."""
    rows = [
        [
            name,
            number(figures["tokens_per_s"], 3),
            number(figures["peak_bytes"] and figures["peak_bytes"] / 1e9, 2),
            number(figures["milligrams_co2e"], 3),
        ]
        for name, figures in result["by_contender"].items()
    ]
    rows += [[name, why, "-", "-"] for name, why in result["skipped"].items()]
    text = markdown(["contender (synthetic)", "tokens/s", "peak GB", "mgCO2e/token"], rows)
    policies = [
        [
            name,
            number(100 * figures["hit_ratio"], 1),
            number(figures["storage_bytes"] / 1e6, 1),
            number(figures["far_bytes"] / 1e6, 1),
            number(1000 * figures["wait_seconds"], 2),
            number(figures["tokens_per_s"], 3),
        ]
        for name, figures in result["policies"].items()
    ]
    headings = ["cache", "hits %", "MB from disk", "MB from far", "waited ms", "tokens/s"]
    return f"{text}\n\n{markdown(headings, policies)}"


def _policy(rounds: Sequence[Mapping[str, Mapping[str, Any]]], name: str) -> dict[str, float]:
    """Return a cache's figures per token, as medians over rounds."""

    def a_token(key: str) -> float:
        totals = [
            float(r[name]["use"].get(key, 0.0)) / len(r[name]["seconds_per_token"]) for r in rounds
        ]
        return statistics.median(totals)

    hits, misses = a_token("ffn_hits"), a_token("ffn_misses")
    return {
        "hit_ratio": hits / max(1e-9, hits + misses),
        "storage_bytes": a_token("ffn_storage_bytes"),
        "far_bytes": a_token("ffn_far_bytes"),
        "wait_seconds": a_token("ffn_wait_seconds"),
        "tokens_per_s": statistics.median(tokens_per_s(r[name]) for r in rounds),
    }


def _milligrams(
    rounds: Sequence[Mapping[str, Mapping[str, Any]]], name: str, tokens_per_second: float
) -> float:
    held_bytes = max((r[name]["peak_bytes"] or r[name].get("resident_bytes") or 0) for r in rounds)
    joules = _POWER.joules(1 / tokens_per_second, 0.0, int(held_bytes))
    return 1000 * grams_co2e(joules, CARBON_INTENSITY)
