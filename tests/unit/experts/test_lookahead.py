# SPDX-License-Identifier: Apache-2.0
"""Which experts are named ahead, and when a rank looks ahead."""

import time

import pytest
import torch

from vllm_tiered.experts import lookahead
from vllm_tiered.experts.lookahead import MOST_TOKENS, IdleWindow
from vllm_tiered.trial import LONG_PHASE_STEPS, WARM_STEPS, StepTrial


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_likeliest_experts_have_the_most_weight_over_all_tokens():
    weights = torch.tensor([[0.5, 0.4], [0.3, 0.3]])
    ids = torch.tensor([[3, 1], [1, 6]], dtype=torch.int32)
    assert lookahead.likeliest(weights, ids, 8).tolist() == [1, 3, 6]


def test_a_window_is_what_it_was_lately(clock):
    window = IdleWindow()
    for seconds in (4.0, 8.0):
        window.begin()
        clock[0] += seconds
        window.end()
        clock[0] += 100
        window.end()  # another step of the same layer, which nothing preceded
    assert window.seconds == 4.0 + (8.0 - 4.0) / 4


def steps(trial, clock, count, tokens, seconds):
    """Whether each of the steps looks ahead; ``seconds`` is their time by that."""
    found = []
    for _ in range(count):
        trial.begin_step(tokens)
        found.append(trial.is_on)
        clock[0] += seconds[trial.is_on]
    return found


@pytest.mark.parametrize("gain", [1.2, 0.8])
def test_it_is_tried_and_kept_if_it_is_faster(clock, gain):
    trial = StepTrial(is_always_on=False, most_tokens=MOST_TOKENS)
    seconds = {False: 1.0, True: 1.0 / gain}
    assert trial.state == "trying"
    found = steps(trial, clock, WARM_STEPS + 3 * LONG_PHASE_STEPS + 1, 1, seconds)
    assert trial.state == ("on" if gain > 1 else "off")
    assert sum(found[:-1]) == LONG_PHASE_STEPS
    assert found[-1] is (gain > 1)
    (verdict,) = trial.verdicts
    assert verdict.is_kept is (gain > 1)
    assert steps(trial, clock, 3, 1, seconds) == [gain > 1] * 3


def test_large_steps_are_neither_timed_nor_looked_ahead_of(clock):
    trial = StepTrial(is_always_on=False, most_tokens=MOST_TOKENS)
    assert not any(steps(trial, clock, 400, MOST_TOKENS + 1, {False: 1.0}))
    assert not trial.verdicts


def test_always_on_makes_no_trial(clock):
    trial = StepTrial(is_always_on=True, most_tokens=MOST_TOKENS)
    assert all(steps(trial, clock, 400, 1, {True: 1.0})) and not trial.verdicts
    assert trial.state == "on"


def test_a_trial_that_some_batch_sizes_won_is_on(clock):
    trial = StepTrial(is_always_on=False, most_tokens=MOST_TOKENS)
    for tokens, gain in ((1, 0.8), (16, 1.2), (4, 0.8)):
        whole = WARM_STEPS + 3 * LONG_PHASE_STEPS + 1
        steps(trial, clock, whole, tokens, {False: 1.0, True: 1.0 / gain})
    assert [found.is_kept for found in trial.verdicts] == [False, True, False]
    assert trial.state == "on"
