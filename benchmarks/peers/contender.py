# SPDX-License-Identifier: Apache-2.0
"""Common parts of the contenders' programs: arguments, prompt, clock, threads."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers import PeerRun

# The prompt consists of ordinary token ids, so no contender's tokenizer matters.
FIRST_ID = 504
ID_STEP = 37


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """A contender's command line.

    `resident_share` is the share of the weights' bytes that may stay in memory; the caller leaves
    memory for the rest (runtime, staging, KV).
    """

    model: Path
    work: Path
    threads: int
    prompt_tokens: int
    new_tokens: int
    resident_share: float
    batch: int
    random_tokens: bool
    routing: str
    prepare: bool


def parse_arguments(description: str | None, argv: list[str] | None = None) -> Arguments:
    """Read a contender's command line; exits with a message if a number is out of range."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder, bfloat16")
    parser.add_argument("--work", type=Path, required=True, help="folder of what --prepare writes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--resident-share", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=1, help="requests; llama.cpp alone takes more")
    parser.add_argument("--random-tokens", action="store_true", help="likewise")
    parser.add_argument("--routing", default="", help="likewise: the experts of each step")
    parser.add_argument("--prepare", action="store_true", help="convert the model, then stop")
    values = parser.parse_args(argv)
    if not 0.0 <= values.resident_share <= 1.0:
        parser.error(f"--resident-share {values.resident_share}: expected 0 to 1")
    for name, least in (("threads", 1), ("prompt_tokens", 1), ("new_tokens", 2), ("batch", 1)):
        if getattr(values, name) < least:
            option = name.replace("_", "-")
            parser.error(f"--{option} {getattr(values, name)}: expected at least {least}")
    if not (values.model / "config.json").is_file():
        parser.error(f"--model {values.model}: no config.json there")
    values.work.mkdir(parents=True, exist_ok=True)
    return Arguments(**vars(values))


def prompt_ids(prompt_tokens: int) -> list[int]:
    """Return the prompt that every contender gets."""
    return [FIRST_ID + ID_STEP * i for i in range(prompt_tokens)]


def prepare_torch(threads: int) -> None:
    """Import torch with this number of threads, and keep the hub out of the measurement."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(threads)


class TokenClock:
    """A streamer for `generate` that notes when the prompt is taken and when each token is out."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of the prefill, then of each token."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def timed_generate(model: Any, prompt_tokens: int, new_tokens: int) -> list[float]:
    """Generate greedily with a transformers model; return the seconds of prefill and tokens."""
    import torch

    ids = torch.tensor([prompt_ids(prompt_tokens)])
    clock = TokenClock()
    with torch.no_grad():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            use_cache=True,
            streamer=clock,
        )
    return clock.seconds


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect what libraries print, so that the result line is alone on stdout."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def report(
    peer: str,
    package: str,
    *,
    load_seconds: float,
    seconds: list[float],
    new_tokens: int,
    model_bytes: int,
    resident_bytes: int | None,
) -> None:
    """Print the `PEER` line. Raises RuntimeError if another number of tokens was generated."""
    if len(seconds) != new_tokens:
        raise RuntimeError(f"{peer} generated {len(seconds)} tokens, expected {new_tokens}")
    run = PeerRun(
        peer=peer,
        version=version(package),
        load_seconds=load_seconds,
        prefill_seconds=seconds[0],
        seconds_per_token=tuple(seconds[1:]),
        batch=1,
        model_bytes=model_bytes,
        resident_bytes=resident_bytes,
    )
    print(run.line(), flush=True)
