# SPDX-License-Identifier: Apache-2.0
"""Placement MILP, compared with brute force."""

import ctypes
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import scipy.optimize
from hypothesis import given, settings

from tests.fixtures.placement_instances import (
    LINK,
    PAGE,
    STORAGE,
    by_kind,
    every_placement,
    small_model,
)
from vllm_tiered.planner import choice_counts
from vllm_tiered.planner.latency_placement import place_for_latency
from vllm_tiered.planner.pipeline_time import NO_SLOWDOWN, Slowdown, transfer_seconds
from vllm_tiered.planner.placement_milp import Links, NearScope, PlacementProblem, solve_placement
from vllm_tiered.weights.layout import buffer_sizes


def balance(placement, times, slower=NO_SLOWDOWN):
    """Return the MILP's objective, in which each transfer overlaps the compute before it."""
    transfers = transfer_seconds(placement, LINK, STORAGE)
    total = 0.0
    for position, transfer in enumerate(transfers):
        compute = times.compute[position - 1]
        both = min(compute * slower.compute, transfer * slower.link)
        total += both + max(compute - both / slower.compute, transfer - both / slower.link)
    return total


@settings(max_examples=40, deadline=None)
@given(
    attention=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    ffn=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    compute=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    budget=st.integers(4, 40),
    far_budget=st.integers(0, 30),
    has_storage=st.booleans(),
    slower=st.sampled_from([NO_SLOWDOWN, Slowdown(1.25, 1.5), Slowdown(2.0, 2.0)]),
)
def test_the_program_finds_what_brute_force_finds(
    attention, ffn, compute, budget, far_budget, has_storage, slower
):
    """If a part of every sublayer is far, the MILP's constraints match the buffers exactly."""
    sublayers = small_model(1 if has_storage else 2, attention, ffn)
    times = by_kind(sublayers, compute[0] * 1e-3, compute[1] * 1e-3)
    tiers = ("near", "far", "stored") if has_storage else ("near", "far")
    fitting = [
        balance(placement, times, slower)
        for placement in every_placement(sublayers, tiers)
        if all(far or stored for far, stored in placement.offloaded)
        and placement.near_bytes <= budget * PAGE
        and placement.far_bytes <= far_budget * PAGE
    ]
    links = Links(LINK, STORAGE if has_storage else None, slower)
    far_bytes = far_budget * PAGE
    problem = PlacementProblem(
        sublayers=sublayers, times=times, links=links, far_bytes=far_bytes, stay=NearScope.NONE
    )
    solved = solve_placement(problem, budget * PAGE)
    if not fitting:
        assert solved is None
        return
    assert solved is not None and all(far or stored for far, stored in solved.offloaded)
    assert solved.near_bytes <= budget * PAGE
    assert solved.far_bytes <= far_bytes
    assert balance(solved, times, slower) == pytest.approx(min(fitting), rel=2e-4)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    compute=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    budget=st.integers(4, 40),
    stay=st.sampled_from(NearScope),
    prefetch_depth=st.integers(1, 3),
)
def test_no_placement_of_its_kind_is_better_than_the_programs(
    sizes, compute, budget, stay, prefetch_depth
):
    """No placement has a lower sum; longer last rounds may exceed the budget, as callers check."""
    sublayers = small_model(4, sizes[:1], sizes[1:])
    times = by_kind(sublayers, compute[0] * 1e-3, compute[1] * 1e-3)
    problem = PlacementProblem(
        sublayers=sublayers,
        times=times,
        links=Links(LINK, None),
        far_bytes=None,
        stay=stay,
        prefetch_depth=prefetch_depth,
    )
    solved = solve_placement(problem, budget * PAGE)
    near_attention = [not far for far in (solved.far if solved else ())][::2]
    near_ffn = [not far for far in (solved.far if solved else ())][1::2]
    if stay is NearScope.NONE:
        assert not any(near_attention + near_ffn)
    if stay is NearScope.LAYERS:
        assert near_attention == near_ffn
    fitting = [
        balance(placement, times)
        for each in every_placement(sublayers, ("near", "far"))
        if (placement := replace(each, prefetch_depth=prefetch_depth)).near_bytes <= budget * PAGE
        and is_of(placement, stay)
    ]
    if fitting and (
        stay is NearScope.NONE or prefetch_depth == 1
    ):  # else the buffers are not known beforehand
        assert solved is not None
        assert balance(solved, times) <= min(fitting) * (1 + 2e-4) + 1e-9


def is_of(placement, stay):
    """Return whether the MILP covers it; with ANY, the MILP has buffers that fit both kinds."""
    stays = [not far for far in placement.far]
    if stay is NearScope.NONE:
        return not any(stays)
    if stay is NearScope.LAYERS:
        is_whole = stays[::2] == stays[1::2]
        return is_whole and len(placement.extents) % 2 == 0
    sizes = buffer_sizes(placement.extents, placement.prefetch_depth)
    return len(set(sizes)) == 1 and len(sizes) == placement.prefetch_depth + 1


def test_the_solver_prints_nothing(monkeypatch, capfd):
    """A line that HiGHS sometimes prints is dropped from stdout; lines of others are kept."""
    libc = ctypes.CDLL(None)
    solver = scipy.optimize.milp
    calls: list[object] = []

    def noisy(*args, **kwargs):
        libc.puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
        if not calls:
            libc.puts(b"another thread's")
        calls.append(args)
        return solver(*args, **kwargs)

    monkeypatch.setattr(choice_counts, "milp", noisy)
    sublayers = small_model(4, (3, 2), (16, 8))
    place_for_latency(sublayers, by_kind(sublayers, 1e-3, 1e-3), LINK, 90 * PAGE)
    assert calls
    libc.puts(b"after")
    libc.fflush(None)
    assert capfd.readouterr() == ("another thread's\nafter\n", "")
