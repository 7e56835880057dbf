# SPDX-License-Identifier: Apache-2.0
"""A page that does not come back as it was written costs a recompute, never a wrong token."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Tokens, engine, generate, metric, random_prompts, run, vllm_tokens
from vllm_tiered.adapter import worker
from vllm_tiered.adapter.load_errors import RecentSteps
from vllm_tiered.errors import BudgetError
from vllm_tiered.tiers.base import Direction
from vllm_tiered.tiers.cpu import CopyJob, CopyThread, CpuDevice

MIB = 1 << 20
PROMPTS = random_prompts(8, longest=100)
TIGHT: dict[str, Any] = {"kv_cache_memory_bytes": 48 * MIB, "max_model_len": 256}


class FlippingThread(CopyThread):
    """Damages a page in far memory before some reads of it: in one bit, or all of it."""

    whole = False
    flips: frozenset[int] = frozenset()  # numbers of the reads before which it does
    num_reads = 0

    def run(self, job: CopyJob) -> None:
        if self.name.endswith(Direction.READ.value) and len(job.copy.src_pages):
            cls = type(self)
            cls.num_reads += 1
            if cls.num_reads in cls.flips:
                page = job.copy.src.data[job.copy.src_pages.ids[0]]
                page[slice(3, None, 4) if cls.whole else 17] ^= 64
        super().run(job)


def flipping_device(reads: set[int], *, whole_pages: bool = False) -> CpuDevice:
    class Thread(FlippingThread):
        flips = frozenset(reads)
        whole = whole_pages

    class Device(CpuDevice):
        thread_class = Thread

    return Device()


@pytest.mark.parametrize(("asynchronous", "caching"), [(False, False), (True, True)])
def test_a_flipped_bit_in_far_memory(monkeypatch, asynchronous, caching) -> None:
    monkeypatch.setattr(worker, "make_device", lambda: flipping_device({300}))
    with engine(
        "demo",
        {"expansion": 2.0, "verify": "full"},
        enable_prefix_caching=caching,
        async_scheduling=asynchronous,
        **TIGHT,
    ) as llm:
        tokens = generate(llm, PROMPTS)
        assert metric("tiered_kv_lost_blocks") >= 1
        assert metric("tiered_kv_recomputed_requests") == 1  # exactly the one that was hit
        again = generate(llm, PROMPTS)
    assert tokens == again == vllm_tokens("demo", PROMPTS)


def test_unverified_damage_changes_tokens(monkeypatch) -> None:
    """What the test above rests on: the damage is where attention sees it."""
    reads = set(range(100, 9999, 10))
    monkeypatch.setattr(worker, "make_device", lambda: flipping_device(reads, whole_pages=True))
    result = run("demo", PROMPTS, {"expansion": 2.0}, **TIGHT)
    assert result.tokens != vllm_tokens("demo", PROMPTS)


def test_many_flipped_bits(monkeypatch) -> None:
    monkeypatch.setattr(worker, "make_device", lambda: flipping_device(set(range(50, 4000, 120))))
    with engine("demo", {"expansion": 2.0, "verify": "full"}, **TIGHT) as llm:
        tokens = generate(llm, PROMPTS)
        assert metric("tiered_kv_recomputed_requests") >= 3
    assert tokens == vllm_tokens("demo", PROMPTS)


def second_turns(monkeypatch) -> tuple[Tokens, Tokens]:
    """Answers to a prompt that goes on behind a damaged first turn; and vLLM's.

    The second chunk of the first prompt reads the blocks of the first chunk, one of them damaged,
    and fills two blocks, which are then in the prefix cache twice.
    """
    monkeypatch.setattr(worker, "make_device", lambda: flipping_device({1}, whole_pages=True))
    prompts = [[token for prompt in random_prompts(12, seed=3) for token in prompt][:200]]
    expected = vllm_tokens("demo", prompts, max_tokens=8)
    longer = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    with engine(
        "demo",
        {"expansion": 2.0, "verify": "full"},
        enable_prefix_caching=True,
        max_num_batched_tokens=64,
        **TIGHT,
    ) as llm:
        assert generate(llm, prompts, 8) == expected
        assert metric("tiered_kv_recomputed_requests") == 1
        again = generate(llm, longer, 8)
    return again, vllm_tokens("demo", longer, max_tokens=8)


def test_what_was_computed_from_a_lost_page_is_not_hit(monkeypatch) -> None:
    again, expected = second_turns(monkeypatch)
    assert again == expected


def test_the_test_above_fails_if_such_blocks_stay(monkeypatch) -> None:
    monkeypatch.setattr(RecentSteps, "written", lambda self: set())
    again, expected = second_turns(monkeypatch)
    assert again != expected


class Turns:
    """Inputs of sessions, and other requests, given to vLLM's engine core itself."""

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
        """Tokens by request, once each has given twelve; sessions then wait for input."""
        tokens: dict[str, list[int]] = {}
        while self.scheduler.get_num_unfinished_requests():
            for outputs in self._core.step()[0].values():
                for output in outputs.outputs:
                    tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        return tokens


