# SPDX-License-Identifier: Apache-2.0
"""Arithmetic from rounds to reported figures: pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.jobs import RoundResult

PREEMPTIONS = "vllm:num_preemptions"
EXPANSION = "vllm:tiered_kv_expansion"
LEVEL_CHANGES = "vllm:tiered_kv_level_changes"
CHECKSUM_ERRORS = "vllm:tiered_kv_page_errors_checksum"
STEPS = "vllm:tiered_kv_steps"
STEP_SECONDS = "vllm:tiered_kv_step_seconds"
STALL_SECONDS = "vllm:tiered_kv_stall_seconds"
COPIED_BYTES = "benchmarks:copied_bytes"  # by a copier that runs during the round
BOOKKEEPING_SECONDS = "vllm:tiered_kv_bookkeeping_seconds"
READ_BYTES = "vllm:tiered_kv_read_bytes"
WRITE_BYTES = "vllm:tiered_kv_write_bytes"
READ_SECONDS = "vllm:tiered_kv_read_seconds"
WRITE_SECONDS = "vllm:tiered_kv_write_seconds"
TIERED_COUNTERS = (
    STEPS,
    LEVEL_CHANGES,
    STEP_SECONDS,
    STALL_SECONDS,
    BOOKKEEPING_SECONDS,
    READ_BYTES,
    WRITE_BYTES,
    READ_SECONDS,
    WRITE_SECONDS,
)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by linear interpolation between the two nearest ranks.

    Raises ValueError for no values or a percent outside 0 to 100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def share(part: float, whole: float) -> float:
    """Return part / whole, or 0 if whole is 0 (an inactive plugin runs no steps)."""
    return part / whole if whole else 0.0


def time_per_output_token_s(result: RoundResult) -> list[float]:
    """Return each request's mean time per token after its first (requests of one have none)."""
    return [
        (times.last_token_s - times.first_token_s) / (times.num_output_tokens - 1)
        for times in result.requests
        if times.num_output_tokens > 1
    ]


def token_latency_s(result: RoundResult) -> list[float]:
    """Return each request's time from arrival to last token, per token, queueing included.

    This is vLLM's normalised latency, and Pie's per-token latency (section 5.1).
    """
    return [
        (times.last_token_s - times.arrival_s) / times.num_output_tokens
        for times in result.requests
    ]


def summarise_round(result: RoundResult) -> dict[str, float]:
    """Return the figures of one round; the plugin's only where it ran.

    Times are in milliseconds. TPOT and TTFT are as in vLLM's serving benchmark: TPOT is per
    request, from its first token to its last; TTFT starts at the request's arrival, so waiting for
    KV blocks counts, as it does in the latency per token.
    """
    tpot_s = time_per_output_token_s(result)
    ttft_s = [times.first_token_s - times.arrival_s for times in result.requests]
    latency_s = token_latency_s(result)
    figures = {
        "tokens_per_s": result.num_output_tokens / result.seconds,
        "seconds": result.seconds,
        "mean_tpot_ms": 1e3 * statistics.fmean(tpot_s),
        "p99_tpot_ms": 1e3 * percentile(tpot_s, 99),
        "p99_token_gap_ms": 1e3 * percentile(result.token_gaps_s, 99),
        "mean_token_latency_ms": 1e3 * statistics.fmean(latency_s),
        "p99_token_latency_ms": 1e3 * percentile(latency_s, 99),
        "mean_ttft_ms": 1e3 * statistics.fmean(ttft_s),
        "p99_ttft_ms": 1e3 * percentile(ttft_s, 99),
        "preemptions": result.counters[PREEMPTIONS],
        "num_steps": result.num_steps,
        "logical_blocks": result.num_blocks,
        "peak_in_flight": result.peak_in_flight,
        "rss_mib": result.rss_bytes / 2**20,
        "foreign_cpu_share": result.foreign_cpu_share,
    }
    if result.tiered:
        figures.update(_tiered_figures(result.counters, result.gauges))
        for direction in ("read", "write"):
            figures[f"{direction}_bytes_per_token"] = (
                figures[f"{direction}_bytes"] / result.num_output_tokens
            )
    return figures


def _tiered_figures(counters: Mapping[str, float], gauges: Mapping[str, float]) -> dict[str, float]:
    """Return the plugin's own figures. Raises KeyError, naming it, if a metric is missing."""
    step_seconds = counters[STEP_SECONDS]
    steps = counters[STEPS]
    return {
        "expansion": gauges[EXPANSION],
        "level_changes": counters[LEVEL_CHANGES],
        "stall_fraction": share(counters[STALL_SECONDS], step_seconds),
        "bookkeeping_fraction": share(counters[BOOKKEEPING_SECONDS], step_seconds),
        "read_bytes": counters[READ_BYTES],
        "write_bytes": counters[WRITE_BYTES],
        "read_bytes_per_step": share(counters[READ_BYTES], steps),
        "write_bytes_per_step": share(counters[WRITE_BYTES], steps),
        "read_gb_per_s": share(counters[READ_BYTES] / 1e9, counters[READ_SECONDS]),
        "write_gb_per_s": share(counters[WRITE_BYTES] / 1e9, counters[WRITE_SECONDS]),
    }


def summarise_rounds(results: Sequence[RoundResult]) -> dict[str, Any]:
    """Return the median of each figure over the rounds, and every round's tokens/s."""
    rounds = [summarise_round(result) for result in results]
    medians: dict[str, Any] = {
        key: statistics.median([figures[key] for figures in rounds]) for key in rounds[0]
    }
    # The worst, not the median: a reader wants to know of one disturbed round.
    medians["foreign_cpu_share"] = max(figures["foreign_cpu_share"] for figures in rounds)
    medians["rounds_tokens_per_s"] = [figures["tokens_per_s"] for figures in rounds]
    return medians


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median over the rounds of each round's own ratio (a slow drift cancels out)."""
    return statistics.median(
        numerator / denominator
        for numerator, denominator in zip(numerators, denominators, strict=True)
    )


def count_equal(ours: RoundResult, theirs: RoundResult) -> dict[str, int]:
    """Count the requests whose generated tokens are all equal. Returns {"equal", "total"}."""
    pairs = list(zip(ours.output_token_ids, theirs.output_token_ids, strict=True))
    return {"equal": sum(list(a) == list(b) for a, b in pairs), "total": len(pairs)}
