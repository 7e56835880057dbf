# SPDX-License-Identifier: Apache-2.0
"""Engines of two pipeline stages, one after the other, in processes with a core each.

Usage: pipeline_script.py MODEL PROMPTS_JSON NUM_TOKENS RUNS_JSON

A run has the plugin's sections `kv` and `weights`, the engine's `arguments`, and faults: `walk`,
the seed of a random walk over the levels, and `flips`, the reads before which the first stage is
damaged.
Prints for each run as a line of JSON: the tokens of two passes, each rank's state, and metrics.
"""

import json
import sys
from typing import Any

import pytest

from tests.e2e.faults import flipping_device, walk
from tests.e2e.harness import engine, generate, metric
from tests.e2e.script_start import quicken

METRICS = (
    "tiered_kv_recomputed_requests",
    "tiered_kv_level_changes",
    "tiered_kv_far_bytes",
    "tiered_kv_near_bytes",
    "external_prefix_cache_hits",
)


def damage_first_stage(monkeypatch: pytest.MonkeyPatch, flips: list[int]) -> None:
    from vllm.distributed.parallel_state import get_pp_group

    from vllm_tiered.adapter.kv import worker

    make_device = worker.make_device

    def make() -> Any:
        return flipping_device(set(flips)) if get_pp_group().is_first_rank else make_device()

    monkeypatch.setattr(worker, "make_device", make)


def run(
    model: str, prompts: list[list[int]], num_tokens: int, kv: dict[str, Any], **options: Any
) -> dict[str, Any]:
    arguments = {
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        # Few tokens a step, so that prompts are computed in chunks and two batches are in flight.
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "kv_cache_memory_bytes": 24 << 20,
        **options.get("arguments", {}),
    }
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "walk" in options:
            walk(monkeypatch, options["walk"])
        if "flips" in options:
            damage_first_stage(monkeypatch, options["flips"])
        with engine(model, kv, weights=options.get("weights"), **arguments) as llm:
            # vLLM's CPU backend makes the later stages' input buffers in a dummy step, and has none
            # before it serves if nothing is compiled.
            llm.collective_rpc("execute_dummy_batch")
            tokens = [generate(llm, prompts, num_tokens) for _ in range(2)]
            states = llm.collective_rpc("tiered_state")
            is_active = states[0]["kv"]["state"] == "on"
            metrics = {name: metric(name) for name in METRICS if is_active}
    return {
        "tokens": tokens,
        "kv": [state["kv"] for state in states],
        "weights": [state.get("weights") for state in states],
        "metrics": metrics,
    }


def main() -> None:
    quicken()
    model, prompts = sys.argv[1], json.loads(sys.argv[2])
    for options in json.loads(sys.argv[4]):
        print(json.dumps(run(model, prompts, int(sys.argv[3]), **options)), flush=True)


if __name__ == "__main__":
    main()
