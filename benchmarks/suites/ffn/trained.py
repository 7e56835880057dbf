# SPDX-License-Identifier: Apache-2.0
"""A trained SwiGLU model in the formats that compete for the same memory: quality beside speed.

Qwen2.5-Coder-1.5B, taken off the 4-bit grid of its file, in the formats of `trained_formats`.

Quality is that of the weights alone: each format is expanded to 16 bit, and the same engine
computes with it. Divergence is of the next token's distribution on ShareGPT's text; pass@1 is
greedy completion of HumanEval's problems, all in one batch. Speed is of one request with everything
in memory, in the engine that the format is for.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.decode_rate import decode_rates
from benchmarks.harness.engine_job import answer, ask, given
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import MeasurementError
from benchmarks.harness.summary import median_ratio
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.coder_model import coder_model_dir, off_grid_dir
from benchmarks.inputs.human_eval import STOPS, Problem, problems, solved
from benchmarks.inputs.model import demo_model_dir
from benchmarks.inputs.relufied_model import Relufying, relufied_model_dir
from benchmarks.peers import llama_formats
from benchmarks.peers.contender import prompt_ids
from benchmarks.suites.ffn.nested import HELD_OUT, nested_ffns
from benchmarks.suites.ffn.trained_formats import LLAMA, Prepared, prepare
from vllm_tiered.adapter.telemetry import manifest
from vllm_tiered.ffn.prepare.layerwise import replace_ffn
from vllm_tiered.ffn.prepare.texts import Text, calibration_texts

RESULT_KEYS = ("frontier", "default_ratio_to_vllm", "num_tokens", "definitions")

DEFINITIONS = {
    "frontier": "a row a format. near_bytes: of its weights, all in memory; of nested rows, base"
    " and 15 % of the planes, whose rest is read. tokens_per_s: of one request's decode steps, best"
    " of the rounds; null if no engine has the format. perplexity, with perplexity_error, its"
    " standard error; kl: mean divergence of the next token's distribution from 16 bit's, with"
    " kl_error, its standard error. pass_at_1: share of HumanEval's problems that greedy"
    " completions solve, with its standard error over problems",
    "default_ratio_to_vllm": "tokens/s of one request's decode steps in 16 bit, with everything in"
    " memory, of the plugin on its defaults over vLLM without it: median over runs in turns, each"
    " the median of its rounds; the runs are in default_runs",
    "num_tokens": "that were predicted for the divergence",
}

_TIMEOUT_S = 7200


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        model: `coder`, `demo`, or `relufied`, which is `demo` with ReLU neurons.
        training_steps: of `relufied`.
        formats: formats to compare with 16 bit.
        tokens: of the text for the divergence.
        num_problems: of HumanEval's 164, the first ones.
        max_tokens: of a completion.
        batch: completions at a time.
        peers_python: interpreter with llama.cpp beside it ("": this one).
        default_runs: of vLLM, and of the plugin on its defaults, in turns.
    """

    model: str = "coder"
    formats: tuple[str, ...] = ("W4A16", "W8A8", "int4", *LLAMA, "nested 5%", "nested 15%")
    tokens: int = 2000
    num_problems: int = 164
    max_tokens: int = 256
    batch: int = 32
    peers_python: str = ""
    threads: int = 2
    prompt_tokens: int = 12
    new_tokens: int = 24
    rounds: int = 3
    default_runs: int = 3
    training_steps: int = 120


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        model="demo",
        formats=("W4A16",),
        tokens=300,
        num_problems=4,
        max_tokens=32,
        default_runs=1,
    ),
    "full": Settings(),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    return 2 + len(settings.formats)


def model_dir(settings: Settings) -> Path:
    """Return the model's folder."""
    if settings.model == "coder":
        return off_grid_dir(coder_model_dir())
    if settings.model == "relufied":
        return relufied_model_dir(Relufying(steps=settings.training_steps))
    return demo_model_dir()


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises MeasurementError if an engine fails."""
    torch.set_num_threads(settings.threads)
    folder = model_dir(settings)
    texts = calibration_texts(folder, settings.tokens, tokens_per_text=256, skip=HELD_OUT)
    asked = problems()[: settings.num_problems]
    frontier = []
    for name in ("16bit", *settings.formats):
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            of = prepare(name, folder, Path(scratch), settings.peers_python, settings.threads)
            row = {"near_bytes": of.near_bytes, "tokens_per_s": _speed(of, settings)}
            row |= divergence(folder, of, texts)
            row |= pass_at_1(_completions(folder, of, asked, settings), asked)
        frontier.append({"name": name, **row})
        step(f"{name}: pass@1 {row['pass_at_1']:.1%}, KL {row['kl']:.4f}")
    runs = default_runs(folder, settings)
    ratio = median_ratio(runs["defaults"], runs["vLLM"]) if runs["vLLM"] else None
    step(f"the plugin on its defaults: {number(ratio, 3)} of vLLM's tokens/s")
    return {
        "frontier": frontier,
        "default_ratio_to_vllm": ratio,
        "default_runs": runs,
        "num_tokens": sum(len(text.token_ids) - 1 for text in texts),
        "model": folder.name,
        "definitions": DEFINITIONS,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return a row a format."""
    rows = [
        [
            row["name"],
            number(row["near_bytes"] / 2**20, 0),
            number(row["tokens_per_s"], 2),
            f"{number(row['perplexity'], 3)} ± {number(row['perplexity_error'], 3)}",
            f"{row['kl']:.4f} ± {row['kl_error']:.4f}",
            f"{row['pass_at_1']:.1%} ± {row['pass_error']:.1%}",
        ]
        for row in result["frontier"]
    ]
    headings = ["format", "near, MiB", "tokens/s", "perplexity", "KL to 16 bit", "pass@1"]
    return markdown(headings, rows)


