# SPDX-License-Identifier: Apache-2.0
"""Figures and table of `experts_offload`, from its contenders' runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.memory_capped import tokens_per_s
from benchmarks.harness.tables import markdown, number
from benchmarks.peers.shapes import OlmoeShape, Qwen3MoeShape
from vllm_tiered.experts.hit_curve import UNIFORM, loaded_bytes

OURS, LLAMA, IN_MEMORY = "vllm-tiered", "llama_cpp", "vLLM, all in memory"

RESULT_KEYS = (
    "speedup_vs_llama_cpp",
    "speedup_vs_layer_streaming",
    "fraction_of_bound",
    "disk_share",
    "tokens_equal_fp32",
    "ratio_all_in_slots",
    "by_batch",
    "prompt",
    "synthetic",
    "lookahead",
    "llama_cpp",
    "first_start_seconds",
    "near_bytes",
    "limit_bytes",
    "resident_bytes",
    "is_limited",
    "skipped_peers",
    "definitions",
)

DEFINITIONS = {
    "tokens_per_s": "of all requests together: over the median time of a step in which all decode",
    "speedup_vs_llama_cpp": "of the batch where it is smallest: median over rounds",
    "speedup_vs_layer_streaming": "computed: a layer-wise streamer reads all experts that memory"
    " does not hold at each step, at the disk's whole bandwidth; the batch where it is smallest",
    "fraction_of_bound": "rate over the bound: the disk's sequential bandwidth in the same round"
    " over the bytes that uniform routing misses with these slots; the batch where it is smallest",
    "disk_share": "bytes of missing experts over the steps' time, as a share of that bandwidth",
    "hit_ratio": "experts found in a slot over experts needed; expected: slots over experts",
    "replayed_hit_ratio": "by policy and slots: the last round's steps through the same slot table",
    "prompt": "seconds of a prompt that wants nearly all experts, and the share of the disk's"
    " bandwidth that reading them takes",
    "synthetic": "by requests, with routing that is uniform, or has published hit ratios, by"
    " construction; hits of the whole run, prompt included",
    "lookahead": "rates without and with experts read ahead, and the median of the ratios;"
    " precision: share of what was read ahead that the router then named",
    "llama_cpp": "threads, and KiB that the kernel reads ahead of a page fault: the best of 2, 4"
    " and 8, and of this machine's own, 128 and 1,024",
    "read_gb_per_step": "what a step's process read from the disk, by the kernel's count",
    "ratio_all_in_slots": "rate with a slot for each expert over vLLM's, median of ratios",
}


def summarise(
    shape: OlmoeShape | Qwen3MoeShape,
    by_batch: Mapping[int, Sequence[Mapping[str, Mapping[str, Any]]]],
) -> dict[str, Any]:
    """Return the figures of each batch, and the least of each over the batches."""
    batches = {str(batch): _of_batch(shape, batch, rounds) for batch, rounds in by_batch.items()}
    keys = ("speedup_vs_llama_cpp", "speedup_vs_layer_streaming", "fraction_of_bound", "disk_share")
    least = {key: [batch[key] for batch in batches.values()] for key in keys}
    return {key: None if None in values else min(values) for key, values in least.items()} | {
        "by_batch": batches
    }


def summarise_prompt(
    num_tokens: int, rounds: Sequence[Mapping[str, Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return the figures of the long prompt: medians over the rounds."""
    seconds = {
        name: statistics.median(r[name]["prefill_seconds"] for r in rounds)
        for name in rounds[0]
        if name != "disk"
    }
    uses = [r[OURS]["prefill_use"] for r in rounds]
    return {
        "tokens": num_tokens,
        "seconds": seconds,
        "loaded_bytes": statistics.median(use["experts_storage_bytes"] for use in uses),
        "disk_share": statistics.median(
            r[OURS]["prefill_use"]["experts_storage_bytes"]
            / r[OURS]["prefill_seconds"]
            / 1e9
            / r["disk"]["gb_per_s"]
            for r in rounds
        ),
    }


