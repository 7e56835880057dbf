# SPDX-License-Identifier: Apache-2.0
"""The prefix store pauses where nothing is hit, and goes on where something is."""

import pytest

from vllm_tiered.kv.store_trial import FIRST_PAUSE, LONGEST_PAUSE, MIN_HITS, StoreTrial

BLOCKS = 100


def evict(trial: StoreTrial, count: int) -> int:
    """Return how many of so many blocks were stored."""
    return sum(trial.evict() for _ in range(count))


def test_without_hits_ever_less_is_stored():
    trial = StoreTrial(BLOCKS)
    assert evict(trial, BLOCKS) == BLOCKS
    pause = FIRST_PAUSE
    for _ in range(6):
        assert evict(trial, pause * BLOCKS) == 0
        assert evict(trial, BLOCKS) == BLOCKS
        pause = min(2 * pause, LONGEST_PAUSE)
    assert pause == LONGEST_PAUSE
    assert trial.num_pauses == 6
    assert not trial.evict()


@pytest.mark.parametrize("share", [MIN_HITS, 1.0])
def test_with_hits_all_is_stored(share):
    trial = StoreTrial(BLOCKS)
    for _ in range(20):
        assert evict(trial, BLOCKS) == BLOCKS
        trial.hit(round(share * BLOCKS))
    assert trial.num_pauses == 0


def test_too_few_hits_are_as_none():
    trial = StoreTrial(BLOCKS)
    trial.hit(round(MIN_HITS * BLOCKS) - 1)
    assert evict(trial, 2 * BLOCKS) == BLOCKS


def test_a_hit_ends_a_pause_and_the_next_one_is_short_again():
    trial = StoreTrial(BLOCKS)
    evict(trial, (1 + FIRST_PAUSE + 1) * BLOCKS)
    assert evict(trial, BLOCKS) == 0 and not trial.is_storing
    trial.hit(0)
    assert not trial.is_storing
    trial.hit(1)
    assert trial.is_storing
    # The hit counts for the trial that it begins, and is too few.
    assert evict(trial, BLOCKS) == BLOCKS
    assert evict(trial, FIRST_PAUSE * BLOCKS) == 0
    assert evict(trial, BLOCKS) > 0


def test_a_load_that_begins_to_share_is_noticed_in_the_next_trial():
    trial = StoreTrial(BLOCKS)
    evict(trial, (1 + FIRST_PAUSE) * BLOCKS)
    assert evict(trial, BLOCKS // 2) == BLOCKS // 2
    trial.hit(BLOCKS // 2)
    assert evict(trial, 5 * BLOCKS // 2) == 3 * BLOCKS // 2
