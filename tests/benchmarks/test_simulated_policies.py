# SPDX-License-Identifier: Apache-2.0
"""Steps of the simulator's policies: stalls, and pages read and written."""

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from benchmarks.simulator.policies.base import Pace, StepBlocks
from benchmarks.simulator.policies.blocks import Blocks
from benchmarks.simulator.policies.interleave import (
    Interleave,
    InterleaveAcrossSteps,
    even_order,
)
from benchmarks.simulator.policies.on_demand import OnDemand
from benchmarks.simulator.policies.pie import Pie
from benchmarks.simulator.policies.table import POLICIES
from vllm_tiered.kv.layout import KvLevels, Level
from vllm_tiered.kv.policy import interleave

LEVELS = KvLevels(
    num_layers=12,
    page_bytes=1000,
    block_tokens=16,
    near_pages=6000,
    max_num_far=11,
    max_blocks=2000,
    offloads_partial_blocks=True,
)
BLOCKS = StepBlocks(used=900, released=1000, partial=20)


def pace(*, bytes_per_s, overhead_s=1e-3, layer_s=1e-3, **kwargs):
    return Pace(
        overhead_s=overhead_s,
        layer_s=layer_s,
        page_bytes=1000,
        read_bytes_per_s=bytes_per_s,
        write_bytes_per_s=bytes_per_s,
        **kwargs,
    )


def policy_of(name):
    entry = POLICIES[name]
    return entry.make(
        dataclasses.replace(
            LEVELS, staging_buffers=entry.staging_buffers, max_num_far=entry.max_num_far(12)
        )
    )


LAZY = [name for name in POLICIES if name != "pie_write_once_eager"]  # its swaps must take time


@pytest.mark.parametrize("name", LAZY)
def test_an_infinitely_fast_link_never_stalls(name):
    policy = policy_of(name)
    num_far = POLICIES[name].max_num_far(12)
    for step in range(20):
        blocks = BLOCKS._replace(is_same=step % 3 > 0)
        outcome = policy.step(Level(num_far, False), blocks, pace(bytes_per_s=float("inf")))
        assert outcome.stall_s == 0
    assert outcome.read_pages > 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_slow_link_bounds_the_steps(name):
    """Steps take as long as their reads, but for a swap in flight."""
    policy, slow = policy_of(name), pace(bytes_per_s=1e8)
    level = Level(6, not POLICIES[name].offloaded_partial)
    seconds = read = 0.0
    for _ in range(30):
        outcome = policy.step(level, BLOCKS, slow)
        seconds += slow.overhead_s + 12 * slow.layer_s + outcome.stall_s
        read += outcome.read_pages
    assert outcome.stall_s > 0
    assert seconds >= slow.read_s(read) - slow.read_s(2 * BLOCKS.used)


@pytest.mark.parametrize("bytes_per_s", [1e8, 3e8, 1e9, 1e10])
def test_pie_moves_whole_layers(bytes_per_s):
    """Bytes are swaps times blocks, in both directions, and as many layers leave as come."""
    policy = policy_of("pie")
    read = written = 0.0
    for _ in range(50):
        outcome = policy.step(Level(6, False), BLOCKS, pace(bytes_per_s=bytes_per_s))
        assert outcome.read_pages % BLOCKS.used == outcome.written_pages % BLOCKS.used == 0
        read += outcome.read_pages
        written += outcome.written_pages
    assert abs(read - written) <= 2 * BLOCKS.used


def test_pie_that_writes_once_writes_what_was_filled_and_the_partial_blocks():
    policy = policy_of("pie_write_once")
    written = filled = reads = 0.0
    for step in range(200):
        blocks = BLOCKS._replace(filled=step % 4)
        filled += blocks.filled
        outcome = policy.step(Level(6, False), blocks, pace(bytes_per_s=1e10))
        reads += outcome.read_pages / BLOCKS.used
        written += outcome.written_pages
    # Every layer leaves in every step: its partial blocks then, and each filled block once.
    assert written == pytest.approx(reads * BLOCKS.partial + 12 * filled, rel=0.02)


def test_a_policy_of_a_fixed_level_refuses_another():
    policy = policy_of("pie")
    policy.step(Level(6, False), BLOCKS, pace(bytes_per_s=1e9))
    with pytest.raises(ValueError, match="this policy has a fixed level"):
        policy.step(Level(5, False), BLOCKS, pace(bytes_per_s=1e9))


def test_what_swaps_cost_is_charged_once_in_the_step_after():
    policy = policy_of("pie")
    copied = charged = 0.0
    for _ in range(10):
        charged += policy.burden(Level(6, False), BLOCKS).pages
        outcome = policy.step(Level(6, False), BLOCKS, pace(bytes_per_s=1e9))
        copied += outcome.read_pages + outcome.written_pages
    last = policy.burden(Level(6, False), BLOCKS).pages
    assert charged + last == copied > last > 0


def stall_by_hand(num_far, num_buffers, read_s, speed):
    """Return the stall of a step as the timer had it before there were policies."""
    done, link_free, stall_s = [0.0] * num_far, speed.link_busy_s, 0.0
    for position, layer in enumerate(interleave(12, num_far).offloaded):
        start = link_free
        if position >= num_buffers and done[position - num_buffers] > start:
            start = done[position - num_buffers]
        link_free = start + read_s
        arrives = speed.overhead_s + layer * speed.layer_s + stall_s
        if link_free > arrives:
            stall_s += link_free - arrives
            arrives = link_free
        done[position] = arrives + speed.layer_s
    return stall_s


