# SPDX-License-Identifier: Apache-2.0
"""Bottleneck analysis of a placement: what bounds each kind of sublayer, and what would help.

The transfer of a sublayer's offloaded parameters begins with the compute of the offloaded sublayer
before it (HeLM, figure 8), or of an earlier one at a greater prefetch depth. The sublayer waits if
the transfer is not over in time. So one of three bounds it: the link, near memory's bandwidth, or
arithmetic.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.memory_split import MemorySplit
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.pipeline_time import (
    ComputeTimes,
    Link,
    transfer_seconds,
    waits_by_sublayer,
)
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.step_time import (
    Batch,
    compute_times,
    far_link,
    roofline,
    slowdown,
    storage_link,
)
from vllm_tiered.weights.layout import (
    Parameter,
    Sublayer,
    extent_bytes,
    extent_bytes_of,
    moved_each_step,
)
from vllm_tiered.weights.placement import Placement

Bound = Literal["link", "near memory", "arithmetic"]
Budget = Literal["near", "far", "none"]

_MOST_SINGLY = 10
"""Number of offloaded parameters above which all are kept near instead of trying combinations."""

_DIGITS = 9
"""Decimal digits of compared seconds, as sums of the same numbers differ in the last bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SublayerTimes:
    """Times of a sublayer in a step.

    Attributes:
        compute_seconds: compute time of the sublayer, slowed by concurrent copies.
        transfer_seconds: transfer time of its offloaded parameters; 0 if none move in each step.
        hidden_seconds: compute time that the transfer may overlap. At a prefetch depth above 1,
            other transfers overlap it too. If the sublayer waits there, this is the part of its
            transfer that is hidden.
        bound_by: what limits the sublayer's speed.
    """

    compute_seconds: float
    transfer_seconds: float
    hidden_seconds: float
    bound_by: Bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """Bottleneck of a group of sublayers that are equal in every attribute.

    Attributes:
        kind: "attention" or "ffn".
        layers: number of such sublayers.
        near_bytes, far_bytes, storage_bytes: bytes of one sublayer's parameters in each tier.
        decode: times in a decode step with all requests.
        prefill: times in a prefill step of one request.
        budget: the budget that is too small. "near": with ``more_bytes`` more of near memory,
            decoding would not wait. "far": with ``more_bytes`` more of far memory, more requests
            would fit without a wait. "none": more memory would not help.
        more_bytes: the missing bytes of that budget for one sublayer; 0 for "none".
    """

    kind: str
    layers: int
    near_bytes: int
    far_bytes: int
    storage_bytes: int
    decode: SublayerTimes
    prefill: SublayerTimes
    budget: Budget
    more_bytes: int


def find_bottlenecks(
    shape: ModelShape, machine: Machine, load: Workload, split: MemorySplit, far_bytes: int
) -> list[Bottleneck]:
    """Return the bottlenecks of a placement's sublayers; equal sublayers are grouped.

    Args:
        shape: shape of the model.
        machine: machine to predict for.
        load: the workload.
        split: the placement and its KV cache.
        far_bytes: budget of far memory.
    """
    placement, requests = split.placement, split.served.requests
    decode = _sublayer_times(shape, machine, placement, load.decode(requests))
    prefill = _sublayer_times(shape, machine, placement, load.prefill())
    spare_near = split.kv_bytes - load.kv_bytes(shape, requests)
    spare_far = far_bytes - placement.far_bytes
    # Transfers are slower while compute is busy.
    is_moved = any(moved_each_step(len(placement.extents), placement.prefetch_depth))
    slower = slowdown(machine, placement).link if is_moved else 1.0
    link = far_link(machine, placement.far_bytes).slowed_by(slower)
    links = (link, (storage_link(machine) or link).slowed_by(slower))
    bottlenecks: Counter[Bottleneck] = Counter()
    for position, (sublayer, (far, stored)) in enumerate(
        zip(shape.sublayers, placement.offloaded, strict=True)
    ):
        budget: Budget = "none"
        more = 0
        if decode[position].bound_by == "link":
            more = _more_near(far, stored, decode[position].hidden_seconds, links)
            budget = "near" if more > spare_near else "none"
        elif requests < load.max_requests and not stored:
            more = _more_far(sublayer, far, decode[position - 1].compute_seconds, link)
            budget = "far" if more > spare_far else "none"
        moved = sum(parameter.num_bytes for parameter in far)
        kept = sum(parameter.num_bytes for parameter in stored)
        bottleneck = Bottleneck(
            kind=sublayer.kind.value,
            layers=1,
            near_bytes=sublayer.num_bytes - moved - kept,
            far_bytes=moved,
            storage_bytes=kept,
            decode=decode[position],
            prefill=prefill[position],
            budget=budget,
            more_bytes=more if budget != "none" else 0,
        )
        bottlenecks[bottleneck] += 1
    return [replace(bottleneck, layers=count) for bottleneck, count in bottlenecks.items()]


