# SPDX-License-Identifier: Apache-2.0
"""A mixture that memory does not hold, its experts read from an SSD as the router names them.

Every contender decodes the same model of random weights under the same memory limit, page cache
included: a share of the weights plus what vLLM itself takes with an almost empty model. The plugin
keeps in slots what fits; llama.cpp maps the model file, with as many threads, and as much read
ahead of a page fault, as suit it best. Tokens are drawn at random (by vLLM from almost even
probabilities), so that routers of random weights choose almost uniformly: the worst case, without
locality, if the hits say so. Rounds are interleaved. Each begins by measuring the disk's own
sequential bandwidth, and with none of the files in the page cache.

Then the routers' choice is replaced, in llama.cpp, too: by uniform routing, as a random model's own
may have locality, and by synthetic routing with published hit ratios. And a longer prompt is timed:
it wants nearly every expert of each layer once, so its time is that of reading them.

Reading experts ahead is measured last, off and on in turn. A random model's hidden states hardly
change from layer to layer here, so that the next router is foreseen nearly always: the most that
reading ahead can give.

The bound is computed first. With S slots for E experts a uniform router misses (E - S) / E of what
it names, and the disk gives its bandwidth over those bytes.

Two controls: float32 tokens of a small model with few slots against vLLM's, and the rate of a model
whose experts all have slots against vLLM's alone.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import memory_capped
from benchmarks.harness.cache import cache_root
from benchmarks.harness.disk import read_ahead_kib, sequential_read_gb_per_s
from benchmarks.harness.memory_capped_peers import lacking
from benchmarks.harness.memory_limit import can_limit, drop_cached
from benchmarks.harness.progress import Step
from benchmarks.inputs.shapes import random_model_dir
from benchmarks.peers.model import model_dir
from benchmarks.peers.shapes import MIXTURES
from benchmarks.suites.experts import replay
from benchmarks.suites.experts.offload_peer import Llama, best_llama, read_ahead_of
from benchmarks.suites.experts.offload_routing import decode_as_given, routings
from benchmarks.suites.experts.offload_settings import PROFILES, Settings, stored, vllm_command
from benchmarks.suites.experts.offload_summary import (
    DEFINITIONS,
    IN_MEMORY,
    LLAMA,
    OURS,
    RESULT_KEYS,
    summarise,
    summarise_lookahead,
    summarise_prompt,
    table,
)
from vllm_tiered.experts.policy import POLICIES

__all__ = ["PROFILES", "RESULT_KEYS", "num_steps", "run", "table"]

PROMPT_TOKEN_BYTES = 256 << 10
"""Memory that a token of a long prompt takes, generously."""


def num_steps(settings: Settings) -> int:
    """Return how many steps `run` reports."""
    per_round = 3 + settings.in_memory
    per_batch = 1 + settings.rounds * per_round
    given = sum(len(routings(settings, batch)) for batch in settings.batches)
    others = 2 * settings.rounds * (1 + given) + 2 * settings.lookahead_rounds
    return 5 + len(settings.batches) * per_batch + others


def run(settings: Settings, step: Step) -> dict[str, Any]:
    """Measure; see the module's docstring."""
    folder = Path(settings.folder) if settings.folder else cache_root() / "out-of-core"
    folder.mkdir(parents=True, exist_ok=True)
    model = model_dir(settings.shape, folder)
    weights = MIXTURES[settings.shape].num_bytes
    step(f"{settings.shape}: {weights / 1e9:.1f} GB in {model}")
    are_equal = _tokens_are_equal(folder, settings)
    step(f"float32 tokens with few slots are vLLM's: {are_equal}")
    ratio = _ratio_all_in_slots(settings, folder)
    step(f"all experts in slots: {ratio:.3f} of vLLM's rate")
    resident = memory_capped.vllm_bytes(settings.load(1), folder)
    limit = int(1e9 * settings.limit_gb) or int(settings.memory_share * weights) + resident
    step(f"vLLM alone has {resident / 1e9:.2f} GB resident: the limit is {limit / 1e9:.2f} GB")
    is_limited = can_limit()
    limit_bytes = limit if is_limited else None
    store = folder / f"experts-{settings.shape}"
    for file in memory_capped.files_in(store):
        file.unlink()
    first = _fill(settings, model, store, weights)
    step(f"first start: {first['load_seconds']:.1f} s, which fills the file of experts")
    by_batch: dict[int, list[dict[str, dict[str, Any]]]] = {}
    prompts: list[dict[str, dict[str, Any]]] = []
    synthetic: dict[str, Any] = {}
    near: dict[int, int] = {}
    tuned: dict[int, dict[str, int | None]] = {}
    skipped = lacking([LLAMA], settings.peers_python or sys.executable)
    for batch in settings.batches:
        near[batch] = _near_bytes(settings, model, store, limit, batch)
        llama, why = best_llama(settings, model, folder, batch, limit_bytes, skipped)
        skipped |= why
        if llama:
            tuned[batch] = {
                "threads": int(llama.command[llama.command.index("--threads") + 1]),
                "read_ahead_kib": llama.read_ahead_kib or read_ahead_kib(folder),
            }
        step(f"batch {batch}: llama.cpp {tuned.get(batch, 'is skipped')}")
        if not by_batch:
            prompts = [
                _prompt_round(settings, model, store, near[batch], llama, limit_bytes, step)
                for _ in range(settings.rounds)
            ]
        by_batch[batch] = []
        for index in range(settings.rounds):
            by_batch[batch].append(
                _round(settings, model, store, batch, near[batch], llama, index, limit_bytes, step)
            )
        synthetic[str(batch)] = decode_as_given(
            settings, model, store, batch, near[batch], llama, limit_bytes, step
        )
    return summarise(MIXTURES[settings.shape], by_batch) | {
        "prompt": summarise_prompt(settings.long_prompt_tokens, prompts),
        "synthetic": synthetic,
        "lookahead": _lookahead(settings, model, store, min(near.values()), limit_bytes, step),
        "llama_cpp": {str(batch): best for batch, best in tuned.items()},
        "tokens_equal_fp32": are_equal,
        "ratio_all_in_slots": ratio,
        "first_start_seconds": first["load_seconds"],
        "near_bytes": {str(batch): value for batch, value in near.items()},
        "limit_bytes": limit,
        "resident_bytes": resident,
        "is_limited": is_limited,
        "skipped_peers": skipped,
        "definitions": DEFINITIONS,
    }


