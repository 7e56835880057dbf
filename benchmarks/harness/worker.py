# SPDX-License-Identifier: Apache-2.0
"""The engine process: `python -m benchmarks _measure READ_FD WRITE_FD`.

It reads JSON lines from one pipe and answers each with one JSON line on the other, so that vLLM's
own output does not interfere. The first line is an EngineSpec, answered when the engine is up. Each
further line is a list of requests to run as one round, {"link_bytes_per_s": number} to change the
speed of a throttled link, or {"score": texts} for how well their tokens are foreseen. The end of
the input ends the process.

An exception is answered as {"error": traceback} and ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from benchmarks.harness.jobs import RESET, EngineSpec, request_from_json

if TYPE_CHECKING:
    from benchmarks.harness.throttled_engine import ThrottledEngine


def main(read_fd: int, write_fd: int) -> int:
    """Serve rounds until the input ends; return the exit status."""
    with os.fdopen(read_fd, "r") as jobs, os.fdopen(write_fd, "w") as answers:
        try:
            _serve(jobs, answers)
        except Exception:
            _answer(answers, {"error": traceback.format_exc()})
            return 1
    return 0


def _serve(jobs: IO[str], answers: IO[str]) -> None:
    from benchmarks.harness import damage, integrity, pinned_level
    from benchmarks.harness.engine import reset_prefix_cache, run_round, score, start_engine
    from benchmarks.harness.throttled_engine import throttle_kv_link

    spec = EngineSpec(**json.loads(jobs.readline()))
    if spec.checks_integrity:
        integrity.install()
    if spec.damaged_reads:
        damage.install(spec.damaged_reads, seed=0)
    if spec.pinned_expansion:
        pinned_level.install(spec.pinned_expansion)
    if spec.kv_link_bytes_per_s and spec.tiered is not None:
        throttle_kv_link(spec.kv_link_bytes_per_s)
    throttled = _throttled_engine(spec)
    start = time.perf_counter()
    llm = start_engine(spec)
    if throttled:
        throttled.watch(llm)
    _answer(answers, {"start_seconds": time.perf_counter() - start})
    for line in jobs:
        job = json.loads(line)
        if job == RESET:
            reset_prefix_cache(llm)
            _answer(answers, {})
            continue
        if isinstance(job, dict) and "score" in job:
            _answer(answers, {"scores": [asdict(score(llm, text)) for text in job["score"]]})
            continue
        if throttled and isinstance(job, dict):
            throttled.set_link(job["link_bytes_per_s"])
            _answer(answers, job)
            continue
        if throttled:
            throttled.begin_round()
        result = run_round(llm, spec, [request_from_json(data) for data in job])
        _answer(answers, (throttled.end_round(result) if throttled else result).to_json())
        sys.stdout.flush()


def _throttled_engine(spec: EngineSpec) -> ThrottledEngine | None:
    if not spec.is_timed:
        return None
    from benchmarks.harness.throttled_engine import ThrottledEngine

    throttled = ThrottledEngine(spec)
    if spec.tiered is not None:
        throttled.prepare()
    return throttled


def _answer(answers: IO[str], data: dict[str, Any]) -> None:
    answers.write(json.dumps(data) + "\n")
    answers.flush()
