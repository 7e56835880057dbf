# SPDX-License-Identifier: Apache-2.0
"""Placements that fit, and their predicted speed."""

import dataclasses
from functools import cache

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.fixtures.model_configs import LLAMA_3_8B, OPT_175B
from vllm_tiered.planner.fit import (
    Fit,
    NoFit,
    chosen_placement,
    evaluate_placements,
    plan_with_unbounded_far,
)
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.memory_split import MemoryBudget, baseline, split_with
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.step_time import Batch, compute_times, predict_step
from vllm_tiered.units import GIB
from vllm_tiered.weights.layout import Kind
from vllm_tiered.weights.placement import place

RTX = load_profile("rtx4090-pcie4")
LLAMA = model_shape(LLAMA_3_8B)
LOAD = Workload(prompt_tokens=512, output_tokens=128)


@cache
def by_name(near_gib, far_gib=64, *, shape=LLAMA, load=LOAD, on=RTX):
    results = evaluate_placements(shape, on, load, int(near_gib * GIB), int(far_gib * GIB))
    return {result.placement: result for result in results}


def test_all_near_is_the_fastest_where_it_fits():
    found = by_name(24)
    assert all(isinstance(result, Fit) for result in found.values())
    best = max(found.values(), key=lambda result: result.tokens_per_s)
    assert best.placement in ("all near", "latency")
    assert found["latency"].far_bytes == 0


def test_a_model_larger_than_near_memory_fits_with_its_weights_far():
    found = by_name(8)
    assert isinstance(found["all near"], NoFit)
    assert "exceed 8.00 GiB" in found["all near"].reason
    assert isinstance(found["all_far"], Fit) and found["all_far"].requests > 1
    assert isinstance(found["latency"], Fit)
    assert found["latency"].decode_seconds <= found["all_far"].decode_seconds


def test_nothing_fits_what_the_embeddings_fill():
    found = by_name(2)
    assert all(isinstance(result, NoFit) for result in found.values())
    assert "embeddings, head and the KV cache of one request take" in found["helm"].reason


def test_far_memory_is_a_budget_too():
    found = by_name(8, far_gib=4)
    assert "13.00 GiB far exceed 4.00 GiB by 9.00 GiB" in found["all_far"].reason
    assert found["all_far"].budget == found["throughput"].budget == "far"
    assert found["all near"].budget == "near"


@pytest.mark.parametrize("name", ["all near", "helm", "latency", "throughput"])
@pytest.mark.parametrize(("near_gib", "far_gib"), [(2, 64), (4, 1), (1, 64)])
def test_with_what_is_short_it_fits(name, near_gib, far_gib):
    """Raising each budget by the missing bytes is enough; a byte less is not."""
    near, far = near_gib * GIB, far_gib * GIB
    for _ in range(4):
        results = evaluate_placements(LLAMA, RTX, LOAD, near, far)  # made one by one
        result = next(result for result in results if result.placement == name)
        if isinstance(result, Fit):
            break
        assert result.short_bytes > 0
        near += result.short_bytes if result.budget == "near" else 0
        far += result.short_bytes if result.budget == "far" else 0
    assert isinstance(result, Fit)


def test_the_number_of_requests_is_what_tokens_come_from():
    batches = by_name(8)["all_far"].batches
    assert [served.requests for served in batches] == [1, 2, 4, 8, 16, 32, 64, 72]
    speeds = [served.tokens_per_s for served in batches]
    assert speeds == sorted(speeds) and speeds[-1] > 50 * speeds[0]


def test_auto_takes_the_plan_of_the_target():
    results = list(evaluate_placements(LLAMA, RTX, LOAD, 8 * GIB, 64 * GIB))
    assert chosen_placement("latency", results) == "latency"
    assert chosen_placement("throughput", results) == "throughput"
    assert chosen_placement("latency", results[:4]) is None


def test_more_far_memory_helps_where_it_binds():
    fit = by_name(12, far_gib=5)["throughput"]
    assert isinstance(fit, Fit)
    better = plan_with_unbounded_far(LLAMA, RTX, LOAD, fit)
    assert better is not None and better.placement.far_bytes > 5 * GIB
    assert better.served.tokens_per_s > fit.tokens_per_s
    ample = by_name(12)["throughput"]
    assert isinstance(ample, Fit) and plan_with_unbounded_far(LLAMA, RTX, LOAD, ample) is None


def test_more_near_memory_for_kv_is_more_requests():
    few, many = by_name(8)["all_far"], by_name(10)["all_far"]
    assert many.requests > few.requests
    assert many.tokens_per_s > few.tokens_per_s


