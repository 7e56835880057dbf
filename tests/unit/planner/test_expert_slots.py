# SPDX-License-Identifier: Apache-2.0
"""Experts in slots in the plan: a step by hand, budgets, and the engine's own number of slots."""

import dataclasses

import pytest

from tests.unit.planner.test_built_model import FULL, MIXTURE, facts
from vllm_tiered.experts.layout import ExpertBundle, ExpertTensor, num_slots
from vllm_tiered.planner.built_model import shape_of
from vllm_tiered.planner.expert_slots import SlotsFit, plan_slots, slots_step
from vllm_tiered.planner.fit import NoFit
from vllm_tiered.planner.kv_swapping import PlainSteps, swapped_step
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.memory_split import baseline
from vllm_tiered.planner.pipeline_time import StepTime
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


DEEP = shape_of(facts(layers=[MIXTURE] * 12, kv=[FULL] * 12))
"""A model whose layers are enough to offload some of their KV, and weights and buffers to gain."""
ROUTED = 12 * 8 * EXPERT
DEEP_OTHERS = DEEP.layer_bytes - ROUTED
MANY = dataclasses.replace(LOAD, max_requests=64)


def deep(near, **options):
    return plan(near, **{"far": 1 << 24, "load": MANY, "shape": DEEP, **options})


def test_the_kv_cache_beside_slots_is_swapped():
    near = DEEP.other_bytes + DEEP_OTHERS + 4 * 12 * EXPERT + MANY.kv_bytes(DEEP, 4)
    fit = deep(near)
    assert isinstance(fit, SlotsFit) and fit.swapped is not None
    assert (fit.slots, fit.served.requests) == (4, 4)
    assert 4 < fit.most_requests <= 16  # the engine expands four times at most
    assert fit.served_for("throughput") == fit.swapped.served
    # Near memory is divided as without swapping.
    assert fit.kv_bytes == near - DEEP.other_bytes - fit.near_bytes - fit.slot_bytes
    # Far memory holds both.
    exactly = fit.far_bytes + fit.swapped.far_bytes
    assert deep(near, far=exactly).swapped == fit.swapped
    less = deep(near, far=exactly - 1).swapped
    assert less is None or less.far_bytes < fit.swapped.far_bytes
    assert deep(near, far=ROUTED).swapped is None


def test_kv_has_the_share_of_the_link_that_experts_leave():
    """Experts take half of it, so that a layer's KV takes twice as long."""
    machine = dataclasses.replace(
        MACHINE,
        near_bytes_per_copied_byte=0,
        step_overhead_ms=0,
        request_overhead_us=0,
        read_gb_per_s=1.0,
    )
    base = StepTime(seconds=4.0, link_seconds=2.0, stall_seconds=1.0)  # a layer takes 1 s

    def step(read_bytes):
        return swapped_step(
            machine,
            PlainSteps(lambda batch: base, far_bytes=ROUTED),
            ONE,
            far_layers=(1, 3),
            num_layers=4,
            read_bytes=read_bytes,
            written_bytes=0,
        )

    assert step(0.5e9).seconds == pytest.approx(4.0)
    # 2 s for layer 1, which is due after 1 s; layer 3 has its KV after 4 s, as it is due.
    late = step(1e9)
    assert (late.seconds, late.stall_seconds) == (pytest.approx(5.0), pytest.approx(2.0))


def test_other_weights_are_far_where_they_leave_too_little_to_slots():
    """Two slots a layer are the least, so that slots cannot be given up instead."""
    least = 2 * 12 * EXPERT + MANY.kv_bytes(DEEP)
    fit = deep(DEEP.other_bytes + DEEP_OTHERS + least)
    assert isinstance(fit, SlotsFit)
    assert (fit.placement, fit.slots, fit.weights_far_bytes) == ("all near", 2, 0)
    near = DEEP.other_bytes + DEEP_OTHERS + least - 1
    fit = deep(near)
    assert isinstance(fit, SlotsFit)
    weights = baseline("all_far", DEEP)
    assert (fit.placement, fit.slots) == ("all_far", 2)
    assert fit.weights_far_bytes == weights.far_bytes > 0
    assert fit.near_bytes == weights.near_bytes - ROUTED
    assert fit.kv_bytes == near - DEEP.other_bytes - fit.near_bytes - fit.slot_bytes
    # Experts have the far memory that these weights leave, or a file.
    far = ROUTED + weights.far_bytes
    assert isinstance(deep(near, far=far), SlotsFit)
    short = deep(near, far=far - 5)
    assert isinstance(short, NoFit)
    assert (short.budget, short.short_bytes) == ("far", 5)
    stored = deep(near, far=far - ROUTED // 2, has_storage=True)
    assert (stored.far_bytes, stored.storage_bytes) == (ROUTED // 2, ROUTED // 2)


def test_far_weights_hide_behind_compute_alone():
    weights = baseline("all_far", DEEP)
    placed = predict_step(DEEP, MACHINE, weights, ONE)
    plain = predict_step(DEEP, MACHINE, baseline("all near", DEEP), ONE)
    experts = slots_step(DEEP, MACHINE, ONE, 4)
    step = slots_step(DEEP, MACHINE, ONE, 4, weights=weights)
    waits = experts.seconds - plain.seconds
    assert waits > 0
    assert step.seconds == pytest.approx(placed.seconds + waits)
    assert step.link_seconds == pytest.approx(placed.link_seconds + experts.link_seconds)


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
