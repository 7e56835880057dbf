# SPDX-License-Identifier: Apache-2.0
"""Trials of off, on, off, and what they decide."""

import pytest

from vllm_tiered import trial
from vllm_tiered.trial import PHASE_STEPS, WARM_STEPS, Measured, Trial

LENGTH = WARM_STEPS + 3 * PHASE_STEPS


def drive(state, batch_size, num_steps, seconds=lambda is_on, index: 1.0):
    """Decode steps of one rank; a trial that ends is concluded with its own figures."""
    switched = []
    for index in range(num_steps):
        is_on = trial.is_on(state, batch_size)
        switched.append(is_on)
        state, measured = trial.step(state, batch_size, seconds(is_on, index))
        if measured is not None:
            state = trial.conclude(state, measured)
    return state, switched


def test_the_phases() -> None:
    state, switched = drive(Trial(), 4, LENGTH)
    off = WARM_STEPS + PHASE_STEPS
    assert switched == [False] * off + [True] * PHASE_STEPS + [False] * PHASE_STEPS
    assert state.batch_size is None and len(state.verdicts) == 1


@pytest.mark.parametrize(("on_seconds", "kept"), [(0.9, True), (0.995, False), (1.1, False)])
def test_the_faster_one_is_kept(on_seconds, kept) -> None:
    state, _ = drive(Trial(), 4, LENGTH, lambda is_on, index: on_seconds if is_on else 1.0)
    assert state.verdicts[0].is_kept is kept
    assert state.verdicts[0].ratio == pytest.approx(on_seconds)
    assert trial.is_on(state, 4) is kept


def test_a_machine_that_gets_slower_decides_nothing() -> None:
    """A drift looks the same on both sides of the middle."""
    state, _ = drive(Trial(), 4, LENGTH, lambda is_on, index: 1 + index / 100)
    assert state.verdicts[0].ratio == pytest.approx(1)
    state, _ = drive(Trial(), 4, LENGTH, lambda is_on, index: 2 - index / 100)
    assert not state.verdicts[0].is_kept


def test_single_slow_steps_decide_nothing() -> None:
    state, _ = drive(Trial(), 4, LENGTH, lambda is_on, index: 50.0 if index % 7 == 0 else 1.0)
    assert state.verdicts[0].ratio == pytest.approx(1)


def test_another_batch_size_is_measured_and_a_known_one_is_not() -> None:
    state, _ = drive(Trial(), 4, LENGTH, lambda is_on, index: 0.5 if is_on else 1.0)
    assert [trial.is_on(state, size) for size in (1, 2, 8, 9)] == [False, True, True, False]
    state, switched = drive(state, 16, LENGTH)
    assert sum(switched) == PHASE_STEPS and len(state.verdicts) == 2
    assert not trial.is_on(state, 16) and trial.is_on(state, 4)
    state, switched = drive(state, 4, LENGTH)
    assert all(switched) and len(state.verdicts) == 2


def test_an_interrupted_trial_starts_again() -> None:
    state, _ = drive(Trial(), 16, LENGTH - 1)
    state, _ = drive(state, 1, 3)
    assert state.batch_size == 1 and len(state.seconds) == 3 and not state.verdicts


def test_ranks_switch_together_for_any_measurements() -> None:
    _, fast = drive(Trial(), 4, LENGTH, lambda is_on, index: 0.5)
    _, slow = drive(Trial(), 4, LENGTH, lambda is_on, index: 3.0 + index)
    assert fast == slow


def test_on_must_beat_both_times_off() -> None:
    assert not Measured(batch_size=1, off_before=2.0, on=1.2, off_after=1.1).is_kept
    assert Measured(batch_size=1, off_before=2.0, on=1.0, off_after=1.1).is_kept
