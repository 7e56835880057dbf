# SPDX-License-Identifier: Apache-2.0
"""Contenders of `weights_placement`, and the requests that each gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.jobs import EngineSpec, RoundResult
from benchmarks.harness.runner import EngineProcess, MeasurementError
from benchmarks.harness.summary import PREEMPTIONS
from benchmarks.inputs.workload import Request
from benchmarks.suites.papers.helm_figures import FLEXGEN_PERCENTS
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.weights.placement import Placement, place


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A placement to compare.

    Attributes:
        weights: the plugin's `weights` section.
        near_of: the contender whose near memory it gets; it is placed again for each link. None for
            a placement that is the same on every link.
        fills_card: it gets all the near memory that the paper's card has for layers, some of which
            the contender `near_of` leaves idle.
    """

    name: str
    weights: Mapping[str, Any]
    near_of: str | None = None
    fills_card: bool = False

    @property
    def memory_of(self) -> str:
        """Return `near_of`. Raises AssertionError if there is none."""
        assert self.near_of is not None, f"{self.name} is the same in every memory"
        return self.near_of


FIXED = (
    Contender(name="flexgen", weights={"placement": "flexgen", "percents": list(FLEXGEN_PERCENTS)}),
    Contender(name="helm", weights={"placement": "helm"}),
    Contender(name="all_far", weights={"placement": "all_far"}),
)

PLACED = (
    Contender(name="latency_helm", weights={"placement": "latency"}, near_of="helm"),
    Contender(
        name="latency_card", weights={"placement": "latency"}, near_of="helm", fills_card=True
    ),
    Contender(name="latency_flexgen", weights={"placement": "latency"}, near_of="flexgen"),
)
"""Contenders run at one request, against the contender whose near memory they get."""

SHARING = (
    Contender(name="throughput", weights={"placement": "throughput"}, near_of="flexgen"),
    Contender(name="throughput_helm", weights={"placement": "throughput"}, near_of="helm"),
)
"""Contenders run at as many requests as their own plan leaves KV memory for.

Layers and KV share the bytes that FlexGen's (or HeLM's) placement and the KV of `flexgen_batch`
requests take.
"""

CONTENDERS = (*FIXED, *PLACED, *SHARING)


class Load:
    """An engine with the requests that it always runs."""

    def __init__(self, process: EngineProcess, requests: Sequence[Request]) -> None:
        self.spec: EngineSpec = process.spec
        self.requests = requests
        self._process = process

    def run(self, _: Sequence[Request]) -> RoundResult:
        """Run one round of its own requests; the argument is ignored."""
        return self._process.run(self.requests)

    def check(self, rounds: Sequence[RoundResult]) -> None:
        """Check that all its requests ran at once, so that the batch is what it is called.

        Raises:
            MeasurementError: naming the round in which they did not.
        """
        for result in rounds:
            if result.counters[PREEMPTIONS] or result.peak_in_flight != len(self.requests):
                raise MeasurementError(
                    f"{result.label}: {result.peak_in_flight} of {len(self.requests)} requests at"
                    f" once, {result.counters[PREEMPTIONS]:.0f} preemptions"
                )


def planned_batch(process: EngineProcess, probe: Sequence[Request]) -> int:
    """Return the number of one-block requests that an engine's own plan leaves KV memory for.

    Args:
        probe: any requests; a round with them shows the number of blocks.

    Raises:
        MeasurementError: not even one fits.
    """
    blocks = process.run(probe).num_blocks - 1  # vLLM keeps one for itself (the null block)
    batch = min(process.spec.max_num_seqs, blocks)
    if batch < 1:
        raise MeasurementError(f"{process.spec.label}: its plan leaves {blocks} blocks to requests")
    return batch


def fixed_placement(contender: Contender, shape: ModelShape) -> Placement:
    """Return the placement of a contender that has the same one on every link."""
    weights = contender.weights
    return place(weights["placement"], shape.sublayers, weights.get("percents"))
