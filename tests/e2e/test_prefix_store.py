# SPDX-License-Identifier: Apache-2.0
"""Blocks that leave vLLM's prefix cache are read from the far tier instead of computed again."""

import random
from typing import Any

import pytest

from tests.e2e.faults import flipping_device, poison_freed_pages, walk
from tests.e2e.harness import Tokens, engine, generate, metric, vllm_tokens
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.kv import scheduler, worker
from vllm_tiered.kv.prefix_pages import PrefixPages
from vllm_tiered.kv.prefix_store import PrefixStore
from vllm_tiered.kv.store_trial import StoreTrial

MIB = 1 << 20
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 128, "enable_prefix_caching": True}
TIGHT: dict[str, Any] = OPTIONS | {"kv_cache_memory_bytes": 40 * MIB, "max_model_len": 384}
STORE: dict[str, Any] = {"far_gib": 0.5, "prefix_store": True}


def conversations(count: int, *, seed: int = 0) -> Tokens:
    """Return first turns of 90 to 130 tokens."""
    rng = random.Random(seed)
    return [
        [rng.randrange(1000, 40000) for _ in range(rng.randrange(90, 130))] for _ in range(count)
    ]


def next_turns(prompts: Tokens, answers: Tokens, *, seed: int = 1) -> Tokens:
    """Return each conversation with its answer and 20 tokens more."""
    rng = random.Random(seed)
    return [
        [*prompt, *answer, *(rng.randrange(1000, 40000) for _ in range(20))]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def run_turns(tiered: dict[str, Any], model: str = "deep", **options: Any) -> dict[str, float]:
    """Run three turns of 16 conversations, check their tokens, and return metrics."""
    turns = [conversations(16)]
    expected = []
    for _ in range(3):
        expected.append(vllm_tokens(model, turns[-1]))
        turns.append(next_turns(turns[-1], expected[-1], seed=len(turns)))
    with engine(model, tiered, **TIGHT | options) as llm:
        for prompts, tokens in zip(turns, expected, strict=False):
            assert generate(llm, prompts) == tokens
        return {
            "hits": metric("external_prefix_cache_hits"),
            "stored": metric("tiered_kv_blocks_stored"),
            "recomputed": metric("tiered_kv_recomputed_requests"),
            "preemptions": metric("num_preemptions"),
            "changes": metric("tiered_kv_level_changes"),
        }


@pytest.mark.parametrize("expansion", [1.5, 3.0, "auto"])
def test_later_turns_read_what_was_evicted(expansion) -> None:
    found = run_turns({"expansion": expansion, **STORE})
    assert found["hits"] > 500
    assert found["stored"] > 0
    assert found["recomputed"] == 0


def test_with_automatic_far_memory_that_of_far_layers_is_used() -> None:
    assert run_turns({"prefix_store": True})["hits"] > 500


def test_by_default_blocks_are_stored_and_without_the_store_computed_again() -> None:
    assert run_turns({})["hits"] > 500
    assert run_turns({"prefix_store": False})["hits"] == 0


def test_by_default_nothing_is_stored_for_long_if_nothing_is_hit(monkeypatch, caplog_vllm) -> None:
    """The trial is shortened here, as a test evicts few blocks."""
    monkeypatch.setattr(scheduler, "StoreTrial", lambda num_blocks: StoreTrial(20))
    stored: list[float] = []
    loads = [conversations(16, seed=100 + seed) for seed in range(4)]
    expected = [vllm_tokens("deep", prompts) for prompts in loads]
    with engine("deep", {}, **TIGHT) as llm:
        for prompts, tokens in zip(loads, expected, strict=True):
            assert generate(llm, prompts) == tokens
            stored.append(metric("tiered_kv_blocks_stored"))
    assert 0 < max(stored) <= 3 * 20
    assert caplog_vllm.text.count("the prefix store pauses") == 1


@pytest.mark.parametrize(
    ("model", "caching", "why_not"),
    [
        ("qwen2", False, "prefix caching is off"),
        ("qwen2", True, "kv.far_gib auto leaves no far memory beside the far layers"),
        ("gemma3", True, "a prefix also needs what the model's windows"),
    ],
)
def test_a_store_that_is_not_used_is_spoken_of(model, caching, why_not, caplog_vllm) -> None:
    tiered: dict[str, Any] = {"expansion": 1.3} if model == "qwen2" else {}
    options = {"kv_cache_memory_bytes": 8 * MIB, "enable_prefix_caching": caching}
    with engine(model, tiered, **options):
        pass
    assert "prefix_store" not in caplog_vllm.text, "nobody asked for it"
    with engine(model, tiered | {"prefix_store": True}, **options):
        pass
    assert caplog_vllm.text.count(f"kv.prefix_store is not used: {why_not}") == 1


def test_a_walk_over_all_levels_with_late_copies(monkeypatch) -> None:
    walk(monkeypatch, seed=5, steps_per_level=3)
    poison_freed_pages(monkeypatch)
    monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(0, 2e-3))
    found = run_turns(STORE)
    assert found["hits"] > 300
    assert found["changes"] > 5
    assert found["recomputed"] == 0


def test_a_preempted_request_goes_on_with_what_was_evicted(monkeypatch) -> None:
    fetched: list[int] = []  # vLLM's metric leaves preempted requests out
    fetch = PrefixStore.fetch

    def recorded(self: PrefixStore, keys: Any, block_ids: Any) -> None:
        fetched.extend(block_ids)
        fetch(self, keys, block_ids)

    monkeypatch.setattr(PrefixStore, "fetch", recorded)
    prompts = conversations(10, seed=7)
    expected = vllm_tokens("deep", prompts, max_tokens=120)
    with engine("deep", {"expansion": 1.5, **STORE}, **TIGHT) as llm:
        assert generate(llm, prompts, 120) == expected
        assert metric("num_preemptions") > 0
    assert fetched


def test_a_damaged_page_is_a_miss(monkeypatch) -> None:
    reads = set(range(100, 40_000, 997))
    monkeypatch.setattr(worker, "make_device", lambda: flipping_device(reads, whole_pages=True))
    found = run_turns({"verify": "full", **STORE})
    assert found["recomputed"] > 0


def test_unread_content_changes_tokens(monkeypatch) -> None:
    """The tests above depend on this."""

    def fetch(self: PrefixPages, block_ids: Any, written: Any) -> None:
        self._relocator.hold_everywhere(block_ids)

    monkeypatch.setattr(PrefixPages, "fetch", fetch)
    with pytest.raises(AssertionError):
        run_turns(STORE)


def test_a_reset_drops_what_is_stored() -> None:
    prompts = conversations(16)
    with engine("deep", STORE, **TIGHT) as llm:
        first = generate(llm, prompts)
        assert metric("tiered_kv_blocks_stored") > 0
        assert llm.reset_prefix_cache()
        assert generate(llm, prompts) == first
        assert metric("external_prefix_cache_hits") == 0
