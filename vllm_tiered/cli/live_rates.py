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

PAGE_ERRORS = "kv_page_errors_"
"""Start of the counters of lost pages, which end in the reason."""

_BYTES = {
    "near": ("near_bytes", "buffer_bytes"),
    "far": ("far_bytes",),
    "storage": ("storage_bytes", "embedding_bytes"),
}
"""Figures of a part's bytes in each tier; a part has some of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of all ranks; None where nothing was measured.

    Attributes:
        read, write: KV bytes per second.
        read_speed, write_speed: KV bytes per second of copying time, of one rank.
        stall, bookkeeping: shares of the steps' time.
        weights_read: bytes of far weights per second.
        weights_speed: bytes of far weights per second of copying time, of one rank.
        weights_wait: share of the steps' time in which compute waited for them.
        weights_step: seconds of a step with far weights; None unless requests ran throughout.
        weights_step_wait: share of it in which compute waited for them.
        expert_hits: share of the needed experts that were near.
        experts_far, experts_storage: bytes of experts per second, by where they came from.
        experts_wait: share of the steps' time in which compute waited for them.
        hits: share of the needed neurons that were near.
        neurons_far, neurons_storage: bytes of neurons per second, by where they came from.
        neurons_wait: share of the steps' time in which compute waited for them.
        watts: joules per second.
        assumed: share of the joules that are assumed.
        joules_per_token: joules per output token.
        tokens: output tokens per second.
    """

    read: float | None = None
    write: float | None = None
    read_speed: float | None = None
    write_speed: float | None = None
    stall: float | None = None
    bookkeeping: float | None = None
    weights_read: float | None = None
    weights_speed: float | None = None
    weights_wait: float | None = None
    weights_step: float | None = None
    weights_step_wait: float | None = None
    expert_hits: float | None = None
    experts_far: float | None = None
    experts_storage: float | None = None
    experts_wait: float | None = None
    hits: float | None = None
    neurons_far: float | None = None
    neurons_storage: float | None = None
    neurons_wait: float | None = None
    watts: float | None = None
    assumed: float | None = None
    joules_per_token: float | None = None
    tokens: float | None = None


class _Interval:
    """Counters' increases from one answer to a later one."""

    def __init__(self, before: State, now: State) -> None:
        self.before, self.now = before, now
        self.seconds = _clock(now) - _clock(before)
        self._rank_seconds = self.seconds * len(now["workers"])

    def per_second(self, part: str, figure: str) -> float | None:
        return _ratio(_change(self.before, self.now, part, figure), self.seconds)

    def share(self, part: str, figure: str, whole: str) -> float | None:
        """Return a counter's increase over another's; what has not counted yet has grown by 0."""
        grown = _change(self.before, self.now, part, figure)
        return _ratio(grown or 0.0, _change(self.before, self.now, part, whole))

    def hits(self, part: str) -> float | None:
        hits, misses = (
            _change(self.before, self.now, part, f"{part}_{name}") or 0.0
            for name in ("hits", "misses")
        )
        return _ratio(hits, hits + misses)

    def wait(self, part: str, figure: str) -> float | None:
        """Return a share of the steps' time, or of all time if nobody counts that of steps."""
        steps = _change(self.before, self.now, "kv", "kv_step_seconds")
        whole = self._rank_seconds if steps is None else steps
        return _ratio(_change(self.before, self.now, part, figure), whole)

    def weights_step(self) -> tuple[float | None, float | None]:
        """Return a step's seconds and the share in which it waited for far weights.

        Steps follow one another only while requests run.
        """
        if not all(_server(answer, "requests_running") for answer in (self.before, self.now)):
            return None, None
        num_steps = _change(self.before, self.now, "weights", "weights_steps")
        waited = _change(self.before, self.now, "weights", "weights_stall_seconds")
        step = _ratio(self._rank_seconds, num_steps)
        return step, _ratio(_ratio(waited, num_steps), step)

    def tokens(self) -> float | None:
        before, now = (_server(answer, "generated_tokens") for answer in (self.before, self.now))
        return None if before is None or now is None or now < before else now - before


