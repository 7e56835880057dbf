# SPDX-License-Identifier: Apache-2.0
"""Numbers from HeLM's paper: targets to reproduce, and links that other machines scale to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_tiered.planner.machine import load_profile

LINK_GB_PER_S: Mapping[str, float] = {
    "nvdram": load_profile("a100-optane").read_gb_per_s,
    "cxl_fpga": 5.12,
    "cxl_asic": 28.0,
    "dram": 22.4,
    "memory_mode": 21.1,
}
"""Far-to-near bandwidth in 10^9 bytes per second, as weights see it.

* CXL-FPGA and CXL-ASIC: table III.
* NVDRAM: the machine's profile, which derives it from table IV.
* DRAM: NVDRAM is "within 25 %" of it with compressed weights (IV-B, figure 6); figure 3a has 24.6.
* MemoryMode (a cache of DRAM before Optane): "within 6 %" of DRAM with compressed weights (IV-B).
"""

PUBLISHED_LINK_GB_PER_S: Mapping[str, float] = {
    "nvdram": 19.91,
    "cxl_fpga": 5.12,
    "cxl_asic": 28.0,
    "dram": 24.6,
    "memory_mode": 24.6,
}
"""The same from figure 3a and table III alone: no figure comes from the results compared with.

* NVDRAM: up to buffers of 4 GB, 20 % below DRAM; at 32 GB figure 3a has 15.52.
* MemoryMode: its line is DRAM's, as long as the buffer fits its cache of DRAM.
"""


OPT_175B: Mapping[str, Any] = {
    "model_type": "opt",
    "hidden_size": 12288,
    "num_attention_heads": 96,
    "num_hidden_layers": 96,
    "ffn_dim": 49152,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
}

COMPRESSED_BYTES_PER_WEIGHT = 0.5625
"""FlexGen's group-wise quantization: 4 bits a weight and two 16-bit numbers per 64 weights."""

CARD_BYTES = 38 * 2**30
"""Usable bytes of the card's 40 GB of HBM2 (table I).

What CUDA and the activations of one request leave is assumed.
"""


class Row(NamedTuple):
    """A row of table IV: compute over the transfer that it overlaps with, by link."""

    placement: str
    requests: int
    stage: str
    attention_over_ffn_load: tuple[float, float, float]
    ffn_over_attention_load: tuple[float, float, float]


TABLE_IV_LINKS = ("nvdram", "cxl_fpga", "cxl_asic")

TABLE_IV: tuple[Row, ...] = (
    Row("flexgen", 1, "prefill", (0.36, 0.10, 0.56), (1.86, 0.53, 2.90)),
    Row("flexgen", 1, "decode", (0.36, 0.10, 0.55), (1.85, 0.53, 2.88)),
    Row("flexgen", 8, "prefill", (0.52, 0.14, 0.79), (3.07, 0.87, 4.77)),
    Row("flexgen", 8, "decode", (0.36, 0.10, 0.55), (1.85, 0.53, 2.88)),
    Row("helm", 1, "prefill", (0.72, 0.20, 1.12), (1.40, 0.40, 2.18)),
    Row("helm", 1, "decode", (0.71, 0.20, 1.10), (1.40, 0.40, 2.16)),
    Row("all_far", 1, "prefill", (0.37, 0.10, 0.56), (1.41, 0.40, 2.18)),
    Row("all_far", 1, "decode", (0.36, 0.10, 0.55), (1.39, 0.39, 2.16)),
    Row("all_far", 8, "prefill", (0.51, 0.14, 0.79), (2.30, 0.65, 3.57)),
    Row("all_far", 8, "decode", (0.36, 0.10, 0.55), (1.39, 0.39, 2.16)),
    Row("all_far", 44, "prefill", (1.25, 0.37, 2.01), (4.82, 1.43, 7.84)),
    Row("all_far", 44, "decode", (0.35, 0.10, 0.57), (1.33, 0.40, 2.16)),
)

FLEXGEN_PERCENTS = (20.0, 80.0, 0.0)
"""Near, far and storage shares that the paper asks FlexGen for (V-A, NVDRAM)."""

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 21
"""Prompt and output tokens of each request (III-B)."""

BATCHES = (1, 8, 44)
"""Batch sizes of the paper; 44 requests fit only with all weights far (V-C)."""


Which = tuple[str, int, str]
"""Placement, number of requests, link."""


class Claim(NamedTuple):
    """A statement in the text: the figure of one run over that of another."""

    text: str
    figure: str
    paper: float
    of: Which
    over: Which


