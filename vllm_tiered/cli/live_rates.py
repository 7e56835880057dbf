# SPDX-License-Identifier: Apache-2.0
"""Rates between two answers of GET /tiered, and what happened between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

State = Mapping[str, Any]
"""An answer of GET /tiered."""

PARTS = {
    "kv": "KV cache",
    "weights": "weights",
    "experts": "experts",
    "ffn": "sparse FFN",
    "l2": "L2 prefetch",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of all ranks; None where nothing was measured.

    Attributes:
        read, write: KV bytes per second.
        read_speed: KV bytes per second of reading time, of one rank.
        stall, bookkeeping: shares of the steps' time.
        weights_read: bytes of far weights per second.
        weights_wait: share of the time in which a rank waited for them.
        hits: share of the needed neurons that were near.
        watts, assumed_watts: joules per second, and those that are assumed.
        tokens: output tokens per second.
    """

    read: float | None = None
    write: float | None = None
    read_speed: float | None = None
    stall: float | None = None
    bookkeeping: float | None = None
    weights_read: float | None = None
    weights_wait: float | None = None
    hits: float | None = None
    watts: float | None = None
    assumed_watts: float | None = None
    tokens: float | None = None


def rates_between(before: State, now: State) -> Rates:
    """Return the rates from one answer to a later one; empty if the server was restarted."""
    seconds = _clock(now) - _clock(before)
    if seconds <= 0:
        return Rates()
    num_ranks = len(now["workers"])

    def per_second(part: str, figure: str) -> float | None:
        change = _change(before, now, part, figure)
        return None if change is None else change / seconds

    def share(part: str, figure: str, whole: str) -> float | None:
        total = _change(before, now, part, whole)
        return (_change(before, now, part, figure) or 0.0) / total if total else None

    waited = per_second("weights", "weights_stall_seconds")
    hits, misses = (_change(before, now, "ffn", name) or 0.0 for name in ("ffn_hits", "ffn_misses"))
    tokens: list[Any] = [
        answer.get("server", {}).get("generated_tokens") for answer in (before, now)
    ]
    return Rates(
        read=per_second("kv", "kv_read_bytes"),
        write=per_second("kv", "kv_write_bytes"),
        read_speed=share("kv", "kv_read_bytes", "kv_read_seconds"),
        stall=share("kv", "kv_stall_seconds", "kv_step_seconds"),
        bookkeeping=share("kv", "kv_bookkeeping_seconds", "kv_step_seconds"),
        weights_read=per_second("weights", "weights_read_bytes"),
        weights_wait=None if waited is None else waited / num_ranks,
        hits=hits / (hits + misses) if hits + misses else None,
        watts=per_second("energy", "energy_joules"),
        assumed_watts=per_second("energy", "energy_assumed_joules"),
        tokens=None if None in tokens else (tokens[1] - tokens[0]) / seconds,
    )


def events_between(before: State, now: State) -> list[str]:
    """Return what happened from one answer to a later one, in words."""
    found = []
    old, new = before["workers"][:1], now["workers"][:1]
    for first, second in zip(old, new, strict=False):
        if first["pid"] != second["pid"] or _clock(now) < _clock(before):
            found.append("the server was restarted")
        found += [
            f"{name}: {second[part]['state']}"
            + (f", {second[part]['reason']}" if second[part]["reason"] else "")
            for part, name in PARTS.items()
            if any(first[part][key] != second[part][key] for key in ("state", "reason"))
        ]
    far = [(answer["engines"] or [{}])[0].get("kv_far_layers") for answer in (before, now)]
    if None not in far and far[0] != far[1]:
        found.append(f"{far[1]} layers far, before {far[0]}")
    if lost := _change(before, now, "kv", "kv_lost_blocks"):
        found.append(f"{lost:.0f} KV blocks did not come back intact; computed anew")
    return found


def bytes_by_tier(now: State) -> dict[str, int]:
    """Return the bytes of KV, weights and neurons per tier, all ranks."""
    return {
        tier: sum(
            worker.get(part, {}).get(f"{tier}_bytes") or 0
            for worker in now["workers"]
            for part in ("kv", "weights", "experts", "ffn")
        )
        for tier in ("near", "far", "storage")
    }


def _clock(answer: State) -> float:
    workers = answer["workers"]
    return float(workers[0]["monotonic_seconds"]) if workers else 0.0


def _change(before: State, now: State, part: str, figure: str) -> float | None:
    """Return by how much a counter rose, all ranks; None if nobody counts it."""
    totals = [
        [
            worker[part]["counters"][figure]
            for worker in answer["workers"]
            if figure in worker.get(part, {}).get("counters", {})
        ]
        for answer in (before, now)
    ]
    return sum(totals[1]) - sum(totals[0]) if totals[1] else None