def summarise_synthetic(rounds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the figures of one synthetic routing; ratios are medians over the rounds."""
    rates = {name: [tokens_per_s(r[name]) for r in rounds] for name in rounds[0]}
    use = rounds[-1][OURS]["use"]
    return {
        "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "tokens_per_s_by_round": rates,
        "speedup_vs_llama_cpp": _ratio(rates[OURS], rates.get(LLAMA)),
        "hit_ratio": use["experts_hits"] / (use["experts_hits"] + use["experts_misses"]),
    }


def summarise_lookahead(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the figures of reading ahead, by "off" and "on"; nothing without a run."""
    if not runs["on"]:
        return {}
    rates = {mode: [tokens_per_s(run) for run in of] for mode, of in runs.items()}
    ahead = [run["use"] for run in runs["on"]]
    return {
        "tokens_per_s": {mode: statistics.median(values) for mode, values in rates.items()},
        "tokens_per_s_by_round": rates,
        "ratio": _ratio(rates["on"], rates["off"]),
        "precision": statistics.median(
            use["experts_ahead_used"] / max(1.0, use["experts_ahead"]) for use in ahead
        ),
        "bytes_per_step": {
            mode: statistics.median(_bytes_read(run) / len(run["seconds_per_token"]) for run in of)
            for mode, of in runs.items()
        },
    }


def bound(shape: OlmoeShape | Qwen3MoeShape, slots: int, batch: int, gb_per_s: float) -> float:
    """Return the tokens a second that the disk allows if each token's experts are uniform.

    A step of `batch` tokens needs E (1 - (1 - k / E)^batch) experts a layer; of those the share
    that no slot holds is read.
    """
    step_bytes = loaded_bytes(
        UNIFORM,
        slots=slots,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        batch_size=batch,
        num_layers=shape.num_layers,
        bundle_bytes=shape.expert_bytes,
    )
    return batch * gb_per_s * 1e9 / step_bytes


def _of_batch(
    shape: OlmoeShape | Qwen3MoeShape, batch: int, rounds: Sequence[Mapping[str, Mapping[str, Any]]]
) -> dict[str, Any]:
    names = [name for name in rounds[0] if name not in ("disk", "replayed")]
    rates = {name: [tokens_per_s(r[name]) for r in rounds] for name in names}
    ours = [r[OURS] for r in rounds]
    disks = [r["disk"]["gb_per_s"] for r in rounds]
    slots = int(ours[0]["manifest"]["experts"]["slots"])
    bounds = [bound(shape, slots, batch, disk) for disk in disks]
    per_step = [_bytes_read(run) / len(run["seconds_per_token"]) for run in ours]
    seconds = [statistics.fmean(run["seconds_per_token"]) for run in ours]
    layer_bytes = (shape.num_experts - slots) * shape.num_layers * shape.expert_bytes
    streaming = [batch * disk * 1e9 / layer_bytes for disk in disks]
    uses = [run["use"] for run in ours]
    return {
        "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "tokens_per_s_by_round": rates,
        "speedup_vs_llama_cpp": _ratio(rates[OURS], rates.get(LLAMA)),
        "speedup_vs_layer_streaming": _ratio(rates[OURS], streaming),
        "fraction_of_bound": _ratio(rates[OURS], bounds),
        "disk_share": statistics.median(
            read / time / 1e9 / disk
            for read, time, disk in zip(per_step, seconds, disks, strict=True)
        ),
        "bound_tokens_per_s": statistics.median(bounds),
        "disk_gb_per_s": statistics.median(disks),
        "slots": slots,
        "hit_ratio": statistics.median(
            use["experts_hits"] / (use["experts_hits"] + use["experts_misses"]) for use in uses
        ),
        "expected_hit_ratio": slots / shape.num_experts,
        "replayed_hit_ratio": rounds[-1]["replayed"],
        "read_gb_per_step": {
            name: statistics.median(
                r[name]["read_bytes"] / len(r[name]["seconds_per_token"]) / 1e9 for r in rounds
            )
            for name in names
        },
        "wait_share": statistics.median(
            use["experts_wait_seconds"] / sum(run["seconds_per_token"])
            for use, run in zip(uses, ours, strict=True)
        ),
        "peak_bytes": {name: max((r[name]["peak_bytes"] or 0) for r in rounds) for name in names},
        "load_seconds": {
            name: statistics.median(r[name]["load_seconds"] for r in rounds) for name in names
        },
    }


def _bytes_read(run: Mapping[str, Any]) -> float:
    return float(run["use"]["experts_storage_bytes"])


def _ratio(ours: Sequence[float], others: Sequence[float] | None) -> float | None:
    if others is None:
        return None
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def table(result: Mapping[str, Any]) -> str:
    """Return Markdown: a row for each batch."""
    rows = [
        [
            batch,
            number(of["tokens_per_s"][OURS], 3),
            number(of["tokens_per_s"].get(LLAMA), 3),
            number(of["tokens_per_s"].get(IN_MEMORY), 3),
            number(of["bound_tokens_per_s"], 3),
            number(of["disk_share"], 3),
            f"{of['hit_ratio']:.3f} ({of['expected_hit_ratio']:.3f})",
        ]
        for batch, of in result["by_batch"].items()
    ]
    return markdown(
        ["batch", OURS, LLAMA, IN_MEMORY, "bound", "disk share", "hits (uniform)"], rows
    )