def _memory_mode_claims() -> tuple[Claim, ...]:
    """Return what sections V-B and V-C state of MemoryMode."""
    helm = ("helm", 1, "memory_mode")
    flexgen = ("flexgen", 1, "memory_mode")
    claims = []
    for name, figure, over_flexgen, over_dram in (
        ("TTFT", "ttft_s", 0.3190, 0.0173),
        ("TBT", "tbt_s", 0.3228, 0.0164),
    ):
        text = f"HeLM over FlexGen, {name}, MemoryMode (11b)"
        claims.append(Claim(text, figure, 1 - over_flexgen, helm, flexgen))
        text = f"HeLM, {name}, MemoryMode over DRAM (11b)"
        claims.append(Claim(text, figure, 1 + over_dram, helm, ("helm", 1, "dram")))
    for requests, ttft, tbt in ((1, 0.0583, 0.0577), (8, 0.0686, 0.0946), (44, 0.0024, 0.0839)):
        of, over = ("all_far", requests, "memory_mode"), ("all_far", requests, "nvdram")
        for name, figure, less in (("TTFT", "ttft_s", ttft), ("TBT", "tbt_s", tbt)):
            text = f"All-CPU {requests}, {name}, MemoryMode over NVDRAM (12)"
            claims.append(Claim(text, figure, 1 - less, of, over))
    for name, link, paper in (("NVDRAM", "nvdram", 1.0757), ("DRAM", "dram", 1.0115)):
        text = f"All-CPU 44, tokens/s, MemoryMode over {name} (12c)"
        of = ("all_far", 44, "memory_mode")
        claims.append(Claim(text, "tokens_per_s", paper, of, ("all_far", 44, link)))
    return tuple(claims)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "HeLM over FlexGen, TTFT, NVDRAM (11b)",
        "ttft_s",
        1 - 0.2720,
        ("helm", 1, "nvdram"),
        ("flexgen", 1, "nvdram"),
    ),
    Claim(
        "HeLM over FlexGen, TBT, NVDRAM (11b)",
        "tbt_s",
        1 - 0.2744,
        ("helm", 1, "nvdram"),
        ("flexgen", 1, "nvdram"),
    ),
    Claim(
        "HeLM, TTFT, NVDRAM over DRAM (11b)",
        "ttft_s",
        1.0875,
        ("helm", 1, "nvdram"),
        ("helm", 1, "dram"),
    ),
    Claim(
        "HeLM, TBT, NVDRAM over DRAM (11b)",
        "tbt_s",
        1.0891,
        ("helm", 1, "nvdram"),
        ("helm", 1, "dram"),
    ),
    Claim(
        "All-CPU over FlexGen, TBT, batch 1, NVDRAM (12b)",
        "tbt_s",
        1.01,
        ("all_far", 1, "nvdram"),
        ("flexgen", 1, "nvdram"),
    ),
    Claim(
        "All-CPU over FlexGen, TBT, batch 8, NVDRAM (12b)",
        "tbt_s",
        1.01,
        ("all_far", 8, "nvdram"),
        ("flexgen", 8, "nvdram"),
    ),
    Claim(
        "All-CPU 44 over FlexGen 8, tokens/s, NVDRAM (12c)",
        "tokens_per_s",
        5.0,
        ("all_far", 44, "nvdram"),
        ("flexgen", 8, "nvdram"),
    ),
    Claim(
        "All-CPU 44, tokens/s, NVDRAM over DRAM (12c)",
        "tokens_per_s",
        0.94,
        ("all_far", 44, "nvdram"),
        ("all_far", 44, "dram"),
    ),
    Claim(
        "HeLM over FlexGen, TBT, CXL-FPGA (13a)",
        "tbt_s",
        1 - 0.27,
        ("helm", 1, "cxl_fpga"),
        ("flexgen", 1, "cxl_fpga"),
    ),
    Claim(
        "HeLM over FlexGen, TBT, CXL-ASIC (13a)",
        "tbt_s",
        1 - 0.21,
        ("helm", 1, "cxl_asic"),
        ("flexgen", 1, "cxl_asic"),
    ),
    Claim(
        "All-CPU over FlexGen, tokens/s, batch 8, CXL-FPGA (13b)",
        "tokens_per_s",
        1 - 0.0835,
        ("all_far", 8, "cxl_fpga"),
        ("flexgen", 8, "cxl_fpga"),
    ),
    Claim(
        "All-CPU 44 over FlexGen 8, tokens/s, CXL-FPGA (13b)",
        "tokens_per_s",
        4.74,
        ("all_far", 44, "cxl_fpga"),
        ("flexgen", 8, "cxl_fpga"),
    ),
    Claim(
        "All-CPU 44 over FlexGen 8, tokens/s, CXL-ASIC (13b)",
        "tokens_per_s",
        5.04,
        ("all_far", 44, "cxl_asic"),
        ("flexgen", 8, "cxl_asic"),
    ),
    *_memory_mode_claims(),
)


def decode_ratios(placement: str, link: str) -> tuple[float, float]:
    """Return table IV's two ratios for decoding at batch 1. Raises KeyError for unknown rows."""
    for row in TABLE_IV:
        if (row.placement, row.requests, row.stage) == (placement, 1, "decode"):
            at = TABLE_IV_LINKS.index(link)
            return row.attention_over_ffn_load[at], row.ffn_over_attention_load[at]
    raise KeyError(f"table IV has no placement {placement!r}")
