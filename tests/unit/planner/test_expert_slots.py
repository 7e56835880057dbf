# SPDX-License-Identifier: Apache-2.0
"""Experts in slots in the plan: a step by hand, budgets, and the engine's own number of slots."""

import dataclasses

import pytest

from tests.unit.planner.test_built_model import FULL, MIXTURE, facts
from vllm_tiered.experts.layout import ExpertBundle, ExpertTensor, num_slots
from vllm_tiered.planner.built_model import shape_of
from vllm_tiered.planner.expert_slots import SlotsFit, plan_slots, slots_step
from vllm_tiered.planner.fit import NoFit
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.memory_split import baseline
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.step_time import Batch, predict_step, roofline

MACHINE = dataclasses.replace(load_profile("rtx4090-pcie4"), far_layer_overhead_us=0)
SHAPE = shape_of(facts(layers=[MIXTURE, MIXTURE], kv=(FULL, FULL)))
LOAD = Workload(prompt_tokens=64, output_tokens=64, max_requests=8)
EXPERT = 2 * (64 * 64 + 64 * 32)
"""Bytes of an expert in one layer."""
OTHERS = SHAPE.other_bytes + SHAPE.layer_bytes - 2 * 8 * EXPERT
ONE = Batch(requests=1, new_tokens=1, context_tokens=64)


def plan(near, far=1 << 20, *, target="throughput", load=LOAD, shape=SHAPE, **options):
    return plan_slots(shape, MACHINE, load, near, far, target=target, **options)


def test_a_step_loads_the_experts_that_have_no_slot():
    """One token names two of eight experts; with four slots one of them is missing."""
    base = predict_step(SHAPE, MACHINE, baseline("all near", SHAPE), ONE).seconds
    load = EXPERT / (MACHINE.read_gb_per_s * 1e9)
    ffn = SHAPE.sublayers[1]
    routed = dataclasses.replace(
        ffn, parameters=tuple(p for p in ffn.parameters if "experts" in p.name)
    )
    products = roofline(routed, SHAPE, MACHINE, ONE).seconds
    step = slots_step(SHAPE, MACHINE, ONE, 4)
    assert step.link_seconds == pytest.approx(2 * load)
    assert step.stall_seconds == pytest.approx(2 * (load - products / 2))
    assert step.seconds == pytest.approx(base + step.stall_seconds)


def test_with_a_slot_for_each_expert_it_is_a_plain_step():
    plain = predict_step(SHAPE, MACHINE, baseline("all near", SHAPE), ONE)
    assert slots_step(SHAPE, MACHINE, ONE, 8).seconds == pytest.approx(plain.seconds)


def test_a_prompt_loads_what_has_no_slot():
    """It names all eight, and computes in waves where there are fewer slots."""
    prompt = Batch(requests=1, new_tokens=512, context_tokens=0)
    step = slots_step(SHAPE, MACHINE, prompt, 3)
    assert step.link_seconds == pytest.approx(2 * 5 * EXPERT / (MACHINE.read_gb_per_s * 1e9))


def test_experts_in_a_file_load_at_its_speed():
    disk = dataclasses.replace(MACHINE, storage_read_gb_per_s=1.0)
    step = slots_step(SHAPE, disk, ONE, 4, far_share=0.25)
    seconds = EXPERT * (0.25 / (MACHINE.read_gb_per_s * 1e9) + 0.75 / 1e9)
    assert step.link_seconds == pytest.approx(2 * seconds, rel=1e-4)


def test_near_memory_is_divided_into_slots_and_kv():
    near = OTHERS + 5 * 2 * EXPERT + LOAD.kv_bytes(SHAPE)
    fit = plan(near)
    assert isinstance(fit, SlotsFit)
    assert fit.near_bytes + SHAPE.other_bytes + fit.slot_bytes + fit.kv_bytes == near
    assert fit.far_bytes == 2 * 8 * EXPERT and fit.storage_bytes == 0
    assert fit.served.requests == LOAD.max_requests_in(SHAPE, fit.kv_bytes)
    alone = plan(near, target="latency")
    assert alone.slots == 5
    assert alone.slots >= fit.slots and alone.alone.decode_seconds <= fit.alone.decode_seconds


def test_the_engine_makes_the_planned_slots_of_the_planned_bytes():
    fit = plan(OTHERS + 5 * 2 * EXPERT + LOAD.kv_bytes(SHAPE), target="latency")
    bundle = ExpertBundle(tensors=(ExpertTensor(name="w", row_bytes=EXPERT),))
    assert num_slots(fit.slot_bytes, [bundle] * 2, num_experts=8, top_k=2) == fit.slots


def test_what_is_short_is_said():
    near = OTHERS + 2 * 2 * EXPERT + LOAD.kv_bytes(SHAPE)
    assert isinstance(plan(near), SlotsFit)
    short = plan(near - 1)
    assert isinstance(short, NoFit)
    assert (short.budget, short.short_bytes) == ("near", 1)
    assert isinstance(plan(near, far=2 * 8 * EXPERT), SlotsFit)
    short = plan(near, far=2 * 8 * EXPERT - 3)
    assert (short.budget, short.short_bytes) == ("far", 3)


def test_a_file_has_what_far_memory_has_not():
    near = OTHERS + 4 * 2 * EXPERT + LOAD.kv_bytes(SHAPE)
    fit = plan(near, far=4 * EXPERT, has_storage=True)
    assert (fit.far_bytes, fit.storage_bytes) == (4 * EXPERT, 12 * EXPERT)


def test_models_that_need_no_slots_have_no_plan():
    assert plan(1 << 40) is None
    assert plan(1 << 40, shape=shape_of(facts())) is None
