# SPDX-License-Identifier: Apache-2.0
"""Tests that the device's cache index equals the reference and keeps the host's neurons."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_tiered.ffn.cache.atu import AdjacentTokenCache
from vllm_tiered.ffn.cache.layer_cache import LayerCache
from vllm_tiered.ffn.cache.window import WindowCache
from vllm_tiered.ffn.layout import Precision
from vllm_tiered.kernels import tuned
from vllm_tiered.kernels.neuron_cache import api, index, reference

BITS = {Precision.FULL: 7, Precision.INT8: 6, Precision.INT4: 4}


pytestmark = pytest.mark.usefixtures("garbage")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Use small parts, so that each pass has several."""
    own = dict(tuned.parameters("neuron_cache")) | {"part": 32}
    monkeypatch.setattr(tuned, "parameters", lambda *_: own)


@st.composite
def schedules(draw):
    """Draw steps that want similar neurons, and buffers that may be too small for them."""
    num_neurons = draw(st.integers(1, 90))
    fits = draw(st.booleans())
    least = num_neurons if fits else 0
    capacities = [draw(st.integers(least, num_neurons)) for _ in range(3)]
    for buffer in draw(st.sets(st.integers(0, 2), max_size=3)):
        capacities[buffer] = 0
    window = draw(st.sampled_from([1, 1, 2, 3, 5]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    shares = rng.dirichlet(np.ones(4))
    reached = rng.choice([7, 6, 4, 0], num_neurons, p=shares)
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        again = rng.choice([7, 6, 4, 0], num_neurons, p=shares)
        reached = np.where(rng.random(num_neurons) < 0.3, again, reached)
        steps.append(torch.from_numpy(reached.astype(np.uint8)))
    return capacities, window, steps


def copy_of(one: index.CacheIndex) -> index.CacheIndex:
    tensors = {
        field.name: value.clone() if isinstance(value, torch.Tensor) else value
        for field in dataclasses.fields(one)
        for value in [getattr(one, field.name)]
    }
    return index.CacheIndex(**tensors)


def check_lists(found: index.CachePlan, expected: index.CachePlan) -> None:
    assert torch.equal(found.counts_P4, expected.counts_P4)
    for buffer, (missing, present, _, _) in enumerate(expected.counts_P4.tolist()):
        for name, count in (
            ("missing_neurons_PN", missing),
            ("missing_slots_PN", missing),
            ("retained_slots_PC", present),
        ):
            mine, other = getattr(found, name)[buffer], getattr(expected, name)[buffer]
            assert torch.equal(mine[:count], other[:count]), name


def check_index(found: index.CacheIndex, expected: index.CacheIndex) -> None:
    for name in ("location_N", "last_used_N", "step"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for buffer, capacity in enumerate(expected.capacities):
        mine, other = found.neuron_in_slot_PC[buffer], expected.neuron_in_slot_PC[buffer]
        assert torch.equal(mine[:capacity], other[:capacity])


def on_host(one: index.CachePlan | index.CacheIndex):
    return dataclasses.replace(
        one,
        **{
            field.name: value.cpu()
            for field in dataclasses.fields(one)
            if isinstance(value := getattr(one, field.name), torch.Tensor)
        },
    )


def residents(one: index.CacheIndex) -> dict[Precision, set[int]]:
    return {
        precision: set(neurons[neurons >= 0].tolist())
        for precision, capacity, neuron_in_slot in zip(
            Precision, one.capacities, one.neuron_in_slot_PC, strict=True
        )
        if capacity
        for neurons in [neuron_in_slot[:capacity]]
    }


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schedule=schedules())
def test_the_kernels_index_is_the_references(schedule, device):
    capacities, window, steps = schedule
    mine = index.empty_index(len(steps[0]), capacities, window, device)
    other = index.empty_index(len(steps[0]), capacities, window, torch.device("cpu"))
    for reached_N in steps:
        found = api.plan(mine, reached_N.to(device))
        check_lists(on_host(found), reference.plan(other, reached_N))
        check_index(on_host(mine), other)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schedule=schedules())
def test_cached_neurons_are_those_of_the_hosts_index(schedule, device):
    capacities, window, steps = schedule
    num_neurons = len(steps[0])

    def cache(capacity: int) -> AdjacentTokenCache | WindowCache:
        if window == 1:
            return AdjacentTokenCache(capacity, num_neurons)
        return WindowCache(capacity, num_neurons, window)

    by_precision = dict(zip(Precision, capacities, strict=True))
    host = LayerCache({p: cache(slots) for p, slots in by_precision.items() if slots})
    mine = index.empty_index(num_neurons, capacities, window, device)
    for reached_N in steps:
        wanted = {p: np.flatnonzero(reached_N.numpy() == BITS[p]) for p in host.caches}
        if any(len(wanted[p]) > by_precision[p] for p in host.caches):
            return  # the host computes such a step densely
        plan = host.plan(wanted)
        host.commit(plan)
        lists = on_host(api.plan(mine, reached_N.to(device)))
        check_lists_are_sound(lists, on_host(mine), reached_N)
        found = residents(on_host(mine))
        assert found == {p: set(one.resident().tolist()) for p, one in host.caches.items()}
        missing, _, wants, _ = lists.counts_P4.T.tolist()
        assert sum(missing) == plan.num_loads and sum(wants) - sum(missing) == plan.hits


def check_lists_are_sound(
    lists: index.CachePlan, one: index.CacheIndex, reached_N: torch.Tensor
) -> None:
    """Check that each used slot has one neuron and is listed once, as missing or retained."""
    for buffer, (missing, present, _, _) in enumerate(lists.counts_P4.tolist()):
        slots = lists.missing_slots_PN[buffer, :missing].tolist()
        slots = [slot for slot in slots if slot >= 0]
        slots += lists.retained_slots_PC[buffer, :present].tolist()
        assert len(set(slots)) == len(slots)
        held = [slot for slot, n in enumerate(one.neuron_in_slot_PC[buffer].tolist()) if n >= 0]
        assert sorted(slots) == held
        for slot in slots:
            neuron = int(one.neuron_in_slot_PC[buffer, slot])
            assert int(one.location_N[neuron]) == slot * 4 + buffer


def test_neurons_without_a_slot_are_listed_and_not_near(device):
    mine = index.empty_index(40, (4, 0, 3), 1, device)
    reached_N = torch.zeros(40, dtype=torch.uint8)
    reached_N[:6], reached_N[10:12], reached_N[20:] = 7, 6, 4
    lists = on_host(api.plan(mine, reached_N.to(device)))
    assert lists.counts_P4.tolist() == [[6, 0, 6, 2], [0, 0, 0, 0], [20, 0, 20, 17]]
    assert lists.missing_slots_PN[0, :6].tolist() == [0, 1, 2, 3, -1, -1]
    assert lists.missing_slots_PN[2, :20].tolist() == [0, 1, 2, *[-1] * 17]
    assert residents(on_host(mine)) == {
        Precision.FULL: {0, 1, 2, 3},
        Precision.INT4: {20, 21, 22},
    }
    # The next step frees two slots, which neurons 4 and 5 get; they had none before.
    reached_N[:2] = 0
    lists = on_host(api.plan(mine, reached_N.to(device)))
    assert lists.missing_neurons_PN[0, :2].tolist() == [4, 5]
    assert lists.missing_slots_PN[0, :2].tolist() == [0, 1]
    assert lists.retained_slots_PC[0, :2].tolist() == [2, 3]


def test_a_large_layer(device):
    rng = random.Random(0)
    mine = index.empty_index(5000, (1500, 1500, 0), 2, device)
    other = copy_of(on_host(mine))
    for _ in range(2):
        drawn = rng.choices([7, 6, 4, 0], [0.2, 0.2, 0.3, 0.3], k=5000)
        reached_N = torch.tensor(drawn, dtype=torch.uint8)
        found = on_host(api.plan(mine, reached_N.to(device)))
        check_lists(found, reference.plan(other, reached_N))
        check_index(on_host(mine), other)


def test_a_cleared_index_loads_everything_again(device):
    mine = index.empty_index(50, (20, 0, 0), 1, device)
    reached_N = torch.zeros(50, dtype=torch.uint8, device=device)
    reached_N[::5] = 7
    for _ in range(2):
        assert api.plan(mine, reached_N).counts_P4[0].tolist() == [10, 0, 10, 0]
        assert api.plan(mine, reached_N).counts_P4[0].tolist() == [0, 10, 10, 0]
        mine.clear()
