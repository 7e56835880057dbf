# SPDX-License-Identifier: Apache-2.0
"""Quality and speed of matrices in 4 bit: `weights.compress`, vLLM's W4A16, llama.cpp's formats.

A model runs with its own weights, with `weights.compress="int4"`, as a checkpoint in W4A16 made by
rounding, and, where the peers' environment has llama.cpp, in that program's formats: the demo
model, or a larger one off the 4-bit grid of the file that it comes from. Each gives the
log-probability of each token of the same texts, and then decodes one request. Each engine runs in a
process of its own, one after the other.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.decode_rate import decode_rates
from benchmarks.harness.engine_job import answer, ask, given
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import MeasurementError
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.coder_model import coder_model_dir, off_grid_dir
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.quantized_checkpoint import quantized_model_dir
from benchmarks.inputs.workload import sharegpt_requests
from benchmarks.peers import llama_formats
from benchmarks.peers.contender import prompt_ids

RESULT_KEYS = ("ratio", "by_format", "num_tokens", "missing", "definitions")

DEFINITIONS = {
    "ratio": "perplexity with the layers' matrices in 4 bit over that with the model's own weights",
    "by_format": "perplexity: exp of the mean negative log-probability of a token given those"
    " before it in its text; ratio: over the own weights; standard_error: of the ratio, from the"
    " tokens' differences; layer_bytes: of the layers' parameters, without embedding and head;"
    " tokens_per_s: of one request's decode steps, the best of the rounds, each format's rounds by"
    " themselves",
    "num_tokens": "that were predicted: all but the first of each text",
    "missing": "what llama.cpp lacked; null if it ran",
    "w4a16": "compressed-tensors in groups of 64, rounded, without calibration; vLLM's own kernel",
}

_PLACEMENT = {"placement": "helm"}
_SYSTEMS: Mapping[str, Mapping[str, str]] = {
    "16bit": {**_PLACEMENT, "compress": "none"},
    "int4": {**_PLACEMENT, "compress": "int4"},
}
_CHECKPOINT = "compressed_int4"
_TIMEOUT_S = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile: texts are ShareGPT prompts of at least `min_tokens`, then cut.

    `model` is `demo` or `coder`. Without AVX-512, bfloat16 is many times slower than float32.
    `formats` are llama.cpp's, and `peers_python` the interpreter that has it beside it ("": this
    one). A round decodes `new_tokens` after `prompt_tokens`, on `threads` threads.
    """

    num_texts: int
    model: str = "demo"
    dtype: str = "bfloat16"
    min_tokens: int = 64
    max_tokens: int = 512
    seed: int = 0
    formats: tuple[str, ...] = ("Q4_K_M", "Q8_0")
    peers_python: str = ""
    threads: int = 2
    prompt_tokens: int = 12
    new_tokens: int = 24
    rounds: int = 3


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(num_texts=32),
    "full": Settings(num_texts=200),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: one per system, for W4A16, and one per format."""
    return len(_SYSTEMS) + 1 + len(settings.formats)


def model_dir(settings: Settings) -> Path:
    """Return the model's folder. Raises KeyError for an unknown model."""
    if settings.model == "coder":
        return off_grid_dir(coder_model_dir())
    return {"demo": demo_model_dir}[settings.model]()


def checkpoint_dir(settings: Settings) -> Path:
    """Return the folder of the model in W4A16, which is made if it is missing."""
    folder = model_dir(settings) / _CHECKPOINT
    if not (folder / "config.json").exists():  # the last but for the tokenizer
        folder.mkdir(exist_ok=True)
        quantized_model_dir(model_dir(settings), _CHECKPOINT, folder)
    return folder


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
        measured[name] = _in_a_process(token_ids, model_dir(settings), weights, settings)
        step(f"{name}: perplexity {perplexity(measured[name]['logprobs']):.3f}")
    if settings.dtype == "bfloat16":
        found = _in_a_process(token_ids, checkpoint_dir(settings), _PLACEMENT, settings)
        measured["W4A16"] = found
        step(f"W4A16: perplexity {perplexity(found['logprobs']):.3f}")
    else:
        step(f"W4A16: left out (vLLM's kernel does not take {settings.dtype})")
    python = settings.peers_python or sys.executable
    missing = llama_formats.missing(python) if settings.formats else "no format was asked for"
    for name in settings.formats:
        if missing is None:
            measured[name] = _in_llama_cpp(name, python, token_ids, settings)
            step(f"{name}: perplexity {perplexity(measured[name]['logprobs']):.3f}")
        else:
            step(f"{name}: left out ({missing})")
    found = summarise(measured)
    return {
        **found,
        "missing": missing,
        "model": model_dir(settings).name,
        "dtype": settings.dtype,
        "definitions": DEFINITIONS,
    }


