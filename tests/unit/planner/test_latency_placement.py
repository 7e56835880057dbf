# SPDX-License-Identifier: Apache-2.0
"""Placements for the shortest step, compared with the placements that they should beat."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.fixtures.placement_instances import (
    LINK,
    PAGE,
    STORAGE,
    by_kind,
    model,
    opt_layer,
    small_model,
)
from vllm_tiered.errors import BudgetError
from vllm_tiered.planner.latency_placement import SearchEffort, place_for_latency
from vllm_tiered.planner.pipeline_time import Link, Slowdown, pipeline_step_time, transfer_seconds
from vllm_tiered.planner.placement_milp import NearScope
from vllm_tiered.weights.layout import buffer_sizes
from vllm_tiered.weights.placement import place, spill_to_storage


@settings(max_examples=25, deadline=None)
@given(
    num_layers=st.integers(2, 6),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    compute=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    budget=st.integers(2, 160),
)
def test_never_slower_than_the_others_and_within_the_budget(num_layers, sizes, compute, budget):
    sublayers = small_model(num_layers, sizes[:2], sizes[2:])
    times = by_kind(sublayers, compute[0] * 1e-3, compute[1] * 1e-3)
    others = [place("all_far", sublayers), place("helm", sublayers)]
    others += [place("flexgen", sublayers, [near, 100 - near, 0]) for near in (20, 50)]
    fitting = [other for other in others[:2] if other.near_bytes <= budget * PAGE]
    try:
        chosen = place_for_latency(sublayers, times, LINK, budget * PAGE)
    except BudgetError:
        assert not fitting
        return
    assert chosen.near_bytes <= budget * PAGE
    for other in fitting:
        assert seconds(chosen, times) <= seconds(other, times) * (1 + 1e-9)


def seconds(placement, times):
    return pipeline_step_time(
        transfer_seconds(placement, LINK, STORAGE), times, prefetch_depth=placement.prefetch_depth
    ).seconds


def test_everything_near_where_it_fits():
    sublayers = model(opt_layer())
    total = sum(part.num_bytes for part in sublayers)
    chosen = place_for_latency(sublayers, by_kind(sublayers, 1e-3, 2e-3), LINK, total)
    assert chosen.far_bytes == 0 and chosen.policy == "latency"


def test_balance_is_what_the_paper_found_and_goes_further():
    """OPT decoding from Optane, by table IV's ratios: HeLM takes 27 % less, ours still less."""
    sublayers = model(opt_layer(), num_layers=24)
    flexgen = place("flexgen", sublayers, [20, 80, 0])
    attention, ffn = transfer_seconds(flexgen, LINK)[:2]
    times = by_kind(sublayers, 0.36 * ffn, 1.85 * attention)
    baseline = seconds(flexgen, times)
    helm = place("helm", sublayers)
    assert 1 - seconds(helm, times) / baseline == pytest.approx(0.27, abs=0.04)
    chosen = place_for_latency(sublayers, times, LINK, helm.near_bytes)
    # With HeLM's memory, no other placement is faster at prefetch depth 1. At depths 2 and 3, the
    # link is also busy while the FFN computes.
    assert chosen.prefetch_depth > 1
    assert seconds(chosen, times) < 0.93 * seconds(helm, times)
    with_less = place_for_latency(sublayers, times, LINK, flexgen.near_bytes)
    assert seconds(with_less, times) < 0.9 * baseline


@pytest.mark.parametrize("percent", [82, 84, 96])
def test_near_memory_is_used_where_a_third_slot_does_not_fit(percent):
    """The last of an odd number of far sublayers has a third buffer, unknown to the MILP."""
    sublayers = model(opt_layer(256), num_layers=4)
    near_bytes = sum(part.num_bytes for part in sublayers) * percent // 100
    chosen = place_for_latency(
        sublayers,
        by_kind(sublayers, 1.3e-4, 0.7e-4),
        Link(bytes_per_s=16e9),
        near_bytes,
        slowdown=Slowdown(1.35, 1.0),
    )
    assert 0.95 * near_bytes < chosen.near_bytes <= near_bytes


def test_far_memory_bounds_the_choice_where_another_fits():
    sublayers = small_model(4, (3, 2), (16, 8))
    times = by_kind(sublayers, 30e-3, 30e-3)  # all transfers hide: far memory costs nothing
    near = place("helm", sublayers).near_bytes
    helm_far = place("helm", sublayers).far_bytes
    chosen = place_for_latency(sublayers, times, LINK, near, helm_far)
    assert chosen.far_bytes <= helm_far


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    compute=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    near=st.integers(20, 100),
    far=st.integers(0, 100),
)
def test_storage_takes_what_far_memory_does_not(sizes, compute, near, far):
    sublayers = small_model(4, sizes[:2], sizes[2:])
    times = by_kind(sublayers, compute[0] * 1e-3, compute[1] * 1e-3)
    others = [spill_to_storage(place(name, sublayers), far * PAGE) for name in ("all_far", "helm")]
    fitting = [other for other in others if other.near_bytes <= near * PAGE]
    try:
        chosen = place_for_latency(sublayers, times, LINK, near * PAGE, far * PAGE, STORAGE)
    except BudgetError:
        assert not fitting
        return
    assert chosen.near_bytes <= near * PAGE and chosen.far_bytes <= far * PAGE
    for other in fitting:
        assert seconds(chosen, times) <= seconds(other, times) * (1 + 1e-9)


def test_too_little_memory_is_said_with_the_least():
    sublayers = small_model(4, (3, 2), (16, 8))
    with pytest.raises(BudgetError, match=r"no placement fits .* the least takes .*near_gib"):
        place_for_latency(sublayers, by_kind(sublayers, 1e-3, 1e-3), LINK, 10 * PAGE)


def test_a_large_model_is_placed_in_no_time():
    sublayers = model(opt_layer(2048), num_layers=96)
    times = by_kind(sublayers, 1e-3, 2e-3)
    link = Link(bytes_per_s=20e9, latency_s=1e-5)
    chosen = place_for_latency(sublayers, times, link, 3 << 30)
    assert chosen.near_bytes <= 3 << 30


def test_whole_layers_stay_near_where_that_saves_a_large_slot():
    """The FFN keeps its own, smaller buffer, so more of attention fits near."""
    sublayers = small_model(12, (6,), (1,))
    times = by_kind(sublayers, 1e-3, 1e-3)
    near = 68 * PAGE
    by_any = SearchEffort(depths=(1,), stays=(NearScope.NONE, NearScope.ANY), gap=1e-4)
    other = place_for_latency(sublayers, times, LINK, near, effort=by_any)
    chosen = place_for_latency(
        sublayers, times, LINK, near, effort=by_any._replace(stays=tuple(NearScope))
    )
    assert other.near_bytes <= near and chosen.near_bytes <= near
    assert [size // PAGE for size in buffer_sizes(chosen.extents)] == [6, 1]
    assert seconds(chosen, times) < 0.8 * seconds(other, times)
