# SPDX-License-Identifier: Apache-2.0
"""Decodes a batch of requests with vLLM and any settings of ours: one contender, one process.

It prints one line, as the peers do. Only steps in which every request decodes are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness.out_of_core import KV_BLOCK_TOKENS
from benchmarks.peers import PREFIX
from benchmarks.peers.contender import prompt_ids
from benchmarks.suites.experts.replay import Recorder


def main() -> None:
    """Start the engine, generate, and print the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.harness.sparse_decode")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tiered", type=json.loads, default={})
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=12)
    parser.add_argument("--prompt-step", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="file for the experts of each step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompt-file", type=Path, help="JSON list of one request's token ids")
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

    recorder = Recorder() if args.trace else None
    given: list[int] = json.loads(args.prompt_file.read_text("utf-8")) if args.prompt_file else []
    lengths = [args.prompt_tokens + index * args.prompt_step for index in range(args.batch)]
    longest = len(given) or max(lengths)
    llm = LLM(
        model=str(args.model),
        dtype=args.dtype,
        load_format=args.load_format,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=longest + args.new_tokens,
        max_num_seqs=args.batch,
        block_size=KV_BLOCK_TOKENS,
        kv_cache_memory_bytes=args.kv_bytes,
        skip_tokenizer_init=True,
        additional_config={"tiered": {"kv": {"enabled": False}, **args.tiered}},
    )
    started = time.perf_counter() - start
    sampling = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.new_tokens,
        ignore_eos=True,
        detokenize=False,
    )
    engine = llm.llm_engine
    for index, length in enumerate(lengths):
        ids = given or _prompt(length, llm)
        engine.add_request(str(index), {"prompt_token_ids": ids}, sampling)
    worker_hooks.drain_metrics()
    begin = time.perf_counter()
    prefill_seconds = 0.0
    seconds: list[float] = []
    use: Counter[str] = Counter()
    prefill_use: Counter[str] = Counter()
    tokens: dict[str, list[int]] = {}
    read_before = 0
    while engine.has_unfinished_requests():
        before = {name: len(ids) for name, ids in tokens.items()}
        if recorder and len(before) == args.batch and not seconds:
            recorder.begin()
        before_step = _read_bytes()
        step_begin = time.perf_counter()
        outputs = engine.step()
        step_end = time.perf_counter()
        used = worker_hooks.drain_metrics()
        tokens |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
        # All had their first token before, so this step only decodes.
        if len(before) == args.batch:
            if not seconds:
                prefill_seconds = step_begin - begin
                read_before = before_step
            if len(outputs) == args.batch:
                seconds.append(step_end - step_begin)
                use.update(used)
        else:
            prefill_use.update(used)
    if recorder:
        recorder.write(args.trace)
    return {
        "load_seconds": started,
        "prefill_seconds": prefill_seconds,
        "seconds_per_token": seconds,
        "batch": args.batch,
        "read_bytes": _read_bytes() - read_before,
        "use": dict(use),
        "prefill_use": dict(prefill_use),
        "resident_bytes": psutil.Process().memory_info().rss,
        "tokens": [tokens[str(index)] for index in range(args.batch)],
        "manifest": manifest.current(),
    }


def _read_bytes() -> int:
    """Return what this process has read from disks, by the kernel's count."""
    return 512 * resource.getrusage(resource.RUSAGE_SELF).ru_inblock


def _prompt(num_tokens: int, llm: Any) -> list[int]:
    """Return the contenders' prompt, within the vocabulary."""
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    return [3 + token % (vocab_size - 3) for token in prompt_ids(num_tokens)]


if __name__ == "__main__":
    main()
