# SPDX-License-Identifier: Apache-2.0
"""Run one request on a model larger than memory, as our contender.

`python -m benchmarks.harness.out_of_core`

It prints one line, as the peers do, and runs under the same limit.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.peers import PREFIX
from benchmarks.peers.contender import prompt_ids

KV_BLOCK_TOKENS = 32


def main() -> None:
    """Start the engine, generate, and print the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.harness.out_of_core")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--placement", default="latency")
    parser.add_argument("--near-bytes", type=int, default=0)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=8)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    print(PREFIX + json.dumps(_run(args)), flush=True)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    import psutil
    from vllm import LLM, SamplingParams

    from vllm_tiered.adapter import worker_hooks
    from vllm_tiered.adapter.telemetry import manifest

    loading = _timed(worker_hooks, "_load_model")
    tiered: dict[str, Any] = {"kv": {"enabled": False}}
    if args.store is not None:
        tiered["weights"] = {
            "placement": args.placement,
            "near_gib": args.near_bytes / 2**30 if args.near_bytes else "auto",
            "far_gib": 0,
            "storage_path": str(args.store),
        }
    llm = LLM(
        model=str(args.model),
        dtype="bfloat16",
        load_format=args.load_format,
        enforce_eager=True,
        max_model_len=args.prompt_tokens + args.new_tokens,
        max_num_seqs=1,
        block_size=KV_BLOCK_TOKENS,
        kv_cache_memory_bytes=args.kv_bytes,
        skip_tokenizer_init=True,
        additional_config={"tiered": tiered},
    )
    started = time.perf_counter() - start
    stated = (manifest.current() or {}).get("weights")
    sampling = SamplingParams(
        temperature=0.0, max_tokens=args.new_tokens, ignore_eos=True, detokenize=False
    )
    engine = llm.llm_engine
    prompt = {"prompt_token_ids": prompt_ids(args.prompt_tokens)}
    engine.add_request("0", prompt, sampling)
    times = [time.perf_counter()]
    stalls = []
    worker_hooks.drain_metrics()
    while engine.has_unfinished_requests():
        engine.step()
        times.append(time.perf_counter())
        stalls.append(worker_hooks.drain_metrics().get("weights_stall_seconds", 0.0))
    steps = [after - before for before, after in itertools.pairwise(times)]
    return {
        "load_seconds": started,
        "weights_load_seconds": loading[0] if loading else None,
        "prefill_seconds": steps[0],
        "seconds_per_token": steps[1:],
        "stall_seconds_per_token": stalls[1:],
        "resident_bytes": psutil.Process().memory_info().rss,
        "manifest": stated,
    }


def _timed(module: Any, name: str) -> list[float]:
    """Time each call of a module's function; return the list that receives the seconds."""
    seconds: list[float] = []
    original = getattr(module, name)

    @functools.wraps(original)  # the plugin compares its wrappers' signatures with vLLM's calls
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begin)

    setattr(module, name, timed)
    return seconds


if __name__ == "__main__":
    main()
