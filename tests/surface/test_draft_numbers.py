# SPDX-License-Identifier: Apache-2.0
"""What is certain of vLLM's numbers under speculative decoding."""

from types import SimpleNamespace

from vllm_tiered.adapter.kv.drafts import Certain, Drafts, partial_blocks
from vllm_tiered.adapter.kv.steps import DecodeStreak
from vllm_tiered.kv.layout import PartialBlocks


def step(num_drafts=0):
    drafts = {"a": [-1] * num_drafts} if num_drafts else {}
    return SimpleNamespace(scheduled_spec_decode_tokens=drafts)


def test_a_step_whose_outcome_is_known():
    drafts = Drafts()
    first, second = step(3), step(2)
    drafts.begin_step(first)
    assert drafts.split("a", 10, 4, restarts=False) == Certain(10, 1, 3)
    drafts.end_step(first)
    drafts.begin_step(second)
    # Two of three drafts were accepted.
    assert drafts.split("a", 13, 3, restarts=False) == Certain(13, 1, 2)
    assert drafts.num_accepted == 2


def test_a_step_in_flight_is_in_doubt():
    drafts = Drafts()
    steps = [step(3), step(3), step(3)]
    drafts.begin_step(steps[0])
    drafts.split("a", 10, 4, restarts=False)
    drafts.begin_step(steps[1])
    # vLLM counts all four tokens; only the first is certain.
    assert drafts.split("a", 14, 4, restarts=False) == Certain(11, 1, 6)
    drafts.end_step(steps[0])  # it accepted none
    drafts.begin_step(steps[2])
    assert drafts.split("a", 15, 4, restarts=False) == Certain(12, 1, 6)
    assert drafts.num_accepted == 0


def test_after_a_pause_nothing_is_in_doubt():
    """vLLM then takes the outcome of the last step without scheduling another."""
    drafts = Drafts()
    steps = [step(3), step(3), step(3)]
    for at, before in ((0, None), (1, steps[0])):
        drafts.begin_step(steps[at])
        drafts.split("a", 10 + 4 * at, 4, restarts=False)
        if before:
            drafts.end_step(before)
    drafts.end_step(steps[1])
    drafts.begin_step(steps[2])
    assert drafts.split("a", 12, 4, restarts=False) == Certain(12, 1, 3)


def test_a_request_that_restarts_has_nothing_in_doubt():
    drafts = Drafts()
    drafts.begin_step(step(3))
    drafts.split("a", 10, 4, restarts=False)
    drafts.begin_step(step())
    assert drafts.split("a", 0, 12, restarts=True) == Certain(0, 12, 0)


def test_partial_blocks():
    def of(num_drafts, *, is_async):
        speculation = SimpleNamespace(num_speculative_tokens=num_drafts) if num_drafts else None
        return partial_blocks(
            SimpleNamespace(
                speculative_config=speculation,
                scheduler_config=SimpleNamespace(async_scheduling=is_async),
            ),
            16,
        )

    assert of(0, is_async=True) == PartialBlocks(1, 2)
    assert of(1, is_async=False) == PartialBlocks(2, 2)
    assert of(4, is_async=False) == of(4, is_async=True) == PartialBlocks(2, 3)
    assert of(8, is_async=True) == PartialBlocks(3, 3)


def test_no_streak_behind_a_step_with_drafts():
    """A later outcome may change what the step behind it has computed."""

    def output(computed, num_drafts=0):
        return SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=["a"], num_computed_tokens=[computed], resumed_req_ids=set()
            ),
            total_num_scheduled_tokens=1 + num_drafts,
            scheduled_spec_decode_tokens={"a": [7] * num_drafts} if num_drafts else {},
        )

    streak = DecodeStreak()
    assert [streak.continues(output(at)) for at in range(3)] == [False, True, True]
    assert not streak.continues(output(3, 2))
    assert [streak.continues(output(at)) for at in range(4, 8)] == [False, False, True, True]
