# SPDX-License-Identifier: Apache-2.0
"""HeLM's table IV and figures 11 to 13 from the cost model: OPT-175B on an A100 with Optane or CXL.

Nothing is measured. Placements and steps come from `vllm_tiered.planner`, the machine from its
profile `a100-optane`. Weights have 4 bits each and 32 bits per group of 64 (section IV-B). They are
expanded before each matmul, which takes most of a sublayer's compute time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.progress import Step
from benchmarks.harness.tables import markdown, number
from benchmarks.suites.papers.helm_figures import (
    BATCHES,
    CARD_BYTES,
    CLAIMS,
    FLEXGEN_PERCENTS,
    LINK_GB_PER_S,
    OPT_175B,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    TABLE_IV,
    TABLE_IV_LINKS,
)
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.model_shape import ModelShape, model_shape
from vllm_tiered.planner.pipeline_time import (
    ComputeTimes,
    Link,
    pipeline_step_time,
    transfer_seconds,
)
from vllm_tiered.planner.step_time import Batch, compute_times
from vllm_tiered.weights.placement import Placement, place

COMPRESSED_BYTES_PER_WEIGHT = 0.5625
"""FlexGen's group-wise quantization: 4 bits a weight and two 16-bit numbers per 64 weights."""

EXPANDED_WEIGHTS_PER_S = 47e9
"""Expansion rate calibrated on table IV's decode rows (least worst error).

It explains the compute time there beyond the matmuls' memory traffic.
"""

MACHINE = load_profile("a100-optane")
"""Profile that `vllm-tiered plan` uses for this machine too.

Its link is replaced by each of `LINK_GB_PER_S` in turn.
"""

