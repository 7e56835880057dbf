# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's own formats of a model: files in 4 to 8 bit, their quality and their speed.

The file of the model itself comes from `llama_cpp`, which needs the peers' environment; the
programs `llama_formats` and `llama_bench` lie next to its interpreter.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.cache import REPO_ROOT
from benchmarks.harness.runner import MeasurementError
from benchmarks.peers import LLAMA_BENCH, MODEL_FILE, PREFIX, available, command
from benchmarks.peers.contender import FIRST_ID, ID_STEP

PROGRAM = "llama_formats"
_ANSWER = "SCORES "
_NAME = "llama_cpp"
_TIMEOUT_S = 3600


def missing(python: str) -> str | None:
    """Return what the peers' environment lacks for this; None if nothing."""
    if lacking := available(python)[_NAME]:
        return lacking
    program = Path(python).parent / PROGRAM
    if program.is_file():
        return None
    return f"program {PROGRAM}: benchmarks/peers/build_llama_cpp.sh {program.parent.parent}"


def quantised(python: str, model: Path, work: Path, name: str, threads: int) -> Path:
    """Write the model in llama.cpp's format `name`, once, and return the file.

    Args:
        name: "" for the model's own 16 bit.

    Raises MeasurementError if llama.cpp cannot.
    """
    target = work / (f"{name}.gguf" if name else MODEL_FILE)
    if target.is_file():
        return target
    prepare = command(
        _NAME,
        python,
        model=model,
        work=work,
        threads=threads,
        prompt_tokens=1,
        new_tokens=2,
        resident_share=0.0,
        prepare=True,
    )
    _output(prepare)
    if not name:
        return target
    staging = target.with_suffix(".part")
    program = str(Path(python).parent / PROGRAM)
    _output([program, "quantise", str(work / MODEL_FILE), str(staging), name, str(threads)])
    return staging.rename(target)


def score(python: str, file: Path, texts: Sequence[Sequence[int]], threads: int) -> list[float]:
    """Return the natural log-probabilities of the texts' tokens but the first ones.

    Raises MeasurementError if llama.cpp cannot.
    """
    lines = "".join(" ".join(map(str, ids)) + "\n" for ids in texts)
    program = str(Path(python).parent / PROGRAM)
    answer = _answer([program, "score", str(file), str(threads)], _ANSWER, lines)
    logprobs: list[float] = answer["logprobs"]
    return logprobs


def layer_bytes(file: Path) -> int:
    """Return the bytes of the layers' tensors in a file: all but embedding, last norm and head."""
    from gguf import GGUFReader

    tensors = GGUFReader(file).tensors
    return sum(int(tensor.n_bytes) for tensor in tensors if tensor.name.startswith("blk."))


def decode_rate(
    python: str, file: Path, prompt_tokens: int, new_tokens: int, threads: int
) -> float:
    """Return one request's decode steps a second. Raises MeasurementError if llama.cpp fails."""
    program = str(Path(python).parent / LLAMA_BENCH)
    numbers = (prompt_tokens, new_tokens, threads, FIRST_ID, ID_STEP)
    seconds = _answer([program, str(file), *map(str, numbers), "-"], PREFIX)["seconds_per_token"]
    return len(seconds) / math.fsum(seconds)


def _answer(line: Sequence[str], prefix: str, given: str = "") -> dict[str, Any]:
    """Return the JSON of the one line of a program's output that begins with `prefix`."""
    answers = [text for text in _output(line, given).splitlines() if text.startswith(prefix)]
    if len(answers) != 1:
        raise MeasurementError(f"{' '.join(line[:3])}: {len(answers)} lines with {prefix!r}")
    answer: dict[str, Any] = json.loads(answers[0].removeprefix(prefix))
    return answer


def _output(line: Sequence[str], given: str = "") -> str:
    finished = subprocess.run(
        list(line),
        input=given,
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if finished.returncode:
        raise MeasurementError(f"{' '.join(line[:3])} failed:\n{finished.stderr[-4000:]}")
    return finished.stdout
