# SPDX-License-Identifier: Apache-2.0
"""Figures and table of `weights_storage`, from its contenders' runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.memory_capped import tokens_per_s
from benchmarks.harness.tables import markdown, number

OURS = "vllm-tiered"

DEFINITIONS = {
    "tokens_per_s": "of decoding one request: over the median time of a token, median over rounds",
    "tokens_per_s_ratio": "ours over the best peer's: median over rounds of each round's ratio",
    "disk_share": "bytes that each token reads over its median time, as a share of the disk's"
    " sequential bandwidth in the same round; median over rounds",
    "second_start_ratio": "all layers stored: seconds in which the first start loads the weights"
    " (and fills the file) over those of a later start; starts has the seconds, of the whole starts"
    " too, and the same for the placement that is measured, whose near part is read again",
    "resident_bytes": "what vLLM with a model of next to nothing has resident",
    "limit_bytes": "for a contender's whole process, page cache included",
    "by_contender": "tokens_per_s, load_seconds and peak_bytes, medians over rounds",
}


def table(result: Mapping[str, Any]) -> str:
    """Return Markdown: a row for each contender."""
    rows = [
        [
            name,
            number(figures["tokens_per_s"], 3),
            number(figures["load_seconds"], 1),
            number(figures["peak_bytes"] and figures["peak_bytes"] / 1e9, 2),
        ]
        for name, figures in result["by_contender"].items()
    ]
    rows += [[name, why, "-", "-"] for name, why in result["skipped_peers"].items()]
    return markdown(["contender", "tokens/s", "start s", "peak GB"], rows)


def summarise(
    rounds: Sequence[Mapping[str, Mapping[str, Any]]],
    first: Mapping[str, Any],
    all_stored: Mapping[str, Sequence[float]],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    names = [name for name in rounds[0] if name != "disk"]
    rates = {name: [tokens_per_s(r[name]) for r in rounds] for name in names}
    others = [name for name in names if name != OURS]
    best = max(others, key=lambda name: statistics.median(rates[name]), default=None)
    stored = first["manifest"]["storage_bytes"]
    disk_shares = [
        stored * ours / 1e9 / r["disk"]["gb_per_s"]
        for r, ours in zip(rounds, rates[OURS], strict=True)
    ]
    later = {
        key: statistics.median(r[OURS][key] for r in rounds)
        for key in ("weights_load_seconds", "load_seconds")
    }
    return {
        "tokens_per_s_ratio": best
        and statistics.median(a / b for a, b in zip(rates[OURS], rates[best], strict=True)),
        "best_peer": best,
        "disk_share": statistics.median(disk_shares),
        "disk_gb_per_s": statistics.median(r["disk"]["gb_per_s"] for r in rounds),
        "second_start_ratio": all_stored["weights"][0] / all_stored["weights"][1],
        "starts": {
            "all_stored": dict(all_stored),
            "measured": {
                "weights": [first["weights_load_seconds"], later["weights_load_seconds"]],
                "engine": [first["load_seconds"], later["load_seconds"]],
            },
        },
        "manifest": first["manifest"],
        "stall_share": statistics.median(
            statistics.median(r[OURS]["stall_seconds_per_token"]) * tokens_per_s(r[OURS])
            for r in rounds
        ),
        "by_contender": {
            name: {
                "tokens_per_s": statistics.median(rates[name]),
                "tokens_per_s_by_round": rates[name],
                "load_seconds": statistics.median(r[name]["load_seconds"] for r in rounds),
                "peak_bytes": _median_or_none([r[name]["peak_bytes"] for r in rounds]),
            }
            for name in names
        },
        "skipped_peers": dict(skipped),
    }


def _median_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
