# SPDX-License-Identifier: Apache-2.0
"""JSON that `vllm-tiered plan --json` prints."""

import argparse
from dataclasses import asdict
from typing import Any

from vllm_tiered.cli.plan_ffn import StorePlan
from vllm_tiered.energy.carbon import grams_co2e
from vllm_tiered.planner.assumptions import describe_gemms
from vllm_tiered.planner.card_memory import CardMemory
from vllm_tiered.planner.expert_slots import NAME as SLOTS
from vllm_tiered.planner.expert_slots import SlotsFit
from vllm_tiered.planner.fit import Fit, NoFit
from vllm_tiered.planner.kv_swapping import SwappedKv
from vllm_tiered.planner.machine import Figures, Machine
from vllm_tiered.planner.model_shape import ModelShape, bytes_by_class
from vllm_tiered.planner.pareto import pareto_front
from vllm_tiered.planner.plan import Plan
from vllm_tiered.planner.serving import ServingEstimate
from vllm_tiered.planner.suggestions import suggest


def to_json(
    args: argparse.Namespace,
    plan: Plan,
    card: CardMemory | None,
    figures: Figures,
    store: StorePlan | str | None = None,
) -> dict[str, Any]:
    """Return all figures of a plan."""
    case, best = plan.case, plan.chosen
    shape = case.shape
    answer = {
        "fits": plan.fits,
        "target": case.target,
        "chosen": SLOTS if plan.best_slots else best.placement if best else None,
        "auto": plan.auto.placement if plan.auto else None,
        "model": {
            "family": shape.family,
            "num_layers": shape.num_layers,
            "layer_bytes": shape.layer_bytes,
            "other_bytes": shape.other_bytes,
            "bytes_by_class": bytes_by_class(shape),
            "kv_bytes_per_token": shape.kv_bytes_per_token,
            "kv_bytes_per_request": case.load.kv_bytes(shape),
            "quantization": shape.quantization,
            "gemms": describe_gemms(shape, case.machine),
            "experts": _experts(shape),
        },
        "machine": {"name": args.machine, "figures": figures},
        "asked": {
            "near_bytes": case.near_bytes,
            "card": asdict(card) if card else None,
            "far_bytes": case.far_bytes,
            "limits": asdict(case.limits),
            "storage": args.storage,
            "compress": args.compress,
            "dtype": args.dtype,
            "tensor_parallel_size": args.tensor_parallel_size,
            "load": asdict(case.load),
        },
        "carbon_intensity": args.carbon_intensity,
        "placements": [
            _result(result, case.machine, args.carbon_intensity) for result in plan.results
        ],
        "experts_in_slots": None if plan.slots is None else _slots(plan.slots, args),
    }
    if store is not None:
        answer["ffn_store"] = _store(store, args.carbon_intensity)
    if args.pareto:
        answer["pareto"] = [
            {"plan": name, **_served(served, args.carbon_intensity)}
            for name, served in pareto_front(plan.results, plan.slots)
        ]
    if args.suggest or not plan.fits:
        answer["suggestions"] = [asdict(suggestion) for suggestion in suggest(case)]
    if best:
        host = plan.host()
        answer["host_compute"] = asdict(host) if host else None
        answer["sublayers"] = [asdict(bottleneck) for bottleneck in plan.bottlenecks(best)]
    return answer


def _store(store: StorePlan | str, carbon_intensity: float) -> dict[str, Any]:
    if isinstance(store, str):
        return {"reason": store}
    better = store.best_without
    return {
        **asdict(store.fit),
        "served": _served(store.fit.served, carbon_intensity),
        "is_calibrated": store.is_calibrated,
        "steps_aside": store.why_dense,
        "better_format": store.better_format,
        "best_without": better and {"plan": better[0], **_served(better[1], carbon_intensity)},
    }


def _slots(slots: SlotsFit | NoFit, args: argparse.Namespace) -> dict[str, Any]:
    if isinstance(slots, NoFit):
        return asdict(slots)
    figures = asdict(slots)
    del figures["swapped"]
    return {
        **figures,
        "served": _served(slots.served, args.carbon_intensity),
        "kv_swapping": _swapped(slots.swapped, args.carbon_intensity),
    }


def _experts(shape: ModelShape) -> dict[str, int] | None:
    if shape.experts is None:
        return None
    return {"num_experts": shape.experts.num_experts, "per_token": shape.experts.per_token}


def _result(result: Fit | NoFit, machine: Machine, carbon_intensity: float) -> dict[str, Any]:
    if isinstance(result, NoFit):
        return asdict(result)
    sizes = ("near", "buffer", "far", "storage", "other", "kv")
    return {
        "placement": result.placement,
        **{f"{name}_bytes": getattr(result, f"{name}_bytes") for name in sizes},
        "far_bytes_by_tier": _by_tier(result.far_bytes, machine),
        "prefetch_depth": result.split.placement.prefetch_depth,
        **_served(result.split.served, carbon_intensity),
        "batches": [_served(served, carbon_intensity) for served in result.batches],
        "kv_swapping": _swapped(result.swapped, carbon_intensity),
    }


def _by_tier(far_bytes: int, machine: Machine) -> dict[str, int] | None:
    """Return the bytes of far weights in each tier by name; None if far memory is one tier."""
    tiers = machine.far_tiers
    if not tiers:
        return None
    parts = tiers.bytes_by_tier(far_bytes)
    return {tier.name: num_bytes for tier, num_bytes in zip(tiers, parts, strict=True)}


def _swapped(swapped: SwappedKv | None, carbon_intensity: float) -> dict[str, Any] | None:
    if swapped is None:
        return None
    return {**asdict(swapped), "served": _served(swapped.served, carbon_intensity)}


def _served(served: ServingEstimate, carbon_intensity: float) -> dict[str, Any]:
    joules = served.joules_per_token
    grams = None if joules is None else grams_co2e(joules, carbon_intensity)
    return {**asdict(served), "gco2e_per_token": grams}
