# SPDX-License-Identifier: Apache-2.0
"""A model that memory does not hold, from an SSD: the plugin against what people use today.

Every contender serves one request with the same bytes of weights under the same memory limit, page
cache included: a share of the weights plus what vLLM itself takes with an almost empty model. The
plugin keeps near what fits and streams the rest ahead of compute. The file of weights is filled
once, in a start of its own; so are the peers' files. Rounds are interleaved, and each begins with
the disk's own sequential bandwidth and without any of the files in the page cache.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.cache import REPO_ROOT, cache_root
from benchmarks.disk import sequential_read_gb_per_s
from benchmarks.memory_limit import can_limit, drop_cached, run_limited
from benchmarks.out_of_core import KV_BLOCK_TOKENS
from benchmarks.peers.model import SHAPES, opt_dir
from benchmarks.progress import Step
from benchmarks.runner import MeasurementError
from benchmarks.storage_summary import DEFINITIONS, OURS, summarise, table, tokens_per_s

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

_TIMEOUT_S = 1800
_MARGIN_BYTES = 96 << 20
"""Between what we may hold and what we plan to: buffers, and what grows a little in use."""

_SHARE_STEP = 0.04
"""By which a peer that is killed keeps less in memory."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What one profile runs.

    Attributes:
        shape: a name of `benchmarks.peers.model.SHAPES`.
        memory_share: of the weights, that memory holds.
        peers: those to compare with, by name; what is not installed is skipped, and said.
        peers_python: the interpreter that has the peers' packages ("": this one).
        folder: where models and stores are kept ("": the cache folder), on the disk to be measured.
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
    num_peers = len(settings.peers)
    lacking = peers.available(_python(settings))
    num_ready = sum(lacking[name] is None for name in settings.peers)
    return 4 + num_peers + num_ready + settings.rounds * (2 + num_peers)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    folder = Path(settings.folder) if settings.folder else cache_root() / "out-of-core"
    folder.mkdir(parents=True, exist_ok=True)
    model = opt_dir(settings.shape, folder)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    step(f"{settings.shape}: {weights / 1e9:.1f} GB in {model}")
    resident = _resident_bytes(settings, folder)
    limit = int(settings.memory_share * weights) + resident
    step(f"vLLM alone has {resident / 1e9:.2f} GB resident: the limit is {limit / 1e9:.2f} GB")
    ready, skipped = _prepared(settings, model, folder, step)
    is_limited = can_limit()
    limit_bytes = limit if is_limited else None
    store = folder / f"store-{settings.shape}"
    _empty(store)
    ours = _our_command(settings, model, store, limit - resident)
    all_stored = _starts(settings, model, folder, limit_bytes)
    step(f"all stored: weights in {' and '.join(f'{s:.1f}' for s in all_stored['weights'])} s")
    drop_cached([folder])
    first = _measure(OURS, ours, limit_bytes, settings)
    step(f"first start: weights in {first['weights_load_seconds']:.1f} s")
    commands = {OURS: ours}
    for name in ready:
        commands[name] = _fitting_command(name, settings, model, folder, limit_bytes, step)
    rounds: list[dict[str, dict[str, Any]]] = []
    for index in range(settings.rounds):
        disk = sequential_read_gb_per_s(_files(store))
        step(f"round {index + 1}: the disk reads {disk:.2f} GB/s")
        result: dict[str, dict[str, Any]] = {"disk": {"gb_per_s": disk}}
        for name, command in _rotated(list(commands.items()), index):
            drop_cached([folder])
            result[name] = _measure(name, command, limit_bytes, settings)
            step(f"{name}: {tokens_per_s(result[name]):.3f} tokens/s")
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


def _prepared(
    settings: Settings, model: Path, folder: Path, step: Step
) -> tuple[list[str], dict[str, str]]:
    """Peers that can run, with their files made, and why the others cannot."""
    lacking = peers.available(_python(settings))
    ready: list[str] = []
    skipped: dict[str, str] = {}
    for name in settings.peers:
        missing = lacking[name]
        if missing is not None:
            skipped[name] = missing
            step(f"{name} is skipped: {missing}")
            continue
        _prepare(name, settings, model, folder)
        ready.append(name)
        step(f"{name}: its files are there")
    return ready, skipped


def _starts(
    settings: Settings, model: Path, folder: Path, limit_bytes: int | None
) -> dict[str, list[float]]:
    """Seconds of the first start and of the second with every layer stored."""
    store = folder / f"store-all-{settings.shape}"
    _empty(store)
    short = replace(settings, new_tokens=2)
    command = [
        *_base_command(short, model, kv_bytes=_kv_bytes(short)),
        *("--store", str(store), "--placement", "all_far"),
    ]
    runs = []
    for _ in range(2):
        drop_cached([folder])
        runs.append(_measure(OURS, command, limit_bytes, short))
    _empty(store)
    return {
        "weights": [run["weights_load_seconds"] for run in runs],
        "engine": [run["load_seconds"] for run in runs],
    }


