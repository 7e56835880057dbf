# SPDX-License-Identifier: Apache-2.0
"""A swapped KV cache in the plan: times by hand, budgets, and the engine's own sizes."""

import dataclasses
import random

import pytest

from benchmarks.simulator.policies.base import Pace, StepBlocks
from benchmarks.simulator.policies.interleave import Interleave
from tests.fixtures.model_configs import LLAMA_3_8B
from tests.unit.planner.test_built_model import DENSE, FULL, STATE, WINDOW, facts
from vllm_tiered.kv.layout import KvLevels, Level
from vllm_tiered.planner.built_model import shape_of
from vllm_tiered.planner.kv_swapping import PlainSteps, _stall, swap_kv, swapped_step
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.memory_split import MemoryBudget, baseline, split_with
from vllm_tiered.planner.model_shape import model_shape
from vllm_tiered.planner.serving import Workload
from vllm_tiered.planner.step_time import Batch, predict_step
from vllm_tiered.units import GIB

GH200 = load_profile("gh200")
PCIE = load_profile("rtx4090-pcie4")
LLAMA = model_shape(LLAMA_3_8B)
NEAR = baseline("all near", LLAMA)
LOAD = Workload(prompt_tokens=512, output_tokens=128)
BLOCKS: StepBlocks = None  # type: ignore[assignment]  # the policy reads them elsewhere


def plan(machine=GH200, *, kv_gib=2.0, far_gib=64.0, load=LOAD, shape=LLAMA, placement=None):
    """Return the prediction without swapping, and that with it."""
    placed = placement or baseline("all near", shape)
    kv_bytes = int(kv_gib * GIB)
    room = MemoryBudget(near_bytes=placed.near_bytes + kv_bytes)
    split = split_with(placed, shape, machine, load, room)
    assert split is not None
    swapped = swap_kv(
        shape,
        machine,
        PlainSteps.of(shape, machine, placed),
        load,
        kv_bytes=kv_bytes,
        far_bytes=int(far_gib * GIB),
        without=split.served,
    )
    return split.served, swapped


def test_a_step_waits_for_what_its_link_has_not_read():
    """Two far layers of four, without contention: layer 1 waits, layer 3 has its read behind it."""
    shape = shape_of(facts(layers=[DENSE] * 4, kv=[FULL] * 4))
    machine = dataclasses.replace(
        PCIE,
        near_bytes_per_copied_byte=0,
        far_layer_overhead_us=0,
        step_overhead_ms=0,
        request_overhead_us=0,
        read_gb_per_s=1.0,
        write_gb_per_s=1.0,
    )
    batch = Batch(requests=1, new_tokens=1, context_tokens=100)
    base = predict_step(shape, machine, baseline("all near", shape), batch).seconds
    layer = base / 4

    def step(read_bytes):
        return swapped_step(
            machine,
            PlainSteps.of(shape, machine, baseline("all near", shape)),
            batch,
            far_layers=(1, 3),
            num_layers=4,
            read_bytes=read_bytes,
            written_bytes=0,
        )

    hidden = step(layer * 1e9)  # as long as a layer's compute
    assert hidden.seconds == pytest.approx(base)
    assert hidden.link_seconds == pytest.approx(2 * layer)
    # Reads of three layers' time: layer 1 waits for two, and layer 3's ends at 6, when it would be
    # computed at 5.
    slow = step(3 * layer * 1e9)
    assert slow.stall_seconds == pytest.approx(3 * layer)
    assert slow.seconds == pytest.approx(base + 3 * layer)


def test_stalls_are_those_of_the_simulator():
    rng = random.Random(0)
    for _ in range(200):
        layers = rng.randint(4, 40)
        num_far = rng.randint(1, layers - 1)
        rest, layer, read = (rng.uniform(0.1, 3) for _ in range(3))
        levels = KvLevels(
            num_layers=layers,
            page_bytes=1,
            block_tokens=16,
            near_pages=1000,
            max_num_far=num_far,
            max_blocks=100,
        )
        policy = Interleave(levels)
        pace = Pace(
            overhead_s=rest,
            layer_s=layer,
            page_bytes=1,
            read_bytes_per_s=1 / read,
            write_bytes_per_s=1,
            link_busy_s=0.0,
        )
        expected = policy._stall(Level(num_far), read, BLOCKS, pace)
        far_layers = policy._far_layers[num_far]
        assert _stall(far_layers, read, rest, layer, 2) == pytest.approx(expected)


def test_a_fast_link_serves_more_requests_and_tokens():
    without, swapped = plan()
    assert without.requests == 25
    assert swapped.served.requests > 1.4 * without.requests
    assert swapped.served.tokens_per_s > 1.2 * without.tokens_per_s
    assert swapped.served.decode_seconds > without.decode_seconds
    assert swapped.expansion > 1.4


def test_a_slower_link_expands_less():
    fast, slow = plan()[1], plan(PCIE)[1]
    assert slow.expansion < fast.expansion
    assert slow.far_layers < fast.far_layers


def test_near_and_far_bytes_are_kept():
    """The pages of the requests, of their partial blocks and of two buffers fit near memory."""
    _, swapped = plan()
    page = 16 * LLAMA.kv_bytes_per_token // 32
    requests, blocks = swapped.served.requests, 40
    released, far = requests * blocks + 1, swapped.far_layers
    kept = 0 if swapped.partial_blocks_far else requests
    pages = (32 - far) * released + far * kept + 2 * (released - kept)
    assert pages * page <= 2 * GIB
    # Far memory is for all blocks that the level may hold, were none of them partial.
    by_buffers = (2 * GIB // page) // (32 - far + 2)
    assert swapped.far_bytes == far * (by_buffers + 1) * page >= far * released * page
    limited = plan(far_gib=swapped.far_bytes / 2 / GIB)[1]
    assert limited.far_bytes <= swapped.far_bytes / 2
    assert limited.served.requests < requests


def test_nothing_is_swapped_where_all_requests_fit():
    load = dataclasses.replace(LOAD, max_requests=20)
    without, swapped = plan(load=load)
    assert without.requests == 20
    assert swapped is None


def test_far_weights_leave_less_of_the_link():
    """With all weights far a GH200's link has little time left, so that fewer layers follow."""
    alone = plan()[1]
    _, beside = plan(placement=baseline("all_far", LLAMA))
    assert beside is None or beside.expansion < alone.expansion


def test_windows_and_states_stay_near():
    shape = shape_of(facts(layers=[DENSE] * 6, kv=[FULL, WINDOW] * 2 + [FULL, STATE]))
    assert shape.num_full_attention == 3
    load = Workload(prompt_tokens=900, output_tokens=100, max_requests=50)
    room = 20 * load.kv_bytes(shape) / GIB
    without, swapped = plan(shape=shape, load=load, kv_gib=room)
    assert swapped.served.requests > without.requests
    bounded = sum(kv.request_bytes(1000) for kv in shape.bounded_kv)
    assert swapped.served.requests * bounded < room * GIB


def test_a_model_without_full_attention_has_no_levels():
    shape = shape_of(facts(layers=[DENSE], kv=[STATE]))
    assert plan(shape=shape, kv_gib=1e-3)[1] is None
