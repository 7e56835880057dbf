# SPDX-License-Identifier: Apache-2.0
"""M2Cache, figures 9 and 13: mixed-precision neurons for a model that does not fit in memory.

The model is an OPT with synthetic sparsity (benchmarks/inputs/synthetic_sparsity/model.py). Every
contender decodes one request under the same memory limit, page cache included: half of the weights
plus what vLLM itself takes with an almost empty model. The plugin keeps all but the FFN near. It
splits the remaining memory between the near neuron cache and the far neurons of the first layers,
and reads the rest from the disk.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import memory_capped
from benchmarks.harness.cache import cache_root
from benchmarks.harness.memory_capped_peers import PeerRuns, lacking
from benchmarks.harness.memory_limit import can_limit, drop_cached
from benchmarks.harness.progress import Step
from benchmarks.inputs.synthetic_sparsity.model import SYNTHETIC_SHAPES, synthetic_model_dir
from benchmarks.inputs.synthetic_sparsity.store import synthetic_store
from benchmarks.suites.ffn.flash import ffn_near_bytes
from benchmarks.suites.ffn.mixed_summary import (
    DEFINITIONS,
    DENSE,
    FULL,
    LAYERS,
    OURS,
    POLICIES,
    UNCACHED,
    summarise,
    table,
)

__all__ = ["PROFILES", "RESULT_KEYS", "num_steps", "run", "table"]

RESULT_KEYS = (
    "speedup_vs_layer_streaming",
    "speedup_vs_llama_cpp",
    "ratio_to_dense",
    "mixed_precision_gain",
    "cache_gain",
    "carbon_ratio",
    "policies",
    "by_contender",
    "skipped",
    "limit_bytes",
    "is_limited",
    "synthetic_sparsity",
    "definitions",
)

_PRECISIONS = ("full", "int8", "int4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        shape: a name of `benchmarks.inputs.synthetic_sparsity.model.SYNTHETIC_SHAPES`.
        mix: shares of the predicted neurons in 16, 8 and 4 bit.
        near_share: share of the memory left to the FFN that the near cache gets; the rest is far.
        peers: names of the peers to compare with; those not installed are skipped and reported.
        peers_python: the interpreter that has the peers' packages ("": this one).
        folder: where models and stores are kept, on the disk under test ("": the cache folder).
    """

    shape: str
    rounds: int
    new_tokens: int
    peers: tuple[str, ...] = ("llama_cpp",)
    mix: tuple[float, ...] = (0.25, 0.25, 0.5)
    near_share: float = 0.6
    window: int = 5
    prompt_tokens: int = 12
    threads: int = 2
    peers_python: str = ""
    folder: str = ""

    @property
    def load(self) -> memory_capped.Load:
        """Return what is decoded."""
        return memory_capped.Load(
            prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens, threads=self.threads
        )


PROFILES: Mapping[str, Settings] = {
    # Half of OPT-1.3B leaves no memory for a far layer besides the near cache.
    "quick": Settings(shape="opt-1.3b", rounds=1, new_tokens=16, near_share=0.9),
    "full": Settings(shape="opt-6.7b", rounds=3, new_tokens=24),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: preparations, then contenders round by round."""
    ours = len({FULL, UNCACHED, LAYERS, DENSE, *POLICIES.values()})
    return 3 + len(settings.peers) + settings.rounds * (ours + len(settings.peers))


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring. Raises ValueError for an unknown peer."""
    lacking(settings.peers, settings.peers_python or sys.executable)
    folder = Path(settings.folder) if settings.folder else cache_root() / "out-of-core"
    folder.mkdir(parents=True, exist_ok=True)
    model = synthetic_model_dir(settings.shape, folder)
    sizes = SYNTHETIC_SHAPES[settings.shape].sizes
    step(f"synthetic {settings.shape}: {sizes.num_bytes / 1e9:.1f} GB in {model}")
    store = synthetic_store(model, folder, precisions=_PRECISIONS, mix=settings.mix)
    step(f"neuron store: {store}")
    resident = memory_capped.vllm_bytes(settings.load, folder)
    limit = sizes.num_bytes // 2 + resident
    step(f"vLLM alone has {resident / 1e9:.2f} GB resident: the limit is {limit / 1e9:.2f} GB")
    limit_bytes = limit if can_limit() else None
    commands = contenders(settings, model, store, folder)
    # The file of streamed layers and the peers' files are made before anything is measured.
    drop_cached([folder])
    memory_capped.measure(LAYERS, commands[LAYERS], limit_bytes, settings.threads)
    runs = PeerRuns(
        python=settings.peers_python or sys.executable,
        model=model,
        folder=folder / "peers" / model.name,
        load=settings.load,
    )
    of_peers, skipped = runs.commands(settings.peers, limit_bytes, step)
    commands |= of_peers
    rounds: list[dict[str, dict[str, Any]]] = []
    for number in range(settings.rounds):
        result: dict[str, dict[str, Any]] = {}
        for name in list(commands)[:: 1 if number % 2 == 0 else -1]:
            drop_cached([folder])
            allowed = None if name == DENSE else limit_bytes
            result[name] = memory_capped.measure(name, commands[name], allowed, settings.threads)
            step(f"{name}: {memory_capped.tokens_per_s(result[name]):.3f} tokens/s")
        for name in skipped:
            step(f"{name}: skipped")
        rounds.append(result)
    return summarise(rounds, skipped) | {
        "limit_bytes": limit,
        "resident_bytes": resident,
        "is_limited": can_limit(),
        "synthetic_sparsity": True,
        "definitions": DEFINITIONS,
    }


def contenders(settings: Settings, model: Path, store: Path, folder: Path) -> dict[str, list[str]]:
    """Return the command lines of the plugin's contenders by name."""
    kv_bytes = settings.load.kv_bytes(SYNTHETIC_SHAPES[settings.shape].sizes)
    ffn_bytes = ffn_near_bytes(settings.shape, model, kv_bytes)

    def sparse(mix: Sequence[float], cache: str) -> list[str]:
        tiered = {
            "ffn": {
                "store": str(store),
                "mix": list(mix),
                "cache": cache,
                "window": settings.window,
                "near_gib": settings.near_share * ffn_bytes / 2**30,
                "far_gib": (1 - settings.near_share) * ffn_bytes / 2**30,
            }
        }
        return memory_capped.decode_command(settings.load, model, kv_bytes, tiered)

    streamed = {
        "weights": {
            "placement": "flexgen",
            "percents": [0, 0, 100],
            "far_gib": 0,
            "storage_path": str(folder / f"{model.name}-layers"),
        }
    }
    return {
        OURS: sparse(settings.mix, "atu"),
        FULL: sparse((1.0, 0.0, 0.0), "atu"),
        UNCACHED: sparse(settings.mix, "none"),
        **{name: sparse(settings.mix, policy) for policy, name in POLICIES.items()},
        LAYERS: memory_capped.decode_command(settings.load, model, kv_bytes, streamed),
        DENSE: memory_capped.decode_command(settings.load, model, kv_bytes),
    }
