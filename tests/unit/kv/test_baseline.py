# SPDX-License-Identifier: Apache-2.0
"""The expansion controller if copies cost compute, as with far pages on storage."""

import dataclasses
import statistics

import pytest

from tests.fakes.kv.controlled_engine import LEVELS, ControlledEngine
from vllm_tiered.kv.baseline import BaselineComparison
from vllm_tiered.kv.tuning import NEAR_TUNING, STORAGE_TUNING
from vllm_tiered.kv.windows import Window

TOP = LEVELS.max_num_far
HOLD = STORAGE_TUNING.base_records * STORAGE_TUNING.record_steps


def storage(**changes):
    return ControlledEngine(
        **{"unit_link": 1e-7, "noise": 0.01, "tuning": STORAGE_TUNING, **changes}
    )


def rate(engine, level):
    """Return tokens/s at a level, without noise."""
    quiet = dataclasses.replace(engine, noise=0.0)
    quiet.level = level
    signals = quiet.signals()
    return signals.tokens / signals.seconds


def test_throughput_without_far_layers_is_learnt_first():
    engine = storage().run(HOLD + 100)
    assert set(engine.path[: HOLD - 1]) == {0}
    assert engine.level > 10


def test_a_level_that_pays_is_kept():
    engine = storage().run(6000)
    assert rate(engine, TOP) > 1.5 * rate(engine, 0)
    assert engine.path.count(TOP) > 0.85 * len(engine.path)
    assert not [reason for reason in engine.reasons if "slower" in reason]


def test_layers_that_cost_more_than_they_give_are_given_up():
    """Compute never waits, but the copies' cost makes every level slower than level 0."""
    engine = storage(copy_cost=1.5e-4)
    assert max(rate(engine, level) for level in range(1, TOP + 1)) < 0.95 * rate(engine, 0)
    engine.run(30_000)
    assert engine.path.count(0) > 0.8 * len(engine.path)
    assert "slower than without far layers" in " ".join(engine.reasons)
    # The time between attempts grows.
    assert engine.path[15_000:].count(0) > 0.95 * 15_000


def test_without_the_comparison_they_are_kept():
    """Stall alone does not show that these layers cost too much, so the rule is needed."""
    engine = ControlledEngine(unit_link=1e-7, noise=0.01, copy_cost=1.5e-4).run(6000)
    assert min(engine.path[1000:]) > 10


@pytest.mark.parametrize("copy_cost", [4e-6, 5.5e-6, 6.2e-6, 7e-6, 1e-5, 3e-5])
def test_never_much_below_what_is_served_without_far_layers(copy_cost):
    """Costs range from clearly worth it to clearly not; in between either decision is right."""
    engine = storage(copy_cost=copy_cost).run(40_000)
    mean = statistics.fmean(rate(engine, level) for level in engine.path[3000:])
    assert mean > 0.98 * max(rate(engine, 0), rate(engine, TOP))


def test_a_long_request_gets_its_level_all_the_same():
    engine = storage(needed_blocks=150, copy_cost=1.5e-4).run(6000)
    assert all(LEVELS.block_limit(LEVELS.ladder[level], 2) >= 150 for level in engine.path)


def test_a_level_that_a_request_needed_is_evaluated_when_it_has_gone():
    """The level was entered before the baseline was known, and lasted longer than an evaluation."""
    engine = storage(needed_blocks=150, copy_cost=1.5e-4).run(3000)
    assert min(engine.path) > 0
    engine.needed_blocks = 10
    engine.run(12_000)
    assert engine.path[4000:].count(0) > 0.8 * len(engine.path[4000:])


def test_a_level_that_a_request_needs_later_is_evaluated_when_it_has_gone():
    engine = storage(copy_cost=1.5e-4).run(2000)
    engine.needed_blocks = 150
    engine.run(3000)
    engine.needed_blocks = 10
    seen = len(engine.path)
    engine.run(8000)
    assert engine.path[seen:].count(0) > 0.8 * 8000


