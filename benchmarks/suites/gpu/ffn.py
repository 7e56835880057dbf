# SPDX-License-Identifier: Apache-2.0
"""Sparse FFN on a GPU against streaming the dense one, with the same near bytes.

The model is an OPT with synthetic sparsity (benchmarks/inputs/synthetic_sparsity/model.py). It and
its neuron store are written on first use. Each engine decodes one request: the sparse FFN, whose
near cache holds `near_share` of the neurons and whose far memory holds the rest; dense layers
placed for latency in as much near memory; and everything near.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.cache import cache_root
from benchmarks.harness.jobs import EngineSpec, RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import engines, interleave
from benchmarks.harness.summary import median_ratio
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.synthetic_sparsity.model import SYNTHETIC_SHAPES, synthetic_model_dir
from benchmarks.inputs.synthetic_sparsity.store import synthetic_store
from benchmarks.inputs.workload import Request, warmup_requests
from benchmarks.suites.gpu import load
from vllm_tiered.planner.model_shape import model_shape

RESULT_KEYS = ("device", "ratio_to_streaming", "systems", "synthetic_sparsity", "definitions")

SPARSE, STREAMED, DENSE = "sparse FFN", "dense, streamed", "dense, near"

DEFINITIONS = {
    "ratio_to_streaming": "tokens/s of the sparse FFN over those of dense layers placed in the same"
    " near bytes: median over rounds",
    "synthetic_sparsity": "the weights are random and built to be sparse; see"
    " benchmarks/inputs/synthetic_sparsity/model.py",
}

_PRECISIONS = ("full", "int8", "int4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile.

    Attributes:
        shape: a name of `benchmarks.inputs.synthetic_sparsity.model.SYNTHETIC_SHAPES`.
        near_share: share of the FFN's bytes that stays near.
        mix: shares of the predicted neurons in 16, 8 and 4 bit.
        folder: where model and store are kept ("": the cache folder).
    """

    shape: str = "opt-1.3b"
    near_share: float = 0.4
    mix: tuple[float, ...] = (1.0, 0.0, 0.0)
    prompt_tokens: int = 12
    output_tokens: int = 64
    rounds: int = 2
    far_gib: float = 16.0
    device: str = "cuda"
    folder: str = ""
    seed: int = 0


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(),
    "full": Settings(shape="opt-6.7b", rounds=5, far_gib=32.0),
}


def num_steps(settings: Settings) -> int:
    """Return how often `run` reports."""
    return 2 + 3 * (1 + settings.rounds)


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    device = load.describe_device("gpu_ffn", settings.device)
    folder = Path(settings.folder) if settings.folder else cache_root() / "out-of-core"
    folder.mkdir(parents=True, exist_ok=True)
    model = synthetic_model_dir(settings.shape, folder, has_tokenizer=False)
    step(f"synthetic {settings.shape} in {model}")
    store = synthetic_store(model, folder, precisions=_PRECISIONS, mix=settings.mix)
    step(f"neuron store: {store}")
    specs = contenders(settings, model, store, int(device.get("memory_bytes", 0)))
    given = _requests(settings, model)
    with engines(specs, warmup_requests(given), step) as group:
        measured = interleave(group, given, settings.rounds, step)
    return {
        "device": device,
        **summarise(measured),
        "engines": load.differ_in(specs),
        "definitions": DEFINITIONS,
    }


def contenders(settings: Settings, model: Path, store: Path, device_bytes: int) -> list[EngineSpec]:
    """Return the three engines, which differ in where the FFN is and how it is computed."""
    shape = model_shape(json.loads((model / "config.json").read_text(encoding="utf-8")))
    sizes = SYNTHETIC_SHAPES[settings.shape].sizes
    ffn_bytes = 4 * sizes.ffn_dim * sizes.hidden_size * sizes.num_layers
    near_ffn_bytes = settings.near_share * ffn_bytes
    near_bytes = shape.layer_bytes - ffn_bytes + near_ffn_bytes
    block = load.BLOCK_TOKENS[settings.device]
    blocks = -(-(settings.prompt_tokens + settings.output_tokens) // block) + 1
    kv_bytes = (blocks + 1) * block * shape.kv_bytes_per_token
    common = load.engine_args(
        settings.device,
        shape.layer_bytes + shape.other_bytes + kv_bytes,
        device_bytes,
        eager=True,
    )
    off = {"kv": {"enabled": False}}
    sparse = {
        "store": str(store),
        "mix": list(settings.mix),
        "near_gib": near_ffn_bytes / 2**30,
        "far_gib": settings.far_gib,
    }
    streamed = {"placement": "latency", "near_gib": near_bytes / 2**30}
    return [
        EngineSpec(
            label=label,
            model_dir=str(model),
            dtype="bfloat16",
            block_size=block,
            kv_cache_memory_bytes=kv_bytes,
            max_num_seqs=1,
            max_model_len=blocks * block,
            enable_prefix_caching=False,
            tiered=tiered,
            engine_args={**common, "skip_tokenizer_init": True},
        )
        for label, tiered in (
            (SPARSE, {**off, "ffn": sparse}),
            (STREAMED, {**off, "weights": streamed}),
            (DENSE, None),
        )
    ]


def _requests(settings: Settings, model: Path) -> list[Request]:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (drawn,) = load.requests(1, 1, 1, int(config["vocab_size"]), settings.seed)
    return [
        Request(
            request_id=drawn.request_id,
            prompt_token_ids=drawn.prompt_token_ids * settings.prompt_tokens,
            num_output_tokens=settings.output_tokens,
        )
    ]


def summarise(measured: Mapping[str, Sequence[RoundResult]]) -> dict[str, Any]:
    """Return the figures from the rounds by label."""
    systems = {label: load.speed(rounds) for label, rounds in measured.items()}
    rates = {label: found["rounds_tokens_per_s"] for label, found in systems.items()}
    return {
        "ratio_to_streaming": median_ratio(rates[SPARSE], rates[STREAMED]),
        "ratio_to_dense": median_ratio(rates[SPARSE], rates[DENSE]),
        "systems": systems,
        "synthetic_sparsity": True,
    }


def table(result: Mapping[str, Any]) -> str:
    """Return a row per system."""
    rows = [
        [label, number(found["tokens_per_s"], 1), number(found["mean_tpot_ms"], 2)]
        for label, found in result["systems"].items()
    ]
    return markdown(["system (synthetic sparsity)", "tokens/s", "ms a token"], rows)