def _round(
    settings: Settings,
    model: Path,
    store: Path,
    batch: int,
    near_bytes: int,
    llama: Llama | None,
    index: int,
    limit_bytes: int | None,
    step: Step,
) -> dict[str, dict[str, Any]]:
    """Measure each contender once, another one first each time."""
    disk = sequential_read_gb_per_s(sorted(model.glob("*.safetensors")))
    step(f"batch {batch}, round {index + 1}: the disk reads {disk:.2f} GB/s")
    result: dict[str, dict[str, Any]] = {"disk": {"gb_per_s": disk}}
    experts = {"near_gib": near_bytes / 2**30, "policy": settings.policy, **stored(store)}
    commands = {OURS: (vllm_command(settings, model, batch, experts), limit_bytes)}
    if llama is not None:
        commands[LLAMA] = (llama.command, limit_bytes)
    if settings.in_memory:
        commands[IN_MEMORY] = (vllm_command(settings, model, batch, None), None)
    trace = store.parent / "experts-trace.json"
    for name, (command, limit) in memory_capped.rotated(list(commands.items()), index):
        drop_cached([store.parent])
        recorded = [*command, "--trace", str(trace)] if name == OURS else command
        with read_ahead_of(store, name, llama):
            result[name] = memory_capped.measure(name, recorded, limit, settings.threads)
        step(f"{name}: {memory_capped.tokens_per_s(result[name]):.3f} tokens/s")
    if llama is None:
        step(f"{LLAMA}: skipped")
    num_experts = MIXTURES[settings.shape].num_experts
    slots = result[OURS]["manifest"]["experts"]["slots"]
    result["replayed"] = {
        policy: {
            str(count): replay.hit_ratio(*replay.read(trace), num_experts, count, policy)
            for count in sorted({slots, *range(8, num_experts, 8)})
        }
        for policy in POLICIES
    }
    return result


def _prompt_round(
    settings: Settings,
    model: Path,
    store: Path,
    near_bytes: int,
    llama: Llama | None,
    limit_bytes: int | None,
    step: Step,
) -> dict[str, dict[str, Any]]:
    """Time a long prompt once with each contender."""
    disk = sequential_read_gb_per_s(sorted(model.glob("*.safetensors")))
    result: dict[str, dict[str, Any]] = {"disk": {"gb_per_s": disk}}
    long = dataclasses.replace(settings, prompt_tokens=settings.long_prompt_tokens, new_tokens=2)
    # Its hidden states take memory that a decode step leaves free.
    spared = int(near_bytes - settings.long_prompt_tokens * PROMPT_TOKEN_BYTES)
    experts = {"near_gib": spared / 2**30, **stored(store)}
    commands = {OURS: vllm_command(long, model, 1, experts)}
    if llama is not None:
        at = llama.command.index("--prompt-tokens") + 1
        commands[LLAMA] = [*llama.command]
        commands[LLAMA][at] = str(settings.long_prompt_tokens)
    for name, command in commands.items():
        drop_cached([store.parent])
        with read_ahead_of(store, name, llama):
            result[name] = memory_capped.measure(name, command, limit_bytes, settings.threads)
        step(f"{name}: {result[name]['prefill_seconds']:.1f} s for a prompt")
    if llama is None:
        step(f"{LLAMA}: skipped")
    return result


