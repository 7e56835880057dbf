# SPDX-License-Identifier: Apache-2.0
"""Starts, watches and ends scripts that have their own engine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.memory_limit import join_group
from tests.e2e.harness import model_path, random_prompts
from tests.e2e.script_start import FORK

ROOT = Path(__file__).parents[2]


OWN_PROCESSES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    **FORK,
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    processes: list[subprocess.Popen[str]] = []

    def start(
        expansion: str, arguments: str, group: Path | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.endless_script", model_path("deep"),
             str(tmp_path), expansion, arguments],
            cwd=ROOT, env={**os.environ, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=None if group is None else lambda: join_group(group),
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], *words: str) -> None:
    """Read lines until one contains all of ``words``."""
    assert process.stdout is not None
    for line in process.stdout:
        if all(word in line for word in words):
            return
    assert process.stderr is not None
    pytest.fail(process.stderr.read()[-3000:])


PROMPTS = random_prompts(8, seed=40)


SCRIPT = Path(__file__).with_name("unchanged_script.py")


NEAR = 48 << 20


OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def run_script(
    variables: dict[str, str], model: str = "deep", **llm_arguments: Any
) -> dict[str, Any]:
    environment = {**os.environ, **variables}
    arguments = {"kv_cache_memory_bytes": NEAR, **llm_arguments}
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), model_path(model), json.dumps(PROMPTS),
         json.dumps(arguments)],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-4000:]
    # vLLM also writes to stdout, before the outputs and, if a process ends late, after them.
    (outputs,) = [line for line in finished.stdout.splitlines() if line.startswith('{"tokens"')]
    return json.loads(outputs)  # type: ignore[no-any-return]
