# SPDX-License-Identifier: Apache-2.0
"""What prefetching behind all-reduces gives (PRESERVE): two ranks on two cores of one machine.

One engine of two ranks, compiled, with `l2.prefetch="auto"`: what it measures at start and decides,
then the same steps with prefetches and without in turns, off, on, off. Before that float32 tokens
with `"on"` against `"off"`. Ranks share the memory bus and the last-level cache here, and the
prefetching thread has no core of its own: the paper's accelerators have a link between them, and
nothing to do while they wait for it.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cache import REPO_ROOT, cache_root
from benchmarks.progress import Step
from benchmarks.runner import MeasurementError, engine_environment
from benchmarks.shapes import planned_model_dir, random_model_dir
from benchmarks.tables import markdown, number

RESULT_KEYS = (
    "tokens_equal",
    "prefetches",
    "prefetched_bytes",
    "on_over_off",
    "kept",
    "by_batch",
    "definitions",
)

DEFINITIONS = {
    "tokens_equal": "float32 tokens with prefetches on equal those with them off, all of them",
    "prefetches": "weights and KV caches that a step of one rank prefetches",
    "prefetched_bytes": "of those weights",
    "on_over_off": "time per decode step with prefetches over without: the median over rounds of"
    " 2 on / (off before + off after), at the smallest batch",
    "kept": 'whether "auto" kept prefetching on at that batch, from its own three phases at start',
    "by_batch": "the same by requests in a step; fetched_share is the share of the bytes that were"
    " asked for before their all-reduce was over",
}

_TIMEOUT_S = 1800
_ANSWER = "L2 "
_TRIAL_TOKENS = 80  # what "auto" needs for its verdict, and some


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What one profile runs: TinyLlama's layers in bfloat16 with made up weights."""

    batches: tuple[int, ...]
    rounds: int
    steps: int = 24
    prompt_tokens: int = 128
    budget_mib: float = 0  # 0 is "auto"
    exact_tokens: int = 24


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(batches=(1,), rounds=4, steps=16, prompt_tokens=64),
    "full": Settings(batches=(1, 8), rounds=9),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: the float32 engines, and the timed one."""
    return 3


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises MeasurementError if tokens differ."""
    exact = {}
    for prefetch in ("off", "on"):
        job = {"kind": "exact", "prefetch": prefetch, **asdict(settings)}
        exact[prefetch] = _in_a_process(job)
        step(f"float32 tokens with prefetch {prefetch}")
    timed = _in_a_process({"kind": "timed", "prefetch": "auto", **asdict(settings)})
    step("off, on, off")
    return summarise(exact, timed)


