# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention, whose backends keep a block table for prefills and one for decodes.

There is memory for all requests: vLLM's own kernels compute a prefill and a decode of the same
token differently, so a request that is preempted and recomputed may get other tokens.
"""

from typing import Any

import pytest

from tests.e2e.faults import poison_freed_pages, walk
from tests.e2e.harness import engine, generate, metric, random_prompts, run
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.kv import translation, worker

PROMPTS = random_prompts(10, longest=200)
OPTIONS: dict[str, Any] = {"block_size": 16, "kv_cache_memory_bytes": 60 << 20}


def wanted(model: str, max_tokens: int = 40) -> list[list[int]]:
    return run(model, PROMPTS, max_tokens=max_tokens, block_size=16).tokens


@pytest.mark.parametrize("far_layers", [1, 2])
def test_every_number_of_far_layers(far_layers, force_far_layers) -> None:
    expected = wanted("deepseek_v2")
    force_far_layers(far_layers)
    result = run("deepseek_v2", PROMPTS, {}, **OPTIONS)
    assert result.tokens == expected
    assert result.manifest["kv"]["far_layers"] == far_layers
    assert result.metrics["tiered_kv_read_bytes"] > 0


@pytest.mark.parametrize("policy", ["interleave", "on_demand"])
def test_a_fixed_expansion(policy) -> None:
    expected = wanted("latent")
    result = run("latent", PROMPTS, {"expansion": 2.0, "policy": policy}, **OPTIONS)
    assert result.tokens == expected
    assert result.manifest["kv"]["expansion"] == 2.0
    assert result.metrics["num_preemptions"] == 0 < result.metrics["tiered_kv_read_bytes"]


def test_a_walk_over_all_levels(monkeypatch) -> None:
    expected = wanted("latent", 60)
    walk(monkeypatch, seed=3, steps_per_level=2)
    poison_freed_pages(monkeypatch)
    monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(0, 2e-3))
    with engine("latent", {}, **OPTIONS) as llm:
        assert generate(llm, PROMPTS, 60) == expected
        assert metric("tiered_kv_level_changes") > 5
        assert metric("tiered_kv_read_bytes") > 0


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_these_tests_notice_a_table_that_is_not_translated(part, monkeypatch) -> None:
    expected = wanted("latent")
    mapped = translation.Translator._map

    def without(self, tables, *args, **kwargs):
        found = mapped(self, tables, *args, **kwargs)
        untranslated = {part: [tables[part].clone()] * 8} if part in tables else {}
        return found._replace(tables={**found.tables, **untranslated})

    monkeypatch.setattr(translation.Translator, "_map", without)
    result = run("latent", PROMPTS, {"expansion": 2.0}, **OPTIONS)
    assert (result.tokens == expected) == (part == "prefill"), "prefills read nothing on this CPU"


def test_these_tests_notice_reads_that_are_not_awaited(monkeypatch) -> None:
    expected = wanted("latent")
    monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(0, 1e-2))
    monkeypatch.setattr(DelayedDevice, "wait", lambda self, event: 0.0)
    result = run("latent", PROMPTS, {"expansion": 2.0}, **OPTIONS)
    assert result.tokens != expected
