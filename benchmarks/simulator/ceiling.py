# SPDX-License-Identifier: Apache-2.0
"""Throughput with near memory for half and an eighth of the KV demand, by machine.

In Pie's figure 7, Pie is on par with unlimited memory from 12 GB on. With the least memory it has
1.9 times the throughput and half the time per token. On the CPU machine the near and the far tier
share one memory bus, so every copied byte takes bandwidth from the model. That machine is simulated
twice: as it is, and with copies that take no bandwidth, as over a separate link.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from benchmarks.simulator.calibration import calibration_case
from benchmarks.simulator.case import Case
from benchmarks.simulator.models import MODELS, page_bytes
from benchmarks.simulator.simulation import Run, simulate
from benchmarks.simulator.trace import LENGTHS, Trace
from vllm_tiered.kv.layout import expansion_of
from vllm_tiered.planner.machine import load_profile

NUM_REQUESTS = 64  # on the GPUs: 12.9 GB of KV for OPT-13B, as at the end of Pie's figure 7

DEFINITIONS = {
    "half_demand": "by machine: all requests at once with near-tier KV for half of the most blocks"
    " that they use with unlimited memory; fraction_of_ceiling is tokens/s at the best fixed level"
    " over those with unlimited memory, gain_over_no_far_layer over those without a far layer,"
    " gain_over_on_demand over the same level if each far layer is read when it is due",
    "eighth_demand": "the same loads with near-tier KV for an eighth of those blocks, served with"
    " the controller: tokens/s over those without a far layer (throughput_gain), and mean time per"
    " output token without a far layer over that with it, queueing included (token_latency_gain)",
}


def half_demand() -> dict[str, dict[str, float]]:
    """Return the figures of half the demand by machine, JSON-safe."""
    return {name: _half_of(case) for name, case in demand_cases().items()}


def eighth_demand() -> dict[str, dict[str, float]]:
    """Return the figures of an eighth of the demand by machine, JSON-safe."""
    return {name: _eighth_of(case) for name, case in demand_cases().items()}


def demand_cases() -> Mapping[str, Case]:
    """Return the cases by name, with all requests at once; the near memory is set later."""
    cpu = calibration_case(near_blocks=1)
    free_copies = dataclasses.replace(
        cpu.machine, near_bytes_per_copied_byte=0.0, far_layer_overhead_us=0.0
    )
    return {
        "cpu-2core": cpu,
        "cpu-2core, a link of its own": dataclasses.replace(cpu, machine=free_copies),
        "gh200, opt-13b": _saturated("gh200", "opt-13b"),
        "h200-pcie5, opt-13b": _saturated("h200-pcie5", "opt-13b"),
        "rtx4090-pcie4, llama-3-8b": _saturated("rtx4090-pcie4", "llama-3-8b"),
    }


def _saturated(machine_name: str, model: str) -> Case:
    rng = random.Random("half demand")
    arrivals = [LENGTHS["sharegpt"].draw(rng, 0.0) for _ in range(NUM_REQUESTS)]
    return Case(
        machine=load_profile(machine_name),
        model=MODELS[model],
        trace=Trace(arrivals=arrivals, horizon_s=1e6),
        near_bytes=0.0,
        max_num_seqs=NUM_REQUESTS,
        noise=0.0,
    )


def _half_of(case: Case) -> dict[str, float]:
    ceiling = with_all_near(case)
    half = with_share(case, ceiling, 2)
    fixed = {level: simulate(half, level) for level in range(len(half.levels.ladder))}
    best = max(fixed, key=lambda level: fixed[level].tokens_per_s)
    on_demand = simulate(dataclasses.replace(half, policy="on_demand"), best)
    return {
        "fraction_of_ceiling": fixed[best].tokens_per_s / ceiling.tokens_per_s,
        "gain_over_no_far_layer": fixed[best].tokens_per_s / fixed[0].tokens_per_s,
        "gain_over_on_demand": fixed[best].tokens_per_s / on_demand.tokens_per_s,
        "best_expansion": expansion_of(case.model.num_layers, half.levels.ladder[best].num_far),
        "stall_fraction": fixed[best].stall_seconds / fixed[best].busy_seconds,
        "ceiling_tokens_per_s": ceiling.tokens_per_s,
        "peak_blocks": ceiling.peak_blocks,
    }


def _eighth_of(case: Case) -> dict[str, float]:
    eighth = dataclasses.replace(
        with_share(case, with_all_near(case), 8), partial_blocks_resident=False
    )
    alone, auto = simulate(eighth, 0), simulate(eighth)
    return {
        "throughput_gain": auto.tokens_per_s / alone.tokens_per_s,
        "token_latency_gain": alone.seconds_per_token / auto.seconds_per_token,
        "stall_fraction": auto.stall_seconds / auto.busy_seconds,
    }


def with_all_near(case: Case) -> Run:
    """Run the load with enough near memory for all of it."""
    most_blocks = sum(
        1 + -(-(arrival.prompt_tokens + arrival.output_tokens) // case.block_tokens)
        for arrival in case.trace.arrivals
    )
    return simulate(dataclasses.replace(case, near_bytes=most_blocks * _block_bytes(case)), 0)


def with_share(case: Case, ceiling: Run, divisor: int) -> Case:
    """Return the case with near memory for a share of the blocks that the ceiling used."""
    num_blocks = -(-ceiling.peak_blocks // divisor)
    return dataclasses.replace(case, near_bytes=num_blocks * _block_bytes(case))


def _block_bytes(case: Case) -> int:
    return case.model.num_layers * page_bytes(case.model, case.block_tokens)
