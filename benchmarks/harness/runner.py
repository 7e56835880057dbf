# SPDX-License-Identifier: Apache-2.0
"""Engine processes, kept alive side by side so that their rounds can be interleaved.

Each engine has its own process: clean memory, its own Prometheus registry, and no state from the
system measured before. While one measures, the others are blocked on a pipe.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

from benchmarks.harness.cache import REPO_ROOT
from benchmarks.harness.jobs import RESET, EngineSpec, RoundResult, Score, request_to_json
from benchmarks.harness.progress import Step
from benchmarks.harness.summary import count_equal
from benchmarks.inputs.workload import Request

_START_TIMEOUT_S = 300
_ROUND_TIMEOUT_S = 900
_LOG_TAIL_LINES = 40

DISTURBED_SHARE = 0.05
"""Share of the CPU taken by other processes above which a round counts as disturbed.

One busy process along with the two OpenMP threads of a 2-core machine makes a round 2 to 10 times
slower, as each parallel region waits for the thread that lost its core. A quiet machine shows 0.02.
"""


class MeasurementError(RuntimeError):
    """Error: an engine process failed, or its measurements may not be reported."""


class Engine(Protocol):
    """Anything that runs rounds of requests."""

    spec: EngineSpec

    def run(self, requests: Sequence[Request]) -> RoundResult:
        """Run one round."""


class EngineProcess:
    """One engine in its own process. Call `wait_ready()` once, then `run()` any number of times."""

    def __init__(self, spec: EngineSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        child_reads, we_write = os.pipe()
        we_read, child_writes = os.pipe()
        environment = engine_environment(
            os.environ, tiered=spec.tiered is not None, threads=spec.threads
        )
        if spec.cpus:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = spec.cpus
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks",
                    "_measure",
                    str(child_reads),
                    str(child_writes),
                ],
                pass_fds=(child_reads, child_writes),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPO_ROOT,
                env=environment,
            )
        os.close(child_reads)
        os.close(child_writes)
        self._jobs: IO[str] = os.fdopen(we_write, "w")
        self._answers: IO[str] = os.fdopen(we_read, "r")
        self._send(spec.to_json())

    def wait_ready(self) -> float:
        """Return the seconds the engine took to start. Raises MeasurementError if it did not."""
        return float(self._receive(_START_TIMEOUT_S)["start_seconds"])

    def run(self, requests: Sequence[Request]) -> RoundResult:
        """Run one round. Raises MeasurementError, with the end of the log, if it fails."""
        self._send([request_to_json(request) for request in requests])
        return RoundResult.from_json(self._receive(_ROUND_TIMEOUT_S))

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. Raises as `run` does."""
        self._send(RESET)
        self._receive(_START_TIMEOUT_S)

    def score(self, texts: Sequence[Sequence[int]]) -> list[Score]:
        """Return the probabilities of each text's tokens. Raises as `run` does."""
        self._send({"score": [list(text) for text in texts]})
        return [Score(**entry) for entry in self._receive(_ROUND_TIMEOUT_S)["scores"]]

    def set_link(self, bytes_per_s: float) -> None:
        """Change the speed of a throttled engine's link. Raises as `run` does."""
        self._send({"link_bytes_per_s": bytes_per_s})
        self._receive(_START_TIMEOUT_S)

    def close(self) -> None:
        """Close the process's input to end it; kill it if that takes over 20 s."""
        for pipe in (self._jobs, self._answers):
            # If the process is gone already, buffered data cannot be sent.
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, data: Any) -> None:
        try:
            self._jobs.write(json.dumps(data) + "\n")
            self._jobs.flush()
        except BrokenPipeError:
            raise self._failure("ended before it was given work") from None

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._answers], [], [], timeout_s)
        if not ready:
            raise self._failure(f"gave no answer within {timeout_s:.0f} s")
        line = self._answers.readline()
        if not line:
            raise self._failure("ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failure(f"failed:\n{answer['error']}")
        return answer

    def _failure(self, what: str) -> MeasurementError:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-_LOG_TAIL_LINES:])
        return MeasurementError(f"engine process {self.spec.label!r} {what}\nits log ends:\n{tail}")