RESULT_KEYS = ("worst_ratio_error", "worst_claim_error", "table_iv", "claims", "runs", "modelled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Empty settings: the model is fixed."""


PROFILES: Mapping[str, Settings] = {"quick": Settings(), "full": Settings()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A step of one stage: its seconds, and those of one layer's parts."""

    seconds: float
    attention_compute: float
    ffn_compute: float
    attention_load: float
    ffn_load: float


def num_steps(settings: Settings) -> int:
    """Return how often `run` reports progress."""
    return 1


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Compute everything and compare it with the paper."""
    shape = model_shape(OPT_175B, dtype="float16")
    table_iv = _table_iv(shape)
    runs = _runs(shape)
    claims = _claims(runs)
    step(f"{2 * len(TABLE_IV) * len(TABLE_IV_LINKS)} ratios and {len(claims)} claims compared")
    return {
        "worst_ratio_error": max(abs(entry["error"]) for entry in table_iv),
        "worst_claim_error": max(abs(claim["error"]) for claim in claims),
        "table_iv": table_iv,
        "claims": claims,
        "runs": runs,
        "modelled": "OPT-175B, A100, 4-bit weights: cost model",
        "definitions": {
            "error": "ours over the paper's, less 1",
            "worst_ratio_error": "the largest in table IV, either way",
            "worst_claim_error": "the largest among what sections V-B to V-D state",
        },
    }


def stage(
    shape: ModelShape, placement: Placement, link: str, requests: int, new_tokens: int
) -> Stage:
    """Return a step in the steady state on a link of `LINK_GB_PER_S`."""
    batch = Batch(requests=requests, new_tokens=new_tokens, context_tokens=PROMPT_TOKENS)
    times = compute_times(shape, MACHINE, batch)
    weights_per_s = EXPANDED_WEIGHTS_PER_S
    compute = tuple(
        seconds + sublayer.num_bytes / shape.dtype_bytes / weights_per_s
        for seconds, sublayer in zip(times.compute, shape.sublayers, strict=True)
    )
    # The shape counts 16-bit bytes; weights on the link have fewer bits, so it carries more.
    packed = shape.dtype_bytes / COMPRESSED_BYTES_PER_WEIGHT
    loads = transfer_seconds(placement, Link(bytes_per_s=LINK_GB_PER_S[link] * 1e9 * packed))
    return Stage(
        seconds=pipeline_step_time(loads, ComputeTimes(compute=compute, rest=times.rest)).seconds,
        attention_compute=compute[0],
        ffn_compute=compute[1],
        attention_load=loads[0],
        ffn_load=loads[1],
    )


def card_bytes(shape: ModelShape, placement: Placement, requests: int) -> float:
    """Return the card's bytes for compressed layers, 16-bit embeddings and head, and KV (V-C)."""
    packed = COMPRESSED_BYTES_PER_WEIGHT / shape.dtype_bytes
    kv_bytes = requests * (PROMPT_TOKENS + OUTPUT_TOKENS) * shape.kv_bytes_per_token
    return packed * placement.near_bytes + shape.other_bytes + kv_bytes


def _placement(name: str, shape: ModelShape) -> Placement:
    return place(name, shape.sublayers, FLEXGEN_PERCENTS if name == "flexgen" else None)


def _table_iv(shape: ModelShape) -> list[dict[str, Any]]:
    entries = []
    for row in TABLE_IV:
        placement = _placement(row.placement, shape)
        new_tokens = PROMPT_TOKENS if row.stage == "prefill" else 1
        for at, link in enumerate(TABLE_IV_LINKS):
            ours = stage(shape, placement, link, row.requests, new_tokens)
            pairs = (
                (
                    "attention compute / FFN load",
                    ours.attention_compute / ours.ffn_load,
                    row.attention_over_ffn_load[at],
                ),
                (
                    "FFN compute / attention load",
                    ours.ffn_compute / ours.attention_load,
                    row.ffn_over_attention_load[at],
                ),
            )
            for ratio, value, paper in pairs:
                entries.append(
                    {
                        "placement": row.placement,
                        "requests": row.requests,
                        "stage": row.stage,
                        "link": link,
                        "ratio": ratio,
                        "paper": paper,
                        "ours": value,
                        "error": value / paper - 1,
                    }
                )
    return entries


def _runs(shape: ModelShape) -> list[dict[str, Any]]:
    """Return each placement at each batch on each link, as in figures 11 to 13."""
    runs = []
    for name in ("flexgen", "helm", "all_far"):
        placement = _placement(name, shape)
        for requests in BATCHES:
            if card_bytes(shape, placement, requests) > CARD_BYTES:
                continue
            for link in LINK_GB_PER_S:
                prefill = stage(shape, placement, link, requests, PROMPT_TOKENS)
                decode = stage(shape, placement, link, requests, 1)
                seconds = prefill.seconds + (OUTPUT_TOKENS - 1) * decode.seconds
                runs.append(
                    {
                        "placement": name,
                        "requests": requests,
                        "link": link,
                        "ttft_s": prefill.seconds,
                        "tbt_s": decode.seconds,
                        "tokens_per_s": requests * OUTPUT_TOKENS / seconds,
                        "prefill": _parts(prefill),
                        "decode": _parts(decode),
                    }
                )
    return runs


def _parts(step: Stage) -> dict[str, float]:
    return {
        "attention_compute_ms": 1e3 * step.attention_compute,
        "ffn_compute_ms": 1e3 * step.ffn_compute,
        "attention_load_ms": 1e3 * step.attention_load,
        "ffn_load_ms": 1e3 * step.ffn_load,
    }


def find(runs: list[dict[str, Any]], placement: str, requests: int, link: str) -> dict[str, Any]:
    """Return the run with these settings. Raises KeyError if there is none."""
    for entry in runs:
        if (entry["placement"], entry["requests"], entry["link"]) == (placement, requests, link):
            return entry
    raise KeyError(f"no run of {placement} with {requests} requests on {link}")


def _claims(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    claims = []
    for claim in CLAIMS:
        ours = find(runs, *claim.of)[claim.figure] / find(runs, *claim.over)[claim.figure]
        claims.append(
            {
                "claim": claim.text,
                "paper": claim.paper,
                "ours": ours,
                "error": ours / claim.paper - 1,
            }
        )
    return claims


def table(result: Mapping[str, Any]) -> str:
    """Return table IV, ours next to the paper's, and the claims."""
    rows: dict[tuple[Any, ...], list[str]] = {}
    for entry in result["table_iv"]:
        key = (entry["placement"], str(entry["requests"]), entry["stage"])
        rows.setdefault(key, []).append(f"{entry['ours']:.2f} ({entry['paper']:.2f})")
    # Both ratios of a link are adjacent in the result; the paper has separate columns for them.
    ordered = [[*key, *cells[0::2], *cells[1::2]] for key, cells in rows.items()]
    headings = ["placement", "batch", "stage"]
    headings += [f"attention/FFN load, {link}" for link in TABLE_IV_LINKS]
    headings += [f"FFN/attention load, {link}" for link in TABLE_IV_LINKS]
    claims = [
        [claim["claim"], number(claim["paper"], 2), number(claim["ours"], 2)]
        for claim in result["claims"]
    ]
    return "\n\n".join([markdown(headings, ordered), markdown(["ratio", "paper", "ours"], claims)])
