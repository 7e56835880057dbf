# SPDX-License-Identifier: Apache-2.0
"""Tables and lines that `vllm-tiered plan` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from vllm_tiered.cli.plan_ffn import StorePlan
from vllm_tiered.energy.carbon import grams_co2e
from vllm_tiered.kv.tuning import DEFAULT_TUNING
from vllm_tiered.planner.bottleneck import Bottleneck, SublayerTimes
from vllm_tiered.planner.expert_slots import NAME as SLOTS
from vllm_tiered.planner.expert_slots import SlotsFit
from vllm_tiered.planner.fit import Fit, NoFit
from vllm_tiered.planner.kv_swapping import SwappedKv
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.memory_split import MemorySplit, Target, cost_of
from vllm_tiered.planner.model_shape import ModelShape, bytes_by_class
from vllm_tiered.planner.plan import Plan
from vllm_tiered.planner.serving import ServingEstimate, Workload
from vllm_tiered.planner.suggestions import Suggestion
from vllm_tiered.units import format_bytes


def make_console() -> Console:
    """Return a console as wide as the terminal, or wide enough for every table."""
    return Console(width=None if Console().is_terminal else 160, highlight=False)


def model_lines(shape: ModelShape, load: Workload) -> list[str]:
    """Return lines with the model's sizes."""
    lines = [
        f"{shape.num_layers} layers of {format_bytes(shape.layer_bytes)}, embeddings and others "
        f"{format_bytes(shape.other_bytes)}, KV {format_bytes(shape.kv_bytes_per_token)} a token, "
        f"{format_bytes(load.kv_bytes(shape))} a request of {load.prompt_tokens} + "
        f"{load.output_tokens} tokens; per rank"
    ]
    kept = sum(kv.request_bytes(load.tokens) for kv in shape.bounded_kv)
    if kept:
        count = sum(kv.num_layers for kv in shape.bounded_kv)
        lines.append(
            f"{count} layers keep a window or a state of each request: {format_bytes(kept)} of it"
        )
    if shape.quantization:
        lines.append(f"Weights are quantised: {shape.quantization}.")
    if shape.experts:
        lines.append(
            f"{shape.experts.num_experts} experts a layer, {shape.experts.per_token} of them a "
            f'token. Routed experts are near, except with "{SLOTS}".'
        )
    classes = (f"{name} {format_bytes(size)}" for name, size in bytes_by_class(shape).items())
    return [*lines, ", ".join(classes)]


def placements_table(
    results: Sequence[Fit | NoFit],
    slots: SlotsFit | NoFit | None,
    chosen: str | None,
    carbon_intensity: float,
) -> Table:
    """Return a table of the placements that fit; the chosen one has a star."""
    fitting = [result for result in results if isinstance(result, Fit)]
    others = [slots] if isinstance(slots, SlotsFit) else []
    estimates = [*(fit.split.served for fit in fitting), *(fit.served for fit in others)]
    with_energy = any(served.joules_per_token is not None for served in estimates)
    with_storage = any(fit.storage_bytes for fit in fitting)
    with_storage |= any(fit.storage_bytes for fit in others)
    with_swapping = any(fit.swapped for fit in fitting) or any(fit.swapped for fit in others)
    tiers = ("far", "stored") if with_storage else ("far",)
    table = _table("placement", "near", "buffers", *tiers, "KV", "requests")
    swapping = ("KV swapped", "tokens/s") if with_swapping else ()
    energy = _ENERGY if with_energy else ()
    for heading in ("TTFT s", "TBT ms", "stall %", "tokens/s", *energy, *swapping):
        table.add_column(heading, justify="right")
    for fit in fitting:
        table.add_row(
            fit.placement + (" *" if fit.placement == chosen else ""),
            format_bytes(fit.near_bytes),
            format_bytes(fit.buffer_bytes),
            format_bytes(fit.far_bytes),
            *([format_bytes(fit.storage_bytes)] if with_storage else []),
            format_bytes(fit.kv_bytes),
            *_served_cells(fit.split.served, carbon_intensity),
            *(_swapped_cells(fit.swapped) if with_swapping else []),
        )
    for fit_of_slots in others:
        table.add_row(
            SLOTS + (" *" if chosen == SLOTS else ""),
            format_bytes(fit_of_slots.near_bytes),
            format_bytes(fit_of_slots.slot_bytes),
            format_bytes(fit_of_slots.far_bytes + fit_of_slots.weights_far_bytes),
            *([format_bytes(fit_of_slots.storage_bytes)] if with_storage else []),
            format_bytes(fit_of_slots.kv_bytes),
            *_served_cells(fit_of_slots.served, carbon_intensity),
            *(_swapped_cells(fit_of_slots.swapped) if with_swapping else []),
        )
    return table


def _swapped_cells(swapped: SwappedKv | None) -> list[str]:
    if swapped is None:
        return ["", ""]
    return [str(swapped.served.requests), f"{swapped.served.tokens_per_s:.1f}"]


