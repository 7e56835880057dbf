# SPDX-License-Identifier: Apache-2.0
"""Runs one job in an engine whose ranks have their own processes, and returns its answer."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from benchmarks.harness.cache import REPO_ROOT
from benchmarks.harness.runner import MeasurementError, engine_environment

_MARK = "ANSWER "  # vLLM writes to stdout too


def ask(
    module: str, job: Mapping[str, Any], variables: Mapping[str, str], *, timeout_s: float
) -> dict[str, Any]:
    """Run a module with a job on its stdin; return what it passed to `answer`.

    Raises MeasurementError if it fails or takes too long; its ranks are ended in any case.
    """
    environment = engine_environment(os.environ, tiered=True) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_PLUGINS": "tiered",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # ranks are called with pickled functions
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        env=environment,
        cwd=REPO_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # else ranks would outlive a killed driver
    )
    try:
        output, errors = process.communicate(json.dumps(job), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise MeasurementError(
            f"the engine of {dict(job)} took more than {timeout_s:.0f} s: set fewer rounds"
        ) from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    answers = [line for line in output.splitlines() if line.startswith(_MARK)]
    if process.returncode or len(answers) != 1:
        raise MeasurementError(f"the engine of {dict(job)} failed:\n{errors[-4000:]}")
    found: dict[str, Any] = json.loads(answers[0].removeprefix(_MARK))
    return found


def job() -> dict[str, Any]:
    """Return the job of this process (in the engine's own process)."""
    asked: dict[str, Any] = json.load(sys.stdin)
    return asked


def answer(found: Mapping[str, Any]) -> None:
    """Print the answer of this process (in the engine's own process)."""
    print(_MARK + json.dumps(found), flush=True)


def generate(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """Return the tokens, and the median seconds of the steps in which all requests decode."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    names = [f"{time.monotonic_ns()}-{index}" for index in range(len(prompts))]
    for name, ids in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    found: dict[str, list[int]] = {}
    ends: list[float] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if len(outputs) == len(prompts):
            ends.append(time.perf_counter())
        for output in outputs:
            found[output.request_id] = list(output.outputs[0].token_ids)
    gaps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return [found[name] for name in names], statistics.median(gaps)