def _fill(settings: Settings, model: Path, store: Path, weights: int) -> dict[str, Any]:
    """Let a first start fill the file of experts, without a limit."""
    store.mkdir(parents=True, exist_ok=True)
    experts = {"near_gib": weights / 4 / 2**30, **stored(store)}
    short = dataclasses.replace(settings, new_tokens=4)
    command = vllm_command(short, model, 1, experts)
    drop_cached([store.parent])
    return memory_capped.measure(OURS, command, None, settings.threads)


def _near_bytes(settings: Settings, model: Path, store: Path, limit: int, batch: int) -> int:
    """Return the near memory that the limit leaves to slots, from a start with few of them."""
    shape = MIXTURES[settings.shape]
    few = (shape.top_k + 0.1) * shape.num_layers * shape.expert_bytes
    short = dataclasses.replace(settings, new_tokens=4)
    command = vllm_command(short, model, batch, {"near_gib": few / 2**30, **stored(store)})
    measured = memory_capped.measure(OURS, command, None, settings.threads)
    others = measured["resident_bytes"] - measured["manifest"]["experts"]["near_bytes"]
    return int(limit - others - memory_capped.MARGIN_BYTES)


def _lookahead(
    settings: Settings,
    model: Path,
    store: Path,
    near_bytes: int,
    limit_bytes: int | None,
    step: Step,
) -> dict[str, Any]:
    """Decode one request with experts read ahead and without, interleaved."""
    runs: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    for index in range(settings.lookahead_rounds):
        for mode in memory_capped.rotated(list(runs), index):
            experts = {
                "near_gib": near_bytes / 2**30,
                "policy": settings.policy,
                "prefetch": mode,
                **stored(store),
            }
            drop_cached([store.parent])
            command = vllm_command(settings, model, 1, experts)
            measured = memory_capped.measure(OURS, command, limit_bytes, settings.threads)
            runs[mode].append(measured)
            step(f"reading ahead {mode}: {memory_capped.tokens_per_s(measured):.3f} tokens/s")
    return summarise_lookahead(runs)


def _tokens_are_equal(folder: Path, settings: Settings) -> bool:
    """Return whether a small model's float32 tokens with few, stored slots are vLLM's."""
    load = memory_capped.Load(
        prompt_tokens=12, new_tokens=24, batch=4, prompt_step=7, threads=settings.threads
    )
    model = random_model_dir("olmoe")
    expert_bytes = 3 * 256 * 128 * 4
    store = folder / "experts-float32"
    store.mkdir(exist_ok=True)
    experts = {"near_gib": 12.5 * 4 * expert_bytes / 2**30, **stored(store)}
    tokens = []
    for tiered in ({"experts": experts}, None):
        command = memory_capped.decode_command(load, model, 1 << 26, tiered, "--dtype", "float32")
        tokens.append(memory_capped.measure(OURS, command, None, settings.threads)["tokens"])
    return bool(tokens[0] == tokens[1])


def _ratio_all_in_slots(settings: Settings, folder: Path) -> float:
    """Return the rate of a model with a slot for each expert over vLLM's alone, interleaved."""
    model = model_dir("olmoe-0.9b", folder)
    shape = MIXTURES["olmoe-0.9b"]
    # A rate of less than two seconds differs by 10 % from one start to the next.
    load = memory_capped.Load(prompt_tokens=12, new_tokens=120, threads=settings.threads)

    def rate(is_ours: bool) -> float:
        tiered = {"experts": {"near_gib": shape.num_bytes / 2**30}} if is_ours else None
        command = memory_capped.decode_command(load, model, load.kv_bytes(shape), tiered)
        return memory_capped.tokens_per_s(
            memory_capped.measure(OURS, command, None, settings.threads)
        )

    rate(False)  # Not counted: a machine that rested is faster for its first run.
    ratios = []
    for number in range(settings.control_rounds):
        order = (True, False) if number % 2 else (False, True)
        rates = {is_ours: rate(is_ours) for is_ours in order}
        ratios.append(rates[True] / rates[False])
    return statistics.median(ratios)
