# SPDX-License-Identifier: Apache-2.0
"""A measurement in an engine of its own process: a job goes in as JSON, an answer comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.cache import REPO_ROOT
from benchmarks.harness.runner import MeasurementError, engine_environment

_ANSWER = "ANSWER "


def ask(
    module: str, job: Mapping[str, Any], *, threads: int, timeout_s: int, tiered: bool = True
) -> dict[str, Any]:
    """Return the answer of a module that is run as a program for a job.

    Args:
        module: reads the job with :func:`given`, and calls :func:`answer` once.
        job: JSON-safe.
        threads: of the engine.
        timeout_s: longest time in seconds.
        tiered: with the plugin.

    Raises:
        MeasurementError: the program failed, or gave no answer.
    """
    finished = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(job),
        env=engine_environment(os.environ, tiered=tiered, threads=threads),
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith(_ANSWER)]
    if finished.returncode or len(lines) != 1:
        told = {key: value for key, value in job.items() if isinstance(value, str | dict)}
        raise MeasurementError(f"the engine of {told} failed:\n{finished.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(lines[0].removeprefix(_ANSWER))
    return found


def given() -> dict[str, Any]:
    """Return the job of this process."""
    job: dict[str, Any] = json.load(sys.stdin)
    return job


def answer(found: Mapping[str, Any]) -> None:
    """Give the answer of this process."""
    print(f"\n{_ANSWER}{json.dumps(found)}", flush=True)
