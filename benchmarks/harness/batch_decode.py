# SPDX-License-Identifier: Apache-2.0
"""Batches of requests in one engine with a neuron store, each decoded by every path.

    sparse    selected neurons, as far as their cache buffers hold them
    dense     all neurons, streamed
    chosen    the path that the plugin chooses

`python -m benchmarks.harness.batch_decode`, in its own process, prints one line. All prompts are
beginnings of one text and vLLM's prefix cache is on, so they are computed once. Their lengths
differ widely, since the neurons of models with synthetic sparsity depend on the position.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.out_of_core import KV_BLOCK_TOKENS
from benchmarks.peers import PREFIX
from benchmarks.peers.contender import prompt_ids

PATHS = ("sparse", "dense", "chosen")


def main() -> None:
    """Start the engine, decode, and print the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.harness.batch_decode")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tiered", type=json.loads, required=True)
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=12)
    parser.add_argument("--prompt-step", type=int, default=11)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--batches", type=json.loads, default=[1])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    print(PREFIX + json.dumps(_run(args)), flush=True)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM

    from vllm_tiered.adapter.telemetry import manifest

    force = forced_path()
    longest = args.prompt_tokens + (max(args.batches) - 1) * args.prompt_step
    llm = LLM(
        model=str(args.model),
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=longest + args.new_tokens,
        max_num_seqs=max(args.batches),
        block_size=KV_BLOCK_TOKENS,
        kv_cache_memory_bytes=args.kv_bytes,
        skip_tokenizer_init=True,
        additional_config={"tiered": {"kv": {"enabled": False}, **args.tiered}},
    )
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    text = [3 + token % (vocab_size - 3) for token in prompt_ids(longest)]
    runs = []
    for batch in args.batches:
        prompts = [text[: args.prompt_tokens + i * args.prompt_step] for i in range(batch)]
        # The longest prompt comes first, as its blocks are the others' beginnings.
        _decode(llm, prompts[::-1], 2)
        for number in range(args.rounds):
            for path in PATHS[:: 1 if number % 2 == 0 else -1]:
                force(path)
                measured = _decode(llm, prompts[::-1], args.new_tokens)
                runs.append({"batch": batch, "path": path, "round": number, **measured})
        force("chosen")
    return {"runs": runs, "manifest": manifest.current()}


def forced_path() -> Callable[[str], None]:
    """Return a function that makes all layers of this process take one of `PATHS`."""
    from vllm_tiered.ffn.cost_model import DenseSparseCostModel
    from vllm_tiered.ffn.layer import FfnLayer

    original = FfnLayer.compute
    path = "chosen"

    def compute(layer: FfnLayer, x_BH: Any, only_decodes: bool) -> Any:
        return original(layer, x_BH, only_decodes and path != "dense")

    def only_as_chosen(judge: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *args: path == "chosen" and judge(*args)

    def force(wanted: str) -> None:
        nonlocal path
        assert wanted in PATHS
        path = wanted

    setattr(FfnLayer, "compute", compute)  # noqa: B010
    for judge in (DenseSparseCostModel.prefers_dense, DenseSparseCostModel.is_surely_dense):
        setattr(DenseSparseCostModel, judge.__name__, only_as_chosen(judge))
    return force


def _decode(llm: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Return the seconds of the steps in which all requests decode, and the paths they used."""
    from vllm import SamplingParams

    from vllm_tiered.adapter import worker_hooks

    engine = llm.llm_engine
    sampling = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    for index, ids in enumerate(prompts):
        engine.add_request(f"{time.monotonic_ns()}-{index}", {"prompt_token_ids": ids}, sampling)
    started: set[str] = set()
    seconds: list[float] = []
    use: Counter[str] = Counter()
    worker_hooks.drain_metrics()
    while engine.has_unfinished_requests():
        all_decode = len(started) == len(prompts)
        begin = time.perf_counter()
        outputs = engine.step()
        end = time.perf_counter()
        used = worker_hooks.drain_metrics()
        started |= {output.request_id for output in outputs}
        if all_decode and len(outputs) == len(prompts):
            seconds.append(end - begin)
            use.update(used)
    return {"seconds_per_step": seconds, "use": dict(use)}


if __name__ == "__main__":
    main()
