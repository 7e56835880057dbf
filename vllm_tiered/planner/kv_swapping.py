# SPDX-License-Identifier: Apache-2.0
"""Prediction of serving with a swapped KV cache (Pie, section 3), level by level.

The near memory that a placement leaves to the KV cache holds more requests with some layers of full
attention offloaded. Each step then reads the offloaded layers' KV over the link that far weights
take as well:

             ┌ rest ┐
    compute  │······│ 0 │ 1 │ 2 │··stall··│ 3 │ 4 │ ...        offloaded layers: 2, 3, ...
    link     │ KV of 2 │  KV of 3         │ KV of 5: the buffer of 2 is free │

Blocks, levels and the offloaded layers are the engine's (`kv/layout.py`, `kv/policy.py`). Where a
model has at least as many other layers (windows, states) as layers of full attention, they are
taken to lie between any two of these. All layers are taken to compute for equally long, and far
weights and experts to have the share of the link that they need without swapping. What a step
writes, new full blocks and whole prompts, goes the other way.

`kv.expansion="auto"` finds its level by measuring, and leaves one at which compute waits for KV for
more than 1 % of a step. So such a level is planned only where it is worth a fixed `kv.expansion`,
which keeps partial blocks near.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from vllm_tiered.config import KvConfig
from vllm_tiered.kv.layout import (
    SPACED_STAGING_BUFFERS,
    STAGING_BUFFERS,
    KvGeometry,
    KvLevels,
    LayerStack,
    Level,
)
from vllm_tiered.kv.policy import interleave
from vllm_tiered.kv.tuning import DEFAULT_TUNING
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.pipeline_time import StepTime
from vllm_tiered.planner.serving import (
    NO_LIMITS,
    Limits,
    ServingEstimate,
    Workload,
    estimate_with,
)
from vllm_tiered.planner.step_time import (
    Batch,
    predict_step,
    slowdown,
    step_overhead_seconds,
)
from vllm_tiered.weights.placement import Placement

MAX_EXPANSION = KvConfig().max_expansion
"""The highest expansion that is planned: the engine's default."""

_WORTHWHILE = 1.01
"""Ratio of tokens/s below which a level counts as no better, as the predictions are no better."""

_MOST_LEVELS = 24
"""Levels that are predicted; of a model with more, evenly spaced ones."""

_MOST_OF_LINK = 0.95
"""The most of the link that far weights are taken to keep from the KV cache."""