def session_beside_another(turns: Turns, before: Callable[[], None]) -> Iterator[Tokens]:
    """A session's turn; ``before`` a request that shares its prefix; the session's next turn."""
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
    """It does not read the page now, but will, or will find it gone when its layer returns."""
    sessions: dict[str, Any] = {"enable_prefix_caching": True, "async_scheduling": False}
    with engine("demo", **sessions) as llm:
        expected = list(session_beside_another(Turns(llm), lambda: None))
    device = flipping_device(set())
    thread: Any = device.thread_class
    monkeypatch.setattr(worker, "make_device", lambda: device)

    def damage_a_shared_page() -> None:
        thread.flips = frozenset({thread.num_reads + 5})

    with engine("demo", {"expansion": 2.0, "verify": "full"}, **sessions, **TIGHT) as llm:
        turns = Turns(llm)
        recomputes = turns.scheduler.connector.recomputes
        story = session_beside_another(turns, damage_a_shared_page)
        assert [next(story), next(story)] == expected[:2]
        assert recomputes.postponed == {"session"}
        assert recomputes.num_recomputed == 2
        assert list(story) == expected[2:]
        assert not recomputes.postponed
        assert recomputes.num_recomputed == 2  # the damaged page was not read again
        turns.scheduler.connector._scheduler.elastic.check_integrity()


def test_sessions_where_the_plugin_stepped_aside() -> None:
    """No layer is far, so nothing can be lost, and nothing that may be lost is kept."""
    sessions: dict[str, Any] = {"enable_prefix_caching": True, "async_scheduling": False}
    stories = []
    for kv in (None, {"expansion": 1.0}):
        with engine("llama3", kv, **sessions) as llm:
            stories.append(list(session_beside_another(Turns(llm), lambda: None)))
    assert stories[0] == stories[1]


@pytest.mark.parametrize(("far_gib", "expansion"), [(0, 2.0), (0.03, 3.0), (0, "auto")])
def test_far_pages_in_a_file(tmp_path: Path, far_gib, expansion) -> None:
    """Nothing in memory; some layers in memory, the others in the file; growing into it."""
    config = {
        "tier": "storage",
        "path": str(tmp_path),
        "far_gib": far_gib,
        "expansion": expansion,
    }
    result = run("demo", PROMPTS, config, **TIGHT | {"kv_cache_memory_bytes": 28 * MIB})
    assert result.metrics["tiered_kv_read_bytes"] > 0
    assert result.tokens == vllm_tokens("demo", PROMPTS)
    assert os.listdir(tmp_path) == []


def test_a_device_that_fails_some_reads(monkeypatch, tmp_path: Path) -> None:
    original = os.preadv
    calls = iter(range(1 << 30))

    def preadv(*args, **kwargs):
        if next(calls) % 500 == 100:
            raise OSError(5, "Input/output error")
        return original(*args, **kwargs)

    monkeypatch.setattr(os, "preadv", preadv)
    config = {"tier": "storage", "path": str(tmp_path), "far_gib": 0, "expansion": 2.0}
    with engine("demo", config, **TIGHT) as llm:
        tokens = generate(llm, PROMPTS)
        assert metric("tiered_kv_recomputed_requests") >= 1
    assert tokens == vllm_tokens("demo", PROMPTS)


def test_a_device_that_never_works_stops_the_engine(monkeypatch, tmp_path: Path) -> None:
    def preadv(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    config = {"tier": "storage", "path": str(tmp_path), "far_gib": 0, "expansion": 2.0}
    with (
        pytest.raises(Exception, match=r"lost KV blocks \d+ times.*kv\.path"),
        engine("demo", config, **TIGHT) as llm,
    ):
        generate(llm, PROMPTS)


def test_a_full_disk_is_refused_at_start(monkeypatch, tmp_path: Path) -> None:
    def posix_fallocate(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    config = {"tier": "storage", "path": str(tmp_path), "far_gib": 0, "expansion": 2.0}
    with pytest.raises(BudgetError, match=r"kv\.path"), engine("demo", config, **TIGHT):
        pass
