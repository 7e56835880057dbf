# SPDX-License-Identifier: Apache-2.0
"""Generates for given prompts with experts in slots: one engine, one process, one printed line.

Which experts each step wants is recorded, or given: then the router's choice is replaced, to see
what another locality does to the speed. The text is then without meaning.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.out_of_core import KV_BLOCK_TOKENS
from benchmarks.peers import PREFIX
from benchmarks.suites.experts.replay import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What is generated.

    Attributes:
        prompts: token ids of each request.
        at_once: requests that run together.
        experts: the section `experts`; empty for vLLM alone.
        trace: file for the experts of each step ("": not recorded).
        routing: file with the experts of each layer and step, [layers, steps, top_k] ("": none).
        step_tokens: most tokens of a step (0: vLLM's own).
        scores: the prompts are scored (`nll`, nats a token, of all after the first).
        temperature: 0 takes the likeliest token; otherwise each request has its own seed.
    """

    model: str
    prompts: list[list[int]]
    new_tokens: int
    at_once: int = 1
    kv_bytes: int = 512 << 20
    experts: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    step_tokens: int = 0
    scores: bool = False
    temperature: float = 1.0
    trace: str = ""
    routing: str = ""

    def command(self) -> list[str]:
        """Return the command line of this module that makes this run."""
        module = "benchmarks.suites.experts.routed_run"
        return [sys.executable, "-m", module, json.dumps(asdict(self))]


def main() -> None:
    """Start the engine, generate, and print the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.suites.experts.routed_run")
    parser.add_argument("run", type=json.loads)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    print(PREFIX + json.dumps(_run(Run(**parser.parse_args().run))), flush=True)


def _run(run: Run) -> dict[str, Any]:
    import psutil
    from vllm import LLM, SamplingParams

    from vllm_tiered.adapter import worker_hooks
    from vllm_tiered.adapter.telemetry import manifest

    recorder = Recorder() if run.trace else None
    if run.routing:
        chosen = json.loads(Path(run.routing).read_text(encoding="utf-8"))
        _replace_routing(chosen, run.at_once)
    longest = max(map(len, run.prompts)) + run.new_tokens
    tiered: dict[str, Any] = {"kv": {"enabled": False}}
    if run.experts:
        tiered["experts"] = run.experts
    limits = {"max_num_batched_tokens": run.step_tokens} if run.step_tokens else {}
    start = time.perf_counter()
    llm = LLM(
        model=run.model,
        dtype=run.dtype,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_seqs=run.at_once,
        block_size=KV_BLOCK_TOKENS,
        kv_cache_memory_bytes=run.kv_bytes,
        skip_tokenizer_init=True,
        additional_config={"tiered": tiered},
        **limits,
    )
    load_seconds = time.perf_counter() - start
    for index, prompt in enumerate(run.prompts):
        sampling = SamplingParams(
            temperature=run.temperature,
            seed=index if run.temperature else None,
            max_tokens=run.new_tokens,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=0 if run.scores else None,
        )
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)
    if recorder:
        recorder.begin()  # vLLM's own warm-up is not counted
    worker_hooks.drain_metrics()
    seconds: list[float] = []
    tokens: dict[str, list[int]] = {}
    nll: list[float] = []
    begin = time.perf_counter()
    while llm.llm_engine.has_unfinished_requests():
        before = sum(len(ids) for ids in tokens.values())
        step_begin = time.perf_counter()
        outputs = llm.llm_engine.step()
        step_seconds = time.perf_counter() - step_begin
        known = set(tokens)
        tokens |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
        made = sum(len(ids) for ids in tokens.values()) - before
        for output in outputs:
            if output.finished and run.scores:
                nll += _nll(output)
        # In these steps every running request decodes.
        if made == run.at_once and known >= {output.request_id for output in outputs}:
            seconds.append(step_seconds)
    total = time.perf_counter() - begin
    if recorder:
        recorder.write(Path(run.trace))
    return {
        "load_seconds": load_seconds,
        "seconds": total,
        "seconds_per_token": seconds,
        "batch": run.at_once,
        "nll": sum(nll) / len(nll) if nll else None,
        "use": worker_hooks.drain_metrics(),
        "tokens": [tokens[str(index)] for index in range(len(run.prompts))],
        "resident_bytes": psutil.Process().memory_info().rss,
        "manifest": manifest.current(),
    }


def _nll(output: Any) -> list[float]:
    """Return the negative log-likelihood of each of a request's prompt tokens but the first."""
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [-found[token].logprob for token, found in list(pairs)[1:]]


def _replace_routing(chosen: list[list[list[int]]], at_once: int) -> None:
    """Let each layer's decode steps want the experts that are given, in turn, a row a request."""
    import torch

    from vllm_tiered.experts.layer import ExpertLayer

    compute = ExpertLayer.compute
    layers: dict[str, int] = {}
    steps: dict[str, int] = {}

    def routed(layer: Any, x: Any, weights: Any, ids: Any, run: Any) -> Any:
        number = layers.setdefault(layer.name, len(layers))
        if len(ids) == at_once:
            of_layer = chosen[number % len(chosen)]
            first = steps.get(layer.name, 0)
            steps[layer.name] = first + at_once
            rows = [of_layer[(first + row) % len(of_layer)] for row in range(at_once)]
            ids = torch.tensor(rows, dtype=ids.dtype)
        return compute(layer, x, weights, ids, run)

    setattr(ExpertLayer, "compute", routed)  # noqa: B010


if __name__ == "__main__":
    main()