def summarise(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures from each system's log-probabilities, bytes and decode rates.

    Raises MeasurementError if the systems predicted different numbers of tokens, or if a system's
    weights are not in the format asked for.
    """
    counts = {name: len(found["logprobs"]) for name, found in measured.items()}
    if len(set(counts.values())) != 1:
        raise MeasurementError(f"the systems predicted different numbers of tokens: {counts}")
    for name, weights in _SYSTEMS.items():
        if measured[name]["manifest"]["compress"] != weights["compress"]:
            raise MeasurementError(f"{name} ran with {measured[name]['manifest']}")
    own = measured["16bit"]["logprobs"]
    by_format = {}
    for name, found in measured.items():
        ratio, error = _ratio(own, found["logprobs"])
        by_format[name] = {
            "perplexity": perplexity(found["logprobs"]),
            "ratio": ratio,
            "standard_error": error,
            "layer_bytes": found["layer_bytes"],
            "tokens_per_s": max(found["tokens_per_s"]),
        }
    return {
        "ratio": by_format["int4"]["ratio"],
        "by_format": by_format,
        "num_tokens": counts["int4"],
    }


def _ratio(own: Sequence[float], found: Sequence[float]) -> tuple[float, float]:
    """Return a ratio of perplexities, and its standard error from the tokens' differences."""
    losses = [a - b for a, b in zip(own, found, strict=True)]
    ratio = math.exp(statistics.fmean(losses))
    return ratio, ratio * statistics.stdev(losses) / math.sqrt(len(losses))


def perplexity(logprobs: Sequence[float]) -> float:
    """Return exp of the mean negative log-probability (natural). Raises ValueError if empty."""
    if not logprobs:
        raise ValueError("no token was predicted")
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def table(result: Mapping[str, Any]) -> str:
    """Return one row per format."""
    rows = [
        [
            name,
            number(of["perplexity"], 3),
            f"{of['ratio']:.4f} (± {of['standard_error']:.4f})",
            number(of["layer_bytes"] / 2**20, 1),
            number(of["tokens_per_s"], 2),
        ]
        for name, of in result["by_format"].items()
    ]
    titles = ["matrices", "perplexity", "over 16 bit", "layers, MiB", "tokens/s, 1 request"]
    return markdown(titles, rows)


def _in_llama_cpp(
    name: str, python: str, token_ids: Sequence[Sequence[int]], settings: Settings
) -> dict[str, Any]:
    model, threads = model_dir(settings), settings.threads
    work = model / "llama.cpp"
    work.mkdir(exist_ok=True)
    file = llama_formats.quantised(python, model, work, name, threads)
    load = (settings.prompt_tokens, settings.new_tokens, threads)
    return {
        "logprobs": llama_formats.score(python, file, token_ids, threads),
        "layer_bytes": llama_formats.layer_bytes(file),
        "tokens_per_s": [
            llama_formats.decode_rate(python, file, *load) for _ in range(settings.rounds)
        ],
    }


def _in_a_process(
    token_ids: Sequence[Sequence[int]],
    model: Path,
    weights: Mapping[str, str],
    settings: Settings,
) -> dict[str, Any]:
    job = {
        "token_ids": token_ids,
        "weights": weights,
        "model": str(model),
        "dtype": settings.dtype,
        "prompt": prompt_ids(settings.prompt_tokens),
        "new_tokens": settings.new_tokens,
        "rounds": settings.rounds,
    }
    return ask(
        "benchmarks.suites.weights.int4", job, threads=settings.threads, timeout_s=_TIMEOUT_S
    )


def _measure() -> None:
    """Read a job, write log-probabilities and decode rates (in the engine's own process)."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.offloader import get_offloader

    from vllm_tiered.adapter.telemetry import manifest

    job = given()
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=max(*map(len, job["token_ids"]), len(job["prompt"]) + job["new_tokens"]) + 1,
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
    found = {
        "logprobs": logprobs,
        "manifest": stated.get("weights"),
        "tokens_per_s": decode_rates(llm, job["prompt"], job["new_tokens"], rounds=job["rounds"]),
        "layer_bytes": sum(part.num_bytes for part in offloader.placement.sublayers),
    }
    answer(found)


if __name__ == "__main__":
    _measure()
