# SPDX-License-Identifier: Apache-2.0
"""What a plan recommends: the best placement with KV swapping, and as the engine makes it."""

import dataclasses
from functools import cache

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from vllm_tiered.kv.layout import LayerStack
from vllm_tiered.kv.tuning import DEFAULT_TUNING
from vllm_tiered.planner.fit import Fit
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.memory_split import MemoryBudget
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.plan import Case, Plan
from vllm_tiered.planner.serving import NO_LIMITS, Limits, Workload
from vllm_tiered.planner.throughput_split import split_for_throughput
from vllm_tiered.units import GIB

LLAMA = model_shape(LLAMA_3_8B)
SHORT = Workload(prompt_tokens=512, output_tokens=128)
LONG = Workload(prompt_tokens=2048, output_tokens=512)


@cache
def plan(near_gib=16, *, on="h200-pcie5", load=LONG, target="throughput", limits=NO_LIMITS):
    return Case(
        shape=LLAMA,
        machine=load_profile(on),
        load=load,
        near_bytes=near_gib * GIB,
        far_bytes=64 * GIB,
        target=target,
        limits=limits,
    ).plan()


def fits(made):
    return {fit.placement: fit for fit in made.results if isinstance(fit, Fit)}


def with_rates(rates):
    """Return a plan of placements with these tokens/s, without and with KV swapping."""
    made = plan()
    swapped = fits(made)["all near"].swapped
    assert swapped is not None

    def changed(fit):
        without, with_swapping = rates[fit.placement]
        served = dataclasses.replace(fit.split.served, tokens_per_s=without)
        faster = dataclasses.replace(swapped.served, tokens_per_s=with_swapping or 1.0)
        return dataclasses.replace(
            fit,
            split=dataclasses.replace(fit.split, served=served),
            swapped=dataclasses.replace(swapped, served=faster) if with_swapping else None,
        )

    results = [changed(fit) for name, fit in fits(made).items() if name in rates]
    return Plan(case=made.case, results=results, slots=None)


@pytest.mark.parametrize(
    ("rates", "chosen", "auto"),
    [
        ({"latency": (90, None), "throughput": (100, None)}, "throughput", "throughput"),
        # With its KV cache swapped, the plan for latency serves 5 % more.
        ({"latency": (90, 115.5), "throughput": (100, 110)}, "latency", "throughput"),
        # 1 % is no difference, so that the target's own plan stays.
        ({"latency": (90, 110.9), "throughput": (100, 110)}, "throughput", "throughput"),
        # Without KV swapping the engine would take the other one.
        ({"latency": (102, None), "throughput": (100, 104)}, "throughput", "latency"),
        ({"helm": (80, 120), "latency": (90, 100), "throughput": (100, 110)}, "helm", "throughput"),
    ],
)
def test_placements_are_compared_with_their_kv_cache_swapped(rates, chosen, auto):
    made = with_rates(rates)
    assert made.chosen is not None and made.auto is not None
    assert (made.chosen.placement, made.auto.placement) == (chosen, auto)
    assert made.best is not None
    assert made.best.tokens_per_s == max(max(rate or 0 for rate in two) for two in rates.values())


def test_a_lone_request_is_not_served_faster_by_swapping():
    made = with_rates({"latency": (90, 110), "throughput": (100, 200)})
    for_latency = dataclasses.replace(made, case=dataclasses.replace(made.case, target="latency"))
    assert for_latency.chosen is not None
    assert for_latency.chosen.placement == "latency"


def test_what_is_best_with_swapping_is_recommended():
    """All near serves 4 requests with its KV swapped, "throughput" as many with far weights."""
    made = plan()
    chosen, auto = made.chosen, made.auto
    assert chosen is not None and auto is not None
    assert (chosen.placement, auto.placement) == ("all near", "throughput")
    assert (chosen.requests, chosen.most_requests, auto.most_requests) == (3, 4, 4)
    assert chosen.tokens_per_s < auto.tokens_per_s
    assert chosen.served_for("throughput").tokens_per_s > 1.05 * auto.tokens_per_s


def test_the_engine_has_no_auto_for_quantised_layers():
    made = plan()
    quantised = dataclasses.replace(LLAMA, quantization="fp8")
    case = dataclasses.replace(made.case, shape=quantised)
    assert dataclasses.replace(made, case=case).auto is None


@pytest.mark.parametrize(
    ("near_gib", "limits"),
    [(16, NO_LIMITS), (18, NO_LIMITS), (18, Limits(tbt_seconds=0.02))],
)
def test_the_engine_makes_the_plan_for_throughput_that_is_predicted(near_gib, limits):
    """It plans for as many requests as the command allows, which KV swapping adds to."""
    fit = fits(plan(near_gib, on="gh200", load=SHORT, limits=limits))["throughput"]
    load = dataclasses.replace(SHORT, max_requests=fit.most_requests)
    room = MemoryBudget(near_bytes=near_gib * GIB - LLAMA.other_bytes, far_bytes=64 * GIB)
    made = split_for_throughput(LLAMA, load_profile("gh200"), load, room)
    assert made.placement == fit.split.placement
    assert limits.excess(fit.served_for("throughput")) is None


def test_limits_do_not_trade_tokens_for_requests():
    """What is best without the limit keeps it, so it is best with the limit too."""
    free = fits(plan(18, on="gh200", load=SHORT))["throughput"]
    bound = fits(plan(18, on="gh200", load=SHORT, limits=Limits(tbt_seconds=0.02)))["throughput"]
    assert free.served_for("throughput").decode_seconds < 0.02
    assert bound.served_for("throughput") == free.served_for("throughput")


def test_auto_holds_a_level_or_it_is_fixed():
    """The controller leaves a level at which more than 1 % of a step waits for KV."""
    all_near = fits(plan(18, on="gh200", load=SHORT))["all near"].swapped
    throughput = fits(plan(18, on="gh200", load=SHORT))["throughput"].swapped
    assert all_near is not None and all_near.is_adaptive
    assert all_near.served.stall_share <= DEFAULT_TUNING.max_stall
    assert throughput is not None and not throughput.is_adaptive
    assert throughput.served.stall_share > DEFAULT_TUNING.max_stall
    # The engine finds the layers of a fixed expansion, and keeps partial blocks near.
    assert not throughput.partial_blocks_far
    assert LayerStack(32).num_far_for(throughput.expansion - 1e-4) == throughput.far_layers


def test_for_latency_nothing_is_fixed():
    """Far layers would be read for a lone request too."""
    made = fits(plan(18, on="gh200", load=SHORT, target="latency"))
    assert all(fit.swapped.is_adaptive for fit in made.values() if fit.swapped)
    assert any(fit.swapped for fit in made.values())
