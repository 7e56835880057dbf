# SPDX-License-Identifier: Apache-2.0
"""L2 prefetch behind all-reduces (PRESERVE), measured with two ranks on two cores of one machine.

First the float32 tokens with `"on"` are compared with those with `"off"`. Then one compiled engine
of two ranks starts with `l2.prefetch="auto"` and reports what it measured and decided. It then runs
the same steps without, with and without prefetches again.

The ranks share the memory bus and the last-level cache here, and the prefetching thread has no core
of its own. The paper's accelerators have a link between them and are idle while they wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness import ranks
from benchmarks.harness.cache import cache_root
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import MeasurementError
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.shapes import planned_model_dir, random_model_dir
from vllm_tiered.adapter.telemetry.monitor import WORKER_METHOD

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
_TRIAL_TOKENS = 80  # enough for "auto" to reach its verdict, with some to spare


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile: TinyLlama's layers in bfloat16 with random weights."""

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
    """Return how many steps `run` reports: the float32 engines and the timed one."""
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
    """Return the figures from the engines' answers.

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
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CACHE_ROOT": str(cache_root() / "l2-compiled"),
    }
    return ranks.ask("benchmarks.suites.l2.prefetch", job, variables, timeout_s=_TIMEOUT_S)


def _measure() -> None:
    """Read a job, run it and write the result (in the engine's own process)."""
    job = ranks.job()
    ranks.answer(_exact(job) if job["kind"] == "exact" else _timed(job))


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
        # vLLM runs as many tokens at start; bfloat16 without AVX-512 takes minutes for thousands.
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
    tokens = ranks.generate(llm, prompts, job["exact_tokens"])[0]
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
        ranks.generate(llm, prompts[:batch], _TRIAL_TOKENS)
    stated = _manifest(llm)  # with the verdicts: the trial is over by now
    rounds = {}
    for batch in job["batches"]:
        before = _switch(llm, False)
        seconds = []
        for _ in range(job["rounds"]):
            phases = []
            for is_on in (False, True, False):
                _switch(llm, is_on)
                phases.append(ranks.generate(llm, prompts[:batch], job["steps"])[1])
            seconds.append(phases)
        after = _switch(llm, False)
        rounds[batch] = {
            "seconds": seconds,
            "fetched_bytes": after[0] - before[0],
            "dropped_bytes": after[1] - before[1],
        }
    return {"manifest": stated, "rounds": rounds}


def _manifest(llm: Any) -> dict[str, Any]:
    (state, *_) = llm.collective_rpc(WORKER_METHOD)
    stated: dict[str, Any] = state["l2"]
    return {"active": False, "why_not": stated["reason"]} | stated


def _switch(llm: Any, is_on: bool) -> tuple[int, int]:
    """Turn prefetches on or off; return the first rank's bytes fetched and dropped so far."""
    counts: list[tuple[int, int]] = llm.collective_rpc(switch_worker, args=(is_on,))
    return counts[0]


def switch_worker(worker: Any, is_on: bool) -> tuple[int, int]:
    """Turn prefetches on or off in one worker; return its bytes fetched and dropped so far."""
    from vllm_tiered.adapter.l2 import hooks as l2_hooks

    engine = l2_hooks.find_engine(worker.vllm_config)
    engine.force(is_on)
    counts: tuple[int, int] = engine.runtime.counts()
    return counts


if __name__ == "__main__":
    from benchmarks.suites.l2.prefetch import (
        _measure as measure,  # pickle finds its functions by this module's name
    )

    measure()
