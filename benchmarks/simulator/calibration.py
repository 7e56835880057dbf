# SPDX-License-Identifier: Apache-2.0
"""Calibration: the simulated CPU machine against measurements of vLLM on it.

The measurements are the table of docs/notes/kv-swapping.md: 36 ShareGPT requests at once,
SmolLM2-135M, blocks of 32 tokens. The constants of the machine `cpu-2core` that are marked as
calibrated were fitted by hand to the first column (no expansion). The effects of swapping, partial
blocks and preemptions were not fitted; the simulation predicts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.workload import sharegpt_requests
from benchmarks.simulator.case import Case
from benchmarks.simulator.models import MODELS, page_bytes
from benchmarks.simulator.simulation import simulate
from benchmarks.simulator.trace import Arrival, Trace
from vllm_tiered.kv.layout import LayerStack
from vllm_tiered.planner.machine import load_profile

MEASURED_TOKENS_PER_S: Mapping[int, Mapping[float, float]] = {
    25: {1: 151, 1.25: 169, 1.5: 180, 2: 212, 2.5: 212, 3: 247},
    49: {1: 237, 1.25: 268, 1.5: 257, 2: 321, 2.5: 321, 3: 309},
    97: {1: 359, 1.25: 355, 1.5: 360, 2: 422, 2.5: 496, 3: 478},
    194: {1: 561, 1.25: 538, 1.5: 531, 2: 507, 2.5: 495, 3: 486},
}
"""Measured tokens/s by near KV blocks (1/8, 1/4, 1/2 and all of the demand) and expansion."""


def calibration_case(near_blocks: int) -> Case:
    """Return the measured load with ``near_blocks`` blocks of near KV."""
    model = MODELS["smollm2-135m"]
    requests = sharegpt_requests(36, 0, demo_model_dir(), 256, 128)
    arrivals = [
        Arrival(
            arrival_s=0.0,
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=request.num_output_tokens,
        )
        for request in requests
    ]
    return Case(
        machine=load_profile("cpu-2core"),
        model=model,
        trace=Trace(arrivals=arrivals, horizon_s=1e6),
        near_bytes=near_blocks * model.num_layers * page_bytes(model, 32),
        block_tokens=32,
        max_num_seqs=36,
        partial_blocks_resident=True,
        noise=0.0,
    )


def calibration() -> dict[str, Any]:
    """Return simulated and measured tokens/s, and the largest relative error."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    errors = []
    for near_blocks, row in MEASURED_TOKENS_PER_S.items():
        case = calibration_case(near_blocks)
        entries = table[str(near_blocks)] = {}
        for expansion, measured in row.items():
            level = LayerStack(case.model.num_layers).num_far_for(expansion)
            simulated = simulate(case, level).tokens_per_s
            entries[f"{expansion:g}"] = {"measured": measured, "simulated": simulated}
            errors.append(abs(simulated / measured - 1))
    return {"worst_error": max(errors), "tokens_per_s": table}