@given(
    num_far=st.integers(1, 11),
    num_buffers=st.integers(1, 4),
    read_s=st.floats(1e-6, 0.02),
    overhead_s=st.floats(0, 0.01),
    link_busy_s=st.floats(0, 0.01),
)
def test_interleave_is_the_timer_that_was_there_before(
    num_far, num_buffers, read_s, overhead_s, link_busy_s
):
    levels = dataclasses.replace(LEVELS, staging_buffers=num_buffers)
    bytes_per_s = (BLOCKS.used - BLOCKS.partial) * 1000 / read_s
    speed = pace(bytes_per_s=bytes_per_s, overhead_s=overhead_s, link_busy_s=link_busy_s)
    stall = Interleave(levels).step(Level(num_far), BLOCKS, speed).stall_s
    assert stall == stall_by_hand(num_far, num_buffers, speed.read_s(880), speed)


def test_even_layers_leave_a_resident_one_between():
    for num_layers in (2, 9, 30, 40):
        for num_far in range(1, num_layers // 2 + 1):
            far = even_order(num_layers, num_far)
            assert len(set(far)) == num_far and far[-1] == num_layers - 1
            assert far[0] > 0 and all(b - a > 1 for a, b in itertools.pairwise(far))


def test_one_buffer_hides_what_fits_between_two_far_layers():
    """With every third layer far, two layers compute while the buffer is read into."""
    policy = policy_of("interleave_1_buffer")
    hidden = pace(bytes_per_s=BLOCKS.used * 1000 / 1.99e-3)
    late = pace(bytes_per_s=BLOCKS.used * 1000 / 2.01e-3)
    assert policy.step(Level(4, False), BLOCKS, hidden).stall_s == 0
    assert policy.step(Level(4, False), BLOCKS, late).stall_s > 0


@pytest.mark.parametrize("bytes_per_s", [1e8, 5e8])
def test_reads_in_the_step_before_are_as_those_of_interleave_if_blocks_change(bytes_per_s):
    plain, across = Interleave(LEVELS), InterleaveAcrossSteps(LEVELS)
    always = InterleaveAcrossSteps(LEVELS, always=True)
    speed = pace(bytes_per_s=bytes_per_s, overhead_s=0.0)
    level = Level(6)
    stalls: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for is_same in [False] * 4 + [True] * 4:
        blocks = BLOCKS._replace(is_same=is_same)
        expected = plain.step(level, blocks, speed).stall_s
        stall = across.step(level, blocks, speed).stall_s
        stalls[is_same].append((stall, expected))
        assert always.step(level, blocks, speed).stall_s <= stall + 1e-12
    assert all(stall == expected for stall, expected in stalls[False])
    assert all(stall < expected for stall, expected in stalls[True])


def test_reads_in_the_step_before_gain_nothing_if_the_overhead_fills_the_buffers():
    speed = pace(bytes_per_s=1e9, overhead_s=2.1e-3)  # two reads of 0.9 ms
    always = InterleaveAcrossSteps(LEVELS, always=True)
    stalls = [always.step(Level(9), BLOCKS, speed).stall_s for _ in range(5)]
    expected = Interleave(LEVELS).step(Level(9), BLOCKS, speed).stall_s
    assert stalls == pytest.approx([expected] * 5)


def test_on_demand_waits_for_every_byte():
    speed = pace(bytes_per_s=1e9)
    outcome = OnDemand(LEVELS).step(Level(6), BLOCKS, speed)
    assert outcome.stall_s == pytest.approx(speed.read_s(6 * (900 - 20)))
    assert OnDemand(LEVELS).burden(Level(6), BLOCKS).pages == 0


def test_kept_blocks_and_buffers_fill_near_memory():
    policy, level = Blocks(LEVELS), Level(11)
    kept = policy.kept(level, BLOCKS)
    staged = policy.staged(level, BLOCKS)
    assert kept + staged == 880
    pages = 1 * BLOCKS.released + 11 * (BLOCKS.partial + kept) + 2 * staged
    assert LEVELS.near_pages - 9 < pages <= LEVELS.near_pages
    assert Blocks(LEVELS, on_demand=True).kept(level, BLOCKS) > kept


def test_blocks_that_fit_are_not_read():
    few = BLOCKS._replace(used=300)
    policy = Blocks(LEVELS)
    assert policy.step(Level(11), few, pace(bytes_per_s=1e6)).stall_s == 0
    assert policy.burden(Level(11), few).layers == 0
    assert policy.burden(Level(11), BLOCKS).layers == 11


def test_new_blocks_are_written_not_read():
    prefill = BLOCKS._replace(prefilled=100, filled=103)
    for policy in (Interleave(LEVELS), OnDemand(LEVELS)):
        outcome = policy.step(Level(6), prefill, pace(bytes_per_s=1e9))
        assert (outcome.read_pages, outcome.written_pages) == (6 * 780, 6 * 103)


def test_pie_begins_without_a_level():
    assert Pie(LEVELS).burden(Level(6, False), BLOCKS) == (0, 0)