def slots_lines(slots: SlotsFit) -> list[str]:
    """Return lines about slots for experts."""
    far = []
    if slots.weights_far_bytes:
        far = [
            f"{format_bytes(slots.weights_far_bytes)} of the other weights are far, as near memory "
            "does not hold them beside one token's experts."
        ]
    return [
        *far,
        f"{slots.slots} of {slots.num_experts} experts of each layer have a slot (the column of "
        f"buffers). One request alone: {1e3 * slots.alone.decode_seconds:.1f} ms a token.",
        "All experts are taken to be as likely. Routers repeat themselves, so this is the least.",
    ]


def swapping_line(swapped: SwappedKv | None, without: ServingEstimate, load: Workload) -> str:
    """Return a line that says what KV swapping adds."""
    if swapped is None:
        if without.requests >= load.max_requests:
            return f"All {load.max_requests} requests fit, so KV swapping has nothing to add."
        return "KV swapping would gain nothing: what it reads costs more than requests it adds."
    served = swapped.served
    how = "which is on by default" if swapped.is_adaptive else "at a fixed expansion"
    line = (
        f"With KV swapping, {how}: {served.requests} requests instead of "
        f"{without.requests}, {served.tokens_per_s:.1f} tokens/s instead of "
        f"{without.tokens_per_s:.1f}, "
        f"TBT {1e3 * served.decode_seconds:.1f} ms, stall {served.stall_share:.0%} (expansion "
        f"{swapped.expansion:.2f}, {swapped.far_layers} layers far, "
        f"{format_bytes(swapped.far_bytes)} of KV in far memory)."
    )
    if not swapped.is_adaptive:
        line += (
            ' It is fixed because "auto" leaves a level at which compute waits for KV for more '
            f"than {DEFAULT_TUNING.max_stall:.0%} of a step."
        )
    return line


def auto_line(plan: Plan) -> str | None:
    """Return a line that says what the engine would choose by itself, if it is something else."""
    auto, chosen = plan.auto, plan.chosen
    if auto is None or chosen is None or _are_same(auto, chosen):
        return None
    served = auto.served_for(plan.case.target)
    return (
        f'The engine\'s own choice, placement "auto", would be {auto.placement}, as it compares '
        f"placements without KV swapping: TBT {1e3 * served.decode_seconds:.1f} ms, "
        f"{served.tokens_per_s:.1f} tokens/s with {_many(served.requests)}."
    )


def _are_same(one: Fit, other: Fit) -> bool:
    return one.split.placement.offloaded == other.split.placement.offloaded


def far_tiers_line(fit: Fit, machine: Machine) -> str:
    """Return a line that says how far weights are divided among the machine's far tiers."""
    parts = zip(machine.far_tiers, machine.far_tiers.bytes_by_tier(fit.far_bytes), strict=True)
    stated = ", ".join(
        f"{format_bytes(num_bytes)} in {tier.name} ({tier.gb_per_s:.1f} GB/s)"
        for tier, num_bytes in parts
        if num_bytes
    )
    if not stated:
        return "No weights are far."
    return (
        f"Far weights: {stated}; {machine.far_gb_per_s(fit.far_bytes):.1f} GB/s together, as each "
        "sublayer has the same shares in all tiers."
    )


def pareto_table(front: Sequence[tuple[str, ServingEstimate]], carbon_intensity: float) -> Table:
    """Return a table of the plans that no other beats."""
    table = _table("no other plan beats", "requests", "TTFT s", "TBT ms", "stall %", "tokens/s")
    for heading in _ENERGY if any(served.joules_per_token for _, served in front) else ():
        table.add_column(heading, justify="right")
    for name, served in front:
        table.add_row(name, *_served_cells(served, carbon_intensity))
    return table


def suggestion_lines(suggestions: Sequence[Suggestion], *, fits: bool) -> list[str]:
    """Return lines that say what would make the model fit, or faster."""
    if not suggestions:
        return ["No change that was tried would help."]
    head = "It would be faster with" if fits else "It would fit with"
    return [
        f"{head} {suggestion.change}: {_many(suggestion.served.requests)}, TBT "
        f"{1e3 * suggestion.served.decode_seconds:.1f} ms, "
        f"{suggestion.served.tokens_per_s:.1f} tokens/s."
        for suggestion in suggestions
    ]