def engine_environment(
    environ: Mapping[str, str], *, tiered: bool, threads: int = 0
) -> dict[str, str]:
    """Return the environment of an engine process.

    vLLM alone starts without any plugins (`VLLM_PLUGINS=""`). With the plugin, only the
    specification configures it: no file or variable does. `threads` sets the number of compute
    threads; in-process engines read no other variable for it.
    """
    env = {k: v for k, v in environ.items() if k not in ("VLLM_PLUGINS", "VLLM_TIERED_CONFIG")}
    env.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
    )
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    if not tiered:
        env["VLLM_PLUGINS"] = ""
    return env


@contextmanager
def engines(
    specs: Sequence[EngineSpec], warmup: Sequence[Request], step: Step
) -> Iterator[list[EngineProcess]]:
    """Start one process per specification, warm each up, yield them in order, end them all.

    As many start at once as there are cores (a start is one busy thread); none measures meanwhile.
    """
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-tiered-bench-")))
        started: list[EngineProcess] = []
        batch = os.cpu_count() or 1
        for first in range(0, len(specs), batch):
            group = specs[first : first + batch]
            for index, spec in enumerate(group, start=first):
                process = EngineProcess(spec, logs / f"{index}.log")
                stack.callback(process.close)
                started.append(process)
            for process in started[first:]:
                seconds = process.wait_ready()
                step(f"engine up in {seconds:.1f} s: {process.spec.label}")
        for process in started:
            process.run(warmup)
        yield started


def interleave(
    processes: Sequence[Engine],
    requests: Sequence[Request],
    num_rounds: int,
    step: Step,
    max_repeats: int = 0,
) -> dict[str, list[RoundResult]]:
    """Run rounds A B C, C B A, A B C, ... and return each label's results, in round order.

    Every second round goes backwards, so that a machine that slowly heats up or gets busier does
    not favour the first systems. A round in which other processes took more than `DISTURBED_SHARE`
    of the CPU is run again, up to `max_repeats` times in all. The least disturbed attempt counts,
    whatever its speed.
    """
    results: dict[str, list[RoundResult]] = {process.spec.label: [] for process in processes}
    repeats_left = max_repeats
    for round_index in range(num_rounds):
        for process in processes if round_index % 2 == 0 else reversed(processes):
            attempts = [process.run(requests)]
            while attempts[-1].foreign_cpu_share > DISTURBED_SHARE and repeats_left > 0:
                repeats_left -= 1
                attempts.append(process.run(requests))
            result = min(attempts, key=lambda attempt: attempt.foreign_cpu_share)
            results[process.spec.label].append(result)
            step(f"round {round_index + 1}/{num_rounds} {_describe(result, len(attempts))}")
    return results


def _describe(result: RoundResult, num_attempts: int) -> str:
    text = f"{result.label}: {result.num_output_tokens / result.seconds:.0f} tokens/s"
    if num_attempts > 1:
        text += f", attempts {num_attempts}"
    if result.foreign_cpu_share > DISTURBED_SHARE:
        text += f", disturbed: others took {result.foreign_cpu_share:.0%} of the CPU"
    return text


def require_equal(ours: RoundResult, theirs: RoundResult) -> dict[str, int]:
    """Return {"equal", "total"}. Raises MeasurementError unless all outputs are equal."""
    counted = count_equal(ours, theirs)
    if counted["equal"] != counted["total"]:
        raise MeasurementError(
            f"float32 control: only {counted['equal']} of {counted['total']} outputs of"
            f" {ours.label!r} equal those of {theirs.label!r}; nothing is reported"
        )
    return counted