def summarise(exact: Mapping[str, Any], timed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures from what the engines answered.

    Raises MeasurementError if tokens differ, or nothing was prefetched where it was asked for.
    """
    tokens_equal = exact["on"]["tokens"] == exact["off"]["tokens"]
    if not tokens_equal:
        raise MeasurementError("float32 tokens with prefetches differ from those without")
    for name, answer in (("on", exact["on"]), ("auto", timed)):
        if not answer["manifest"]["active"]:
            raise MeasurementError(f"{name} prefetched nothing: {answer['manifest']['why_not']}")
    stated = timed["manifest"]
    verdicts = {found["batch_size"]: found for found in stated["verdicts"]}
    by_batch = {}
    for batch, found in timed["rounds"].items():
        verdict = verdicts.get(int(batch))
        asked = found["fetched_bytes"] + found["dropped_bytes"]
        by_batch[batch] = {
            "on_over_off": statistics.median(_ratios(found["seconds"])),
            "ratios": _ratios(found["seconds"]),
            "off_ms": 1e3 * statistics.median(_off(found["seconds"])),
            "on_ms": 1e3 * statistics.median(seconds for _, seconds, _ in found["seconds"]),
            "verdict": verdict and verdict["ratio"],
            "kept": verdict and verdict["kept"],
            "fetched_share": found["fetched_bytes"] / asked if asked else 0.0,
        }
    smallest = by_batch[min(by_batch, key=int)]
    return {
        "tokens_equal": tokens_equal,
        "prefetches": stated["num_weights"] + stated["num_attentions"],
        "prefetched_bytes": stated["weight_bytes"],
        "budget_bytes": stated["budget_bytes"],
        "on_over_off": smallest["on_over_off"],
        "kept": smallest["kept"],
        "by_batch": by_batch,
        "model": "TinyLlama-1.1B's layers, 8 of them, made up weights",
        "definitions": DEFINITIONS,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return one row per batch."""
    rows = [
        [
            batch,
            number(found["off_ms"], 1),
            number(found["on_ms"], 1),
            number(found["on_over_off"], 3),
            number(found["fetched_share"], 2),
            {True: "yes", False: "no", None: ""}[found["kept"]],
        ]
        for batch, found in result["by_batch"].items()
    ]
    return markdown(["requests", "off, ms", "on, ms", "on/off", "asked for in time", "kept"], rows)


def _ratios(seconds: Sequence[Sequence[float]]) -> list[float]:
    return [2 * on / (before + after) for before, on, after in seconds]


def _off(seconds: Sequence[Sequence[float]]) -> list[float]:
    return [value for before, _, after in seconds for value in (before, after)]


def _in_a_process(job: Mapping[str, Any]) -> dict[str, Any]:
    environment = engine_environment(os.environ, tiered=True) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_PLUGINS": "tiered",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CACHE_ROOT": str(cache_root() / "l2-compiled"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to switch it from here, by a function
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.l2_prefetch"],
        env=environment,
        cwd=REPO_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # ranks would outlive a driver that is ended
    )
    try:
        output, errors = process.communicate(json.dumps(job), timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise MeasurementError(
            f"the engine of {dict(job)} took more than {_TIMEOUT_S} s: set fewer rounds or steps"
        ) from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    answers = [line for line in output.splitlines() if line.startswith(_ANSWER)]
    if process.returncode or len(answers) != 1:
        raise MeasurementError(f"the engine of {dict(job)} failed:\n{errors[-4000:]}")
    answer: dict[str, Any] = json.loads(answers[0].removeprefix(_ANSWER))
    return answer


def _measure() -> None:
    """In the engine's process: read a job, write what was found."""
    job = json.load(sys.stdin)
    answer = _exact(job) if job["kind"] == "exact" else _timed(job)
    print(_ANSWER + json.dumps(answer), flush=True)


def _engine(job: Mapping[str, Any], **arguments: Any) -> Any:
    from vllm import LLM

    l2: dict[str, Any] = {"prefetch": job["prefetch"]}
    if job["budget_mib"] and job["prefetch"] != "off":
        l2["budget_mib"] = job["budget_mib"]
    return LLM(
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        block_size=32,
        max_model_len=1024,
        max_num_seqs=16,
        # vLLM runs as many at start, and bfloat16 without AVX-512 takes minutes for thousands.
        max_num_batched_tokens=256,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
        additional_config={"tiered": {"kv": {"enabled": False}, "l2": l2}},
        **arguments,
    )


def _exact(job: Mapping[str, Any]) -> dict[str, Any]:
    llm = _engine(
        job, model=str(random_model_dir("qwen2")), dtype="float32", kv_cache_memory_bytes=8 << 20
    )
    prompts = [[1000 + 37 * (i + 5 * j) % 20000 for i in range(20 + 7 * j)] for j in range(8)]
    tokens = _generate(llm, prompts, job["exact_tokens"])[0]
    return {"tokens": tokens, "manifest": _manifest(llm)}


def _timed(job: Mapping[str, Any]) -> dict[str, Any]:
    llm = _engine(
        job,
        model=str(planned_model_dir("llama")),
        dtype="bfloat16",
        load_format="dummy",
        kv_cache_memory_bytes=256 << 20,
    )
    prompts = [[3 + (i + 11 * j) % 8000 for i in range(job["prompt_tokens"])] for j in range(16)]
    for batch in job["batches"]:
        _generate(llm, prompts[:batch], _TRIAL_TOKENS)
    stated = _manifest(llm)  # with the verdicts: from here on the trial is over
    rounds = {}
    for batch in job["batches"]:
        before = _switch(llm, False)
        seconds = []
        for _ in range(job["rounds"]):
            phases = []
            for is_on in (False, True, False):
                _switch(llm, is_on)
                phases.append(_generate(llm, prompts[:batch], job["steps"])[1])
            seconds.append(phases)
        after = _switch(llm, False)
        rounds[batch] = {
            "seconds": seconds,
            "fetched_bytes": after[0] - before[0],
            "dropped_bytes": after[1] - before[1],
        }
    return {"manifest": stated, "rounds": rounds}


def _generate(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """Tokens, and the median seconds of the steps in which all requests decode."""
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


def _manifest(llm: Any) -> dict[str, Any]:
    stated = llm.collective_rpc("tiered_manifest")[0] or {}
    answer: dict[str, Any] = stated.get("l2", {"active": False, "why_not": "off"})
    return answer


def _switch(llm: Any, is_on: bool) -> tuple[int, int]:
    """Prefetches on or off from here on; bytes fetched and dropped so far, of the first rank."""
    counts: list[tuple[int, int]] = llm.collective_rpc(switch_worker, args=(is_on,))
    return counts[0]


def switch_worker(worker: Any, is_on: bool) -> tuple[int, int]:
    """In a worker."""
    from vllm_tiered.adapter import l2_hooks

    engine = l2_hooks.engine_of(worker.vllm_config)
    engine.hold(is_on)
    counts: tuple[int, int] = engine.runtime.counts()
    return counts


if __name__ == "__main__":
    from benchmarks.l2_prefetch import _measure as measure  # its functions travel by that name

    measure()
