# SPDX-License-Identifier: Apache-2.0
"""Input of engines on a GPU: models of real shapes with random weights, and ShareGPT's lengths.

Nothing is downloaded or tokenised: prompts are random tokens with the lengths of recorded
conversations (`sharegpt_lengths.json`). With `device="cpu"` the same benchmarks run on vLLM's CPU
backend, to show with a small shape that they work.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.jobs import EngineSpec, RoundResult
from benchmarks.harness.summary import time_per_output_token_s
from benchmarks.inputs.shapes import PLANNED_SHAPES
from benchmarks.inputs.workload import Request
from benchmarks.suites.gpu.device import gpu_stamp, require_gpu
from vllm_tiered.planner.model_shape import ModelShape, model_shape

_LENGTHS = Path(__file__).with_name("sharegpt_lengths.json")

_OVERHEAD_BYTES = 6 << 30
"""GPU memory of an engine besides weights and KV: CUDA's context, activations, staging."""

BLOCK_TOKENS = {"cuda": 16, "cpu": 32}
"""vLLM's default block size on a GPU, and the smallest that its CPU attention takes."""


def describe_device(name: str, device: str) -> dict[str, Any]:
    """Return a description of the device to measure on.

    Raises MeasurementError without a GPU, unless the CPU was asked for.
    """
    if device == "cpu":
        return {"name": "cpu"}
    return gpu_stamp(require_gpu(name))


def shape_of(name: str) -> ModelShape:
    """Return one of `PLANNED_SHAPES`. Raises ValueError, naming those, if it is unknown."""
    if name not in PLANNED_SHAPES:
        raise ValueError(f"no shape {name!r}; there are: {', '.join(PLANNED_SHAPES)}")
    return model_shape(PLANNED_SHAPES[name])


def sharegpt_lengths(n: int) -> list[tuple[int, int]]:
    """Return the token counts of n prompts and answers. Raises ValueError if there are fewer."""
    recorded = json.loads(_LENGTHS.read_text(encoding="utf-8"))["prompt_and_output_tokens"]
    if n > len(recorded):
        raise ValueError(f"{n} requests, but there are {len(recorded)} lengths: lower num_requests")
    return [(prompt, output) for prompt, output in recorded[:n]]


def requests(
    n: int, max_prompt_tokens: int, max_output_tokens: int, vocab_size: int, seed: int
) -> list[Request]:
    """Return requests with ShareGPT's lengths, cut to the maxima, all present at once."""
    rng = random.Random(seed)
    return [
        Request(
            request_id=f"r{index:04d}",
            prompt_token_ids=tuple(
                rng.randrange(100, vocab_size) for _ in range(min(prompt, max_prompt_tokens))
            ),
            num_output_tokens=min(output, max_output_tokens),
        )
        for index, (prompt, output) in enumerate(sharegpt_lengths(n))
    ]


def engine_args(device: str, near_bytes: int, device_bytes: int, *, eager: bool) -> dict[str, Any]:
    """Return arguments that limit an engine to its share of the GPU: several run side by side.

    Args:
        near_bytes: bytes of weights and KV cache.
        device_bytes: the GPU's memory.
    """
    if device == "cpu":
        return {}
    return {
        "enforce_eager": eager,
        "attention_backend": "TRITON_ATTN",
        "gpu_memory_utilization": min(0.95, (near_bytes + _OVERHEAD_BYTES) / device_bytes),
    }


def workload_stamp(shape: str, given: Sequence[Request]) -> dict[str, Any]:
    """Return a result's description of its load."""
    return {
        "model": f"{shape}, made up weights",
        "lengths": "ShareGPT_V3's, random tokens",
        "requests": len(given),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in given),
        "output_tokens": sum(request.num_output_tokens for request in given),
        "dtype": "bfloat16",
        "arrivals": "all at once",
    }


def speed(rounds: Sequence[RoundResult]) -> dict[str, Any]:
    """Return medians over rounds, for engines that leave the KV cache to vLLM (no swap counts)."""
    rates = [result.num_output_tokens / result.seconds for result in rounds]
    tpots_s = [statistics.fmean(time_per_output_token_s(result)) for result in rounds]
    return {
        "tokens_per_s": statistics.median(rates),
        "rounds_tokens_per_s": rates,
        "mean_tpot_ms": 1e3 * statistics.median(tpots_s),
    }


def differ_in(specs: Sequence[EngineSpec]) -> Mapping[str, Any]:
    """Return each engine's own arguments by label."""
    return {
        spec.label: {"tiered": spec.tiered, "engine_args": dict(spec.engine_args)} for spec in specs
    }
