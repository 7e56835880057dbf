# SPDX-License-Identifier: Apache-2.0
"""One rank against two, over vLLM's processes and over Ray, with each part of the plugin on.

All engines decode the same requests in float32 with one core for each rank, so two ranks have twice
the cores of one and half the bytes each. Far memory is host memory, so a rank's memory is counted
without what it shares with other processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ranks
from benchmarks.harness.cache import cache_root, publish_dir
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import MeasurementError
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.shapes import PLANNED_SHAPES, write_model

RESULT_KEYS = ("parts", "tokens_equal", "worst_coordination_share", "definitions")

DEFINITIONS = {
    "ms_per_step": "median time of a step in which all requests decode, median of rounds",
    "tokens_per_s": "requests over that",
    "rank_bytes": "the largest rank's memory that no other process has (USS) at the end",
    "speedup": "tokens_per_s over that of one rank with the same part",
    "coordination_share": "of the time of steps, what planning them, telling ranks, translating and"
    " hearing from ranks took: the most that coordination can have cost",
    "tokens_equal": "all engines gave the tokens of vLLM on one rank",
}

RANKS: Mapping[str, tuple[int, str]] = {
    "1 rank": (1, "mp"),
    "2 ranks, mp": (2, "mp"),
    "2 ranks, Ray": (2, "ray"),
}
PARTS = ("vLLM", "kv", "weights", "ffn")

_TIMEOUT_S = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile: OPT-1.3B's layers with random weights."""

    layers: int
    rounds: int
    requests: int = 4
    prompt_tokens: int = 64
    tokens: int = 32


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(layers=4, rounds=3),
    "full": Settings(layers=24, rounds=10),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: the model and its store, then one per engine."""
    return 1 + len(RANKS) * len(PARTS)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises MeasurementError if tokens differ."""
    model, store = _prepared(settings.layers)
    step("model and neuron store")
    answers: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        answers[part] = {}
        for name, (num_ranks, executor) in RANKS.items():
            job = {"part": part, "ranks": num_ranks, "executor": executor, **asdict(settings)}
            job |= {"model": str(model), "store": str(store)}
            variables = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(num_ranks)))}
            answers[part][name] = ranks.ask(
                "benchmarks.suites.weights.tp_ray", job, variables, timeout_s=_TIMEOUT_S
            )
            step(f"{part}, {name}")
    return summarise(answers, settings.requests)


