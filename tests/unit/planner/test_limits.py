# SPDX-License-Identifier: Apache-2.0
"""Limits on times: fewer requests, or no plan; and the plans that no other beats."""

from functools import cache

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from tests.unit.planner.test_expert_slots import EXPERT, OTHERS, SHAPE
from tests.unit.planner.test_expert_slots import LOAD as FEW
from tests.unit.planner.test_expert_slots import plan as slots
from vllm_tiered.planner.expert_slots import SlotsFit
from vllm_tiered.planner.fit import Fit, NoFit, evaluate_placements
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.pareto import pareto_front
from vllm_tiered.planner.serving import NO_LIMITS, Limits, Workload, estimate_serving
from vllm_tiered.units import GIB

GH200 = load_profile("gh200")
LLAMA = model_shape(LLAMA_3_8B)
LOAD = Workload(prompt_tokens=512, output_tokens=128)


@cache
def results(near_gib=18, tbt=None, ttft=None):
    limits = Limits(tbt_seconds=tbt, ttft_seconds=ttft)
    return {
        result.placement: result
        for result in evaluate_placements(
            LLAMA, GH200, LOAD, int(near_gib * GIB), 64 * GIB, limits=limits
        )
    }


def test_without_limits_nothing_exceeds_them():
    served = results()["all near"].split.served
    assert NO_LIMITS.excess(served) is None


@pytest.mark.parametrize("name", ["all near", "all_far", "latency", "throughput"])
def test_as_many_requests_as_the_limit_allows_are_served(name):
    free = results(near_gib=8 if name == "all_far" else 18)[name]
    one, all_of_them = free.split.alone.decode_seconds, free.decode_seconds
    limit = (one + all_of_them) / 2
    found = results(8 if name == "all_far" else 18, tbt=limit)[name]
    assert isinstance(found, Fit)
    assert found.decode_seconds <= limit
    assert 1 <= found.requests < free.requests
    if name.startswith("all"):
        more = estimate_serving(LLAMA, GH200, found.split.placement, LOAD, found.requests + 1)
        assert more.decode_seconds > limit


def test_swapping_keeps_the_limit():
    swapped = results()["all near"].swapped
    limit = swapped.served.decode_seconds * 0.95
    within = results(tbt=limit)["all near"].swapped
    assert within is None or within.served.decode_seconds <= limit


def test_what_one_request_exceeds_is_no_plan_and_says_so():
    free = results(8)["all_far"]
    found = results(8, tbt=free.split.alone.decode_seconds / 2)["all_far"]
    assert isinstance(found, NoFit)
    assert (found.budget, found.short_bytes) == ("time", 0)
    assert found.reason.startswith("with one request the time between tokens is ")
    late = results(8, ttft=free.prefill_seconds / 2)["all_far"]
    assert isinstance(late, NoFit)
    assert late.reason.startswith("the time to first token is ")


def test_slots_for_experts_keep_the_limit():
    near = OTHERS + 5 * 2 * EXPERT + FEW.kv_bytes(SHAPE, 4)
    free = slots(near)
    limit = (free.alone.decode_seconds + free.served.decode_seconds) / 2
    within = slots(near, limits=Limits(tbt_seconds=limit))
    assert isinstance(within, SlotsFit)
    assert within.served.decode_seconds <= limit
    none = slots(near, limits=Limits(tbt_seconds=free.alone.decode_seconds / 100))
    assert isinstance(none, NoFit) and none.budget == "time"


def test_no_plan_beats_one_of_the_front():
    found = list(results().values())
    front = pareto_front(found)
    plans = [served for fit in found if isinstance(fit, Fit) for served in fit.batches]
    plans += [fit.swapped.served for fit in found if isinstance(fit, Fit) and fit.swapped]

    def costs(served):
        return served.decode_seconds, served.prefill_seconds, -served.tokens_per_s

    for _, served in front:
        for other in plans:
            pairs = list(zip(costs(other), costs(served), strict=True))
            better = [theirs < ours - 1e-5 * abs(ours) for theirs, ours in pairs]
            as_good = [theirs <= ours for theirs, ours in pairs]
            assert not (all(as_good) and any(better))
    steps = [served.decode_seconds for _, served in front]
    assert steps == sorted(steps)
    # The best of each kind is there.
    assert max(s.tokens_per_s for _, s in front) == max(s.tokens_per_s for s in plans)
    assert steps[0] == min(s.decode_seconds for s in plans)
