# SPDX-License-Identifier: Apache-2.0
"""Batch size at which the sparse FFN stops paying, and whether the plugin's choice follows it.

One engine runs an OPT with synthetic sparsity (benchmarks/inputs/synthetic_sparsity/model.py)
without a memory limit. Near memory holds a share of the neurons; everything else comes from the
disk. The tokens of a batch together need most neurons of a layer (M2Cache's stated limit), so from
some batch size on it is faster to stream all of them. Each batch is decoded sparsely, densely and
as the plugin chooses, in interleaved rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import memory_capped
from benchmarks.harness.batch_decode import PATHS
from benchmarks.harness.cache import cache_root
from benchmarks.harness.memory_limit import drop_cached
from benchmarks.harness.progress import Step
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.synthetic_sparsity.model import SYNTHETIC_SHAPES, synthetic_model_dir
from benchmarks.inputs.synthetic_sparsity.store import synthetic_store

RESULT_KEYS = (
    "by_batch",
    "switch_over_batch",
    "choice_ratio",
    "choice_is_within_5_percent",
    "synthetic_sparsity",
    "definitions",
)

DEFINITIONS = {
    "by_batch": "tokens/s of all requests together, by the median step, medians over rounds; and"
    " the share of layers' steps that were computed sparsely",
    "switch_over_batch": "the smallest batch from which on dense is faster (null: none)",
    "choice_ratio": "tokens/s of what the plugin chose over the better of sparse and dense, the"
    " worst batch; of each batch the median of the rounds' ratios",
    "synthetic_sparsity": "the weights are random and built to be sparse; see"
    " benchmarks/inputs/synthetic_sparsity/model.py",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        shape: a name of `benchmarks.inputs.synthetic_sparsity.model.SYNTHETIC_SHAPES`.
        near_share: share of the FFN's bytes given to the near neuron cache.
        prompt_step: by how much each request's prompt is longer than the one before.
        folder: where models and stores are kept, on the disk under test ("": the cache folder).
    """

    shape: str
    batches: tuple[int, ...]
    rounds: int
    new_tokens: int = 8
    prompt_tokens: int = 12
    prompt_step: int = 11
    near_share: float = 0.6
    threads: int = 2
    folder: str = ""


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(shape="opt-1.3b", batches=(1, 4, 16, 64), rounds=2),
    "full": Settings(shape="opt-6.7b", batches=(1, 2, 4, 8, 16, 32, 64), rounds=3),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    return 2 + len(settings.batches)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    folder = Path(settings.folder) if settings.folder else cache_root() / "out-of-core"
    folder.mkdir(parents=True, exist_ok=True)
    model = synthetic_model_dir(settings.shape, folder)
    step(f"synthetic {settings.shape} in {model}")
    store = synthetic_store(model, folder)
    step(f"neuron store: {store}")
    drop_cached([folder])
    command = batch_command(settings, model, store)
    measured = memory_capped.measure("batches", command, None, settings.threads)
    result = summarise(measured["runs"])
    for batch, figures in result["by_batch"].items():
        rates = ", ".join(f"{path} {figures[path]:.2f}" for path in PATHS)
        step(f"batch {batch}: {rates} tokens/s")
    return result | {
        "manifest": measured["manifest"],
        "synthetic_sparsity": True,
        "definitions": DEFINITIONS,
    }


def batch_command(settings: Settings, model: Path, store: Path) -> list[str]:
    """Return the command line of `benchmarks.harness.batch_decode`."""
    sizes = SYNTHETIC_SHAPES[settings.shape].sizes
    ffn_bytes = 4 * sizes.ffn_dim * sizes.hidden_size * sizes.num_layers
    most = max(settings.batches)
    load = memory_capped.Load(
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        batch=most,
        prompt_step=settings.prompt_step,
    )
    tiered = {
        "ffn": {
            "store": str(store),
            "mix": [1.0, 0.0, 0.0],
            "near_gib": settings.near_share * ffn_bytes / 2**30,
            "far_gib": 0,
        }
    }
    return [
        *(sys.executable, "-m", "benchmarks.harness.batch_decode", "--model", str(model)),
        *("--tiered", json.dumps(tiered), "--kv-bytes", str(load.kv_bytes(sizes))),
        *("--prompt-tokens", str(settings.prompt_tokens)),
        *("--prompt-step", str(settings.prompt_step)),
        *("--new-tokens", str(settings.new_tokens), "--rounds", str(settings.rounds)),
        *("--batches", json.dumps(list(settings.batches))),
    ]


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all runs."""
    batches = sorted({run["batch"] for run in runs})
    by_batch: dict[int, dict[str, Any]] = {}
    ratios: dict[int, float] = {}
    for batch in batches:
        of_batch = [run for run in runs if run["batch"] == batch]
        rates = {
            path: [
                batch / statistics.median(run["seconds_per_step"])
                for run in sorted(of_batch, key=lambda run: int(run["round"]))
                if run["path"] == path
            ]
            for path in PATHS
        }
        shares = {path: _sparse_share(of_batch, path) for path in PATHS}
        by_batch[batch] = {path: statistics.median(of) for path, of in rates.items()}
        by_batch[batch]["sparse_share"] = shares
        ratios[batch] = statistics.median(
            chosen / max(sparse, dense)
            for sparse, dense, chosen in zip(*(rates[path] for path in PATHS), strict=True)
        )
        by_batch[batch]["choice_ratio"] = ratios[batch]
    switch_over = None
    for batch in reversed(batches):
        if by_batch[batch]["dense"] < by_batch[batch]["sparse"]:
            break
        switch_over = batch
    worst = min(ratios.values())
    return {
        "by_batch": {str(batch): figures for batch, figures in by_batch.items()},
        "switch_over_batch": switch_over,
        "choice_ratio": worst,
        "choice_is_within_5_percent": worst >= 0.95,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return Markdown: a row for each batch."""
    rows = [
        [
            str(batch),
            *(number(figures[path], 2) for path in PATHS),
            number(100 * figures["choice_ratio"], 0),
            number(100 * figures["sparse_share"]["chosen"], 0),
        ]
        for batch, figures in result["by_batch"].items()
    ]
    headings = ["batch (synthetic)", *(f"{path}, tokens/s" for path in PATHS)]
    return markdown([*headings, "chosen over better %", "chosen sparse %"], rows)


def _sparse_share(runs: Sequence[Mapping[str, Any]], path: str) -> float:
    """Return the share of layer steps that were computed sparsely."""
    used = [run["use"] for run in runs if run["path"] == path]
    sparse = sum(use.get("ffn_sparse_steps", 0.0) for use in used)
    return float(sparse / max(1.0, sparse + sum(use.get("ffn_dense_steps", 0.0) for use in used)))
