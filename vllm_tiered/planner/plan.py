# SPDX-License-Identifier: Apache-2.0
"""A question to the planner, and its answer: placements, slots for experts, the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from vllm_tiered.planner.bottleneck import Bottleneck, find_bottlenecks
from vllm_tiered.planner.expert_slots import SlotsFit, plan_slots
from vllm_tiered.planner.fit import (
    NAMES,
    Fit,
    NoFit,
    chosen_placement,
    evaluate_placements,
    plan_with_unbounded_far,
)
from vllm_tiered.planner.host_compute import HostPlan, plan_host
from vllm_tiered.planner.machine import Machine
from vllm_tiered.planner.memory_split import MemorySplit, Target, cost_of, pick
from vllm_tiered.planner.model_shape import ModelShape
from vllm_tiered.planner.serving import NO_LIMITS, Limits, ServingEstimate, Workload
from vllm_tiered.planner.step_time import predict_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is asked of the planner.

    Attributes:
        shape, machine, load: model, machine and workload.
        near_bytes, far_bytes: the budgets; near memory includes embeddings, head and KV cache.
        target: what is optimised.
        has_storage: whether weights that exceed far memory are stored.
        limits: times that may not be exceeded.
    """

    shape: ModelShape
    machine: Machine
    load: Workload
    near_bytes: int
    far_bytes: int
    target: Target
    has_storage: bool = False
    limits: Limits = NO_LIMITS

    def plan(self, names: Sequence[str] = NAMES) -> Plan:
        """Return the answer, with these placements.

        Raises:
            ConfigError: see :func:`~vllm_tiered.planner.fit.evaluate_placements`.
        """
        given = (self.shape, self.machine, self.load, self.near_bytes, self.far_bytes)
        results = evaluate_placements(
            *given,
            has_storage=self.has_storage,
            limits=self.limits,
            target=self.target,
            names=names,
        )
        slots = plan_slots(
            *given, target=self.target, has_storage=self.has_storage, limits=self.limits
        )
        return Plan(case=self, results=list(results), slots=slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Answer of the planner.

    Attributes:
        case: what was asked.
        results: the result of each placement.
        slots: slots for experts; None if the model needs none.
    """

    case: Case
    results: list[Fit | NoFit]
    slots: SlotsFit | NoFit | None

    @property
    def fits(self) -> bool:
        """Whether something fits the budgets and the limits."""
        return any(True for _ in self._fitting())

    @property
    def not_fitting(self) -> list[NoFit]:
        """What does not fit, with the reasons."""
        return [result for result in (*self.results, self.slots) if isinstance(result, NoFit)]

    @property
    def chosen(self) -> Fit | None:
        """The best placement for the target, with KV swapping where it gains; None if none fits.

        The target's own plan wins if it is as good as the best within 1 %.
        """
        fits, target = [fit for fit in self.results if isinstance(fit, Fit)], self.case.target
        if not fits:
            return None
        return pick(
            target,
            fits,
            lambda fit: cost_of(fit.served_for(target), target),
            lambda fit: fit.placement,
        )

    @property
    def auto(self) -> Fit | None:
        """The plan that `weights.placement="auto"` would take; None if the engine has none.

        The engine compares placements without KV swapping, so it may differ from :attr:`chosen`.
        """
        if not self.case.shape.may_share_with_kv:
            return None
        name = chosen_placement(self.case.target, self.results)
        fits_by_name = {fit.placement: fit for fit in self.results if isinstance(fit, Fit)}
        return fits_by_name.get(name) if name else None

    @property
    def best_slots(self) -> SlotsFit | None:
        """The slots for experts, if they are better than the chosen placement."""
        if not isinstance(self.slots, SlotsFit):
            return None
        target, chosen = self.case.target, self.chosen
        if chosen and is_better(chosen.served_for(target), self.slots.served_for(target), target):
            return None
        return self.slots

    @property
    def best(self) -> ServingEstimate | None:
        """The prediction that is best for the target; None if nothing fits.

        For latency it is of one request, otherwise of all requests with the KV cache swapped.
        """
        best: ServingEstimate | None = None
        for fit in self._fitting():
            served = fit.served_for(self.case.target)
            if best is None or is_better(served, best, self.case.target):
                best = served
        return best

    def bottlenecks(self, fit: Fit) -> list[Bottleneck]:
        """Return what bounds each sublayer of a placement."""
        case = self.case
        return find_bottlenecks(case.shape, case.machine, case.load, fit.split, case.far_bytes)

    def host(self) -> HostPlan | None:
        """Return the best placement of one request with the host's processor as a third home.

        None if no placement with some far weights computed on the host is better than the best
        without.
        """
        case, one = self.case, self.case.load.decode(1)
        fits = [fit for fit in self.results if isinstance(fit, Fit)]
        plans = [
            plan
            for fit in fits
            if (plan := plan_host(case.shape, case.machine, fit.split.placement, one))
        ]
        if not plans:
            return None
        steps = (predict_step(case.shape, case.machine, fit.split.placement, one) for fit in fits)
        without = min(steps, key=lambda step: step.seconds)
        best = min(plans, key=lambda plan: plan.step.seconds)
        is_better = best.step.seconds < 0.99 * without.seconds
        return replace(best, without=without) if is_better else None

    def with_unbounded_far(self, fit: Fit) -> MemorySplit | None:
        """Return the placement's plan for unlimited far memory; None if it is no better."""
        case = self.case
        return plan_with_unbounded_far(case.shape, case.machine, case.load, fit)

    def _fitting(self) -> Iterator[Fit | SlotsFit]:
        for result in (*self.results, self.slots):
            if isinstance(result, Fit | SlotsFit):
                yield result


def is_better(one: ServingEstimate, other: ServingEstimate, target: Target) -> bool:
    """Return whether one prediction is better than another for a target."""
    return cost_of(one, target) < cost_of(other, target)
