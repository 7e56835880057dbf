# SPDX-License-Identifier: Apache-2.0
"""Plans of an engine whose far memory has several nodes."""

from dataclasses import replace

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from vllm_tiered.adapter.weights.far_nodes import place_with_tiers, with_tiers
from vllm_tiered.adapter.weights.measurements import MeasuredSublayers
from vllm_tiered.planner.far_tiers import NO_TIERS, FarTier, FarTiers
from vllm_tiered.planner.latency_placement import place_for_latency
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.pipeline_time import ComputeTimes, Link
from vllm_tiered.units import GIB
from vllm_tiered.weights.placement import place

SUBLAYERS = model_shape({**LLAMA_3_8B, "num_hidden_layers": 4}).sublayers
LAYER_BYTES = sum(sublayer.num_bytes for sublayer in SUBLAYERS)
MEASURED = MeasuredSublayers(
    times=ComputeTimes(compute=(4e-3,) * len(SUBLAYERS)), link=Link(bytes_per_s=20e9)
)
FAST, SLOW = FarTier("node 1", GIB // 4, 20.0), FarTier("node 2", 64 * GIB, 5.0)


def test_without_tiers_the_measured_link_plans():
    near = LAYER_BYTES // 2
    placement, link = place_with_tiers(SUBLAYERS, MEASURED, NO_TIERS, near, None)
    assert link == MEASURED.link
    assert placement == place_for_latency(SUBLAYERS, MEASURED.times, MEASURED.link, near)


def test_the_link_is_that_of_the_planned_far_weights():
    near = LAYER_BYTES // 2
    tiers = FarTiers((FAST, SLOW))
    placement, link = place_with_tiers(SUBLAYERS, MEASURED, tiers, near, None)
    assert placement.far_bytes > 0 and placement.near_bytes <= near
    assert link.bytes_per_s == pytest.approx(1e9 * tiers.gb_per_s(placement.far_bytes))
    assert 5e9 < link.bytes_per_s < 20e9


def test_a_machine_for_many_requests_has_the_rate_of_all_that_may_be_far():
    machine = load_profile("cpu-2core")
    assert with_tiers(machine, NO_TIERS, SUBLAYERS) is machine
    tiers = FarTiers((FAST, SLOW))
    mixed = with_tiers(machine, tiers, SUBLAYERS)
    far_bytes = place("all_far", SUBLAYERS).far_bytes
    assert mixed.read_gb_per_s == pytest.approx(tiers.gb_per_s(far_bytes), rel=0.01)
    assert replace(mixed, read_gb_per_s=0, write_gb_per_s=0) == replace(
        machine, read_gb_per_s=0, write_gb_per_s=0
    )
