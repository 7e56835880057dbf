# SPDX-License-Identifier: Apache-2.0
"""Far memory on several NUMA nodes: measured at start, divided by speed, planned with."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from vllm_tiered.adapter.weights.measurements import MeasuredSublayers, link_bytes
from vllm_tiered.devices.base import Device
from vllm_tiered.planner.far_tiers import FarTier, FarTiers
from vllm_tiered.planner.latency_placement import place_for_latency
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.pipeline_time import Link
from vllm_tiered.probe.nodes import measure_nodes
from vllm_tiered.weights.layout import Sublayer
from vllm_tiered.weights.placement import Placement

logger = logging.getLogger("vllm.tiered")

_TRANSFERS = 4
"""Size of the buffer that is read of each node, in transfers of the largest sublayer.

A start does not read the 8 GiB of a probe; Optane's rate for large buffers may be 20 % lower."""

_MOST_TRIES = 3


def measure_far_tiers(
    device: Device, sublayers: Sequence[Sublayer], near_device: torch.device, num_ranks: int
) -> FarTiers:
    """Measure each NUMA node; from now on the device divides far memory by speed.

    Args:
        device: the device whose far buffers will hold the weights.
        sublayers: sublayers of the layers.
        near_device: torch device that computes.
        num_ranks: ranks that share the nodes' memory.

    Returns:
        The nodes in the order in which far memory uses them; none if they are not told apart.
    """
    reads = measure_nodes(device, near_device, _TRANSFERS * link_bytes(sublayers))
    if reads:
        rates = ", ".join(f"{read.bytes_per_s / 1e9:.1f} GB/s from {read.node}" for read in reads)
        logger.info("tiered weights: far memory by NUMA node: %s", rates)
    tiers = (
        FarTier(f"node {read.node}", read.capacity_bytes // num_ranks, read.bytes_per_s / 1e9)
        for read in reads
    )
    return FarTiers(tuple(tiers), at_once=device.reads_nodes_at_once)


def place_with_tiers(
    sublayers: Sequence[Sublayer],
    measured: MeasuredSublayers,
    far_tiers: FarTiers,
    near_bytes: int,
    far_bytes: int | None,
) -> tuple[Placement, Link]:
    """Return the placement with the shortest step, and the link that its far weights have.

    The link depends on how much is far, and that on the link. So the placement is made anew until
    the link is that of its own far weights, at most three times.

    Raises:
        BudgetError: see :func:`~vllm_tiered.planner.latency_placement.place_for_latency`.
    """
    given = (near_bytes, far_bytes, measured.storage)
    if not far_tiers:
        return place_for_latency(sublayers, measured.times, measured.link, *given), measured.link
    link = _link_from(far_tiers, max(0, sum(one.num_bytes for one in sublayers) - near_bytes))
    for _ in range(_MOST_TRIES):
        placement = place_for_latency(sublayers, measured.times, link, *given)
        planned, link = link, _link_from(far_tiers, placement.far_bytes)
        if link == planned:
            break
    return placement, link


def with_tiers(machine: Machine, far_tiers: FarTiers, sublayers: Sequence[Sublayer]) -> Machine:
    """Return a measured machine whose far memory is as fast as its tiers are together.

    All that may be far is taken to be: a plan for many requests leaves near memory to the KV cache.
    """
    if not far_tiers:
        return machine
    movable = sum(p.num_bytes for one in sublayers for p in one.parameters if p.may_move)
    rate = far_tiers.gb_per_s(movable)
    return replace(machine, read_gb_per_s=rate, write_gb_per_s=rate)


def _link_from(far_tiers: FarTiers, far_bytes: int) -> Link:
    return Link(bytes_per_s=1e9 * far_tiers.gb_per_s(far_bytes))
