# SPDX-License-Identifier: Apache-2.0
"""Windows, which sum steps, and the records of levels that are compared."""

import dataclasses
import itertools
import math
import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.fakes.kv.controlled_engine import ControlledEngine
from vllm_tiered.kv.windows import Record, Window


def test_windows_of_two_halves_are_that_of_the_whole():
    engine = ControlledEngine(noise=0.1)
    steps = [engine.signals() for _ in range(10)]
    windows = []
    for part in (steps[:4], steps[4:], steps):
        window = Window()
        for signals in part:
            window = window.with_step(signals, 0.01)
        windows.append(window)
    merged = windows[0].merged(windows[1])
    assert merged[:-1] == pytest.approx(windows[2][:-1])
    assert sorted(merged.peaks) == sorted(windows[2].peaks)


@given(steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20))
def test_peaks_are_the_steps_that_no_other_exceeds(steps):
    window = Window()
    signals = ControlledEngine().signals()
    for used, partial in steps:
        at = dataclasses.replace(signals, used_blocks=used, num_partial=partial)
        window = window.with_step(at, 0.01)
    exceeded = {
        one
        for one, other in itertools.permutations(set(steps), 2)
        if one[0] <= other[0] and one[1] <= other[1]
    }
    assert sorted(window.peaks) == sorted((*one, 0) for one in set(steps) - exceeded)
    assert window.max_partial == max(partial for _, partial in steps)


def test_one_long_stall_is_no_stalled_window():
    engine = ControlledEngine()
    window = Window()
    for index in range(16):
        signals = engine.signals()
        stall = signals.seconds if index == 3 else 0.0
        window = window.with_step(dataclasses.replace(signals, stall_seconds=stall), 0.01)
    assert window.stall_seconds > 0.05 * window.seconds
    assert not window.is_stalled(0.01)


def sample(rate, running=10.0):
    return Window(steps=64, seconds=2.0, tokens=round(2 * rate), running=round(64 * running))


@given(rates=st.lists(st.integers(100, 10_000), min_size=2, max_size=16))
def test_records_are_mean_and_variance_of_the_logarithms(rates):
    record = Record(level_idx=3)
    for rate in rates:
        record = record.with_sample(sample(rate))
    logs = [math.log(rate) for rate in rates]
    assert record.mean == pytest.approx(statistics.fmean(logs))
    assert record.variance == pytest.approx(statistics.variance(logs), abs=1e-9)
    assert record.count == len(rates)


def record_of(rates):
    record = Record()
    for rate in rates:
        record = record.with_sample(sample(rate))
    return record


def test_a_comparison_needs_more_than_its_noise():
    steady = record_of([1000, 1001] * 4)
    assert record_of([995, 996] * 4).is_as_good_as(steady, 0.01)
    assert not record_of([980, 981] * 4).is_as_good_as(steady, 0.01)
    assert record_of([980, 981] * 4).is_worse_than(steady, 0.005)
    noisy = record_of([800, 1200] * 4)
    assert not noisy.is_as_good_as(steady, 0.01)
    assert not noisy.is_worse_than(steady, 0.01)


@pytest.mark.parametrize(("running", "is_like"), [(10, True), (15, True), (4, False), (30, False)])
def test_a_sample_of_another_load_is_distinguished(running, is_like):
    assert record_of([1000] * 3).is_like(sample(1000, running)) is is_like
