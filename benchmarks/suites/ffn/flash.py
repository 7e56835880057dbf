# SPDX-License-Identifier: Apache-2.0
"""LLM in a flash, table 2: cost of reading a token's FFN by each technique, and decoding in vLLM.

The model is an OPT with synthetic sparsity (benchmarks/inputs/synthetic_sparsity/model.py). The
first part measures reads alone: it reads the neurons of each token of a recorded text from the disk
in the paper's five ways, in interleaved rounds. In the second part vLLM decodes one request under a
memory limit: its own resident size plus half the weights. It runs once with the sparse FFN from its
neuron store, and once with dense weights of which half are streamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from benchmarks.harness import memory_capped
from benchmarks.harness.cache import cache_root
from benchmarks.harness.memory_limit import can_limit, drop_cached
from benchmarks.harness.progress import Step
from benchmarks.inputs.synthetic_sparsity.model import (
    PREDICTOR_FILE,
    SYNTHETIC_SHAPES,
    synthetic_model_dir,
)
from benchmarks.inputs.synthetic_sparsity.record import record, sparsity_of_model
from benchmarks.inputs.synthetic_sparsity.store import synthetic_store
from benchmarks.peers.contender import prompt_ids
from benchmarks.suites.ffn.flash_files import Matrices, matrices
from benchmarks.suites.ffn.flash_replay import (
    Apart,
    Bundled,
    Technique,
    Token,
    Whole,
    capacities_for,
    tokens_of,
)
from benchmarks.suites.ffn.flash_summary import (
    BUNDLING,
    DEFINITIONS,
    HALF,
    NAIVE,
    PAPERS_PREDICTOR,
    PREDICTOR,
    SPARSE,
    STREAMED,
    WINDOWING,
    mean_cost,
    summarise_engines,
    summarise_io,
    table,
)
from vllm_tiered.ffn.store.reader import NeuronStore

__all__ = ["PROFILES", "RESULT_KEYS", "num_steps", "run", "table"]

RESULT_KEYS = (
    "io_speedup",
    "end_to_end_speedup",
    "read_share",
    "dram_share",
    "by_technique",
    "by_contender",
    "is_direct",
    "is_limited",
    "synthetic_sparsity",
    "definitions",
)

_PAPERS_SHARE = 0.10
"""Share of the neurons that the paper's predictor selects (LLM in a flash, 4.1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        shape: a name of `benchmarks.inputs.synthetic_sparsity.model.SYNTHETIC_SHAPES`.
        tokens: number of tokens replayed and counted, after `window` warm-up tokens.
        dense_tokens: number of tokens for the techniques that read everything; their tokens cost
            the same.
        window: number of tokens whose neurons stay cached, the paper's k.
        new_tokens: number of tokens that vLLM decodes; 0 leaves the engines out.
        folder: where models and stores are kept, on the disk under test ("": the cache folder).
    """

    shape: str
    rounds: int
    engine_rounds: int
    tokens: int = 32
    dense_tokens: int = 2
    window: int = 5
    prompt_tokens: int = 12
    new_tokens: int = 24
    threads: int = 2
    folder: str = ""


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(shape="opt-1.3b", rounds=3, engine_rounds=1, new_tokens=16),
    "full": Settings(shape="opt-6.7b", rounds=5, engine_rounds=3),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: preparations, replays and engines."""
    engines = 1 + 2 * settings.engine_rounds if settings.new_tokens else 0
    return 3 + settings.rounds * 6 + engines


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    folder = Path(settings.folder) if settings.folder else cache_root() / "out-of-core"
    folder.mkdir(parents=True, exist_ok=True)
    model = synthetic_model_dir(settings.shape, folder)
    sizes = SYNTHETIC_SHAPES[settings.shape].sizes
    step(f"synthetic {settings.shape}: {sizes.num_bytes / 1e9:.1f} GB in {model}")
    files, path = matrices(model, folder), synthetic_store(model, folder)
    step(f"neuron store, and rows and columns apart: {path}")
    texts = recorded(settings, model)
    step(f"recorded {len(texts[0])} tokens")
    store = NeuronStore.open(path)
    try:
        io = _replayed(settings, files, store, texts, model, step)
        is_direct = store.is_direct
    finally:
        store.close()
    engines: list[dict[str, dict[str, Any]]] = []
    if settings.new_tokens:
        engines = _engines(settings, model, path, folder, step)
    return {
        **io,
        **summarise_engines(engines),
        "is_direct": is_direct,
        "is_limited": can_limit(),
        "synthetic_sparsity": True,
        "definitions": DEFINITIONS,
    }


def recorded(settings: Settings, model: Path) -> tuple[list[Token], list[Token]]:
    """Return each token's neurons by layer, for the synthetic predictor and a 10 % predictor."""
    num_tokens = settings.window + settings.tokens
    sizes = SYNTHETIC_SHAPES[settings.shape].sizes
    ids = [3 + token % (sizes.vocab_size - 3) for token in prompt_ids(num_tokens)]
    sparsity = sparsity_of_model(model)
    normal = NormalDist()
    threshold = normal.inv_cdf(1 - sparsity.active_share) * (1 + sparsity.noise**2) ** 0.5
    low = normal.inv_cdf(1 - _PAPERS_SHARE) - threshold
    predicted, more = [], []
    for layer in record(model, ids):
        predicted.append(layer.predicted)
        more.append(layer.scores >= low)
    return tokens_of(predicted), tokens_of(more)


