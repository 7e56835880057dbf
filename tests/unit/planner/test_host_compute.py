# SPDX-License-Identifier: Apache-2.0
"""Far weights that the host computes: bounds of both rates, by hand, and machines without gain."""

import dataclasses

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from vllm_tiered.planner.fit import Fit
from vllm_tiered.planner.host_compute import (
    ROUND_TRIP_SECONDS,
    host_bytes_per_s,
    host_step,
    plan_host,
)
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.memory_split import baseline
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.plan import Case
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.step_time import Batch, compute_times, predict_step, roofline
from vllm_tiered.units import GIB

LLAMA = model_shape(LLAMA_3_8B)
ALL_FAR = baseline("all_far", LLAMA)
ONE = Batch(requests=1, new_tokens=1, context_tokens=500)
DESKTOP = dataclasses.replace(
    load_profile("rtx4090-pcie4"), near_bytes_per_copied_byte=0, far_layer_overhead_us=0
)
"""25 GB/s over the link, and 70 - 25 = 45 for the processor."""


def test_with_all_on_the_host_a_step_is_what_it_reads_and_what_is_near():
    every = tuple(range(64))
    step = host_step(LLAMA, DESKTOP, ALL_FAR, ONE, every)
    near = sum(
        roofline(
            dataclasses.replace(
                sublayer, parameters=tuple(p for p in sublayer.parameters if p not in far)
            ),
            LLAMA,
            DESKTOP,
            ONE,
        ).seconds
        for sublayer, far in zip(ALL_FAR.sublayers, ALL_FAR.far, strict=True)
    )
    far_bytes = sum(p.num_bytes for far in ALL_FAR.far for p in far)
    rest = compute_times(LLAMA, DESKTOP, ONE, ALL_FAR).rest
    expected = far_bytes / 45e9 + 64 * ROUND_TRIP_SECONDS + near + rest
    assert step.seconds == pytest.approx(expected)
    assert step.link_seconds == step.stall_seconds == 0


def test_the_best_share_nears_the_sum_of_both_rates():
    plan = plan_host(LLAMA, DESKTOP, ALL_FAR, ONE)
    assert plan is not None
    far_bytes = sum(p.num_bytes for far in ALL_FAR.far for p in far)
    bound = far_bytes / 70e9
    assert bound < plan.step.seconds < 1.35 * bound
    assert plan.without.seconds > far_bytes / 25e9
    share = plan.host_bytes / far_bytes
    assert 0.4 < share < 0.75, "45 of 70 GB/s are the processor's"
    assert len(plan.sublayers) < plan.far_sublayers == 64
    assert f"computed {len(plan.sublayers)} of 64 far sublayers of all_far" in plan.describe()


def test_no_other_number_is_better():
    plan = plan_host(LLAMA, DESKTOP, ALL_FAR, ONE)
    assert plan is not None
    for count in (1, 8, 16, 32, 48, 64):
        chosen = tuple(index * 64 // count for index in range(count))
        assert host_step(LLAMA, DESKTOP, ALL_FAR, ONE, chosen).seconds >= plan.step.seconds


def test_the_planner_takes_the_placement_that_is_best_with_the_host():
    case = Case(
        shape=LLAMA,
        machine=DESKTOP,
        load=Workload(prompt_tokens=512, output_tokens=128),
        near_bytes=8 * GIB,
        far_bytes=64 * GIB,
        target="latency",
    )
    plan = case.plan()
    found, one = plan.host(), case.load.decode(1)
    assert found is not None
    alone = {}
    for fit in plan.results:
        if isinstance(fit, Fit):
            placement = fit.split.placement
            alone[fit.placement] = predict_step(LLAMA, DESKTOP, placement, one).seconds
            other = plan_host(LLAMA, DESKTOP, placement, one)
            assert other is None or other.step.seconds >= found.step.seconds
    assert len(alone) > 2 and found.step.seconds < 0.9 * min(alone.values())
    assert found.without.seconds == min(alone.values())


def test_a_link_as_fast_as_host_memory_leaves_the_host_nothing():
    fast = dataclasses.replace(DESKTOP, read_gb_per_s=70.0)
    assert host_bytes_per_s(fast) is None
    assert plan_host(LLAMA, fast, ALL_FAR, ONE) is None


def test_the_host_reads_a_slower_tier_no_faster_than_it_is():
    """Of 300 GB, 26 are in CXL memory: link and processor share 28 GB/s of it, and 240 of DRAM."""
    machine = load_profile("h200-dram-cxl-asic")
    dram, cxl = machine.far_tiers
    assert machine.host_gb_per_s is not None
    far_bytes = dram.capacity_bytes + 26 * 10**9
    seconds = dram.capacity_bytes / (machine.host_gb_per_s * 1e9) + 26 / cxl.gb_per_s
    left = host_bytes_per_s(machine, far_bytes)
    of_dram = host_bytes_per_s(machine, dram.capacity_bytes)
    assert left is not None and of_dram is not None
    assert left == pytest.approx(far_bytes / seconds - 1e9 * machine.far_gb_per_s(far_bytes))
    assert left < of_dram
    slow = dataclasses.replace(
        machine,
        far_tiers=dataclasses.replace(machine.far_tiers, tiers=(dram._replace(gb_per_s=200),)),
    )
    assert host_bytes_per_s(slow, 10**9) == pytest.approx(40e9)


def test_without_far_weights_or_figures_there_is_no_plan():
    assert plan_host(LLAMA, DESKTOP, baseline("all near", LLAMA), ONE) is None
    assert plan_host(LLAMA, load_profile("gh200"), ALL_FAR, ONE) is None
