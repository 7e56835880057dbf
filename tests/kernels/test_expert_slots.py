# SPDX-License-Identifier: Apache-2.0
"""Tests that the device's slot table equals the reference, and the host's table."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_tiered.experts.policy import HALF_LIFE, POLICIES
from vllm_tiered.experts.slot_table import SlotTable
from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.expert_slots import api, index, reference

DECAYS = {"lru": None, "lfu": 0.5 ** (1 / HALF_LIFE)}

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


pytestmark = pytest.mark.usefixtures("garbage")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use small blocks and few programs, so that each row and each program has several."""
    own = dict(tuned.parameters("expert_slots")) | {"block_words": 16, "num_programs": 3}
    monkeypatch.setattr(tuned, "parameters", lambda *_: own)


@st.composite
def schedules(draw):
    """Draw a layer, and steps of tokens that name each expert of theirs once."""
    num_experts = draw(st.integers(1, 70))
    num_slots = draw(st.integers(1, num_experts))
    top_k = draw(st.integers(1, min(num_slots, 8)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    popular = rng.dirichlet(np.full(num_experts, 0.5)) + 1e-6
    steps = []
    for _ in range(draw(st.integers(1, 10))):
        tokens = draw(st.integers(0, num_slots // top_k))
        ids = [
            rng.choice(num_experts, top_k, replace=False, p=popular / popular.sum())
            for _ in range(tokens)
        ]
        steps.append(torch.tensor(np.array(ids).reshape(tokens, top_k), dtype=torch.int32))
    return num_experts, num_slots, draw(st.sampled_from(sorted(DECAYS))), steps


def on_host(one):
    return dataclasses.replace(
        one,
        **{
            field.name: value.cpu()
            for field in dataclasses.fields(one)
            if isinstance(value := getattr(one, field.name), torch.Tensor)
        },
    )


def check_index(found: index.SlotIndex, expected: index.SlotIndex) -> None:
    for name in ("slot_of_E", "expert_in_S", "clock", "totals"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    if found.decay is None:
        assert torch.equal(found.keys_E, expected.keys_E)
    else:  # a GPU may round the product and the sum once
        mine, other = found.keys_E.view(torch.float32), expected.keys_E.view(torch.float32)
        torch.testing.assert_close(mine, other)


def check_plan(found: index.SlotPlan, expected: index.SlotPlan) -> None:
    assert torch.equal(found.slots, expected.slots)
    assert torch.equal(found.num_missing, expected.num_missing)
    count = int(expected.num_missing)
    for name in ("missing_experts_S", "missing_slots_S"):
        mine, other = getattr(found, name), getattr(expected, name)
        assert torch.equal(mine[:count], other[:count]), name


@SETTINGS
@given(schedule=schedules())
def test_the_kernels_table_is_the_references(schedule, device):
    num_experts, num_slots, policy, steps = schedule
    mine = index.empty_index(num_experts, num_slots, DECAYS[policy], device)
    other = index.empty_index(num_experts, num_slots, DECAYS[policy], torch.device("cpu"))
    for ids in steps:
        found = api.resolve(mine, ids.to(device))
        check_plan(on_host(found), reference.resolve(other, ids))
        check_index(on_host(mine), other)


@SETTINGS
@given(schedule=schedules())
def test_it_is_the_hosts_table(schedule, device):
    """The host's float64 uses may order ties otherwise, so LFU is compared by its counts."""
    num_experts, num_slots, policy, steps = schedule
    mine = index.empty_index(num_experts, num_slots, DECAYS[policy], device)
    table = SlotTable(num_slots, POLICIES[policy](num_experts))
    wanted = misses = 0
    for ids in steps:
        named = np.unique(ids.numpy().astype(np.int64))
        wanted += len(named)
        misses += sum(len(wave.experts) for wave in table.plan(named)[1:])
        api.resolve(mine, ids.to(device))
        if policy == "lru":
            found = on_host(mine)
            assert found.slot_of_E.tolist() == table.slot_of.tolist()
            assert found.expert_in_S.tolist() == table.expert_in.tolist()
    assert mine.totals.tolist()[:2] == [len(steps), wanted]
    if policy == "lru":
        assert int(mine.totals[2]) == misses


@pytest.mark.parametrize(("shape", "dtype"), [((3, 40), torch.bfloat16), ((5,), torch.uint8)])
def test_slots_have_the_rows_that_ids_name(shape, dtype, device):
    """Rows of whole words and of bytes; slots begin poisoned, and untouched ones stay so."""
    num_experts, num_slots, top_k = 12, 6, 3
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.integers(0, 200, (num_experts, *shape))).to(dtype)
    far = rows.pin_memory() if device.type == "cuda" else rows
    slots = torch.full((num_slots, *shape), 255, dtype=dtype, device=device)
    table = index.empty_index(num_experts, num_slots, DECAYS["lfu"], device)
    for number in range(12):
        tokens = 1 + number % 2
        named = [rng.choice(num_experts, top_k, replace=False) for _ in range(tokens)]
        ids = torch.tensor(np.array(named), device=device)
        plan = api.resolve(table, ids)
        api.fill(plan, far, slots)
        assert torch.equal(slots[plan.slots].cpu(), rows[ids.cpu()])
        held = table.expert_in_S.cpu()
        assert (slots.cpu()[held < 0] == 255).all()
        assert torch.equal(slots.cpu()[held >= 0], rows[held[held >= 0].long()])


def test_ids_outside_the_layer_get_no_slot(device):
    table = index.empty_index(4, 3, None, device)
    ids = torch.tensor([[2, -1, 4]], device=device)
    assert api.resolve(table, ids).slots.tolist() == [[0, -1, -1]]
    assert table.totals.tolist() == [1, 1, 1, 3, 2, 0, 0, 0]
    assert table.slot_of_E.tolist() == [-1, -1, 0, -1]


def test_a_large_layer(device):
    rng = np.random.default_rng(1)
    mine = index.empty_index(512, 190, DECAYS["lfu"], device)
    other = index.empty_index(512, 190, DECAYS["lfu"], torch.device("cpu"))
    for _ in range(6):
        ids = np.array([rng.choice(512, 10, replace=False) for _ in range(19)], dtype=np.int32)
        found = api.resolve(mine, torch.from_numpy(ids).to(device))
        check_plan(on_host(found), reference.resolve(other, torch.from_numpy(ids)))
        check_index(on_host(mine), other)


def test_more_pairs_than_slots_are_refused(device):
    table = index.empty_index(8, 4, None, device)
    with pytest.raises(AssertionError):
        api.resolve(table, torch.arange(5, device=device))
