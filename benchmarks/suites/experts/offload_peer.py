# SPDX-License-Identifier: Apache-2.0
"""llama.cpp with what suits it best: threads, and what the kernel reads ahead of a page fault."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import memory_capped
from benchmarks.harness.disk import read_ahead
from benchmarks.harness.memory_capped_peers import PeerRuns
from benchmarks.harness.memory_limit import drop_cached
from benchmarks.harness.runner import MeasurementError
from benchmarks.suites.experts.offload_settings import Settings
from benchmarks.suites.experts.offload_summary import LLAMA

_LLAMA_THREADS = (4, 2, 8)
_READ_AHEAD_KIB = (None, 128, 1024)
"""Read ahead of a page fault: what this machine has, Linux's default, and between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama:
    """llama.cpp at its best.

    Attributes:
        command: its command line.
        read_ahead_kib: what the kernel reads ahead of a page fault; None for the machine's own.
    """

    command: list[str]
    read_ahead_kib: int | None


def best_llama(
    settings: Settings,
    model: Path,
    folder: Path,
    batch: int,
    limit_bytes: int | None,
    skipped: Mapping[str, str],
) -> tuple[Llama | None, dict[str, str]]:
    """Return llama.cpp with what suits it best, or why there is none.

    The read-ahead is chosen with the first number of threads, then the threads with the best one.
    """
    if skipped:
        return None, {}
    rates: dict[tuple[int, int | None], float] = {}
    commands: dict[int, list[str]] = {}
    failed = ""
    for threads in _LLAMA_THREADS:
        runs = PeerRuns(
            python=settings.peers_python or sys.executable,
            model=model,
            folder=folder / "peers" / settings.shape,
            load=dataclasses.replace(settings.load(batch), threads=threads),
        )
        short = [*runs.command(LLAMA, 0.0, new_tokens=6), "--random-tokens"]
        commands[threads] = [*runs.command(LLAMA, 0.0), "--random-tokens"]
        for kib in [max(rates, key=lambda key: rates[key])[1]] if rates else _READ_AHEAD_KIB:
            try:
                runs.prepare(LLAMA)
                drop_cached([folder])
                with read_ahead(folder, kib):
                    measured = memory_capped.measure(LLAMA, short, limit_bytes, settings.threads)
            except (MeasurementError, OSError) as error:
                failed = str(error)
            else:
                rates[threads, kib] = memory_capped.tokens_per_s(measured)
    if not rates:
        return None, {LLAMA: failed}
    threads, kib = max(rates, key=lambda key: rates[key])
    return Llama(command=commands[threads], read_ahead_kib=kib), {}


def read_ahead_of(store: Path, name: str, llama: Llama | None) -> AbstractContextManager[None]:
    """Return the read-ahead that a contender is measured with."""
    if name == LLAMA and llama is not None:
        return read_ahead(store, llama.read_ahead_kib)
    return nullcontext()
