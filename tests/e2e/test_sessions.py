# SPDX-License-Identifier: Apache-2.0
"""Requests with streamed input hold blocks between two turns that nothing can take."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.faults import flipping_device
from tests.e2e.harness import Tokens, engine, random_prompts
from vllm_tiered.adapter.kv import load_errors, worker

MIB = 1 << 20
SESSIONS: dict[str, Any] = {"enable_prefix_caching": True, "async_scheduling": False}


class Turns:
    """Adds sessions and other requests directly to vLLM's engine core."""

    def __init__(self, llm: Any) -> None:
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._engine = llm.llm_engine
        self._core = llm.llm_engine.engine_core.engine_core

    def add(self, request_id: str, prompt: list[int], *, resumable: bool) -> None:
        from vllm import SamplingParams

        request = self._engine.input_processor.process_inputs(
            request_id,
            {"prompt_token_ids": prompt},
            SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
            supported_tasks=self._engine.get_supported_tasks(),
            resumable=resumable,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))

    def run(self) -> dict[str, list[int]]:
        """Return tokens by request once each has given twelve; sessions then wait for input.

        The test fails if the engine makes no more progress.
        """
        tokens: dict[str, list[int]] = {}
        for _ in range(2000):
            if not self.scheduler.get_num_unfinished_requests():
                return tokens
            for outputs in self._core.step()[0].values():
                for output in outputs.outputs:
                    tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        pytest.fail(f"no end in sight: {tokens}")


def session_with_another(turns: Turns, before: Callable[[], None]) -> Iterator[Tokens]:
    """Yield a session's turn; after ``before`` a request with its prefix; its next turn."""
    prompt, more, rest = random_prompts(3, seed=21)
    prompt = (prompt * 40)[:140]
    turns.add("session", prompt, resumable=True)
    yield [turns.run()["session"]]
    before()
    turns.add("other", prompt + more, resumable=False)
    yield [turns.run()["other"]]
    turns.add("session", rest, resumable=True)
    yield [turns.run()["session"]]


def test_a_session_that_waits_for_input_starts_over(monkeypatch) -> None:
    """It reads the page later, or finds it lost when its layer is near again."""
    with engine("deep", **SESSIONS) as llm:
        expected = list(session_with_another(Turns(llm), lambda: None))
    device = flipping_device(set())
    thread: Any = device.thread_class
    monkeypatch.setattr(worker, "make_device", lambda: device)

    def damage_a_shared_page() -> None:
        thread.flips = frozenset({thread.num_reads + 5})

    with engine(
        "deep", {"expansion": 2.0, "verify": "full"}, kv_cache_memory_bytes=48 * MIB, **SESSIONS
    ) as llm:
        turns = Turns(llm)
        recomputes = turns.scheduler.connector.recomputes
        story = session_with_another(turns, damage_a_shared_page)
        assert [next(story), next(story)] == expected[:2]
        assert recomputes.postponed == {"session"}
        assert recomputes.num_recomputed == 2
        assert list(story) == expected[2:]
        assert not recomputes.postponed
        assert recomputes.num_recomputed == 2  # the damaged page was not read again
        turns.scheduler.connector._scheduler.elastic.check_integrity()


def test_sessions_where_the_plugin_is_off() -> None:
    """No layer is far, so no page can be lost, and no recompute state is kept."""
    stories = []
    for kv in (None, {"expansion": 1.0}):
        with engine("llama3", kv, **SESSIONS) as llm:
            stories.append(list(session_with_another(Turns(llm), lambda: None)))
    assert stories[0] == stories[1]


@pytest.mark.parametrize("caching", [True, False])
def test_a_turn_starts_over_if_steps_are_scheduled_ahead(caching, monkeypatch) -> None:
    """vLLM schedules no steps ahead on a CPU, so the connector is told that it does."""
    options = SESSIONS | {"enable_prefix_caching": caching}
    turns = [(name, tokens_of(50 + seed, 70)) for seed, name in enumerate("abcabcab")]
    with engine("deep", **options) as llm:
        expected = turn_by_turn(llm, turns)
    begun: list[str] = []
    start_over = load_errors._start_over

    def record(scheduler: Any, session: Any) -> None:
        begun.append(session.request_id)
        start_over(scheduler, session)
        assert not scheduler.kv_cache_manager.get_block_ids(session.request_id)[0]

    monkeypatch.setattr(load_errors, "_start_over", record)
    with engine(
        "deep", {"expansion": 2.0}, kv_cache_memory_bytes=48 * MIB, max_model_len=448, **options
    ) as llm:
        connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        connector.schedules_ahead = True
        assert turn_by_turn(llm, turns) == expected
        (state,) = llm.collective_rpc("tiered_state")
        assert state["kv"]["counters"]["kv_read_bytes"] > 0
        connector._scheduler.elastic.check_integrity()
    assert begun == list("abcab"), "every turn but the first"


def tokens_of(seed: int, count: int) -> list[int]:
    return (random_prompts(1, seed=seed)[0] * 100)[:count]


def turn_by_turn(llm: Any, turns: list[tuple[str, list[int]]]) -> Tokens:
    """Run the turns one after the other; return their tokens."""
    sessions = Turns(llm)
    answers = []
    for request_id, tokens in turns:
        sessions.add(request_id, list(tokens), resumable=True)  # vLLM appends to it
        answers.append(sessions.run()[request_id])
    return answers


@pytest.mark.parametrize(
    ("near_mib", "turns"),
    [
        # 8 blocks; the second turn ends in the 14th.
        (12, [("a", tokens_of(31, 100)), ("a", tokens_of(32, 300))]),
        # 16 blocks: both hold 14, then one asks for 3 more.
        (24, [("a", tokens_of(33, 190)), ("b", tokens_of(34, 190)), ("a", tokens_of(35, 90))]),
        # Two blocks each and a partial block, which takes the place of blocks in far layers.
        (24, [(f"{number}", tokens_of(40 + number, 45)) for number in range(12)]),
    ],
    ids=["larger than the level", "beside one that waits", "many"],
)
def test_the_level_grows_for_the_next_turn(near_mib, turns) -> None:
    """Nothing else runs, so only the turn itself shows that blocks are short."""
    with engine("deep", **SESSIONS) as llm:
        expected = turn_by_turn(llm, turns)
    with engine(
        "deep", {}, kv_cache_memory_bytes=near_mib * MIB, max_model_len=448, **SESSIONS
    ) as llm:
        assert turn_by_turn(llm, turns) == expected
