# SPDX-License-Identifier: Apache-2.0
"""Time of a step, compared with times by hand and with a simulation of the weight buffers."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from vllm_tiered.planner.pipeline_time import (
    ComputeTimes,
    fitted_link,
    pipeline_step_time,
    waits_by_sublayer,
)
from vllm_tiered.weights.layout import buffer_of


def times_of(*compute, rest=0.0):
    return ComputeTimes(compute=compute, rest=rest)


def test_a_link_is_fitted_to_all_of_its_transfers():
    exact = [(size, 2e-4 + size / 3e9) for size in (2**20, 2**22, 2**26)]
    link = fitted_link(exact)
    assert link.bytes_per_s == pytest.approx(3e9) and link.latency_s == pytest.approx(2e-4)
    for size, seconds in exact:
        noisy = [(s, t * (1.1 if s == size else 1.0)) for s, t in exact]
        assert fitted_link(noisy).seconds(size) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(
    "samples", [[(10**6, 1e-3)], [(10**6, 1e-3), (10**7, 1e-2)], [(10**6, 1e-3), (10**7, 1.2e-2)]]
)
def test_a_link_has_no_latency_that_its_transfers_do_not_show(samples):
    link = fitted_link(samples)
    assert link.latency_s == pytest.approx(0.0, abs=1e-9)
    assert link.bytes_per_s == pytest.approx(samples[0][0] / samples[0][1], rel=0.1)


def test_transfers_hide_behind_the_sublayer_before():
    result = pipeline_step_time([1.0, 2.0, 1.0, 2.0], times_of(3.0, 3.0, 3.0, 3.0))
    assert result == (12.0, 6.0, 0.0)


def test_what_does_not_hide_is_stall():
    """Each transfer of 2 s overlaps compute of 1 s, so the link is never idle."""
    result = pipeline_step_time([2.0] * 4, times_of(1.0, 1.0, 1.0, 1.0))
    assert result.seconds == pytest.approx(8.0)
    assert result.stall_seconds == pytest.approx(4.0)


def test_the_unbalanced_pipeline_of_the_paper():
    """Figure 8: attention is shorter than the FFN's transfer, the FFN longer than attention's."""
    result = pipeline_step_time([1.0, 5.0] * 3, times_of(*(2.0, 3.0) * 3))
    assert result.seconds == pytest.approx(3 * (5.0 + 3.0))


def test_the_rest_of_a_step_hides_the_first_transfer():
    without = pipeline_step_time([3.0, 0.0] * 4, times_of(*[1] * 8))
    with_rest = pipeline_step_time([3.0, 0.0] * 4, times_of(*[1] * 8, rest=1.0))
    assert without.seconds == with_rest.seconds == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("transfers", "prefetch_depth"),
    [
        ([0.0] * 4, 1),
        ([5.0, 0.0, 0.0, 0.0], 1),
        ([5.0, 0.0, 5.0, 0.0], 1),
        ([5.0, 5.0, 5.0, 0.0], 1),  # the last of an odd number has a third buffer
        ([5.0] * 4, 3),
    ],
)
def test_what_has_a_slot_for_itself_is_not_moved_again(transfers, prefetch_depth):
    assert pipeline_step_time(transfers, times_of(1, 1, 1, 1), prefetch_depth=prefetch_depth) == (
        4.0,
        0.0,
        0.0,
    )


def test_two_ahead_what_is_unbalanced_hides_too():
    """At depth 2, an unbalanced pipeline has no stall if compute takes longer in total.

    In HeLM's placement on Optane, the FFN's transfer is too long for attention, and attention's
    leaves the link idle while the FFN computes.
    """
    transfers, times = [1.4, 1.4] * 8, times_of(*[1.0, 2.0] * 8)
    assert pipeline_step_time(transfers, times).seconds == pytest.approx(8 * (1.4 + 2.0))
    result = pipeline_step_time(transfers, times, prefetch_depth=2)
    assert result.seconds == pytest.approx(24.0) and result.stall_seconds == 0.0


def test_more_slots_do_not_help_a_link_that_is_never_idle():
    transfers, times = [3.0, 3.0] * 6, times_of(*[1.0, 2.0] * 6)
    for prefetch_depth in (1, 2, 3):
        assert pipeline_step_time(
            transfers, times, prefetch_depth=prefetch_depth
        ).seconds == pytest.approx(36.0)


@example(
    transfers=[9] * 8, compute=[9] * 7 + [8] + [0] * 8, prefetch_depth=3
)  # falls behind a little
@example(
    transfers=[3] * 10, compute=[1] * 16, prefetch_depth=3
)  # a longer round: some do not move again
@settings(max_examples=60, deadline=None)
@given(
    transfers=st.lists(st.integers(0, 9), min_size=6, max_size=16),
    compute=st.lists(st.integers(0, 9), min_size=16, max_size=16),
    prefetch_depth=st.integers(1, 4),
)
def test_a_step_is_as_long_as_the_rings_events_say(transfers, compute, prefetch_depth):
    """Compare with a simulation of each buffer's contents and arrival times over many steps."""
    compute = compute[: len(transfers)]
    far = [seconds for seconds in transfers if seconds]
    slots = [buffer_of(position, len(far), prefetch_depth) for position in range(len(far))]
    resident: dict[int, int] = {}
    arrived: dict[int, float] = {}
    now = link = 0.0
    ends = []
    for _ in range(200):
        index = 0
        for seconds, transfer in zip(compute, transfers, strict=True):
            if transfer:
                now = max(now, arrived.get(slots[index], 0.0))
                resident[slots[index]] = index
                for further in range(1, prefetch_depth + 1):
                    following = (index + further) % len(far)
                    slot = slots[following]
                    if slot != slots[index] and resident.get(slot) != following:
                        link = max(link, now) + far[following]
                        resident[slot], arrived[slot] = following, link
                index += 1
            now += seconds
        ends.append(now)
    steady = (ends[-1] - ends[-101]) / 100
    step = pipeline_step_time(transfers, times_of(*compute), prefetch_depth=prefetch_depth)
    assert step.seconds == pytest.approx(steady, rel=0.01)
    waits = waits_by_sublayer(transfers, times_of(*compute), prefetch_depth=prefetch_depth)
    assert sum(waits) == pytest.approx(step.stall_seconds)
    assert step.stall_seconds == pytest.approx(steady - sum(compute), rel=0.01, abs=0.2)
