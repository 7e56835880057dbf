# SPDX-License-Identifier: Apache-2.0
"""Times predicted by the planner, against those that the engine takes.

Each round probes this machine between the engines' rounds, and the medians of the probes describe
the machine. The planner's own functions then predict each step, to be compared with a real engine
with random weights: the median decode step, over models, placements (weights on a disk among them),
expansions of the KV cache, batches and contexts; and the time to first token of prompts. No
prediction uses the engines' times.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.cache import REPO_ROOT
from benchmarks.harness.jobs import EngineSpec, RoundResult
from benchmarks.harness.progress import Step
from benchmarks.harness.runner import DISTURBED_SHARE, Engine, MeasurementError, engines
from benchmarks.harness.tables import markdown, number
from benchmarks.inputs.shapes import PLANNED_SHAPES, planned_model_dir
from benchmarks.inputs.workload import Request
from vllm_tiered.kv.layout import KvLevels, LayerStack, Level
from vllm_tiered.planner.built_model import built_shape
from vllm_tiered.planner.from_probe import machine_from_probe
from vllm_tiered.planner.kv_swapping import PlainSteps, kv_levels, level_step
from vllm_tiered.planner.latency_placement import place_for_latency
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.model_shape import ModelShape, model_shape
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.step_time import Batch, compute_times, far_link, predict_step
from vllm_tiered.units import GIB
from vllm_tiered.weights.placement import Placement, place, spill_to_storage

RESULT_KEYS = ("median_error", "worst_error", "by_configuration", "machine", "definitions")

DEFINITIONS = {
    "median_error": "median over configurations of |predicted - measured| / measured",
    "worst_error": "the largest of them",
    "predicted_ms": "a decode step, or the steps of a prompt, from the probes of this run alone",
    "measured_ms": "median of the engine's decode steps with all requests in them, over rounds; of"
    " a prompt (batch 1, phase prompt) its time to first token",
    "machine": "figures of the probes' medians, each with its kind and source",
    "num_disturbed": "configurations whose least disturbed round others took more than 5 % of the"
    " CPU from: their errors are the disturbance's",
    "foreign_cpu_share": "share of the CPU time taken by other processes, in the least disturbed"
    " round",
}

_EXPANDED = "kv x"
_BLOCK_TOKENS = 32
_OUTPUT_TOKENS = 16

Key = tuple[str, str, str, int, int]
"""Model, placement, phase, batch, and context or prompt tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one profile. `batches` and `contexts` are paired item by item.

    A placement is one of the engine's, `off`, `stored` for all on a disk in `storage_dir` (that of
    temporary files if empty), or `kv x2` for an expansion of 2. `prompts` are lengths. `threads` is
    the number of compute threads; copies get one more core. `near_share` of the
    layers' bytes is the near budget of the placement `latency`.
    """

    models: tuple[str, ...] = ("opt", "llama")
    placements: tuple[str, ...] = ("off", "helm", "all_far", "latency", "stored", "kv x2")
    batches: tuple[int, ...] = (1, 4, 16, 16)
    contexts: tuple[int, ...] = (32, 256, 32, 256)
    rounds: int
    max_repeats: int  # of rounds disturbed by other processes
    threads: int = 1
    near_share: float = 0.6
    dtype: str = "bfloat16"
    prompts: tuple[int, ...] = (512,)
    storage_dir: str = ""

    @property
    def rows(self) -> list[tuple[str, int, int]]:
        """Return phase, batch and tokens of each configuration."""
        decode = zip(self.batches, self.contexts, strict=True)
        rows = [("decode", batch, context) for batch, context in decode]
        return [*rows, *(("prompt", 1, tokens) for tokens in self.prompts)]


PROFILES: Mapping[str, Settings] = {
    "quick": Settings(
        placements=("off", "helm", "all_far", "kv x2"),
        batches=(1, 16),
        contexts=(32, 128),
        rounds=1,
        max_repeats=2,
    ),
    "full": Settings(rounds=3, max_repeats=12),
}


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports: every engine start, every probe, every engine round."""
    per_model = len(settings.placements) * (1 + settings.rounds) + settings.rounds
    return len(settings.models) * per_model


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    with tempfile.TemporaryDirectory(dir=settings.storage_dir or None) as folder:
        return _run(settings, Path(folder), step)


