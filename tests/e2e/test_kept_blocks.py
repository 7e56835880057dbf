# SPDX-License-Identifier: Apache-2.0
"""Policy `blocks`: full blocks stay near while there are pages, and a step reads the others."""

from typing import Any

import pytest

from tests.e2e.faults import poison_freed_pages, walk
from tests.e2e.harness import engine, generate, metric, random_prompts, run, vllm_tokens
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.kv import worker

MIB = 1 << 20
PROMPTS = random_prompts(10, longest=150)
TIGHT: dict[str, Any] = {
    "kv_cache_memory_bytes": 40 * MIB,
    "max_model_len": 256,
    "max_num_batched_tokens": 128,
}


def blocks(expansion: float, **others: Any) -> dict[str, Any]:
    return {"policy": "blocks", "expansion": expansion, **others}


@pytest.mark.parametrize("expansion", [1.1, 2.0, 3.0])
@pytest.mark.parametrize("caching", [False, True])
def test_tokens_are_vllms(expansion: float, caching: bool) -> None:
    expected = vllm_tokens("deep", PROMPTS)
    with engine("deep", blocks(expansion), enable_prefix_caching=caching, **TIGHT) as llm:
        assert generate(llm, PROMPTS) == expected
        assert metric("tiered_kv_read_bytes") > 0
        assert metric("tiered_kv_expansion") == pytest.approx(expansion, abs=0.1)
        assert generate(llm, PROMPTS) == expected


@pytest.mark.parametrize("delays", [False, True])
def test_a_walk_over_all_levels(delays, monkeypatch) -> None:
    """With delays, copies are late, and pages hold poison until they arrive and once freed."""
    expected = vllm_tokens("deep", PROMPTS)
    walk(monkeypatch, seed=7, steps_per_level=2)
    poison_freed_pages(monkeypatch)
    if delays:
        monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(0, 2e-3))
    with engine("deep", {"policy": "blocks"}, enable_prefix_caching=True, **TIGHT) as llm:
        assert [generate(llm, PROMPTS) for _ in range(2)] == [expected] * 2
        assert metric("tiered_kv_level_changes") > 5
        assert metric("tiered_kv_read_bytes") > 0


def test_it_follows_the_load() -> None:
    expected = vllm_tokens("deep", PROMPTS)
    with engine("deep", {"policy": "blocks"}, **TIGHT) as llm:
        assert generate(llm, PROMPTS) == expected
        assert metric("tiered_kv_level_changes") >= 1
        assert metric("tiered_kv_read_bytes") > 0


def test_nothing_is_read_while_all_blocks_fit() -> None:
    few = PROMPTS[:3]
    result = run("deep", few, blocks(3.0), **TIGHT)
    assert result.tokens == vllm_tokens("deep", few)
    assert result.metrics["tiered_kv_read_bytes"] == 0
    assert result.metrics["tiered_kv_write_bytes"] == 0
