# SPDX-License-Identifier: Apache-2.0
"""Quality cost of rounding the layers' matrices to 4 bit: perplexity on ShareGPT text.

A model runs once with its own weights and once with `weights.compress="int4"`: the demo model, or a
larger one off the 4-bit grid of the file that it comes from.
vLLM's own engine gives the log-probability of each token of the same texts. Each engine runs in a
process of its own.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.cache import REPO_ROOT
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import MeasurementError, engine_environment
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.coder_model import coder_model_dir, off_grid_dir
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.workload import sharegpt_requests

RESULT_KEYS = ("perplexity_16bit", "perplexity_int4", "ratio", "bytes", "num_tokens", "definitions")

DEFINITIONS = {
    "perplexity_16bit": "exp of the mean negative log-probability of a token given those before it"
    " in its text, with the model's own weights",
    "perplexity_int4": "the same with the layers' matrices in 4 bit, groups of 64",
    "ratio": "perplexity_int4 over perplexity_16bit",
    "bytes": "of the layers' parameters, in 16 bit and with int4",
    "num_tokens": "that were predicted: all but the first of each text",
}

_PLACEMENT = {"placement": "helm"}
_SYSTEMS: Mapping[str, Mapping[str, str]] = {
    "16bit": {**_PLACEMENT, "compress": "none"},
    "int4": {**_PLACEMENT, "compress": "int4"},
}
_TIMEOUT_S = 900
_ANSWER = "PERPLEXITY "


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile: texts are ShareGPT prompts of at least `min_tokens`, then cut.

    `model` is `demo` or `coder`. Without AVX-512, bfloat16 is many times slower than float32.
    """

    num_texts: int
    model: str = "demo"
    dtype: str = "bfloat16"
    min_tokens: int = 64
    max_tokens: int = 512
    seed: int = 0


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(num_texts=32),
    "full": Settings(num_texts=200),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: one per system."""
    return len(_SYSTEMS)


def model_dir(settings: Settings) -> Path:
    """Return the model's folder. Raises KeyError for an unknown model."""
    if settings.model == "coder":
        return off_grid_dir(coder_model_dir())
    return {"demo": demo_model_dir}[settings.model]()


def texts(settings: Settings) -> list[list[int]]:
    """Return the token ids of the texts. Raises ValueError if there are too few."""
    drawn = sharegpt_requests(
        min(20 * settings.num_texts, 3000), settings.seed, model_dir(settings), settings.max_tokens
    )
    long_enough = [
        list(request.prompt_token_ids)
        for request in drawn
        if len(request.prompt_token_ids) >= settings.min_tokens
    ]
    if len(long_enough) < settings.num_texts:
        raise ValueError(
            f"only {len(long_enough)} of {len(drawn)} texts have {settings.min_tokens} tokens: "
            "lower num_texts or min_tokens"
        )
    return long_enough[: settings.num_texts]


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises MeasurementError if an engine fails."""
    token_ids = texts(settings)
    measured = {}
    for name, weights in _SYSTEMS.items():
        measured[name] = _in_a_process(token_ids, weights, settings)
        step(f"{name}: perplexity {perplexity(measured[name]['logprobs']):.3f}")
    return {**summarise(measured), "model": model_dir(settings).name, "dtype": settings.dtype}


def summarise(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures from each system's log-probabilities and manifest.

    Raises MeasurementError if the systems predicted different numbers of tokens, or if a system's
    weights are not in the format asked for.
    """
    counts = {name: len(found["logprobs"]) for name, found in measured.items()}
    if len(set(counts.values())) != 1:
        raise MeasurementError(f"the systems predicted different numbers of tokens: {counts}")
    for name, found in measured.items():
        if found["manifest"]["compress"] != _SYSTEMS[name]["compress"]:
            raise MeasurementError(f"{name} ran with {found['manifest']}")
    plain, int4 = (perplexity(measured[name]["logprobs"]) for name in _SYSTEMS)
    return {
        "perplexity_16bit": plain,
        "perplexity_int4": int4,
        "ratio": int4 / plain,
        "bytes": {name: found["layer_bytes"] for name, found in measured.items()},
        "num_tokens": counts["int4"],
        "definitions": DEFINITIONS,
    }


def perplexity(logprobs: Sequence[float]) -> float:
    """Return exp of the mean negative log-probability (natural). Raises ValueError if empty."""
    if not logprobs:
        raise ValueError("no token was predicted")
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def table(result: Mapping[str, Any]) -> str:
    """Return one row per system."""
    rows = [
        [name, number(result[f"perplexity_{name}"], 3), number(num_bytes / 2**20, 1)]
        for name, num_bytes in result["bytes"].items()
    ]
    return markdown(["layers' matrices", "perplexity", "layers, MiB"], rows)


def _in_a_process(
    token_ids: Sequence[Sequence[int]], weights: Mapping[str, str], settings: Settings
) -> dict[str, Any]:
    job = {
        "token_ids": token_ids,
        "weights": weights,
        "model": str(model_dir(settings)),
        "dtype": settings.dtype,
    }
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.suites.weights.int4"],
        input=json.dumps(job),
        env=engine_environment(os.environ, tiered=True),
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    answers = [line for line in finished.stdout.splitlines() if line.startswith(_ANSWER)]
    if finished.returncode or len(answers) != 1:
        raise MeasurementError(
            f"the engine with {dict(weights)} failed:\n{finished.stderr[-4000:]}"
        )
    answer: dict[str, Any] = json.loads(answers[0].removeprefix(_ANSWER))
    return answer


def _measure() -> None:
    """Read a job and write the log-probabilities (in the engine's own process)."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.offloader import get_offloader

    from vllm_tiered.adapter.telemetry import manifest

    job = json.load(sys.stdin)
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=max(map(len, job["token_ids"])) + 1,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
        seed=0,
        additional_config={"tiered": {"kv": {"enabled": False}, "weights": job["weights"]}},
    )
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in job["token_ids"]],
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    logprobs = [
        of_token[token_id].logprob
        for output in outputs
        for token_id, of_token in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if of_token is not None
    ]
    offloader: Any = get_offloader()
    stated = manifest.current() or {}
    answer = {
        "logprobs": logprobs,
        "manifest": stated.get("weights"),
        "layer_bytes": sum(part.num_bytes for part in offloader.placement.sublayers),
    }
    print(f"\n{_ANSWER}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    _measure()
