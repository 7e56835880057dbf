# SPDX-License-Identifier: Apache-2.0
"""The number of far layers changes while requests run; the tokens stay the same on any schedule."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faults import walk
from tests.e2e.harness import engine, generate, metric, random_prompts, run, vllm_tokens
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.kv import adaptive, worker
from vllm_tiered.kv.controller import Decision

MIB = 1 << 20
PROMPTS = random_prompts(10, longest=100)
TIGHT: dict[str, Any] = {"kv_cache_memory_bytes": 40 * MIB, "max_model_len": 256}


def drive(llm) -> tuple[list[list[int]], float]:
    return generate(llm, PROMPTS), metric("tiered_kv_level_changes")


@pytest.mark.parametrize("caching", [False, True])
def test_a_walk_over_all_levels(monkeypatch, caching) -> None:
    walk(monkeypatch, seed=1)
    with engine("deep", {}, enable_prefix_caching=caching, **TIGHT) as llm:
        tokens, num_changes = drive(llm)
        again, _ = drive(llm)
    assert num_changes > 5
    assert tokens == vllm_tokens("deep", PROMPTS) == again


def test_another_model(monkeypatch, force_levels) -> None:
    force_levels()
    walk(monkeypatch, seed=2, steps_per_level=2)
    result = run("opt", PROMPTS, {}, max_model_len=256, kv_cache_memory_bytes=8 * MIB)
    assert result.metrics["tiered_kv_read_bytes"] > 0
    assert result.tokens == vllm_tokens("opt", PROMPTS)


def test_delayed_copies_and_poisoned_staging(monkeypatch) -> None:
    walk(monkeypatch, seed=0, steps_per_level=2)
    monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(0, 2e-3))
    result = run("deep", PROMPTS, {}, enable_prefix_caching=True, **TIGHT)
    assert result.tokens == vllm_tokens("deep", PROMPTS)


def test_grows_when_requests_wait() -> None:
    with engine("deep", {}, **TIGHT) as llm:
        tokens, num_changes = drive(llm)
        read_bytes = metric("tiered_kv_read_bytes")
    assert num_changes >= 1 and read_bytes > 0
    assert tokens == vllm_tokens("deep", PROMPTS)


def test_gauges_and_state_follow_the_level_and_the_partly_filled_blocks(monkeypatch) -> None:
    def climb(signals, state, levels, tuning):
        return Decision(level_idx=len(levels.ladder) - 1, reason="as high as can be"), state

    monkeypatch.setattr(adaptive.controller, "step", climb)
    with engine("deep", {}, **TIGHT) as llm:
        tokens, num_changes = drive(llm)
        assert num_changes >= 1 and metric("tiered_kv_partial_blocks_far") == 1
        (worker_state,) = llm.collective_rpc("tiered_state")
        kv = worker_state["kv"]  # as it is now, not as it was at start
        assert kv["far_layers"] == metric("tiered_kv_far_layers") > 0
        assert kv["expansion"] == pytest.approx(metric("tiered_kv_expansion"))
        assert len(kv["offloaded_layers"]) >= kv["far_layers"]
        assert (kv["state"], kv["reason"]) == ("on", None)
        assert kv["counters"]["kv_read_bytes"] == metric("tiered_kv_read_bytes")
    assert tokens == vllm_tokens("deep", PROMPTS)


def test_backs_off_when_nothing_waits() -> None:
    with engine("deep", {}) as llm:
        tokens, num_changes = drive(llm)
        assert num_changes == 0 and metric("tiered_kv_expansion") == 1.0
        assert metric("tiered_kv_read_bytes") == metric("tiered_kv_write_bytes") == 0
    assert tokens == vllm_tokens("deep", PROMPTS)


def test_a_request_larger_than_the_near_tier() -> None:
    """vLLM refuses it: 12 MiB hold 8 blocks of 32 tokens; the request needs 14."""
    prompts = [*random_prompts(1, seed=3, longest=5), random_prompts(1, seed=4)[0] * 30]
    prompts[1] = prompts[1][:400]
    with (
        pytest.raises(ValueError, match="max seq len"),
        engine("deep", kv_cache_memory_bytes=12 * MIB, max_model_len=448),
    ):
        pass
    with engine("deep", {}, kv_cache_memory_bytes=12 * MIB, max_model_len=448) as llm:
        tokens = generate(llm, prompts)
        assert metric("tiered_kv_expansion") > 1.0
    assert tokens == vllm_tokens("deep", prompts)


def test_such_a_request_alone_in_an_idle_engine(tmp_path: Path) -> None:
    """vLLM schedules none of it before there are blocks for all of its prompt.

    So the first steps compute nothing, and the report's layer timeline begins with the first step.
    """
    prompts = [(random_prompts(1, seed=4)[0] * 30)[:400]]
    report = {"path": str(tmp_path / "timeline.jsonl")}
    with engine(
        "deep",
        additional_config={"tiered": {"report": report}},
        kv_cache_memory_bytes=12 * MIB,
        max_model_len=448,
    ) as llm:
        tokens = generate(llm, prompts)
        assert metric("tiered_kv_expansion") > 1.0
    assert tokens == vllm_tokens("deep", prompts)


def test_prefix_cache_reset_keeps_the_level(monkeypatch) -> None:
    walk(monkeypatch, seed=5, steps_per_level=4)
    with engine("deep", {}, enable_prefix_caching=True, **TIGHT) as llm:
        first, _ = drive(llm)
        assert llm.reset_prefix_cache()
        second, _ = drive(llm)
        total = metric("tiered_kv_blocks_released") + metric("tiered_kv_blocks_reserved")
        assert total == llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1
    assert first == second == vllm_tokens("deep", PROMPTS)