def _replayed(
    settings: Settings,
    files: Matrices,
    store: NeuronStore,
    texts: tuple[list[Token], list[Token]],
    model: Path,
    step: Step,
) -> dict[str, Any]:
    sizes = SYNTHETIC_SHAPES[settings.shape].sizes
    other_bytes = sizes.num_bytes - files.num_bytes
    predictor_bytes = (model / PREDICTOR_FILE).stat().st_size
    resident_bytes = max(0, sizes.num_bytes // 2 - other_bytes)
    held_bytes: dict[str, int] = {}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(settings.rounds):
        result = {}
        names = (NAIVE, HALF, PREDICTOR, WINDOWING, BUNDLING, PAPERS_PREDICTOR)
        for name in names[:: 1 if number % 2 == 0 else -1]:
            tokens = texts[name == PAPERS_PREDICTOR]
            # Techniques run one at a time, so that only one's cache buffers are in memory.
            technique = _technique(name, settings, files, store, tokens, resident_bytes)
            try:
                result[name] = _replay(technique, settings, tokens)
            finally:
                technique.close()
            uses_predictor = name not in (NAIVE, HALF)
            held = other_bytes * (name != NAIVE) + technique.dram_bytes
            held_bytes[name] = held + predictor_bytes * uses_predictor
            read = result[name]["read_seconds"]
            step(f"round {number + 1}/{settings.rounds} {name}: {1000 * read:.1f} ms a token")
        rounds.append(result)
    return summarise_io(
        rounds, ffn_bytes=files.num_bytes, model_bytes=sizes.num_bytes, held_bytes=held_bytes
    )


def _technique(
    name: str,
    settings: Settings,
    files: Matrices,
    store: NeuronStore,
    tokens: Sequence[Token],
    resident_bytes: int,
) -> Technique:
    if name == NAIVE:
        return Whole(files)
    if name == HALF:
        return Whole(files, resident_bytes)
    if name == PREDICTOR:
        return Apart(files, capacities_for(tokens, 1), 0)
    capacities = capacities_for(tokens, settings.window)
    if name == WINDOWING:
        return Apart(files, capacities, settings.window)
    return Bundled(store, capacities, settings.window)


def _replay(technique: Technique, settings: Settings, tokens: Sequence[Token]) -> dict[str, float]:
    if isinstance(technique, Whole):
        return mean_cost([technique.token(t) for t in tokens[: settings.dense_tokens]])
    for token in tokens[: settings.window]:
        technique.token(token)
    return mean_cost([technique.token(token) for token in tokens[settings.window :]])


def _engines(
    settings: Settings, model: Path, store: Path, folder: Path, step: Step
) -> list[dict[str, dict[str, Any]]]:
    """Run interleaved rounds of the two engines."""
    sizes = SYNTHETIC_SHAPES[settings.shape].sizes
    load = memory_capped.Load(
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        threads=settings.threads,
    )
    resident = memory_capped.vllm_bytes(load, folder)
    limit = sizes.num_bytes // 2 + resident
    step(f"vLLM alone has {resident / 1e9:.2f} GB resident: the limit is {limit / 1e9:.2f} GB")
    commands = {
        SPARSE: sparse_command(load, settings, model, store),
        STREAMED: streamed_command(load, settings, model, folder / f"{model.name}-streamed"),
    }
    limit_bytes = limit if can_limit() else None
    # A separate start fills the file of streamed weights.
    drop_cached([folder])
    memory_capped.measure(STREAMED, commands[STREAMED], limit_bytes, settings.threads)
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(settings.engine_rounds):
        result = {}
        for name in list(commands)[:: 1 if number % 2 == 0 else -1]:
            drop_cached([folder])
            result[name] = memory_capped.measure(
                name, commands[name], limit_bytes, settings.threads
            )
            step(f"{name}: {memory_capped.tokens_per_s(result[name]):.3f} tokens/s")
        rounds.append(result)
    return rounds


def sparse_command(
    load: memory_capped.Load, settings: Settings, model: Path, store: Path
) -> list[str]:
    """Return the sparse engine's command: the FFN gets what the near rest of the model leaves."""
    kv_bytes = load.kv_bytes(SYNTHETIC_SHAPES[settings.shape].sizes)
    near_bytes = ffn_near_bytes(settings.shape, model, kv_bytes)
    tiered = {
        "ffn": {
            "store": str(store),
            "mix": [1.0, 0.0, 0.0],
            "cache": "window",
            "window": settings.window,
            "near_gib": near_bytes / 2**30,
            "far_gib": 0,
        }
    }
    return memory_capped.decode_command(load, model, kv_bytes, tiered)


def streamed_command(
    load: memory_capped.Load, settings: Settings, model: Path, folder: Path
) -> list[str]:
    """Return the dense engine's command: half the model's bytes near, the rest streamed."""
    sizes = SYNTHETIC_SHAPES[settings.shape].sizes
    kv_bytes = load.kv_bytes(sizes)
    embeddings = (sizes.vocab_size + sizes.max_positions) * sizes.hidden_size * 2
    near_bytes = sizes.num_bytes // 2 - embeddings - kv_bytes - memory_capped.MARGIN_BYTES
    tiered = {
        "weights": {
            "placement": "latency",
            "near_gib": near_bytes / 2**30,
            "far_gib": 0,
            "storage_path": str(folder),
        }
    }
    return memory_capped.decode_command(load, model, kv_bytes, tiered)


def ffn_near_bytes(shape: str, model: Path, kv_bytes: int) -> int:
    """Return the bytes left for the FFN from half the model's bytes."""
    sizes = SYNTHETIC_SHAPES[shape].sizes
    ffn_bytes = 4 * sizes.ffn_dim * sizes.hidden_size * sizes.num_layers
    other_bytes = sizes.num_bytes - ffn_bytes
    return sizes.num_bytes // 2 - other_bytes - kv_bytes - memory_capped.MARGIN_BYTES
