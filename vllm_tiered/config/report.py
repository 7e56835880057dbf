# SPDX-License-Identifier: Apache-2.0
"""Section `report`: the timeline file, and what emissions are computed with."""

from dataclasses import dataclass
from typing import ClassVar

from vllm_tiered.config.rules import Number, PathTo
from vllm_tiered.config.section import Section, option


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig(Section):
    """The timeline file for `vllm-tiered report`, and what emissions are computed with."""

    NAME: ClassVar[str] = "report"

    path: str | None = option(
        None,
        PathTo(what="file"),
        "File of the timeline: JSON lines, a few MB at most however long the engine runs. Without "
        "it nothing is written. With several replicas each writes its own: `NAME.dp0.jsonl`.",
    )
    carbon_intensity: float = option(
        820.0,
        Number(at_least=0, at_most=100_000),
        "Carbon intensity of the grid in gCO2e per kWh, for the emissions in the report and in "
        "the metrics.",
    )
    embodied_kg: float = option(
        0.0,
        Number(at_least=0, at_most=1_000_000),
        "Emissions of making the machine in kgCO2e, as its maker states them. 0: not counted.",
    )
    lifetime_years: float = option(
        5.0,
        Number(at_least=0.1, at_most=100),
        "Years over which `embodied_kg` is spread.",
    )
