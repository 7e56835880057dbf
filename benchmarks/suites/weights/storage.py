# SPDX-License-Identifier: Apache-2.0
"""A model that does not fit in memory, served from an SSD: the plugin against today's peers.

Every contender serves one request with the same bytes of weights under the same memory limit, page
cache included: a share of the weights plus what vLLM itself takes with an almost empty model. The
plugin keeps near what fits and streams the rest ahead of compute. A separate start fills the file
of weights once; the peers' files are made once too. Rounds are interleaved. Each begins by
measuring the disk's own sequential bandwidth, and with none of the files in the page cache.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import memory_capped
from benchmarks.harness.cache import cache_root
from benchmarks.harness.disk import sequential_read_gb_per_s
from benchmarks.harness.memory_capped_peers import PeerRuns, lacking
from benchmarks.harness.memory_limit import can_limit, drop_cached
from benchmarks.harness.progress import Step
from benchmarks.peers.model import model_dir
from benchmarks.peers.shapes import DENSE, outside_layers_bytes
from benchmarks.suites.weights.storage_summary import DEFINITIONS, OURS, summarise, table

__all__ = ["PROFILES", "RESULT_KEYS", "num_steps", "run", "table"]

RESULT_KEYS = (
    "tokens_per_s_ratio",
    "disk_share",
    "second_start_ratio",
    "by_contender",
    "best_peer",
    "skipped_peers",
    "limit_bytes",
    "resident_bytes",
    "is_limited",
    "definitions",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        shape: a name of `benchmarks.peers.shapes.DENSE`.
        memory_share: share of the weights that memory holds.
        peers: names of the peers to compare with; those not installed are skipped and reported.
        peers_python: the interpreter that has the peers' packages ("": this one).
        folder: where models and stores are kept, on the disk under test ("": the cache folder).
    """

    shape: str
    new_tokens: int
    rounds: int
    peers: tuple[str, ...]
    memory_share: float = 0.5
    prompt_tokens: int = 12
    threads: int = 2
    placement: str = "latency"
    peers_python: str = ""
    folder: str = ""

    @property
    def load(self) -> memory_capped.Load:
        """Return what is decoded."""
        return memory_capped.Load(
            prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens, threads=self.threads
        )


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(shape="opt-1.3b", new_tokens=6, rounds=1, peers=("llama_cpp",)),
    "full": Settings(
        shape="opt-6.7b",
        new_tokens=10,
        rounds=3,
        peers=("llama_cpp", "flexgen", "accelerate_disk", "airllm_disk"),
    ),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: preparations, the first start, and the rounds."""
    return 4 + len(settings.peers) + settings.rounds * (2 + len(settings.peers))


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises ValueError for an unknown peer."""
    lacking(settings.peers, settings.peers_python or sys.executable)
    folder = Path(settings.folder) if settings.folder else cache_root() / "out-of-core"
    folder.mkdir(parents=True, exist_ok=True)
    model = model_dir(settings.shape, folder)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    step(f"{settings.shape}: {weights / 1e9:.1f} GB in {model}")
    resident = memory_capped.vllm_bytes(settings.load, folder)
    limit = int(settings.memory_share * weights) + resident
    step(f"vLLM alone has {resident / 1e9:.2f} GB resident: the limit is {limit / 1e9:.2f} GB")
    is_limited = can_limit()
    limit_bytes = limit if is_limited else None
    runs = PeerRuns(
        python=settings.peers_python or sys.executable,
        model=model,
        folder=folder / "peers" / settings.shape,
        load=settings.load,
        largest_share=settings.memory_share,
    )
    commands, skipped = runs.commands(settings.peers, limit_bytes, step)
    all_stored = _starts(settings, model, folder, limit_bytes)
    step(f"all stored: weights in {' and '.join(f'{s:.1f}' for s in all_stored['weights'])} s")
    store = folder / f"store-{settings.shape}"
    _empty(store)
    commands = {OURS: _our_command(settings, model, store, limit - resident), **commands}
    drop_cached([folder])
    first = memory_capped.measure(OURS, commands[OURS], limit_bytes, settings.threads)
    step(f"first start: weights in {first['weights_load_seconds']:.1f} s")
    rounds: list[dict[str, dict[str, Any]]] = []
    for index in range(settings.rounds):
        disk = sequential_read_gb_per_s(memory_capped.files_in(store))
        step(f"round {index + 1}: the disk reads {disk:.2f} GB/s")
        result: dict[str, dict[str, Any]] = {"disk": {"gb_per_s": disk}}
        for name, command in memory_capped.rotated(list(commands.items()), index):
            drop_cached([folder])
            result[name] = memory_capped.measure(name, command, limit_bytes, settings.threads)
            step(f"{name}: {memory_capped.tokens_per_s(result[name]):.3f} tokens/s")
        for name in skipped:
            step(f"{name}: skipped")
        rounds.append(result)
    return summarise(rounds, first, all_stored, skipped) | {
        "limit_bytes": limit,
        "resident_bytes": resident,
        "is_limited": is_limited,
        "weights_bytes": weights,
        "definitions": DEFINITIONS,
    }


def _starts(
    settings: Settings, model: Path, folder: Path, limit_bytes: int | None
) -> dict[str, list[float]]:
    """Return the seconds of the first start, and of the second with every layer stored."""
    store = folder / f"store-all-{settings.shape}"
    _empty(store)
    command = [
        *_base_command(settings, model, new_tokens=2),
        *("--store", str(store), "--placement", "all_far"),
    ]
    runs = []
    for _ in range(2):
        drop_cached([folder])
        runs.append(memory_capped.measure(OURS, command, limit_bytes, settings.threads))
    _empty(store)
    return {
        "weights": [run["weights_load_seconds"] for run in runs],
        "engine": [run["load_seconds"] for run in runs],
    }


def _our_command(settings: Settings, model: Path, store: Path, for_weights: int) -> list[str]:
    """Return the plugin's command; near memory is the limit less vLLM, embeddings and KV cache."""
    shape = DENSE[settings.shape]
    near_bytes = for_weights - outside_layers_bytes(shape)
    near_bytes -= settings.load.kv_bytes(shape) + memory_capped.MARGIN_BYTES
    return [
        *_base_command(settings, model, new_tokens=settings.new_tokens),
        *("--store", str(store), "--near-bytes", str(near_bytes)),
        *("--placement", settings.placement),
    ]


def _base_command(settings: Settings, model: Path, *, new_tokens: int) -> list[str]:
    return [
        *(sys.executable, "-m", "benchmarks.harness.out_of_core", "--model", str(model)),
        *("--kv-bytes", str(settings.load.kv_bytes(DENSE[settings.shape]))),
        *("--prompt-tokens", str(settings.prompt_tokens), "--new-tokens", str(new_tokens)),
    ]


def _empty(folder: Path) -> None:
    for file in memory_capped.files_in(folder) if folder.is_dir() else ():
        file.unlink()
