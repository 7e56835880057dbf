# SPDX-License-Identifier: Apache-2.0
"""Rows of `vllm-tiered top`: what each part does now, by name, with its unit."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_tiered.cli.live_rates import Rates, State, sum_engines
from vllm_tiered.units import format_bytes

Row = tuple[str, str]
"""A title and a text."""


def figure_rows(now: State, rates: Rates) -> Iterator[Row]:
    """Yield the rows of an answer; those of weights, experts and neurons only if they are on."""
    yield from _kv_rows(now, rates)
    if _is_on(now, "weights"):
        yield from _weights_rows(now, rates)
    if _is_on(now, "experts"):
        yield "experts found near", _share(rates.expert_hits)
        loaded = _loaded(rates.experts_far, rates.experts_storage, rates.experts_wait)
        yield "experts loaded", loaded
        yield from _preload_row("experts read ahead", now, "experts")
    if _is_on(now, "ffn"):
        yield "neurons found near", _share(rates.hits)
        loaded = _loaded(rates.neurons_far, rates.neurons_storage, rates.neurons_wait)
        yield "neurons loaded", loaded
        yield from _preload_row("neurons read ahead", now, "ffn")
    if rates.watts is not None:
        yield "power", _power(rates)


def _kv_rows(now: State, rates: Rates) -> Iterator[Row]:
    engine = (now["engines"] or [{}])[0]
    expansion = engine.get("kv_expansion")
    if expansion is not None:
        layers = f"{engine.get('kv_far_layers', 0):.0f} layers far"
        yield "KV expansion", f"{expansion:.2f}x, {layers}"
    released, reserved = (
        sum_engines(now, f"kv_blocks_{name}") for name in ("released", "reserved")
    )
    if released is not None:
        yield "KV blocks", f"{released:.0f} usable, {reserved or 0:.0f} held back"
    yield "KV read, written", f"{_rate(rates.read)}, {_rate(rates.write)}"
    yield "while reading", _of_peak(rates.read_speed, _peak(now, "read"))
    yield "while writing", _of_peak(rates.write_speed, _peak(now, "write"))
    yield "compute waits for KV", _share(rates.stall)
    yield "planning and hooks", _share(rates.bookkeeping)


def _weights_rows(now: State, rates: Rates) -> Iterator[Row]:
    yield (
        "far weights",
        f"{_rate(rates.weights_read)}, compute waits {_share(rates.weights_wait)}",
    )
    yield "while reading them", _of_peak(rates.weights_speed, _peak(now, "read"))
    expected = now["workers"][0]["weights"].get("expected_step")
    if expected is not None:
        yield "a step, planned", _step(expected["seconds"], expected["stall_share"])
        yield "a step, observed", _step(rates.weights_step, rates.weights_step_wait)


def _preload_row(title: str, now: State, part: str) -> Iterator[Row]:
    """Yield whether the first rank reads ahead, and what its trials have found."""
    preload: Mapping[str, Any] | None = now["workers"][0][part].get("preload")
    if preload is None:
        return
    verdicts = preload["verdicts"]
    why = preload["reason"] or ", ".join(
        f"{one['ratio']:.2f}x the time at {one['batch_size']} tokens a step" for one in verdicts
    )
    yield title, f"{preload['state']} ({why})" if why else preload["state"]


def _power(rates: Rates) -> str:
    assumed = rates.assumed or 0.0
    kind = "assumed" if assumed > 0.999 else f"{assumed:.0%} assumed" if assumed else "measured"
    token = "" if rates.joules_per_token is None else f", {rates.joules_per_token:.3g} J/token"
    return f"{rates.watts:.1f} W ({kind}){token}"


def _is_on(now: State, part: str) -> bool:
    return any(worker.get(part, {}).get("state") == "on" for worker in now["workers"])


def _peak(now: State, direction: str) -> float | None:
    """Return the measured peak of a rank's link; ranks measure at once, so their mean."""
    name = f"peak_{direction}_bytes_per_s"
    found = [worker.get("link", {}).get(name) for worker in now["workers"]]
    peaks = [float(peak) for peak in found if peak is not None]
    return sum(peaks) / len(peaks) if peaks else None


def _of_peak(value: float | None, peak: float | None) -> str:
    if peak is None:
        return _rate(value)
    share = "" if value is None else f"{value / peak:.0%} of "
    return f"{_rate(value)} ({share}the measured peak, {_rate(peak)})"


def _loaded(far: float | None, storage: float | None, wait: float | None) -> str:
    return (
        f"{_rate(far)} from far memory, {_rate(storage)} from storage, compute waits {_share(wait)}"
    )


def _step(seconds: float | None, stall_share: float | None) -> str:
    if seconds is None:
        return "idle"
    return f"{1000 * seconds:.1f} ms, of it waiting for weights {_share(stall_share)}"


def _rate(value: float | None) -> str:
    return "not measured" if value is None else f"{format_bytes(round(value))}/s"


def _share(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"