def store_lines(store: StorePlan | str, target: Target) -> list[str]:
    """Return lines about the FFN from a neuron store, and whether it is worth it."""
    if isinstance(store, str):
        return [f"The FFN from the store does not fit: {store}"]
    fit, own = store.fit, cost_of(store.fit.served_for(target), target)
    measured = "measured on calibration text"
    source = measured if store.is_calibrated else "the store has no calibration: none is near"
    lines = [
        f"The FFN from the store: {format_bytes(fit.near_bytes)} near instead of "
        f"{format_bytes(fit.dense_bytes)}. {fit.missing_share:.0%} of what a token wants is loaded "
        f"({source}). By its bytes alone, one request gets a token in "
        f"{1e3 * fit.alone.decode_seconds:.1f} ms, and {_many(fit.served.requests)} "
        f"{fit.served.tokens_per_s:.1f} tokens/s, TTFT {fit.served.prefill_seconds:.2f} s."
    ]
    if store.why_dense is not None:
        aside = f"With default settings the engine leaves the FFN to vLLM: {store.why_dense}."
        lines.append(aside)
    elif store.better_format is not None:
        lines.append(f"By what prepare measured, {store.better_format}.")
    better = store.best_without
    if better is None or own <= cost_of(better[1], target):
        return [*lines, "Nothing else that fits is predicted to be faster, so measure it."]
    name, served = better
    times = own / cost_of(served, target)
    return [
        *lines,
        f"It is not worth it: {name} would be {times:.1f} times as fast "
        f"({1e3 * served.decode_seconds:.1f} ms a token, {served.tokens_per_s:.1f} tokens/s).",
    ]


def _many(requests: int) -> str:
    return "one request" if requests == 1 else f"{requests} requests"


def batches_table(fit: Fit, carbon_intensity: float) -> Table:
    """Return a table of the chosen placement by the number of requests."""
    table = _table("", "requests", "TTFT s", "TBT ms", "stall %", "tokens/s")
    for heading in _ENERGY if fit.joules_per_token is not None else ():
        table.add_column(heading, justify="right")
    for served in fit.batches:
        table.add_row("", *_served_cells(served, carbon_intensity))
    return table


def sublayers_table(bottlenecks: Sequence[Bottleneck], *, why: bool) -> Table:
    """Return a table of the chosen placement's sublayers, equal ones in one row."""
    with_storage = any(bottleneck.storage_bytes for bottleneck in bottlenecks)
    tiers = ("far", "stored") if with_storage else ("far",)
    table = _table("sublayer", "layers", "near", *tiers, "transfer ms", "decode ms", "prefill ms")
    if why:
        for heading in ("hidden ms", "decode bound by", "prefill bound by", "would help"):
            table.add_column(heading, justify="right" if heading == "hidden ms" else "left")
    for bottleneck in bottlenecks:
        cells = [
            "FFN" if bottleneck.kind == "ffn" else bottleneck.kind,
            str(bottleneck.layers),
            format_bytes(bottleneck.near_bytes),
            format_bytes(bottleneck.far_bytes),
            *([format_bytes(bottleneck.storage_bytes)] if with_storage else []),
            _ms(bottleneck.decode.transfer_seconds),
            _ms(bottleneck.decode.compute_seconds),
            _ms(bottleneck.prefill.compute_seconds),
        ]
        if why:
            cells += [
                _ms(bottleneck.decode.hidden_seconds) if bottleneck.decode.transfer_seconds else "",
                _bound(bottleneck.decode),
                _bound(bottleneck.prefill),
                _would_help(bottleneck),
            ]
        table.add_row(*cells)
    return table


def machine_lines(name: str, figures: Mapping[str, Mapping[str, object]], power: bool) -> list[str]:
    """Return lines that say where the predictions come from."""
    kinds = Counter(figure["kind"] for figure in figures.values())
    stated = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    lines = [f"Predicted for {name}; its figures: {stated} (--json lists them)."]
    if not power:
        lines.append(f"No energy figures: the power of {name} is not known.")
    return lines


def far_line(better: MemorySplit | None) -> str:
    """Return a line that says whether more far memory would help."""
    if better is None:
        return "More far memory would not help."
    return (
        f"More far memory would help: with {format_bytes(better.placement.far_bytes)} "
        f"{better.served.requests} requests would get {better.served.tokens_per_s:.1f} tokens/s"
    )


_ENERGY = ("J/token", "mgCO2e/token")


def _served_cells(served: ServingEstimate, carbon_intensity: float) -> list[str]:
    cells = [
        str(served.requests),
        f"{served.prefill_seconds:.2f}",
        f"{served.decode_seconds * 1e3:.1f}",
        f"{served.stall_share:.0%}",
        f"{served.tokens_per_s:.1f}",
    ]
    joules = served.joules_per_token
    if joules is not None:
        cells += [f"{joules:.2f}", f"{grams_co2e(joules, carbon_intensity) * 1e3:.2f}"]
    return cells


def _would_help(bottleneck: Bottleneck) -> str:
    if bottleneck.budget == "none":
        return ""
    return f"{format_bytes(bottleneck.more_bytes)} more {bottleneck.budget} memory each"


def _bound(phase: SublayerTimes) -> str:
    return {"near memory": "near bandwidth"}.get(phase.bound_by, phase.bound_by)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table
