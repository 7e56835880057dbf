# SPDX-License-Identifier: Apache-2.0
"""PRESERVE's design-space exploration from the model: its figures 5 to 9 and table 1.

Nothing is measured. `vllm-tiered dse` shows the same, and also explores other spaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.progress import Step
from vllm_tiered.accelerator.results import Asked, design_space
from vllm_tiered.report.accelerator_tables import markdown, summary, tables

RESULT_KEYS = (
    "worst_claim_error",
    "table_1_error",
    "with_prefetch",
    "without_prefetch",
    "claims",
    "readings",
    "table_1",
    "modelled",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Empty settings: the paper's design space is fixed."""


PROFILES: Mapping[str, Settings] = {"quick": Settings(), "full": Settings()}


def num_steps(settings: Settings) -> int:
    """Return how often `run` reports progress."""
    return 1


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Compute everything and compare it with the paper."""
    answer = design_space(Asked())
    step(f"{len(answer['claims'])} figures compared")
    return {
        **answer,
        "worst_claim_error": max(abs(claim["error"]) for claim in answer["claims"]),
        "table_1_error": answer["table_1"]["mean_errors"]["unfitted"],
        "modelled": "PRESERVE's table 2 and an Ascend 910B: performance and area model",
        "definitions": {
            "error": "ours over the paper's, less 1",
            "worst_claim_error": "the largest in what figures 5 to 9 state",
            "table_1_error": "mean of the speedups' absolute errors, with nothing fitted",
            "throughput_density": "tokens/s/mm2 as the paper counts: `papers_per_ours` is fitted",
        },
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the tables as Markdown."""
    parts = ["\n".join(summary(result))]
    for cells in tables(result):
        parts += [f"**{cells.title}**", markdown(cells), *([cells.note] if cells.note else [])]
    return "\n\n".join(parts)