def summarise(answers: Mapping[str, Mapping[str, Any]], requests: int) -> dict[str, Any]:
    """Return the figures from the engines' answers.

    Raises MeasurementError if tokens differ or a part that was asked for did nothing.
    """
    expected = answers["vLLM"]["1 rank"]["tokens"]
    parts: dict[str, Any] = {}
    for part, by_ranks in answers.items():
        parts[part] = {}
        for name, answer in by_ranks.items():
            if answer["tokens"] != expected:
                raise MeasurementError(f"{part}, {name}: tokens differ from vLLM's on one rank")
            if part != "vLLM" and not answer["moved_bytes"]:
                raise MeasurementError(f"{part}, {name}: nothing was loaded from far memory")
            seconds = statistics.median(answer["seconds"])
            alone = statistics.median(by_ranks["1 rank"]["seconds"])
            parts[part][name] = {
                "ms_per_step": 1e3 * seconds,
                "tokens_per_s": requests / seconds,
                "speedup": alone / seconds,
                "rank_bytes": max(answer["rank_bytes"]),
                "coordination_share": answer["coordination_share"],
            }
    shares = [
        found["coordination_share"]
        for by_ranks in parts.values()
        for found in by_ranks.values()
        if found["coordination_share"] is not None
    ]
    return {
        "parts": parts,
        "tokens_equal": True,
        "worst_coordination_share": max(shares),
        "definitions": DEFINITIONS,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return one row per part and per way to run it."""
    rows = [
        [
            part,
            name,
            number(found["ms_per_step"], 1),
            number(found["tokens_per_s"], 1),
            number(found["speedup"], 2),
            number(found["rank_bytes"] / 2**20, 0),
            ""
            if found["coordination_share"] is None
            else number(100 * found["coordination_share"], 1),
        ]
        for part, by_ranks in result["parts"].items()
        for name, found in by_ranks.items()
    ]
    header = ["part", "ranks", "ms/step", "tokens/s", "speedup", "MiB of a rank", "coordination, %"]
    return markdown(header, rows)


def _prepared(layers: int) -> tuple[Path, Path]:
    """Return the model with random weights and its neuron store in float32."""
    import torch

    from vllm_tiered.ffn.layout import Precision
    from vllm_tiered.ffn.prepare.pipeline import prepare

    model = cache_root() / f"random-opt-{layers}-layers"
    if not (model / "config.json").is_file():
        # Tied random embeddings repeat the last token for ever.
        changed = {"num_hidden_layers": layers, "tie_word_embeddings": False}
        shape = {**PLANNED_SHAPES["opt"], **changed}
        vocab_size = shape.pop("vocab_size")
        del shape["architectures"], shape["torch_dtype"]
        with publish_dir(model) as staging:
            write_model(shape, vocab_size, 0, staging)
    store = model.with_name(f"{model.name}-store")
    prepare(model, store, dtype=torch.float32, precisions=(Precision.FULL,), predictor="none")
    return model, store


def _sections(job: Mapping[str, Any]) -> dict[str, Any]:
    off: dict[str, Any] = {"l2": {"prefetch": "off"}}
    if job["part"] == "vLLM":
        return off | {"kv": {"enabled": False}}
    if job["part"] == "kv":
        return off | {"kv": {"expansion": 1.3}}
    if job["part"] == "weights":
        return off | {"kv": {"expansion": 1.0}, "weights": {"placement": "all_far"}}
    ffn = {"store": job["store"], "exact": True}
    return off | {"kv": {"expansion": 1.0}, "ffn": ffn}


def _measure() -> None:
    """Read a job, run it and write the result (in the engine's own process)."""
    from vllm import LLM

    job = ranks.job()
    llm = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        tensor_parallel_size=job["ranks"],
        distributed_executor_backend=job["executor"],
        async_scheduling=False,
        block_size=32,
        max_model_len=512,
        max_num_seqs=job["requests"],
        kv_cache_memory_bytes=(256 << 20) // job["ranks"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        additional_config={"tiered": _sections(job)},
    )
    prompts = [
        [3 + (7 * i + 11 * j) % 8000 for i in range(job["prompt_tokens"])]
        for j in range(job["requests"])
    ]
    seconds = []
    for _ in range(1 + job["rounds"]):
        tokens, median = ranks.generate(llm, prompts, job["tokens"])
        seconds.append(median)
    answer = {
        "tokens": tokens,
        "seconds": seconds[1:],
        "rank_bytes": llm.collective_rpc(private_bytes),
        **_counted(job["part"]),
    }
    ranks.answer(answer)


def private_bytes(worker: Any) -> int:
    """Return the memory that only this worker's process has (USS), in bytes."""
    import psutil

    return int(psutil.Process().memory_full_info().uss)


def _counted(part: str) -> dict[str, Any]:
    from prometheus_client import REGISTRY

    from vllm_tiered.adapter.telemetry.figures import read_figures

    values = read_figures(REGISTRY.collect())
    moved = {
        "vLLM": (),
        "kv": ("kv_read_bytes",),
        "weights": ("weights_read_bytes",),
        "ffn": ("ffn_far_bytes", "ffn_storage_bytes"),
    }[part]
    steps = values.get("kv_step_seconds")
    return {
        "moved_bytes": sum(values[name] for name in moved),
        "coordination_share": values["kv_bookkeeping_seconds"] / steps if steps else None,
    }


if __name__ == "__main__":
    from benchmarks.suites.weights.tp_ray import (
        _measure as measure,  # pickle finds its functions by this module's name
    )

    measure()