def _sublayer_times(
    shape: ModelShape, machine: Machine, placement: Placement, batch: Batch
) -> list[SublayerTimes]:
    times = compute_times(shape, machine, batch, placement)
    link = far_link(machine, placement.far_bytes)
    transfers = transfer_seconds(placement, link, storage_link(machine))
    far = [position for position, seconds in enumerate(transfers) if seconds]
    is_moved = dict(zip(far, moved_each_step(len(far), placement.prefetch_depth), strict=True))
    waits = [0.0] * len(transfers)
    if any(is_moved.values()):  # both are busy
        slower = slowdown(machine, placement)
        times = replace(times, compute=tuple(s * slower.compute for s in times.compute))
        transfers = [seconds * slower.link for seconds in transfers]
        waits = waits_by_sublayer(transfers, times, prefetch_depth=placement.prefetch_depth)
    windows = _windows(far, times, placement.prefetch_depth)
    found = []
    for position, (sublayer, seconds) in enumerate(
        zip(shape.sublayers, times.compute, strict=True)
    ):
        transfer = transfers[position] if is_moved.get(position) else 0.0
        hidden = windows[position] if is_moved.get(position) else 0.0
        if placement.prefetch_depth > 1 and waits[position]:
            hidden = transfer - waits[position]  # other transfers use the rest of its window
        arithmetic = roofline(sublayer, shape, machine, batch).is_arithmetic
        bound_by: Bound = "arithmetic" if arithmetic else "near memory"
        late = (
            round(waits[position] if placement.prefetch_depth > 1 else transfer - hidden, _DIGITS)
            > 0
        )
        found.append(
            SublayerTimes(
                compute_seconds=round(seconds, _DIGITS),
                transfer_seconds=round(transfer, _DIGITS),
                hidden_seconds=round(max(0.0, hidden), _DIGITS),
                bound_by="link" if late else bound_by,
            )
        )
    return found


def _windows(far: Sequence[int], times: ComputeTimes, prefetch_depth: int) -> dict[int, float]:
    """Return the compute that each offloaded sublayer's transfer may overlap, by position.

    That compute begins with the offloaded sublayer ``prefetch_depth`` positions earlier. For the
    first sublayers it spans the end of the previous step.
    """
    windows = {}
    for index, position in enumerate(far):
        begin = far[(index - prefetch_depth) % len(far)]
        if begin < position:
            windows[position] = sum(times.compute[begin:position])
        else:
            around = sum(times.compute[begin:]) + sum(times.compute[:position])
            windows[position] = around + times.rest
    return windows


def _more_near(
    far: Sequence[Parameter],
    stored: Sequence[Parameter],
    hidden_seconds: float,
    links: tuple[Link, Link],
) -> int:
    """Return the fewest bytes to keep near for the other parameters to arrive in time."""
    moved = (*far, *stored)
    if len(moved) > _MOST_SINGLY:
        return sum(parameter.num_bytes for parameter in moved)

    def transfer(stays: Collection[Parameter]) -> float:
        return sum(
            link.seconds(extent_bytes_of(p for p in group if p not in stays))
            for link, group in zip(links, (far, stored), strict=True)
        )

    enough = (
        sum(parameter.num_bytes for parameter in stays)
        for count in range(1, len(moved) + 1)
        for stays in itertools.combinations(moved, count)
        if transfer(stays) <= hidden_seconds
    )
    return min(enough)


def _more_far(
    sublayer: Sublayer, far: Sequence[Parameter], hidden_seconds: float, link: Link
) -> int:
    """Return how many more bytes could be far and still arrive in time; 0 if none."""
    movable = [parameter for parameter in sublayer.parameters if parameter.may_move]
    extent = extent_bytes(parameter.num_bytes for parameter in movable)
    if link.seconds(extent) > hidden_seconds:
        return 0
    return extent - extent_bytes(parameter.num_bytes for parameter in far)
