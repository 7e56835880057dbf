# SPDX-License-Identifier: Apache-2.0
"""Bottlenecks of sublayers: each claim about what would help is tried."""

import dataclasses

import pytest

from tests.fixtures.model_configs import LLAMA_3_8B
from vllm_tiered.planner.bottleneck import find_bottlenecks
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.memory_split import MemoryBudget, baseline, split_with
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.step_time import predict_step
from vllm_tiered.units import GIB
from vllm_tiered.weights.placement import Placement

LLAMA = model_shape(LLAMA_3_8B)
LOAD = Workload(prompt_tokens=512, output_tokens=128)
GH200 = load_profile("gh200")


def reasons(name, near_gib, far_gib=64, on=GH200, load=LOAD):
    room = MemoryBudget(near_bytes=int(near_gib * GIB), far_bytes=int(far_gib * GIB))
    split = split_with(baseline(name, LLAMA), LLAMA, on, load, room)
    assert split is not None
    return split, find_bottlenecks(LLAMA, on, load, split, int(far_gib * GIB))


def kinds(found):
    return {reason.kind: reason for reason in found if reason.layers > 1}


def test_every_sublayer_is_in_one_row():
    _, found = reasons("helm", 12)
    assert sum(reason.layers for reason in found) == 64
    assert sum(r.layers * (r.near_bytes + r.far_bytes) for r in found) == LLAMA.layer_bytes


def test_with_all_near_decoding_is_bound_by_memory_and_prefill_by_arithmetic():
    _, found = reasons("all near", 20)
    assert {reason.decode.bound_by for reason in found} == {"near memory"}
    assert {reason.prefill.bound_by for reason in found} == {"arithmetic"}
    assert all(reason.decode.transfer_seconds == 0 for reason in found)


def test_a_wait_is_the_links_and_the_near_budgets():
    split, found = reasons("helm", 8)
    ffn = kinds(found)["ffn"]
    assert ffn.decode.transfer_seconds > ffn.decode.hidden_seconds
    assert (ffn.decode.bound_by, ffn.budget) == ("link", "near")
    assert ffn.more_bytes == 2 * 14336 * 4096 * 2  # gate and up
    spare = split.kv_bytes - LOAD.kv_bytes(LLAMA, split.served.requests)
    assert ffn.more_bytes > spare


def test_the_near_memory_that_it_names_ends_the_wait():
    """With each whole FFN near, no FFN waits, and the step is shorter by their waits."""
    split, found = reasons("helm", 8)
    placement = split.placement
    nearer = Placement(
        policy="nearer",
        sublayers=placement.sublayers,
        far=tuple(
            () if sublayer.kind.value == "ffn" else far
            for sublayer, far in zip(placement.sublayers, placement.far, strict=True)
        ),
    )
    moved = nearer.resident_bytes - placement.resident_bytes
    assert moved == kinds(found)["ffn"].more_bytes * 32
    batch = LOAD.decode(split.served.requests)
    before = predict_step(LLAMA, GH200, placement, batch)
    after = predict_step(LLAMA, GH200, nearer, batch)
    wait = kinds(found)["ffn"].decode
    waits = 31 * (wait.transfer_seconds - wait.hidden_seconds)
    assert before.stall_seconds - after.stall_seconds == pytest.approx(waits, rel=0.25)
    assert after.seconds < before.seconds - 0.75 * waits


def test_more_slots_end_the_wait_that_one_ahead_has():
    """In HeLM's placement, the link is idle while the FFN computes; more buffers use that time."""
    link = 0.95 * GH200.near_gb_per_s
    on = dataclasses.replace(GH200, read_gb_per_s=link, near_bytes_per_copied_byte=0.0)
    load = dataclasses.replace(LOAD, max_requests=1)
    split, found = reasons("helm", 12, on=on, load=load)
    assert kinds(found)["ffn"].decode.bound_by == "link"
    placement = dataclasses.replace(split.placement, prefetch_depth=3)
    batch = load.decode(1)
    assert predict_step(LLAMA, on, split.placement, batch).stall_seconds > 1e-3
    assert predict_step(LLAMA, on, placement, batch).stall_seconds == pytest.approx(0.0, abs=1e-9)
    deeper = dataclasses.replace(split, placement=placement)
    found = find_bottlenecks(LLAMA, on, load, deeper, 64 * GIB)
    assert {reason.decode.bound_by for reason in found} == {"near memory"}
    slow = dataclasses.replace(on, read_gb_per_s=link / 3)
    assert predict_step(LLAMA, slow, placement, batch).stall_seconds > 1e-3
    found = find_bottlenecks(LLAMA, slow, load, deeper, 64 * GIB)
    assert "link" in {reason.decode.bound_by for reason in found}
    for reason in found:
        assert reason.decode.hidden_seconds >= 0 and reason.more_bytes >= 0


def test_with_memory_to_spare_it_is_the_placement_not_the_budget():
    one = dataclasses.replace(LOAD, max_requests=1)
    _, found = reasons("helm", 20, load=one)
    ffn = kinds(found)["ffn"]
    assert (ffn.decode.bound_by, ffn.budget, ffn.more_bytes) == ("link", "none", 0)


def test_a_far_budget_that_keeps_out_what_would_be_hidden():
    """All is near, with too little memory for the load; attention could hide behind the FFN."""
    fast = dataclasses.replace(GH200, read_gb_per_s=1000.0)
    split, found = reasons("all near", 14, far_gib=0.01, on=fast)
    assert split.served.requests < LOAD.max_requests
    attention = kinds(found)["attention"]
    extent = 80 << 20
    assert attention.budget == "far"
    assert attention.more_bytes == extent
    _, ample = reasons("all near", 14, far_gib=1, on=fast)
    assert kinds(ample)["attention"].budget == "none"


@pytest.mark.parametrize(("name", "near_gib"), [("all_far", 8), ("flexgen", 8), ("helm", 12)])
def test_what_is_hidden_is_compute_since_the_far_sublayer_before(name, near_gib):
    """If each sublayer has far parameters, a transfer overlaps the compute of the one before."""
    _, found = reasons(name, near_gib)
    rows = kinds(found)
    assert rows["ffn"].decode.hidden_seconds == rows["attention"].decode.compute_seconds
    assert rows["attention"].decode.hidden_seconds == rows["ffn"].decode.compute_seconds
    first = next(reason for reason in found if reason.layers == 1)
    rest = GH200.step_overhead_ms * 1e-3
    assert first.decode.hidden_seconds > rest  # it also overlaps the end of the step before
