# SPDX-License-Identifier: Apache-2.0
"""Manifest, counters and gauges of moved bytes equal hand-computed values."""

from typing import Any

import pytest

from tests.e2e.harness import engine, generate, metric, random_prompts, run
from vllm_tiered.adapter.telemetry import manifest

BLOCK_TOKENS = 32
PAGE_BYTES = 3 * BLOCK_TOKENS * 2 * 64 * 4  # demo model in float32: 3 KV heads of size 64


def expected_reads(prompt_tokens: int, output_tokens: int) -> int:
    """Return the full blocks staged over all steps of one request that runs alone."""
    computed = [0, *range(prompt_tokens, prompt_tokens + output_tokens - 1)]
    return sum(tokens // BLOCK_TOKENS for tokens in computed)


@pytest.mark.parametrize("policy", ["interleave", "on_demand"])
def test_bytes_are_exactly_the_full_blocks(policy) -> None:
    """Each step reads the full blocks of its requests in every offloaded layer.

    Each block is written once, when it is full.
    """
    prompt, output_tokens = random_prompts(1, longest=5)[0] * 30, 60
    near = 40 * 30 * PAGE_BYTES
    result = run(
        "deep",
        [prompt],
        {"expansion": 2.0, "policy": policy},
        max_tokens=output_tokens,
        kv_cache_memory_bytes=near,
    )
    layer_pages = 17 * PAGE_BYTES
    read_blocks = expected_reads(len(prompt), output_tokens)
    written_blocks = (len(prompt) + output_tokens - 1) // BLOCK_TOKENS
    assert result.metrics["tiered_kv_read_bytes"] == read_blocks * layer_pages
    assert result.metrics["tiered_kv_write_bytes"] == written_blocks * layer_pages
    assert result.metrics["tiered_kv_steps"] == output_tokens
    assert result.manifest["kv"] == {
        "active": True,
        "why_not": None,
        "is_supported": True,
        "policy": policy,
        "expansion": 2.0,
        "max_expansion": 2.0,
        "num_layers": 30,
        "near_only_layers": 0,
        "far_layers": 17,
        "max_far_layers": 17,
        "offloaded_layers": result.manifest["kv"]["offloaded_layers"],
        "staging_buffers": 2,
        "num_blocks": result.num_blocks - 1,
        "block_tokens": BLOCK_TOKENS,
        "page_bytes": PAGE_BYTES,
        "far_dtype": "auto",
        "far_page_bytes": PAGE_BYTES,
        "near_bytes": near,
        "far_bytes": result.num_blocks * layer_pages,
        "storage_bytes": 0,
        "tier": "far",
    }
    assert len(result.manifest["kv"]["offloaded_layers"]) == 17


def test_shared_prefix_is_staged_once() -> None:
    """Two requests have the same first blocks: a block is one page, read once a step."""
    prompt = random_prompts(1, seed=2, longest=5)[0] * 40
    full = len(prompt) // BLOCK_TOKENS
    with engine("deep", {"expansion": 2.0}, enable_prefix_caching=True,
                kv_cache_memory_bytes=40 * 30 * PAGE_BYTES) as llm:  # fmt: skip
        generate(llm, [prompt], 2)
        before = metric("tiered_kv_read_bytes")
        generate(llm, [[*prompt, 7], [*prompt, 8]], 2)
        read_blocks = (metric("tiered_kv_read_bytes") - before) / (17 * PAGE_BYTES)
        assert read_blocks == 2 * full  # two steps read each once


def test_switching_itself_off_is_logged_and_does_nothing() -> None:
    with engine("deep", {"expansion": 1.0}, kv_cache_memory_bytes=40 * 30 * PAGE_BYTES) as llm:
        generate(llm, random_prompts(2), 24)
        current = manifest.current()
        assert metric("tiered_energy_joules") > 0  # energy is counted even so
        assert current is not None and current["kv"]["active"] is False
        assert current["kv"]["far_bytes"] == 0
        assert metric("tiered_kv_expansion") == 1.0
        assert metric("tiered_kv_read_bytes") == 0
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 40


def test_kv_disabled_is_vllm() -> None:
    result = run("llama3", random_prompts(2), {"enabled": False}, max_tokens=4)
    assert set(result.manifest) == {"l2"} and not result.manifest["l2"]["active"]


def test_gauges() -> None:
    near = 40 * 30 * PAGE_BYTES
    with engine("deep", {"expansion": 2.0}, kv_cache_memory_bytes=near) as llm:
        generate(llm, random_prompts(3), 4)
        blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1
        assert metric("tiered_kv_expansion") == 2.0
        assert metric("tiered_kv_partial_blocks_far") == 0
        assert metric("tiered_kv_near_bytes") == near
        assert metric("tiered_kv_far_bytes") == (blocks + 1) * 17 * PAGE_BYTES
        assert metric("tiered_kv_storage_bytes") == 0
        assert metric("tiered_kv_blocks_released") + metric("tiered_kv_blocks_reserved") == blocks
        assert 0 < metric("tiered_kv_read_seconds") < metric("tiered_kv_step_seconds")
        assert 0 < metric("tiered_kv_bookkeeping_seconds") < metric("tiered_kv_step_seconds")


@pytest.mark.parametrize("kv", [{}, {"expansion": 2.0}], ids=["auto", "fixed"])
def test_withheld_blocks_are_not_in_use(kv) -> None:
    near = 40 * 30 * PAGE_BYTES
    with engine("deep", kv, kv_cache_memory_bytes=near, watermark=0.25) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        elastic = scheduler.connector._scheduler.elastic
        manager = scheduler.kv_cache_manager
        assert elastic.reserved or kv
        assert manager.usage == 0.0
        usages, watermarks = [], []
        step = scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            usages.append(manager.usage)
            watermarks.append(manager.watermark_blocks / elastic.released_blocks)
            return output

        scheduler.schedule = schedule
        generate(llm, random_prompts(3), 4)
        assert 0.0 < max(usages) < 0.5 and manager.usage == 0.0
        assert all(0.2 < share < 0.3 for share in watermarks)