class PlainSteps(NamedTuple):
    """Steps without KV swapping.

    Attributes:
        predict: predicts the time of a batch's step.
        far_bytes: far memory of weights or experts.
    """

    predict: Callable[[Batch], StepTime]
    far_bytes: int

    @classmethod
    def of(cls, shape: ModelShape, machine: Machine, placement: Placement) -> PlainSteps:
        """Return the steps with a placement of the weights."""
        return cls(partial(predict_step, shape, machine, placement), placement.far_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SwappedKv:
    """A level of KV swapping, and what is predicted of serving at it.

    Attributes:
        far_layers: layers whose KV is offloaded.
        partial_blocks_far: blocks that are not full are offloaded too.
        expansion: capacity relative to the same near memory without offloaded layers.
        far_bytes: far memory of the KV cache.
        is_adaptive: `kv.expansion="auto"` holds the level; otherwise a fixed expansion does.
        served: prediction for as many requests as fit, or as the workload has.
    """

    far_layers: int
    partial_blocks_far: bool
    expansion: float
    far_bytes: int
    is_adaptive: bool
    served: ServingEstimate


def swap_kv(
    shape: ModelShape,
    machine: Machine,
    plain: PlainSteps,
    load: Workload,
    *,
    kv_bytes: int,
    far_bytes: int,
    without: ServingEstimate,
    limits: Limits = NO_LIMITS,
    may_fix: bool = True,
) -> SwappedKv | None:
    """Return the level that serves the most tokens/s; None if none serves more than no swapping.

    A fixed level is taken if it serves more than the best one that "auto" holds.

    Args:
        shape: shape of the model.
        machine: machine to predict for.
        plain: the steps without swapping.
        load: the workload.
        kv_bytes: near memory of the KV cache.
        far_bytes: far memory that weights and experts leave.
        without: the prediction without swapping.
        limits: times that may not be exceeded.
        may_fix: whether a fixed level is taken, at which few requests read far layers too.
    """
    if without.requests >= load.max_requests:
        return None
    swapped = [
        found
        for level in _levels(shape, load, kv_bytes)
        if (found := _at_level(shape, machine, plain, load, level, kv_bytes, far_bytes, limits))
        and found.served.requests > without.requests
    ]
    best, rate = None, without.tokens_per_s
    for is_adaptive in (True, False) if may_fix else (True,):
        held = [found for found in swapped if found.is_adaptive is is_adaptive]
        most = max(held, key=lambda found: found.served.tokens_per_s, default=None)
        if most and most.served.tokens_per_s >= _WORTHWHILE * rate:
            best, rate = most, most.served.tokens_per_s
    return best


def swapped_step(
    machine: Machine,
    plain: PlainSteps,
    batch: Batch,
    *,
    far_layers: Sequence[int],
    num_layers: int,
    read_bytes: float,
    written_bytes: float,
    staging_buffers: int = STAGING_BUFFERS,
) -> StepTime:
    """Predict the time of a step that reads offloaded layers' KV before it computes them.

    Args:
        machine: machine to predict for.
        plain: the steps without swapping.
        batch: batch of the step.
        far_layers: the offloaded layers, ascending, among those of full attention.
        num_layers: number of layers of full attention.
        read_bytes: bytes that each offloaded layer reads.
        written_bytes: bytes that each offloaded layer writes.
        staging_buffers: buffers that the layers are read into.
    """
    base = plain.predict(batch)
    if not far_layers:
        return base
    slower = slowdown(machine)
    kv_gb_per_s = machine.next_far_gb_per_s(plain.far_bytes)
    left = 1.0 - min(_MOST_OF_LINK, base.link_seconds / base.seconds)
    read = slower.link * read_bytes / (kv_gb_per_s * 1e9 * left)
    write = slower.link * written_bytes / (machine.write_gb_per_s * 1e9)
    rest = step_overhead_seconds(machine, batch.requests)
    layers = base.seconds - rest
    # Compute loses to both directions.
    copying = min(len(far_layers) * (read + write), layers * slower.compute)
    layers += copying * (1.0 - 1.0 / slower.compute)
    layers += len(far_layers) * machine.far_layer_overhead_us * 1e-6
    stall = _stall(far_layers, max(read, write), rest, layers / num_layers, staging_buffers)
    return StepTime(
        seconds=rest + layers + stall,
        link_seconds=base.link_seconds + len(far_layers) * read,
        stall_seconds=base.stall_seconds + stall,
    )


def _stall(
    far_layers: Sequence[int], read: float, rest: float, layer: float, staging_buffers: int
) -> float:
    """Return the seconds for which a step waits for reads; none begins before the step does.

    Args:
        far_layers: the offloaded layers, ascending.
        read: seconds of a layer's read.
        rest: seconds of the step before its first layer.
        layer: seconds of a layer's compute.
        staging_buffers: number of buffers.
    """
    free = [0.0] * staging_buffers  # when the buffer for each next layer is free
    link = stall = 0.0
    for position, index in enumerate(far_layers):
        link = max(link, free[position]) + read
        arrives = rest + index * layer + stall
        if link > arrives:
            stall += link - arrives
            arrives = link
        free.append(arrives + layer)
    return stall


def level_step(
    shape: ModelShape,
    machine: Machine,
    plain: PlainSteps,
    batch: Batch,
    levels: KvLevels,
    level: Level,
) -> StepTime:
    """Predict the time of a step at a level: what its far layers read and write."""
    layer_bytes = shape.kv_bytes_per_token / levels.num_layers
    read, written = batch.context_tokens, batch.new_tokens
    if level.partial_blocks_resident:
        read = max(0, read - levels.block_tokens // 2)
    elif written < levels.block_tokens:  # a block is written again until it is full
        written = levels.block_tokens
    order = interleave(levels.num_layers, level.num_far, levels.staging_buffers)
    return swapped_step(
        machine,
        plain,
        batch,
        far_layers=order.offloaded,
        num_layers=levels.num_layers,
        read_bytes=batch.requests * read * layer_bytes,
        written_bytes=batch.requests * written * layer_bytes,
        staging_buffers=levels.staging_buffers,
    )


def kv_levels(shape: ModelShape, block_tokens: int, kv_bytes: int) -> KvLevels | None:
    """Return the levels of near memory for the KV cache; None if no layer can be offloaded."""
    num_layers = shape.num_full_attention
    if not num_layers:
        return None
    others = shape.num_attention - num_layers  # with windows or states in attention's place
    stack = LayerStack(
        num_layers=num_layers,
        staging_buffers=SPACED_STAGING_BUFFERS if others >= num_layers else STAGING_BUFFERS,
        hides_first_read=others >= num_layers,
    )
    page_bytes = block_tokens * shape.kv_bytes_per_token // num_layers
    near_pages = kv_bytes // page_bytes
    return KvLevels(
        num_layers=num_layers,
        page_bytes=page_bytes,
        block_tokens=block_tokens,
        near_pages=near_pages,
        max_num_far=stack.max_num_far_within(MAX_EXPANSION),
        max_blocks=int(MAX_EXPANSION * near_pages) // num_layers,
        staging_buffers=stack.staging_buffers,
        offloads_partial_blocks=True,
    )


def _levels(shape: ModelShape, load: Workload, kv_bytes: int) -> list[tuple[KvLevels, Level]]:
    """Return the levels that `auto` may take, except the one without offloaded layers."""
    levels = kv_levels(shape, load.block_tokens, kv_bytes)
    if levels is None:
        return []
    found = [level for level in levels.ladder if level.num_far]
    stride = max(1, round(len(found) / _MOST_LEVELS))
    return [(levels, level) for level in found[::-stride]]


def _at_level(
    shape: ModelShape,
    machine: Machine,
    plain: PlainSteps,
    load: Workload,
    level: tuple[KvLevels, Level],
    kv_bytes: int,
    far_bytes: int,
    limits: Limits,
) -> SwappedKv | None:
    """Return the prediction at a level.

    None if no request fits or is fast enough, or if the engine would not stay there.
    """
    levels, at = level
    geometry = levels.geometry(at)
    blocks = -(-load.tokens // load.block_tokens)
    bounded = sum(kv.request_bytes(load.tokens) for kv in shape.bounded_kv)
    # The engine takes far memory for all blocks that the level may hold.
    held = geometry.far_bytes(geometry.logical_limit + 1)
    most = _most_requests(load.max_requests, geometry, blocks, bounded, kv_bytes)
    if not most or held > far_bytes:
        return None

    def predict(batch: Batch) -> StepTime:
        return level_step(shape, machine, plain, batch, levels, at)

    def estimate(requests: int) -> ServingEstimate:
        far = plain.far_bytes + held
        return estimate_with(predict, machine, load, requests, far, num_ranks=shape.num_ranks)

    served = limits.most_requests(most, estimate)
    if served is None:
        return None
    step = load.decode(served.requests)
    swapped, alone = predict(step), plain.predict(step)
    waits = (swapped.stall_seconds - alone.stall_seconds) / swapped.seconds
    is_adaptive = waits <= DEFAULT_TUNING.max_stall
    if not is_adaptive and not at.partial_blocks_resident:
        return None
    return SwappedKv(
        far_layers=at.num_far,
        partial_blocks_far=not at.partial_blocks_resident,
        expansion=levels.expansion(at),
        far_bytes=held,
        is_adaptive=is_adaptive,
        served=served,
    )


def _most_requests(
    most: int, geometry: KvGeometry, blocks: int, bounded: int, kv_bytes: int
) -> int:
    """Return how many requests of so many blocks fit at a level, at most ``most``.

    Args:
        most: the most requests.
        geometry: sizes at the level.
        blocks: blocks of a request.
        bounded: bytes of a request in layers that keep a window or a state.
        kv_bytes: near memory of the KV cache.
    """

    def fits(requests: int) -> bool:
        pages = geometry.pages_needed(requests * blocks + 1, requests)
        return pages * geometry.page_bytes + requests * bounded <= kv_bytes

    return bisect_left(range(1, most + 1), True, key=lambda requests: not fits(requests))
