# SPDX-License-Identifier: Apache-2.0
"""Prediction of computing some far weights where they are, by the host's processor.

A decode step of one request multiplies each weight with one row, so it takes as long as the weights
take to read. The host reads its memory faster than the link carries it. While it computes one far
sublayer, the link carries the next ones, so both rates add up:

    compute  │ near │ host: FFN 0 │ near │ FFN 1 │ near │ host: FFN 2 │ ...
    link            │    FFN 1    │      │ ...          │    FFN 3    │

The engine does not do this yet. :func:`plan_host` says what it would bring to a placement, so that
it is known before it is built; the planner compares all placements with it. Processor and link read
the same memory, so the processor has what the link leaves. With more requests the host's arithmetic
would bound it, which is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.pipeline_time import (
    ComputeTimes,
    StepTime,
    pipeline_step_time,
    transfer_seconds,
)
from vllm_tiered.planner.step_time import (
    Batch,
    compute_times,
    far_link,
    predict_step,
    roofline,
    slowdown,
    storage_link,
)
from vllm_tiered.weights.placement import Placement

ROUND_TRIP_SECONDS = 30e-6
"""Assumed time in which a sublayer's input reaches the host and its output returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlan:
    """Far sublayers that the host's processor would compute, and what is predicted of it.

    Attributes:
        policy: placement of the weights.
        sublayers: indices of these sublayers.
        far_sublayers: number of sublayers with far weights.
        host_bytes: weights that the processor reads in each step.
        step: the decode step of one request.
        without: the same with all far weights on the link, of the best placement if several are
            compared.
    """

    policy: str
    sublayers: tuple[int, ...]
    far_sublayers: int
    host_bytes: int
    step: StepTime
    without: StepTime

    def describe(self) -> str:
        """Return a line for people."""
        return (
            f"If the host's processor computed {len(self.sublayers)} of {self.far_sublayers} far "
            f"sublayers of {self.policy}, one request would take {1e3 * self.step.seconds:.1f} ms "
            f"a token instead of {1e3 * self.without.seconds:.1f} (predicted; the engine does not "
            "do this yet)."
        )


def plan_host(
    shape: ModelShape, machine: Machine, placement: Placement, batch: Batch
) -> HostPlan | None:
    """Return the best number of far sublayers to compute on the host, evenly spaced.

    Args:
        shape: shape of the model.
        machine: machine to predict for.
        placement: placement of the weights.
        batch: a decode step of one request.

    Returns:
        None if nothing is far, or the host is not known to be faster than the link.
    """
    rate = host_bytes_per_s(machine, placement.far_bytes)
    far = [at for at, (parameters, _) in enumerate(placement.offloaded) if parameters]
    if not far or rate is None:
        return None
    without = predict_step(shape, machine, placement, batch)
    best: tuple[float, tuple[int, ...], StepTime] | None = None
    for count in range(1, len(far) + 1):
        chosen = tuple(far[index * len(far) // count] for index in range(count))
        step = host_step(shape, machine, placement, batch, chosen)
        if best is None or step.seconds < best[0]:
            best = step.seconds, chosen, step
    assert best is not None
    seconds, chosen, step = best
    if seconds >= 0.99 * without.seconds:
        return None
    return HostPlan(
        policy=placement.policy,
        sublayers=chosen,
        far_sublayers=len(far),
        host_bytes=sum(p.num_bytes for at in chosen for p in placement.offloaded[at][0]),
        step=step,
        without=without,
    )


def host_bytes_per_s(machine: Machine, far_bytes: int = 0) -> float | None:
    """Return what the processor can read beside the link; None if unknown, or nothing is left.

    Args:
        machine: machine to predict for.
        far_bytes: far weights. Each sublayer has the same shares of them in all tiers, so that of
            slower tiers, too, the processor has what the link leaves.
    """
    if machine.host_gb_per_s is None:
        return None
    read = machine.host_gb_per_s
    if machine.far_tiers and far_bytes:
        fastest = machine.far_tiers.tiers[0]
        parts = machine.far_tiers.bytes_by_tier(far_bytes)
        # The first tier is the host's own memory; the link may be slower than what it reads from.
        rates = [
            machine.host_gb_per_s if tier is fastest else tier.gb_per_s
            for tier in machine.far_tiers
        ]
        read = far_bytes / sum(part / rate for part, rate in zip(parts, rates, strict=True))
    left = read - machine.far_gb_per_s(far_bytes)
    return left * 1e9 if left > 0 else None


def host_step(
    shape: ModelShape,
    machine: Machine,
    placement: Placement,
    batch: Batch,
    sublayers: tuple[int, ...],
) -> StepTime:
    """Predict a decode step in which the host computes the far weights of these sublayers."""
    rate = host_bytes_per_s(machine, placement.far_bytes)
    assert rate is not None
    times = compute_times(shape, machine, batch, placement)
    link = far_link(machine, placement.far_bytes)
    transfers = transfer_seconds(placement, link, storage_link(machine))
    compute = list(times.compute)
    for at in sublayers:
        far, _ = placement.offloaded[at]
        sublayer = placement.sublayers[at]
        rest = replace(
            sublayer, parameters=tuple(p for p in sublayer.parameters if p not in set(far))
        )
        # The near device's part, attention included, comes before or after the host's.
        near = roofline(rest, shape, machine, batch).seconds
        read = sum(p.num_bytes * shape.share_read(p, batch.tokens) for p in far)
        compute[at] = near + read / rate + ROUND_TRIP_SECONDS
        transfers[at] = 0.0
    return pipeline_step_time(
        transfers,
        ComputeTimes(compute=tuple(compute), rest=times.rest),
        slowdown(machine, placement, sublayers),
        placement.prefetch_depth,
    )
