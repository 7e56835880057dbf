# SPDX-License-Identifier: Apache-2.0
"""The engine process: `python -m benchmarks _measure READ_FD WRITE_FD`.

It reads JSON lines from one pipe and answers each with one JSON line on the other, so that what
vLLM prints cannot get between. The first line is an EngineSpec, answered when the engine is up;
each further line is a list of requests to run as one round. The end of the input ends the process.
An exception is answered as {"error": traceback} and ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import IO, Any

from benchmarks.jobs import EngineSpec, request_from_json


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
    from benchmarks import integrity
    from benchmarks.engine import run_round, start_engine

    spec = EngineSpec(**json.loads(jobs.readline()))
    if spec.checks_integrity:
        integrity.install()
    start = time.perf_counter()
    llm = start_engine(spec)
    _answer(answers, {"start_seconds": time.perf_counter() - start})
    for line in jobs:
        requests = [request_from_json(data) for data in json.loads(line)]
        _answer(answers, run_round(llm, spec, requests).to_json())
        sys.stdout.flush()


def _answer(answers: IO[str], data: dict[str, Any]) -> None:
    answers.write(json.dumps(data) + "\n")
    answers.flush()
