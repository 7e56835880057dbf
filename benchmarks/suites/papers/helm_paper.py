# SPDX-License-Identifier: Apache-2.0
"""HeLM's table IV and figures 11 to 13 from the cost model: OPT-175B on an A100 with Optane or CXL.

Nothing is measured. Placements and steps come from `vllm_tiered.planner`. Weights have 4 bits each
and 32 bits per group of 64 (section IV-B). They are expanded before each matmul, which takes most
of a sublayer's compute time.

Each figure is computed twice: with constants fitted to table IV (`FITTED`), which shows how much of
the table the model's form explains, and with constants published elsewhere (`PUBLISHED`), which
shows how well it predicts a machine that nobody has fitted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.progress import Step
from benchmarks.harness.tables import markdown, number
from benchmarks.suites.papers.helm_figures import (
    BATCHES,
    CARD_BYTES,
    CLAIMS,
    COMPRESSED_BYTES_PER_WEIGHT,
    FLEXGEN_PERCENTS,
    LINK_GB_PER_S,
    OPT_175B,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    PUBLISHED_LINK_GB_PER_S,
    TABLE_IV,
    TABLE_IV_LINKS,
)
from vllm_tiered.planner.machine import Machine, load_profile
from vllm_tiered.planner.model_shape import ModelShape, model_shape
from vllm_tiered.planner.pipeline_time import (
    ComputeTimes,
    Link,
    pipeline_step_time,
    transfer_seconds,
)
from vllm_tiered.planner.step_time import Batch, compute_times
from vllm_tiered.weights.placement import Placement, place

EXPANSION_BYTES_PER_WEIGHT = 13.0625
"""Bytes that FlexGen 0.1.8 reads and writes on the card to expand a weight (`decompress`).

Two halves are extracted (packed 0.5, result 0.5 each) and copied (0.5 in, 1 out each), then a
division and an addition in 16 bit read 2 and write 2 each, and 4 bytes of scale and minimum for a
group of 64. The matmul's own read is in its time.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Figures of the paper's machine: GB/s by link, the card, and weights expanded per second."""

    links: Mapping[str, float]
    machine: Machine
    expanded_weights_per_s: float


MACHINE = load_profile("a100-optane")
"""Profile that `vllm-tiered plan` uses for this machine too; its link is one of `links`."""

FITTED = Constants(links=LINK_GB_PER_S, machine=MACHINE, expanded_weights_per_s=47e9)
"""Constants with the least worst error in table IV: throughput and NVDRAM's link in the profile,
and here the rate of expansion, from the decode rows."""

PUBLISHED = Constants(
    links=PUBLISHED_LINK_GB_PER_S,
    machine=replace(MACHINE, tflops=312, near_gb_per_s=1555),
    expanded_weights_per_s=1555e9 / EXPANSION_BYTES_PER_WEIGHT,
)
"""Constants without a fit: figure 3a's and table III's links, the card's published peaks (table I,
data sheet), and FlexGen's expansion at the peak of the card's memory."""

RESULT_KEYS = (
    "worst_ratio_error",
    "worst_claim_error",
    "table_iv",
    "claims",
    "published",
    "runs",
    "modelled",
)


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
    fitted, published = (_compared(shape, constants) for constants in (FITTED, PUBLISHED))
    step(f"{len(fitted['table_iv'])} ratios and {len(fitted['claims'])} claims compared, twice")
    del published["runs"]
    return {
        **fitted,
        "published": published,
        "modelled": "OPT-175B, A100, 4-bit weights: cost model",
        "definitions": {
            "error": "ours over the paper's, less 1",
            "worst_ratio_error": "the largest in table IV, either way",
            "median_ratio_error": "the median of their sizes",
            "worst_claim_error": "the largest among what sections V-B to V-D state",
            "median_claim_error": "the median of their sizes",
            "published": "all of it with constants that are not fitted to table IV",
        },
    }


def _compared(shape: ModelShape, constants: Constants) -> dict[str, Any]:
    table_iv = _table_iv(shape, constants)
    runs = _runs(shape, constants)
    found: dict[str, Any] = {"table_iv": table_iv, "claims": _claims(runs), "runs": runs}
    for name, entries in (("ratio", found["table_iv"]), ("claim", found["claims"])):
        errors = [abs(entry["error"]) for entry in entries]
        found[f"worst_{name}_error"] = max(errors)
        found[f"median_{name}_error"] = statistics.median(errors)
    return found


def stage(
    shape: ModelShape,
    placement: Placement,
    link: str,
    requests: int,
    new_tokens: int,
    constants: Constants,
) -> Stage:
    """Return a step in the steady state on one of the links."""
    batch = Batch(requests=requests, new_tokens=new_tokens, context_tokens=PROMPT_TOKENS)
    times = compute_times(shape, constants.machine, batch)
    weights_per_s = constants.expanded_weights_per_s
    compute = tuple(
        seconds + sublayer.num_bytes / shape.dtype_bytes / weights_per_s
        for seconds, sublayer in zip(times.compute, shape.sublayers, strict=True)
    )
    # The shape counts 16-bit bytes; weights on the link have fewer bits, so it carries more.
    packed = shape.dtype_bytes / COMPRESSED_BYTES_PER_WEIGHT
    loads = transfer_seconds(placement, Link(bytes_per_s=constants.links[link] * 1e9 * packed))
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


def _table_iv(shape: ModelShape, constants: Constants) -> list[dict[str, Any]]:
    entries = []
    for row in TABLE_IV:
        placement = _placement(row.placement, shape)
        new_tokens = PROMPT_TOKENS if row.stage == "prefill" else 1
        for at, link in enumerate(TABLE_IV_LINKS):
            ours = stage(shape, placement, link, row.requests, new_tokens, constants)
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


def _runs(shape: ModelShape, constants: Constants) -> list[dict[str, Any]]:
    """Return each placement at each batch on each link, as in figures 11 to 13."""
    runs = []
    for name in ("flexgen", "helm", "all_far"):
        placement = _placement(name, shape)
        for requests in BATCHES:
            if card_bytes(shape, placement, requests) > CARD_BYTES:
                continue
            for link in constants.links:
                prefill = stage(shape, placement, link, requests, PROMPT_TOKENS, constants)
                decode = stage(shape, placement, link, requests, 1, constants)
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
    """Return table IV, ours (fitted, without a fit) next to the paper's, and the claims."""
    published = result["published"]
    rows: dict[tuple[Any, ...], list[str]] = {}
    for entry, other in zip(result["table_iv"], published["table_iv"], strict=True):
        key = (entry["placement"], str(entry["requests"]), entry["stage"])
        cell = f"{entry['paper']:.2f} ({entry['ours']:.2f}, {other['ours']:.2f})"
        rows.setdefault(key, []).append(cell)
    # Both ratios of a link are adjacent in the result; the paper has separate columns for them.
    ordered = [[*key, *cells[0::2], *cells[1::2]] for key, cells in rows.items()]
    headings = ["placement", "batch", "stage"]
    headings += [f"attention/FFN load, {link}" for link in TABLE_IV_LINKS]
    headings += [f"FFN/attention load, {link}" for link in TABLE_IV_LINKS]
    claims = [
        [claim["claim"], *(number(value, 2) for value in (claim["paper"], claim["ours"], of))]
        for claim, other in zip(result["claims"], published["claims"], strict=True)
        for of in (other["ours"],)
    ]
    of_claims = markdown(["ratio", "paper", "ours, fitted", "ours, without a fit"], claims)
    return "\n\n".join([markdown(headings, ordered), of_claims])