@settings(max_examples=8, deadline=None)
@given(near=st.floats(3, 30), prompt=st.integers(16, 2000), output=st.integers(1, 500))
def test_memory_adds_up_to_the_budget(near, prompt, output):
    load = Workload(prompt_tokens=prompt, output_tokens=output)
    for result in by_name(near, load=load).values():
        if isinstance(result, NoFit):
            continue
        used = result.near_bytes + result.buffer_bytes + result.other_bytes + result.kv_bytes
        assert used == int(near * GIB)
        assert 0 < load.kv_bytes(LLAMA, result.requests) <= result.kv_bytes
        assert 0 <= result.stall_share < 1


# Times ----------------------------------------------------------------------------------


def test_decoding_reads_weights_and_kv():
    """Times of one sublayer each, for 16 requests of 1000 tokens."""
    batch = Batch(requests=16, new_tokens=1, context_tokens=1000)
    times = compute_times(LLAMA, RTX, batch)
    attention, ffn = LLAMA.sublayers[:2]
    assert (attention.kind, ffn.kind) == (Kind.ATTENTION, Kind.FFN)
    near = RTX.near_gb_per_s * 1e9
    assert times.compute[1] == pytest.approx(ffn.num_bytes / near)
    kv = 16 * 1000 * LLAMA.kv_bytes_per_token / 32
    assert times.compute[0] == pytest.approx((attention.num_bytes + kv) / near)


def test_prefill_is_bound_by_arithmetic():
    times = compute_times(LLAMA, RTX, Batch(requests=1, new_tokens=2048, context_tokens=0))
    ffn = LLAMA.sublayers[1]
    assert times.compute[1] == pytest.approx(ffn.num_bytes * 2048 / (RTX.tflops * 1e12))


def test_float32_doubles_bytes_not_operations():
    prefill = Batch(requests=1, new_tokens=2048, context_tokens=0)
    half = compute_times(LLAMA, RTX, prefill)
    full = compute_times(model_shape(LLAMA_3_8B, dtype="float32"), RTX, prefill)
    assert full.compute[1] == pytest.approx(half.compute[1])


def test_4_bit_without_a_figure_takes_bytes_not_operations():
    rtx = dataclasses.replace(RTX, int4_compute_factor=None)
    prefill = Batch(requests=1, new_tokens=2048, context_tokens=0)
    decode = Batch(requests=1, new_tokens=1, context_tokens=0)
    small = model_shape(LLAMA_3_8B, compress="int4")
    of = [compute_times(shape, rtx, prefill).compute[1] for shape in (LLAMA, small)]
    assert of[0] == of[1]
    of = [compute_times(shape, rtx, decode).compute[1] for shape in (LLAMA, small)]
    assert of[1] == pytest.approx(of[0] * 0.625 / 2, rel=1e-3)


def test_copies_take_bandwidth_from_compute():
    decode = Batch(requests=1, new_tokens=1, context_tokens=0)
    placement = place("all_far", LLAMA.sublayers)
    shared = dataclasses.replace(
        RTX, near_bytes_per_copied_byte=2.0, read_gb_per_s=1e6, far_layer_overhead_us=0.0
    )
    free = dataclasses.replace(shared, near_bytes_per_copied_byte=0.0)
    slow = predict_step(LLAMA, shared, placement, decode)
    fast = predict_step(LLAMA, free, placement, decode)
    extra = 2.0 * placement.far_bytes / (RTX.near_gb_per_s * 1e9)
    assert slow.seconds - fast.seconds == pytest.approx(extra, rel=0.01)


def test_the_papers_finding_that_the_batch_is_worth_more_than_weights_near():
    """OPT-175B in 16 bit on a 40 GB card: a link-bound step takes as long for many (V-C)."""
    shape, on = model_shape(OPT_175B), load_profile("a100-optane")
    load = Workload(prompt_tokens=128, output_tokens=21)
    budget = MemoryBudget(near_bytes=40 * 10**9 - shape.other_bytes)
    few = split_with(baseline("flexgen", shape), shape, on, load, budget)
    many = split_with(baseline("all_far", shape), shape, on, load, budget)
    assert few is not None and many is not None
    assert (few.served.requests, many.served.requests) == (8, 46)
    assert many.served.decode_seconds == pytest.approx(few.served.decode_seconds, rel=0.1)
    assert many.served.tokens_per_s > 4.5 * few.served.tokens_per_s


def test_each_transfer_costs_half_of_what_a_far_layer_does():
    """A far layer has two transfers to submit and await; no compute hides them here."""
    decode = Batch(requests=1, new_tokens=1, context_tokens=0)
    placement = place("all_far", LLAMA.sublayers)
    slow = dataclasses.replace(RTX, read_gb_per_s=0.1, near_bytes_per_copied_byte=0.0)
    late = dataclasses.replace(slow, far_layer_overhead_us=slow.far_layer_overhead_us + 500.0)
    more = predict_step(LLAMA, late, placement, decode).seconds
    more -= predict_step(LLAMA, slow, placement, decode).seconds
    assert more == pytest.approx(LLAMA.num_layers * 500e-6)
