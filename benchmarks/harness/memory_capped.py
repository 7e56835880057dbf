# SPDX-License-Identifier: Apache-2.0
"""Contenders that decode a model under one memory limit, and the memory that vLLM itself takes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness.cache import REPO_ROOT
from benchmarks.harness.memory_limit import run_limited
from benchmarks.harness.out_of_core import KV_BLOCK_TOKENS
from benchmarks.harness.runner import MeasurementError
from benchmarks.peers import PREFIX

MARGIN_BYTES = 96 << 20
"""Kept free between the limit and our plan: buffers, and allocations that grow a little in use."""

_TIMEOUT_S = 1800
_EMPTY_MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 1024,
    "word_embed_proj_dim": 1024,
    "ffn_dim": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "torch_dtype": "bfloat16",
}


class HasKv(Protocol):
    """Sizes of a model that has KV."""

    @property
    def kv_token_bytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Load of `batch` requests, the i-th with `prompt_tokens` + i * `prompt_step` tokens."""

    prompt_tokens: int
    new_tokens: int
    batch: int = 1
    prompt_step: int = 0
    threads: int = 2

    def kv_bytes(self, shape: HasKv) -> int:
        """Return the KV bytes of all requests in whole blocks, with vLLM's null block."""
        blocks = 1
        for index in range(self.batch):
            num_tokens = self.prompt_tokens + index * self.prompt_step + self.new_tokens
            blocks += -(-num_tokens // KV_BLOCK_TOKENS)
        return blocks * KV_BLOCK_TOKENS * shape.kv_token_bytes


def decode_command(
    load: Load,
    model: Path,
    kv_bytes: int,
    tiered: Mapping[str, Any] | None = None,
    *extra: str,
) -> list[str]:
    """Return the command line of `benchmarks.harness.sparse_decode`."""
    command = [
        *(sys.executable, "-m", "benchmarks.harness.sparse_decode", "--model", str(model)),
        *("--kv-bytes", str(kv_bytes)),
        *("--prompt-tokens", str(load.prompt_tokens), "--prompt-step", str(load.prompt_step)),
        *("--new-tokens", str(load.new_tokens), "--batch", str(load.batch)),
    ]
    if tiered is not None:
        command += ["--tiered", json.dumps(tiered)]
    return [*command, *extra]


def measure(
    name: str, command: Sequence[str], limit_bytes: int | None, threads: int
) -> dict[str, Any]:
    """Run a contender; return the figures of the line that it prints, and `peak_bytes`.

    Raises MeasurementError, with the end of its log, if it fails or takes too long.
    """
    environment = {
        **os.environ,
        "VLLM_PLUGINS": "tiered",
        "PYTHONPATH": str(REPO_ROOT),
        "OMP_NUM_THREADS": str(threads),
    }
    try:
        outcome = run_limited(
            command, limit_bytes, timeout_s=_TIMEOUT_S, env=environment, cwd=REPO_ROOT
        )
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(f"{name} took more than {_TIMEOUT_S} s") from error
    lines = [line for line in outcome.output.splitlines() if line.startswith(PREFIX)]
    if outcome.returncode or len(lines) != 1:
        why = "was killed for want of memory" if outcome.was_killed else "failed"
        raise MeasurementError(f"{name} {why}:\n{outcome.output[-3000:]}")
    measured: dict[str, Any] = json.loads(lines[0].removeprefix(PREFIX))
    return measured | {"peak_bytes": outcome.peak_bytes}


def vllm_bytes(load: Load, folder: Path) -> int:
    """Return the resident bytes of vLLM with an almost empty model."""
    empty = folder / "empty-model"
    empty.mkdir(exist_ok=True)
    (empty / "config.json").write_text(json.dumps(_EMPTY_MODEL), encoding="utf-8")
    short = Load(prompt_tokens=12, new_tokens=8, threads=load.threads)
    command = decode_command(short, empty, 8 << 20, None, "--load-format", "dummy")
    return int(measure("vLLM alone", command, None, load.threads)["resident_bytes"])


def tokens_per_s(measured: Mapping[str, Any]) -> float:
    """Return the rate of all requests together, by the median step to exclude disturbances."""
    median = float(statistics.median(measured["seconds_per_token"]))
    return int(measured.get("batch", 1)) / median


def files_in(folder: Path) -> list[Path]:
    """Return all files below a folder, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def rotated(items: list[Any], by: int) -> Iterator[Any]:
    """Yield the items rotated, so that each round begins with another contender."""
    yield from items[by % len(items) :]
    yield from items[: by % len(items)]
