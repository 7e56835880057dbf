# SPDX-License-Identifier: Apache-2.0
"""Tests of energy and emissions by M2Cache's formula 1."""

from dataclasses import replace

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from vllm_tiered.energy.carbon import (
    CARBON_INTENSITY,
    DRAM_WATTS_PER_GB,
    SSD_WATTS,
    Power,
    grams_co2e,
)
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.serving import Workload, estimate_serving
from vllm_tiered.planner.step_time import predict_step
from vllm_tiered.weights.placement import place

POWER = Power(
    near_idle_watts=20.0, near_active_watts=300.0, far_watts_per_gb=0.1, storage_watts=2.0
)
RTX = load_profile("rtx3090-pcie4")
LLAMA = model_shape(LLAMA_3_8B)


def test_each_part_draws_for_its_time():
    joules = POWER.joules(10.0, 4.0, 30 * 10**9)
    assert joules == pytest.approx(300 * 6 + 20 * 4 + (0.1 * 30 + 2) * 10)


def test_the_papers_memory_and_grid():
    """Defaults are 26 W for 256 GB and 820 g per kWh."""
    assert RTX.power is not None
    assert RTX.power.far_watts_per_gb * 256 == pytest.approx(26, rel=1e-3)
    assert grams_co2e(3.6e6, CARBON_INTENSITY) == 820
    assert (DRAM_WATTS_PER_GB * 256, SSD_WATTS) == (26, 2)


def test_a_token_takes_its_share_of_the_power_over_all_steps():
    """Two requests with one prefill and 4 decode steps: their tokens share all the energy."""
    load = Workload(prompt_tokens=64, output_tokens=4)
    placement = place("all_far", LLAMA.sublayers)
    served = estimate_serving(LLAMA, RTX, placement, load, 2)
    decode = predict_step(LLAMA, RTX, placement, load.decode(2))
    prefill = predict_step(LLAMA, RTX, placement, load.prefill(2))
    seconds = 4 * decode.seconds + prefill.seconds
    stall = 4 * decode.stall_seconds + prefill.stall_seconds
    assert RTX.power is not None
    expected = RTX.power.joules(seconds, stall, placement.far_bytes) / 8
    assert served.joules_per_token == pytest.approx(expected)
    assert served.tokens_per_s == pytest.approx(8 / seconds)


def test_each_rank_has_a_card_and_far_memory_and_all_share_a_disk():
    power = Power(near_idle_watts=10, near_active_watts=100, far_watts_per_gb=0.5, storage_watts=2)
    one = power.joules(10, 4, 8_000_000_000)
    assert one == 100 * 6 + 10 * 4 + 0.5 * 8 * 10 + 2 * 10
    assert power.joules(10, 4, 8_000_000_000, 2) == 2 * (one - 20) + 20
    load = Workload(prompt_tokens=64, output_tokens=4)
    two = replace(LLAMA, num_ranks=2)
    placement = place("all_far", LLAMA.sublayers)
    served = estimate_serving(two, RTX, placement, load, 1)
    decode = predict_step(two, RTX, placement, load.decode(1))
    prefill = predict_step(two, RTX, placement, load.prefill(1))
    assert RTX.power is not None
    seconds = 4 * decode.seconds + prefill.seconds
    stall = 4 * decode.stall_seconds + prefill.stall_seconds
    expected = RTX.power.joules(seconds, stall, placement.far_bytes, 2) / 4
    assert served.joules_per_token == pytest.approx(expected)


def test_more_requests_share_the_joules():
    load = Workload(prompt_tokens=64, output_tokens=64)
    placement = place("all_far", LLAMA.sublayers)
    few, many = (estimate_serving(LLAMA, RTX, placement, load, n).joules_per_token for n in (1, 16))
    assert few is not None and many is not None and many < few / 8


def test_unknown_power_is_no_figure():
    load = Workload(prompt_tokens=64, output_tokens=64)
    placement = place("all_far", LLAMA.sublayers)
    cpu = load_profile("cpu-2core")
    assert estimate_serving(LLAMA, cpu, placement, load, 1).joules_per_token is None
