# SPDX-License-Identifier: Apache-2.0
"""Figures and tables of `ffn_flash`, from its replays and its engines' runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness.memory_capped import tokens_per_s
from benchmarks.harness.tables import markdown, number
from benchmarks.suites.ffn.flash_replay import TokenCost

NAIVE, HALF, PREDICTOR, WINDOWING, BUNDLING = (
    "naive",
    "half-resident",
    "+ predictor",
    "+ windowing",
    "+ bundling",
)
PAPERS_PREDICTOR = "bundling, 10 % predicted"
SPARSE, STREAMED = "sparse FFN", "half-resident, streamed"

DEFINITIONS = {
    "io_speedup": "naive's seconds of reads a token over those of predictor, windowing and bundling"
    " together; median over rounds of each round's ratio",
    "io_speedup_with_cache": "the same with the cache's own seconds counted (LLM in a flash: memory"
    " management)",
    "io_speedup_10_percent": "the same as io_speedup with a predictor that names 10 % of the"
    " neurons, as the paper's does; the synthetic one names fewer",
    "end_to_end_speedup": "tokens/s of the sparse FFN over those of streaming what half of the"
    " memory does not hold, both in vLLM under the same limit; median over rounds",
    "read_share": "bytes that a token reads over those of all FFN weights (paper: 2.4 %)",
    "dram_share": "of the model's bytes, what memory holds: all but the FFN, the predictor, and the"
    " FFN's neurons near (paper: 52 %)",
    "by_technique": "a token's read and cache seconds, bytes read and GB/s, medians over rounds of"
    " means over tokens",
    "by_contender": "tokens/s of decoding one request: over the median time of a token, median over"
    " rounds; peak_bytes of the process, page cache included",
    "synthetic_sparsity": "the weights are random and built to be sparse; see"
    " benchmarks/inputs/synthetic_sparsity/model.py",
}

_TECHNIQUES = (NAIVE, HALF, PREDICTOR, WINDOWING, BUNDLING, PAPERS_PREDICTOR)


def mean_cost(costs: Sequence[TokenCost]) -> dict[str, float]:
    """Return the mean cost per token of one technique in one round."""
    return {
        "read_seconds": statistics.fmean(cost.read_seconds for cost in costs),
        "cache_seconds": statistics.fmean(cost.cache_seconds for cost in costs),
        "num_bytes": statistics.fmean(cost.num_bytes for cost in costs),
        "num_reads": statistics.fmean(cost.num_reads for cost in costs),
    }


def summarise_io(
    rounds: Sequence[Mapping[str, Mapping[str, float]]],
    *,
    ffn_bytes: int,
    model_bytes: int,
    held_bytes: Mapping[str, int],
) -> dict[str, Any]:
    """Return the figures of the replays.

    Args:
        rounds: each technique's `mean_cost`.
        held_bytes: bytes of the model that each technique keeps in memory, predictors included.
    """

    def ratio(slow: str, fast: str, cost: Callable[[Mapping[str, float]], float]) -> float:
        return statistics.median(cost(r[slow]) / cost(r[fast]) for r in rounds)

    def reads(figures: Mapping[str, float]) -> float:
        return figures["read_seconds"]

    def reads_and_cache(figures: Mapping[str, float]) -> float:
        return figures["read_seconds"] + figures["cache_seconds"]

    by_technique: dict[str, dict[str, Any]] = {}
    for name in _TECHNIQUES:
        medians = {
            key: statistics.median(r[name][key] for r in rounds)
            for key in ("read_seconds", "cache_seconds", "num_bytes")
        }
        by_technique[name] = medians | {
            "gb_per_s": medians["num_bytes"] / 1e9 / medians["read_seconds"],
            "read_seconds_by_round": [r[name]["read_seconds"] for r in rounds],
            "dram_share": held_bytes[name] / model_bytes,
        }
    return {
        "io_speedup": ratio(NAIVE, BUNDLING, reads),
        "io_speedup_with_cache": ratio(NAIVE, BUNDLING, reads_and_cache),
        "io_speedup_10_percent": ratio(NAIVE, PAPERS_PREDICTOR, reads),
        "read_share": by_technique[BUNDLING]["num_bytes"] / ffn_bytes,
        "read_share_10_percent": by_technique[PAPERS_PREDICTOR]["num_bytes"] / ffn_bytes,
        "dram_share": by_technique[BUNDLING]["dram_share"],
        "by_technique": by_technique,
    }


def summarise_engines(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the figures of the engines' runs; without rounds there is no ratio."""
    rates = {name: [tokens_per_s(r[name]) for r in rounds] for name in (SPARSE, STREAMED)}
    if not rounds:
        return {"end_to_end_speedup": None, "by_contender": {}}
    ratios = [a / b for a, b in zip(rates[SPARSE], rates[STREAMED], strict=True)]
    return {
        "end_to_end_speedup": statistics.median(ratios),
        "by_contender": {
            name: {
                "tokens_per_s": statistics.median(rates[name]),
                "tokens_per_s_by_round": rates[name],
                "load_seconds": statistics.median(r[name]["load_seconds"] for r in rounds),
                "peak_bytes": max((r[name]["peak_bytes"] or 0) for r in rounds) or None,
                "use": rounds[-1][name]["use"],
                "manifest": rounds[-1][name]["manifest"],
            }
            for name in (SPARSE, STREAMED)
        },
    }


def table(result: Mapping[str, Any]) -> str:
    """Return Markdown: the paper's table 2, then the engines."""
    rows = [
        [
            name,
            number(100 * figures["dram_share"], 1),
            number(figures["num_bytes"] / 1e9, 3),
            number(figures["gb_per_s"], 2),
            number(1000 * figures["read_seconds"], 1),
            number(1000 * figures["cache_seconds"], 1),
        ]
        for name, figures in result["by_technique"].items()
    ]
    headings = ["technique (synthetic)", "DRAM, % of the model", "read GB", "GB/s", "I/O ms"]
    text = markdown([*headings, "cache ms"], rows)
    engines = [
        [name, number(figures["tokens_per_s"], 3), number((figures["peak_bytes"] or 0) / 1e9, 2)]
        for name, figures in result["by_contender"].items()
    ]
    return f"{text}\n\n{markdown(['in vLLM', 'tokens/s', 'peak GB'], engines)}"