def _run(settings: Settings, folder: Path, step: Step) -> dict[str, Any]:
    probes: list[dict[str, Any]] = []
    measured: dict[Key, list[RoundResult]] = {}
    for model in settings.models:
        specs = [_spec(model, placement, settings, folder) for placement in settings.placements]
        warmup = _requests(1, min(settings.contexts))
        with engines(specs, warmup, step) as group:
            repeats_left = settings.max_repeats
            for round_index in range(settings.rounds):
                probes.append(_quiet_probe(settings, folder, min(2, repeats_left)))
                share = probes[-1]["foreign_cpu_share"]
                step(f"probe {len(probes)}: others took {share:.0%} of the CPU")
                order = list(zip(group, settings.placements, strict=True))
                for engine, placement in order if round_index % 2 == 0 else reversed(order):
                    shares = []
                    for phase, batch, context in settings.rows:
                        result, repeats = _round(engine, batch, context, repeats_left)
                        repeats_left -= repeats
                        key = (model, placement, phase, batch, context)
                        measured.setdefault(key, []).append(result)
                        shares.append(result.foreign_cpu_share)
                    step(f"{engine.spec.label}: others took {max(shares):.0%} of the CPU")
    return {**summarise(probes, measured, settings), "definitions": DEFINITIONS}


