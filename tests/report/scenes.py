# SPDX-License-Identifier: Apache-2.0
"""Made-up runs to draw and to count: an adaptive engine under a load that comes and goes."""

import math
import random
from collections.abc import Iterator
from typing import Any

from vllm_tiered.kv.layout import KvLevels, expansion_of
from vllm_tiered.report.records import (
    Event,
    Header,
    LayerSpan,
    LayerTimeline,
    Machine,
    StepSample,
)

NUM_LAYERS = 30
LEVELS = KvLevels(
    num_layers=NUM_LAYERS,
    page_bytes=24 * 1024,
    block_tokens=32,
    near_pages=2730,
    max_far_layers=22,
    max_blocks=272,
)


def header(**changes: Any) -> Header:
    values: dict[str, Any] = {
        "vllm_tiered": "0.1.0",
        "vllm": "0.32.0",
        "model": "SmolLM2-135M-Instruct",
        "started": "2026-11-21T14:00:00+00:00",
        "num_layers": NUM_LAYERS,
        "block_tokens": LEVELS.block_tokens,
        "num_blocks": LEVELS.max_blocks,
        "near_bytes": LEVELS.near_pages * LEVELS.page_bytes,
        "far_bytes": LEVELS.max_far_layers * LEVELS.max_blocks * LEVELS.page_bytes,
        "storage_bytes": 0,
        "carbon_intensity": 820.0,
        "machine": Machine(cpu="A processor", cores=2, memory_bytes=24 << 30),
        "manifest": {"policy": "interleave", "expansion": "auto", "max_expansion": 4.0},
    }
    return Header(**(values | changes))


def step(time: float = 0.0, **changes: Any) -> StepSample:
    """A step of 30 ms at level 0 that ends at `time`."""
    values: dict[str, Any] = {
        "time": time,
        "seconds": 0.03,
        "tokens": 16,
        "stall_seconds": 0.0,
        "read_seconds": 0.0,
        "read_bytes": 0,
        "write_seconds": 0.0,
        "write_bytes": 0,
        "joules": 0.0,
        "assumed_joules": 0.0,
        "far_layers": 0,
        "expansion": 1.0,
        "granted_blocks": 90,
        "withheld_blocks": 0,
        "used_blocks": 60,
        "tail_slots": 16,
        "num_running": 16,
        "num_waiting": 0,
        "num_preempted": 0,
    }
    return StepSample(**(values | changes))


def adaptive_run(seconds: float, *, seed: int = 0) -> Iterator[StepSample | Event]:
    """Load until two thirds, a pause, then less load: the level rises, falls, and is told."""
    noise = random.Random(seed)
    time, far_layers = 2.0, 0
    while time < seconds:
        if 0.66 < time / seconds < 0.72:
            time += 0.06 * seconds
            continue
        wanted = 20 if time < 0.66 * seconds else 8
        if noise.random() < 1.5 / (seconds / 0.03) * 30 and far_layers != wanted:
            target = far_layers + (2 if wanted > far_layers else -2)
            why = "requests wait for blocks" if target > far_layers else "nothing waits"
            kind = "grow" if target > far_layers else "shrink"
            yield Event(time=time, kind=kind, text=f"{far_layers} -> {target}: {why}")
            far_layers = target
        running = min(48, 10 + 2 * far_layers) + noise.randint(-2, 2)
        step_seconds = 0.022 + 0.0004 * running + noise.uniform(0, 0.004)
        is_contended = 0.4 < time / seconds < 0.43
        limit = LEVELS.block_limit(far_layers, running)
        used = min(limit, int(running * 5.4))
        read_bytes = far_layers * used * LEVELS.page_bytes
        time += step_seconds
        yield step(
            time,
            seconds=step_seconds,
            tokens=running,
            stall_seconds=step_seconds * (0.12 if is_contended else noise.uniform(0, 0.006)),
            read_seconds=read_bytes / 11e9,
            read_bytes=read_bytes,
            write_seconds=0.0004,
            write_bytes=far_layers * LEVELS.page_bytes * running // 32,
            joules=90.0 * step_seconds,
            assumed_joules=2.0 * step_seconds,
            far_layers=far_layers,
            expansion=expansion_of(NUM_LAYERS, far_layers),
            granted_blocks=limit,
            withheld_blocks=LEVELS.block_limit(far_layers, 0) - limit,
            used_blocks=used,
            tail_slots=running,
            num_running=running,
            num_waiting=max(0, 50 - running),
            num_preempted=int(noise.random() < (0.02 if far_layers < 10 else 0.0005)),
        )


def pipeline_step(
    *, num_layers: int = NUM_LAYERS, far_layers: int = 10, slow_read: bool = False
) -> LayerTimeline:
    """A step in which every third layer or so is staged two layers of its kind ahead."""
    stride = max(1, num_layers // far_layers)
    rotating = list(range(stride - 1, num_layers, stride))[:far_layers]
    read_seconds = 4.5e-3 if slow_read else 1.6e-3
    reads: dict[int, tuple[float, float]] = {}
    link_free, clock, spans = 0.0, 1.5e-3, []
    for layer in range(num_layers):
        for ahead in rotating[: 2 + sum(1 for each in rotating if each < layer)]:
            if ahead not in reads:
                begin = max(link_free, clock - 1.5e-3)
                link_free = begin + read_seconds
                reads[ahead] = (begin, link_free)
        if layer not in rotating:
            compute = (clock, clock + 0.9e-3)
            spans.append(_span(layer, "pinned", compute))
        else:
            ready = max(clock, reads[layer][1])
            compute = (ready, ready + 0.9e-3)
            wait = (clock, ready) if ready > clock else (None, None)
            write = (compute[1], compute[1] + 0.25e-3) if layer % 2 else (None, None)
            spans.append(_span(layer, "rotating", compute, wait, reads[layer], write))
        clock = compute[1]
    return LayerTimeline(step=4711, time=math.pi * 20, layers=tuple(spans))


def _span(layer: int, role: Any, compute: Any, *others: Any) -> LayerSpan:
    wait, read, write = others or ((None, None),) * 3
    return LayerSpan(
        layer=layer,
        role=role,
        compute_start=compute[0],
        compute_end=compute[1],
        wait_start=wait[0],
        wait_end=wait[1],
        read_start=read[0],
        read_end=read[1],
        write_start=write[0],
        write_end=write[1],
    )