def _speed(of: Prepared, settings: Settings) -> float | None:
    """Return one request's decode steps a second, best of the rounds; None if no engine has it."""
    if of.gguf is not None:
        python = settings.peers_python or sys.executable
        load = (settings.prompt_tokens, settings.new_tokens, settings.threads)
        rates = [llama_formats.decode_rate(python, of.gguf, *load) for _ in range(settings.rounds)]
        return max(rates)
    if of.served is None:
        return None
    job = {"model": str(of.served), "rounds": settings.rounds, "tiered": of.tiered}
    return float(max(_in_a_process(job, settings)["tokens_per_s"]))


def default_runs(folder: Path, settings: Settings) -> dict[str, list[float]]:
    """Return tokens/s of vLLM, and of the plugin on its defaults, run by run in turns."""
    runs: dict[str, list[float]] = {"vLLM": [], "defaults": []}
    job = {"model": str(folder), "rounds": settings.rounds, "defaults": True}
    for index in range(settings.default_runs):
        for name in sorted(runs, reverse=bool(index % 2)):
            found = _in_a_process(job, settings, tiered=name == "defaults")
            if found["has_plugin"] != (name == "defaults"):
                raise MeasurementError(f"{name} ran {'with' if found['has_plugin'] else 'without'}")
            runs[name].append(statistics.median(found["tokens_per_s"]))
    return runs


# Quality --------------------------------------------------------------------------------


def divergence(original: Path, of: Prepared, texts: Sequence[Text]) -> dict[str, float]:
    """Return perplexity of a format, and its divergence from the original by token."""
    apart, surprise = [], []
    with _loaded(original) as first, _loaded(of.expanded) as second, torch.inference_mode():
        if of.nested:
            for layer, ffn in zip(
                second.model.layers, nested_ffns(original, of.nested, torch.bfloat16), strict=True
            ):
                replace_ffn(layer, ffn)
        for text in texts:
            ids = torch.tensor([text.token_ids])
            expected = first(ids).logits[0, :-1].float().log_softmax(-1)
            found = second(ids).logits[0, :-1].float().log_softmax(-1)
            apart.append((expected.exp() * (expected - found)).sum(-1))
            surprise.append(-found.gather(1, ids[0, 1:, None])[:, 0])
    by_token = torch.cat(apart)
    nll = torch.cat(surprise)
    perplexity = math.exp(nll.mean().item())
    return {
        "perplexity": perplexity,
        "perplexity_error": perplexity * (nll.std() / math.sqrt(len(nll))).item(),
        "kl": by_token.mean().item(),
        "kl_error": (by_token.std() / math.sqrt(len(by_token))).item(),
    }


@contextlib.contextmanager
def _loaded(folder: Path) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    yield AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, local_files_only=True
    ).eval()


def pass_at_1(completions: Sequence[str], asked: Sequence[Problem]) -> dict[str, float]:
    """Return the share of the problems that the completions solve, and its standard error."""
    passed = solved(asked, completions)
    share = sum(passed) / len(passed)
    return {
        "pass_at_1": share,
        "pass_error": math.sqrt(share * (1 - share) / len(passed)),
    }


def _completions(
    original: Path, of: Prepared, asked: Sequence[Problem], settings: Settings
) -> list[str]:
    job: dict[str, Any] = {
        "model": str(of.expanded),
        "prompts": [problem.prompt for problem in asked],
        "nested": {"of": str(original), "share": of.nested} if of.nested else None,
    }
    completions: list[str] = _in_a_process(job, settings)["completions"]
    return completions


# Engines --------------------------------------------------------------------------------


def _in_a_process(
    job: Mapping[str, Any], settings: Settings, *, tiered: bool = True
) -> dict[str, Any]:
    asked = {
        "rounds": 0,
        "prompts": [],
        "tiered": {},
        "defaults": False,
        "nested": None,
        "max_tokens": settings.max_tokens,
        "batch": settings.batch,
        "prompt": prompt_ids(settings.prompt_tokens),
        "new_tokens": settings.new_tokens,
        **job,
    }
    return ask(
        "benchmarks.suites.ffn.trained",
        asked,
        threads=settings.threads,
        timeout_s=_TIMEOUT_S,
        tiered=tiered,
    )


def _serve() -> None:
    """Read a job, write completions and decode rates (in the engine's own process)."""
    from vllm import LLM, SamplingParams

    job = given()
    # Without the plugin this means nothing to vLLM.
    tiered = {} if job["defaults"] else {"kv": {"enabled": False}, **job["tiered"]}
    llm = LLM(
        model=job["model"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=job["batch"],
        kv_cache_memory_bytes=1 << 30,
        seed=0,
        additional_config={"tiered": tiered},
    )
    if job["nested"]:
        ffns = nested_ffns(Path(job["nested"]["of"]), job["nested"]["share"], torch.bfloat16)
        llm.apply_model(partial(_replace_ffns, ffns=ffns))
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], stop=list(STOPS))
    outputs = llm.generate(job["prompts"], sampling, use_tqdm=False) if job["prompts"] else []
    found = {
        "completions": [output.outputs[0].text for output in outputs],
        "tokens_per_s": decode_rates(llm, job["prompt"], job["new_tokens"], rounds=job["rounds"]),
        "has_plugin": manifest.current() is not None,
    }
    answer(found)


def _replace_ffns(model: Any, ffns: Iterable[nn.Module]) -> None:
    for layer, ffn in zip(model.model.layers, ffns, strict=True):
        replace_ffn(layer, ffn)


if __name__ == "__main__":
    _serve()