def rates_between(before: State, now: State) -> Rates:
    """Return the rates from one answer to a later one; empty if the server was restarted."""
    over = _Interval(before, now)
    if over.seconds <= 0 or _pids(before) != _pids(now):
        return Rates()
    tokens, joules = over.tokens(), _change(before, now, "energy", "energy_joules")
    weights_step, weights_step_wait = over.weights_step()
    return Rates(
        read=over.per_second("kv", "kv_read_bytes"),
        write=over.per_second("kv", "kv_write_bytes"),
        read_speed=over.share("kv", "kv_read_bytes", "kv_read_seconds"),
        write_speed=over.share("kv", "kv_write_bytes", "kv_write_seconds"),
        stall=over.share("kv", "kv_stall_seconds", "kv_step_seconds"),
        bookkeeping=over.share("kv", "kv_bookkeeping_seconds", "kv_step_seconds"),
        weights_read=over.per_second("weights", "weights_read_bytes"),
        weights_speed=over.share("weights", "weights_read_bytes", "weights_read_seconds"),
        weights_wait=over.wait("weights", "weights_stall_seconds"),
        weights_step=weights_step,
        weights_step_wait=weights_step_wait,
        expert_hits=over.hits("experts"),
        experts_far=over.per_second("experts", "experts_far_bytes"),
        experts_storage=over.per_second("experts", "experts_storage_bytes"),
        experts_wait=over.wait("experts", "experts_wait_seconds"),
        hits=over.hits("ffn"),
        neurons_far=over.per_second("ffn", "ffn_far_bytes"),
        neurons_storage=over.per_second("ffn", "ffn_storage_bytes"),
        neurons_wait=over.wait("ffn", "ffn_wait_seconds"),
        watts=_ratio(joules, over.seconds),
        assumed=over.share("energy", "energy_assumed_joules", "energy_joules"),
        joules_per_token=_ratio(joules, tokens),
        tokens=_ratio(tokens, over.seconds),
    )


def events_between(before: State, now: State) -> list[str]:
    """Return what happened from one answer to a later one, in words."""
    if _pids(before) != _pids(now) or _clock(now) < _clock(before):
        return ["the server was restarted"]
    found = []
    for first, second in zip(before["workers"][:1], now["workers"][:1], strict=False):
        found += [
            f"{name}: {second[part]['state']}"
            + (f", {second[part]['reason']}" if second[part]["reason"] else "")
            for part, name in PARTS.items()
            if any(first[part][key] != second[part][key] for key in ("state", "reason"))
        ]
    return found + _level_changes(before, now) + _losses(before, now)


def _level_changes(before: State, now: State) -> list[str]:
    far = [(answer["engines"] or [{}])[0].get("kv_far_layers") for answer in (before, now)]
    changes = _rise(before, now, "kv_level_changes")
    often = f" in {changes:.0f} changes" if changes > 1 else ""
    if None not in far and far[0] != far[1]:
        return [f"{far[1]:.0f} layers far, before {far[0]:.0f}{often}"]
    return [f"{far[1]:.0f} layers far again{often}"] if changes > 0 and None not in far else []


def _losses(before: State, now: State) -> list[str]:
    found = []
    if lost := _change(before, now, "kv", "kv_lost_blocks"):
        found.append(f"{lost:.0f} KV blocks did not come back intact; computed anew")
    names = {name for worker in now["workers"] for name in worker.get("kv", {}).get("counters", {})}
    for name in sorted(names):
        if name.startswith(PAGE_ERRORS) and (lost := _change(before, now, "kv", name)):
            found.append(f"{lost:.0f} far pages lost ({name.removeprefix(PAGE_ERRORS)})")
    if (again := _rise(before, now, "kv_recomputed_requests")) > 0:
        found.append(f"{again:.0f} requests computed again, because KV blocks were lost")
    if _rise(before, now, "kv_storage_failed") > 0:
        found.append("the KV cache's storage tier failed and is not used any more")
    return found


def bytes_by_tier(now: State) -> dict[str, int]:
    """Return the bytes of KV, weights, experts and neurons per tier, all ranks."""
    return {
        tier: sum(
            worker.get(part, {}).get(name) or 0
            for worker in now["workers"]
            for part in ("kv", "weights", "experts", "ffn")
            for name in names
        )
        for tier, names in _BYTES.items()
    }


def sum_engines(answer: State, figure: str) -> float | None:
    """Return a scheduler's figure, summed over the engines; None if none of them has it."""
    found = [engine[figure] for engine in answer["engines"] if engine.get(figure) is not None]
    return sum(found) if found else None


def _clock(answer: State) -> float:
    workers = answer["workers"]
    return float(workers[0]["monotonic_seconds"]) if workers else 0.0


def _pids(answer: State) -> list[int]:
    return [worker["pid"] for worker in answer["workers"]]


def _server(answer: State, figure: str) -> float | None:
    value: float | None = answer.get("server", {}).get(figure)
    return value


def _rise(before: State, now: State, figure: str) -> float:
    """Return by how much a scheduler's figure rose, all engines."""
    return (sum_engines(now, figure) or 0.0) - (sum_engines(before, figure) or 0.0)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _change(before: State, now: State, part: str, figure: str) -> float | None:
    """Return by how much a counter rose, all ranks; None if nobody counts it, or it fell.

    A counter that has not counted is left out of an answer. Where KV steps are counted, that is a
    measured 0.
    """
    old, new = _total(before, part, figure), _total(now, part, figure)
    if new is None and figure.startswith("kv_") and _total(now, "kv", "kv_steps") is not None:
        new = 0.0
    return None if new is None or new < (old or 0.0) else new - (old or 0.0)


def _total(answer: State, part: str, figure: str) -> float | None:
    found = [worker.get(part, {}).get("counters", {}).get(figure) for worker in answer["workers"]]
    counted = [float(value) for value in found if value is not None]
    return sum(counted) if counted else None