def _prepare(name: str, settings: Settings, model: Path, folder: Path) -> None:
    """Let a peer make its files, which takes what memory it takes."""
    command = _peer_command(name, settings, model, folder, share=0.0, prepare=True)
    outcome = run_limited(
        command, None, timeout_s=_TIMEOUT_S, env=_environment(settings), cwd=REPO_ROOT
    )
    if outcome.returncode:
        raise MeasurementError(f"{name} could not prepare its files:\n{outcome.output[-3000:]}")


def _fitting_command(
    name: str,
    settings: Settings,
    model: Path,
    folder: Path,
    limit_bytes: int | None,
    step: Step,
) -> list[str]:
    """With the largest share of weights in memory that the limit allows, if it takes one."""
    share = settings.memory_share
    if not peers.PEERS[name].uses_resident_share:
        step(f"{name}: the system decides what stays in memory")
        return _peer_command(name, settings, model, folder, share=share)
    trial = replace(settings, new_tokens=2)
    while True:
        drop_cached([folder])
        try:
            _measure(
                name, _peer_command(name, trial, model, folder, share=share), limit_bytes, trial
            )
        except MeasurementError:
            share -= _SHARE_STEP
            if share < 0:
                raise
            continue
        step(f"{name}: keeps {share:.0%} of the weights in memory")
        return _peer_command(name, settings, model, folder, share=share)


def _peer_command(
    name: str,
    settings: Settings,
    model: Path,
    folder: Path,
    *,
    share: float,
    prepare: bool = False,
) -> list[str]:
    return peers.command(
        name,
        _python(settings),
        model=model,
        work=folder / "peers" / settings.shape / name,
        threads=settings.threads,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        resident_share=share,
        prepare=prepare,
    )


def _resident_bytes(settings: Settings, folder: Path) -> int:
    """Of vLLM with a model of next to nothing, less the model."""
    empty = folder / "empty-model"
    empty.mkdir(exist_ok=True)
    (empty / "config.json").write_text(json.dumps(_EMPTY_MODEL), encoding="utf-8")
    command = [*_base_command(settings, empty, kv_bytes=8 << 20), "--load-format", "dummy"]
    return int(_measure("vLLM alone", command, None, settings)["resident_bytes"])


def _our_command(settings: Settings, model: Path, store: Path, for_weights: int) -> list[str]:
    """Near memory is what the limit leaves beside vLLM itself, embeddings and the KV cache."""
    shape = SHAPES[settings.shape]
    other_bytes = (shape.vocab_size + shape.max_positions) * shape.hidden_size * 2
    kv_bytes = _kv_bytes(settings)
    near_bytes = for_weights - other_bytes - kv_bytes - _MARGIN_BYTES
    return [
        *_base_command(settings, model, kv_bytes=kv_bytes),
        *("--store", str(store), "--near-bytes", str(near_bytes)),
        *("--placement", settings.placement),
    ]


def _kv_bytes(settings: Settings) -> int:
    """Of the request, in whole blocks, and of the block that vLLM keeps for itself."""
    shape = SHAPES[settings.shape]
    blocks = -(-(settings.prompt_tokens + settings.new_tokens) // KV_BLOCK_TOKENS) + 1
    return blocks * KV_BLOCK_TOKENS * 2 * shape.num_layers * shape.hidden_size * 2


def _base_command(settings: Settings, model: Path, *, kv_bytes: int) -> list[str]:
    return [
        *(sys.executable, "-m", "benchmarks.out_of_core", "--model", str(model)),
        *("--kv-bytes", str(kv_bytes)),
        *("--prompt-tokens", str(settings.prompt_tokens)),
        *("--new-tokens", str(settings.new_tokens)),
    ]


def _measure(
    name: str, command: Sequence[str], limit_bytes: int | None, settings: Settings
) -> dict[str, Any]:
    outcome = run_limited(
        command, limit_bytes, timeout_s=_TIMEOUT_S, env=_environment(settings), cwd=REPO_ROOT
    )
    lines = [line for line in outcome.output.splitlines() if line.startswith(peers.PREFIX)]
    if outcome.returncode or len(lines) != 1:
        why = "was killed for want of memory" if outcome.was_killed else "failed"
        raise MeasurementError(f"{name} {why}:\n{outcome.output[-3000:]}")
    measured: dict[str, Any] = json.loads(lines[0].removeprefix(peers.PREFIX))
    return measured | {"peak_bytes": outcome.peak_bytes}


def _environment(settings: Settings) -> dict[str, str]:
    return {
        **os.environ,
        "VLLM_PLUGINS": "tiered",
        "PYTHONPATH": str(REPO_ROOT),
        "OMP_NUM_THREADS": str(settings.threads),
    }


def _python(settings: Settings) -> str:
    return settings.peers_python or sys.executable


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _empty(folder: Path) -> None:
    for file in _files(folder) if folder.is_dir() else ():
        file.unlink()


def _rotated(items: list[Any], by: int) -> Iterator[Any]:
    """Another contender is first in each round."""
    yield from items[by % len(items) :]
    yield from items[: by % len(items)]
