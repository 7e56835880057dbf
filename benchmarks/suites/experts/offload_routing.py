# SPDX-License-Identifier: Apache-2.0
"""Decoding with routing that is given to each contender: uniform, or with published hit ratios."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import memory_capped
from benchmarks.harness.memory_limit import drop_cached
from benchmarks.harness.progress import Step
from benchmarks.inputs.routing_trace import PUBLISHED, synthetic_routing
from benchmarks.peers.shapes import MIXTURES
from benchmarks.suites.experts.offload_peer import Llama, read_ahead_of
from benchmarks.suites.experts.offload_settings import Settings, stored
from benchmarks.suites.experts.offload_summary import LLAMA, OURS, summarise_synthetic
from benchmarks.suites.experts.routed_run import Run


def routings(settings: Settings, batch: int) -> dict[str, Mapping[float, float]]:
    """Return hit curves by name; the published ones are of one request."""
    routings: dict[str, Mapping[float, float]] = {"uniform": {}}
    if batch == 1:
        routings |= {name: PUBLISHED[name] for name in settings.curves}
    return routings


def decode_as_given(
    settings: Settings,
    model: Path,
    store: Path,
    batch: int,
    near_bytes: int,
    llama: Llama | None,
    limit_bytes: int | None,
    step: Step,
) -> dict[str, dict[str, Any]]:
    """Decode with uniform routing, and one request with the hit ratios published for LRU.

    Ours keeps experts by LRU too, so that its hits are the published ones.
    """
    shape, load = MIXTURES[settings.shape], settings.load(batch)
    num_rows = batch * (settings.new_tokens + 8)
    file, llamas_file = store.parent / "synthetic-routing.json", store.parent / "routing.txt"
    found = {}
    for name, curve in routings(settings, batch).items():
        routing = synthetic_routing(
            curve,
            num_layers=shape.num_layers,
            num_steps=num_rows,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
        )
        file.write_text(json.dumps(routing), encoding="utf-8")
        sizes = (shape.num_layers, num_rows, shape.top_k)
        ids = [expert for layer in routing for chosen in layer for expert in chosen]
        llamas_file.write_text(" ".join(map(str, (*sizes, *ids))), encoding="utf-8")
        run = Run(
            model=str(model),
            prompts=[
                [504 + 37 * i + request for i in range(settings.prompt_tokens)]
                for request in range(batch)
            ],
            new_tokens=settings.new_tokens,
            at_once=batch,
            kv_bytes=load.kv_bytes(shape),
            experts={"near_gib": near_bytes / 2**30, "policy": "lru", **stored(store)},
            routing=str(file),
        )
        commands = {OURS: run.command()}
        if llama is not None:
            commands[LLAMA] = [*llama.command, "--routing", str(llamas_file)]
        runs: list[dict[str, dict[str, Any]]] = []
        for index in range(settings.rounds):
            runs.append({})
            for who, command in memory_capped.rotated(list(commands.items()), index):
                drop_cached([store.parent])
                with read_ahead_of(store, who, llama):
                    measured = memory_capped.measure(who, command, limit_bytes, settings.threads)
                runs[-1][who] = measured
                rate = memory_capped.tokens_per_s(measured)
                step(f"batch {batch}, routing {name}, {who}: {rate:.3f} tokens/s")
            if llama is None:
                step(f"{LLAMA}: skipped")
        found[name] = summarise_synthetic(runs)
    return found