def test_pressure_that_far_layers_took_away_still_counts():
    """With far layers no request is blocked any more, but the blocks in use show the pressure."""
    engine = storage(demand=150, copy_cost=4e-4, waiting=0).run(2000)
    higher = dataclasses.replace(engine)
    higher.level = max(engine.path)
    assert not higher.signals().is_blocked
    assert "slower than without far layers" in " ".join(engine.reasons)


LONG_PROMPTS = {"prefill_every": 256, "prefill_steps": 64}


@pytest.mark.parametrize("copy_cost", [0.0, 1.5e-4])
def test_long_prompts_do_not_keep_it_from_deciding(copy_cost):
    """A prefill step takes 30 times as long as another, and comes in bursts."""
    engine = storage(copy_cost=copy_cost, **LONG_PROMPTS).run(20_000)
    pays = rate(engine, TOP) > rate(engine, 0)
    assert pays == (copy_cost == 0.0)
    later = engine.path[5000:]
    assert later.count(TOP if pays else 0) > 0.8 * len(later)


def test_a_level_that_gains_nothing_is_given_up():
    """As fast as without far layers, within the noise: no reason to keep them."""
    engine = storage(decode=(0.0, 2e-4), copy_cost=0.0, tuning=NEAR_TUNING).run(20_000)
    assert rate(engine, TOP) == pytest.approx(rate(engine, 0), rel=0.02)
    assert engine.path[2000:].count(0) > 0.8 * len(engine.path[2000:])
    assert "no faster than without far layers" in " ".join(engine.reasons)


# Records --------------------------------------------------------------------------------


def window(tokens, *, steps=16, running=10, seconds=0.03):
    return Window(
        steps=steps,
        seconds=steps * seconds,
        tokens=steps * tokens,
        running=steps * running,
        compute_rate=steps / seconds,
    )


def filled(comparison, level, rates, **changes):
    for tokens in rates:
        for _ in range(4):
            comparison = comparison.with_window(
                window(tokens, **changes), level, record_steps=64, base_records=4
            )
    return comparison


def test_plain_losses_are_known_after_three_samples():
    comparison = filled(BaselineComparison(), 0, [100, 104, 98, 101])
    assert comparison.base.count == 4
    for count, expected in ((2, None), (3, pytest.approx(0.25, abs=0.01))):
        here = filled(comparison.at_level(20), 20, [75, 77, 74][:count])
        assert here.loss(8, 0.01) == expected


@pytest.mark.parametrize(
    ("tokens", "spread", "is_loss"),
    [(98, 30, True), (103, 30, True), (101, 1, True), (103, 1, False), (125, 30, False)],
)
def test_in_doubt_a_level_is_no_gain(tokens, spread, is_loss):
    """It has to be faster by 1 % and a standard error once there are enough samples."""
    comparison = filled(BaselineComparison(), 0, [100 - spread, 100 + spread] * 2).at_level(20)
    low, high = tokens - spread, tokens + spread
    verdicts = []
    for index in range(10):
        comparison = filled(comparison, 20, [high if index % 2 else low])
        verdicts.append(comparison.loss(8, 0.01) is not None)
    assert verdicts[7] == is_loss
    if spread > 1:
        assert not any(verdicts[:7])


def test_another_load_begins_a_new_record():
    comparison = filled(BaselineComparison(), 0, [100] * 4).at_level(20)
    comparison = filled(comparison, 20, [75, 75])
    comparison = filled(comparison, 20, [75], running=40)
    assert comparison.here.count == 2, "one sample may be an accident"
    comparison = filled(comparison, 20, [75], running=40)
    assert (comparison.here.count, comparison.here.running) == (1, 40)
    assert comparison.base.count == 4


def test_the_base_is_waited_for_once():
    comparison = filled(BaselineComparison(), 0, [100] * 4)
    assert comparison.is_known
    comparison = filled(comparison, 0, [100, 100], running=40)
    assert comparison.is_known and comparison.base.count == 1


def test_evaluated_samples_are_not_evaluated_again():
    comparison = filled(BaselineComparison(), 0, [100] * 4).at_level(20)
    comparison = dataclasses.replace(filled(comparison, 20, [110] * 8), is_evaluated=True)
    assert filled(comparison, 20, [60] * 8).loss(8, 0.01) is None
    assert not comparison.at_level(5).is_evaluated, "other levels are"
