# SPDX-License-Identifier: Apache-2.0
"""The report's summary, and the choice of windows and steps to draw."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.timelines import pipeline_step, step
from vllm_tiered.report.records import LayerSpan, LayerTimeline, Window, merge_windows
from vllm_tiered.report.summary import at_most, summarise, typical_step


def window(end, *, level_changed=False, **changes):
    return Window.from_step(step(end, **changes), level_changed=level_changed)


def test_a_run_in_figures():
    """3 s of steps in 8 s: one second of 100 tokens/s at level 0, then two of 300 at level 2."""
    found = summarise(
        [
            window(1.0, seconds=1.0, tokens=100, stall_seconds=0.002, num_preempted=3),
            window(
                8.0,
                seconds=2.0,
                tokens=600,
                stall_seconds=0.1,
                read_seconds=0.5,
                read_bytes=4_000_000_000,
                write_seconds=0.01,
                write_bytes=50_000_000,
                expansion=2.5,
                level_changed=True,
                joules=1400.0,
                assumed_joules=350.0,
            ),
        ]
    )
    assert (found.seconds, found.step_seconds, found.num_steps) == (8.0, 3.0, 2)
    assert found.longest_step_seconds == 2.0
    assert found.tokens == 700
    assert found.tokens_per_second == pytest.approx(700 / 3)
    assert found.median_tokens_per_second == 300  # most of the time, not of the windows
    assert found.stall_share == pytest.approx(0.102 / 3)
    assert found.transparent_share == pytest.approx(1 / 3)
    assert (found.read_bytes, found.write_bytes) == (4_000_000_000, 50_000_000)
    assert found.read_share == pytest.approx(0.5 / 3)
    assert found.read_bytes_per_second == pytest.approx(8e9)
    assert found.write_share == pytest.approx(0.01 / 3)
    assert found.write_bytes_per_second == pytest.approx(5e9)
    assert found.mean_expansion == pytest.approx((1.0 + 2 * 2.5) / 3)
    assert found.largest_expansion == 2.5
    assert (found.level_changes, found.num_preempted) == (1, 3)
    assert (found.joules, found.assumed_share, found.joules_per_token) == (1400, 0.25, 2.0)


def test_nothing_moved_is_no_division_by_zero():
    found = summarise([window(1.0, seconds=0.0, tokens=0)])
    assert (found.read_bytes_per_second, found.stall_share, found.tokens_per_second) == (0, 0, 0)


def test_joules_without_tokens_or_readings_are_no_figure():
    assert summarise([window(1.0, tokens=0, joules=5.0)]).joules_per_token is None
    assert summarise([window(1.0, tokens=9)]).joules_per_token is None


@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=300), st.integers(1, 50))
def test_a_picture_gets_the_whole_run_in_as_many_windows_as_it_shows(pauses, num_windows):
    end, windows = 0.0, []
    for pause in pauses:
        end += pause
        windows.append(window(end, seconds=0.01))
    coarse = at_most(windows, num_windows)
    assert 1 <= len(coarse) <= num_windows
    assert merge_windows(coarse).num_steps == len(windows)
    assert len(windows) > num_windows or coarse == windows


def test_the_step_to_draw_is_the_latest_that_read():
    reading = [replace(pipeline_step(), step=number) for number in (1, 2)]
    idle = LayerTimeline(step=3, time=9.0, layers=(LayerSpan(layer=0, role="resident"),))
    assert typical_step([*reading, idle]) == reading[1]
    assert typical_step([idle]) == idle
    assert typical_step([]) is None