def median_probe(probes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several probes of the same scope into one that has their medians.

    Medians are less sensitive to other programs, and to a machine that is slow for a while.
    """

    def median(values: Sequence[Any]) -> Any:
        first = values[0]
        if any(value is None for value in values):  # an engine did not start in one of them
            return None
        if isinstance(first, Mapping):
            return {key: median([value[key] for value in values]) for key in first}
        if isinstance(first, list):
            return [median(list(entries)) for entries in zip(*values, strict=True)]
        if isinstance(first, float):
            return statistics.median(values)
        return first

    merged: dict[str, Any] = median(list(probes))
    return merged


def summarise(
    probes: Sequence[Mapping[str, Any]],
    measured: Mapping[Key, Sequence[RoundResult]],
    settings: Settings,
) -> dict[str, Any]:
    """Return predictions and errors from the probes, and from the rounds by configuration."""
    machine, figures = machine_from_probe(median_probe(probes))
    rows: list[dict[str, Any]] = []
    for (model, placement, phase, batch, context), rounds in measured.items():
        measured_s = statistics.median(one for r in rounds for one in _seconds(r, phase, batch))
        predicted = predict(model, placement, phase, batch, context, machine, settings)
        rows.append(
            {
                "model": model,
                "placement": placement,
                "phase": phase,
                "batch": batch,
                "context": context,
                "predicted_ms": 1e3 * predicted,
                "measured_ms": 1e3 * measured_s,
                "error": predicted / measured_s - 1,
                "foreign_cpu_share": min(one.foreign_cpu_share for one in rounds),
            }
        )
    errors = [abs(row["error"]) for row in rows]
    return {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "num_configurations": len(rows),
        "num_disturbed": sum(row["foreign_cpu_share"] > DISTURBED_SHARE for row in rows),
        "by_configuration": rows,
        "machine": figures,
        "probes": list(probes),
        "rounds_ms": {
            "/".join(map(str, key)): [
                1e3 * statistics.median(_seconds(one, key[2], key[3])) for one in rounds
            ]
            for key, rounds in measured.items()
        },
    }


def predict(
    model: str,
    placement: str,
    phase: str,
    batch: int,
    context: int,
    machine: Machine,
    settings: Settings,
) -> float:
    """Return the seconds of a decode step or a prompt, as `vllm-tiered plan` predicts them."""
    shape = planned_shape(model, settings.dtype)
    placed = _placement(shape, placement, machine, _near_gib(shape, settings.near_share))
    if phase == "prompt":
        steps = Workload(prompt_tokens=context, output_tokens=1).prefill_steps(batch)
    else:
        after = context + _OUTPUT_TOKENS // 2
        steps = [Batch(requests=batch, new_tokens=1, context_tokens=after)]
    expansion = _expansion(placement)
    if expansion is None:
        return sum(predict_step(shape, machine, placed, one).seconds for one in steps)
    levels, level = _level(shape, settings, expansion)
    plain = PlainSteps.of(shape, machine, placed)
    return sum(level_step(shape, machine, plain, one, levels, level).seconds for one in steps)


def _expansion(placement: str) -> float | None:
    """Return the expansion of a placement `kv x...`."""
    return float(placement.removeprefix(_EXPANDED)) if placement.startswith(_EXPANDED) else None


def _level(shape: ModelShape, settings: Settings, expansion: float) -> tuple[KvLevels, Level]:
    """Return the level of an expansion."""
    levels = kv_levels(shape, _BLOCK_TOKENS, _kv_bytes(shape, settings))
    assert levels is not None
    stack = LayerStack(num_layers=levels.num_layers)
    num_far = stack.num_far_for(expansion)
    assert num_far is not None, "the shapes reach the expansions"
    return levels, Level(num_far)


def _kv_bytes(shape: ModelShape, settings: Settings) -> int:
    """Return the bytes of a KV cache that holds every batch near."""
    longest = max(*settings.contexts, *settings.prompts) + _OUTPUT_TOKENS
    most = max(
        *(
            batch * math.ceil((context + _OUTPUT_TOKENS) / _BLOCK_TOKENS)
            for batch, context in zip(settings.batches, settings.contexts, strict=True)
        ),
        math.ceil(longest / _BLOCK_TOKENS),
    )
    return (1 + most) * _BLOCK_TOKENS * shape.kv_bytes_per_token


def _placement(shape: ModelShape, name: str, machine: Machine, near_gib: float) -> Placement:
    if name == "off" or _expansion(name) is not None:
        none: tuple[()] = ()
        return Placement(
            policy="all near", sublayers=shape.sublayers, far=(none,) * len(shape.sublayers)
        )
    if name == "stored":
        return spill_to_storage(place("all_far", shape.sublayers), 0)
    if name == "latency":
        one = compute_times(shape, machine, Batch(requests=1, new_tokens=1, context_tokens=0))
        return place_for_latency(shape.sublayers, one, far_link(machine, 0), int(near_gib * GIB))
    return place(name, shape.sublayers)


def planned_shape(model: str, dtype: str = "bfloat16") -> ModelShape:
    """Return the planner's view of a model of `shapes.PLANNED_SHAPES`."""
    config = PLANNED_SHAPES[model]
    if "quantization_config" in config:
        return built_shape(str(planned_model_dir(model)), dtype=dtype)
    return model_shape(config, dtype=dtype)


def _near_gib(shape: ModelShape, near_share: float) -> float:
    return round(near_share * shape.layer_bytes / GIB, 3)


def _spec(model: str, placement: str, settings: Settings, folder: Path) -> EngineSpec:
    shape = planned_shape(model, settings.dtype)
    weights: dict[str, Any] = {"placement": placement}
    if placement == "latency":
        weights["near_gib"] = _near_gib(shape, settings.near_share)
    if placement == "stored":
        weights = {"placement": "all_far", "far_gib": 0, "storage_path": str(folder / model)}
        (folder / model).mkdir(exist_ok=True)
    tiered: dict[str, Any] | None = {"kv": {"enabled": False}, "weights": weights}
    kv_bytes = _kv_bytes(shape, settings)
    if placement == "off":
        tiered = None
    elif (expansion := _expansion(placement)) is not None:
        tiered = {"kv": {"expansion": expansion}}
        levels, level = _level(shape, settings, expansion)
        # What each batch takes near at this level, partial blocks included.
        blocks = kv_bytes // (_BLOCK_TOKENS * shape.kv_bytes_per_token)
        pages = levels.geometry(level).pages_needed(blocks, 2 * max(settings.batches))
        kv_bytes = pages * levels.page_bytes
    longest = max(*settings.contexts, *settings.prompts) + _OUTPUT_TOKENS
    return EngineSpec(
        label=f"{model}, {placement}",
        model_dir=str(planned_model_dir(model)),
        dtype=settings.dtype,
        block_size=_BLOCK_TOKENS,
        kv_cache_memory_bytes=kv_bytes,
        max_num_seqs=max(settings.batches),
        max_model_len=_BLOCK_TOKENS * math.ceil(longest / _BLOCK_TOKENS),
        enable_prefix_caching=False,
        tiered=tiered,
        random_weights=True,
        threads=settings.threads,
    )


def _requests(batch: int, context: int) -> list[Request]:
    return [
        Request(
            request_id=f"{batch}-{context}-{index}",
            prompt_token_ids=tuple(5 + (31 * index + token) % 1000 for token in range(context)),
            num_output_tokens=_OUTPUT_TOKENS,
        )
        for index in range(batch)
    ]


def _round(engine: Engine, batch: int, context: int, repeats_left: int) -> tuple[RoundResult, int]:
    """Return the least disturbed attempt, and the number of extra attempts."""
    requests = _requests(batch, context)
    attempts = [engine.run(requests)]
    while attempts[-1].foreign_cpu_share > DISTURBED_SHARE and len(attempts) <= min(
        2, repeats_left
    ):
        attempts.append(engine.run(requests))
    return min(attempts, key=lambda one: one.foreign_cpu_share), len(attempts) - 1


def _seconds(result: RoundResult, phase: str, batch: int) -> list[float]:
    """Return the times of a round that are compared: decode steps, or times to first token."""
    if phase == "prompt":
        return [times.first_token_s - times.arrival_s for times in result.requests]
    return _decode_steps(result, batch)


def _decode_steps(result: RoundResult, batch: int) -> list[float]:
    """Return the seconds between tokens, without steps in which a request is still in prefill."""
    gaps = list(result.token_gaps_s)
    per_request = _OUTPUT_TOKENS - 1
    if len(gaps) != batch * per_request:
        raise MeasurementError(f"{result.label}: {len(gaps)} gaps of {batch} requests")
    return [
        gap
        for first in range(0, len(gaps), per_request)
        for gap in gaps[first + 2 : first + per_request]
    ]


def _quiet_probe(settings: Settings, folder: Path, max_repeats: int) -> dict[str, Any]:
    """Return the least disturbed of several probes."""
    attempts = [_probe(settings, folder)]
    while attempts[-1]["foreign_cpu_share"] > DISTURBED_SHARE and len(attempts) <= max_repeats:
        attempts.append(_probe(settings, folder))
    return min(attempts, key=lambda one: one["foreign_cpu_share"])


def _probe(settings: Settings, folder: Path) -> dict[str, Any]:
    """Run `vllm-tiered probe --json` in its own process, as the engines run."""
    options = ["--path", str(folder), "--dtype", settings.dtype]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_tiered.cli.main", "probe", "--json", *options],
        cwd=REPO_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": str(settings.threads), "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MeasurementError(f"the probe failed:\n{done.stderr}")
    probe: dict[str, Any] = json.loads(done.stdout)
    return probe


def table(result: Mapping[str, Any]) -> str:
    """Return one row per configuration."""
    rows = [
        [
            row["model"],
            row["placement"],
            row["phase"],
            str(row["batch"]),
            str(row["context"]),
            number(row["predicted_ms"], 1),
            number(row["measured_ms"], 1),
            f"{row['error']:+.0%}",
        ]
        for row in result["by_configuration"]
    ]
    return markdown(
        [
            "model",
            "placement",
            "phase",
            "batch",
            "tokens",
            "predicted ms",
            "measured ms",
            "error",
        ],
        rows,
    )
