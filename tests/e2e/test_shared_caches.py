# SPDX-License-Identifier: Apache-2.0
"""Layers without a KV cache of their own read their target's pages, wherever these are.

In the shape of Gemma 4 E, the last three of twelve layers read the KV caches of the last layers of
their kind before. In other shapes tests let layers share KV caches themselves.
"""

import time
from functools import cache
from typing import Any

import pytest

from tests.e2e.faults import poison_freed_pages, walk
from tests.e2e.harness import (
    Run,
    Tokens,
    engine,
    generate,
    metric,
    random_prompts,
    run,
    vllm_tokens,
)
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.kv import scheduler, worker
from vllm_tiered.adapter.kv.translation import LayerTranslator
from vllm_tiered.kv.swapper import Swapper
from vllm_tiered.kv.tuning import DEFAULT_TUNING

MIB = 1 << 20
PROMPTS = random_prompts(10, longest=200)
TIGHT: dict[str, Any] = {
    "max_num_batched_tokens": 96,
    "max_model_len": 320,
    "kv_cache_memory_bytes": 6 * MIB,
}
"""With this memory requests wait or are preempted."""
PAIRS = {layer: layer - 1 for layer in range(3, 28, 4)}
PAIRS |= {28: 26, 29: 26}
"""Layers that share a KV cache among the 30 of "deep": pairs, and four at the end."""


def run_deep(tiered: dict[str, Any] | None) -> Run:
    """Run "deep" with less memory than its requests would use; vLLM alone has enough."""
    near_bytes = 12 * MIB if tiered else 64 * MIB
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": near_bytes}
    return run("deep", PROMPTS[:5], tiered, max_tokens=20, **options)


@cache
def deep_tokens() -> Tokens:
    """Return vLLM's own tokens of "deep" with shared KV caches."""
    return run_deep(None).tokens


def test_all_layers_of_full_attention_far() -> None:
    """The last one serves two layers; the staging buffer is one, as others lie between."""
    expected = vllm_tokens("gemma4_e", PROMPTS, max_tokens=60)
    result = run("gemma4_e", PROMPTS, {"expansion": 3.0}, max_tokens=60, **TIGHT)
    assert result.tokens == expected
    kv = result.manifest["kv"]
    assert (kv["num_layers"], kv["staging_buffers"], kv["expansion"]) == (3, 1, 3.0)
    assert kv["offloaded_layers"] == [2, 5, 8]
    assert kv["near_only_layers"] == 6
    assert result.metrics["tiered_kv_read_bytes"] > 0
    assert result.metrics["num_preemptions"] > 0


@pytest.mark.parametrize("delays", [False, True])
def test_a_walk_over_all_levels(delays, monkeypatch) -> None:
    """With delays, copies are late, and pages hold poison until they arrive and once freed."""
    expected = vllm_tokens("gemma4_e", PROMPTS, max_tokens=60)
    walk(monkeypatch, seed=3, steps_per_level=2)
    poison_freed_pages(monkeypatch)
    if delays:
        monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(0, 2e-3))
    with engine("gemma4_e", {}, **TIGHT, enable_prefix_caching=True) as llm:
        first = generate(llm, PROMPTS, 60)
        second = generate(llm, PROMPTS, 60)
        assert metric("tiered_kv_level_changes") > 5
        assert metric("tiered_kv_read_bytes") > 0
    assert first == second == expected


def test_grows_when_requests_wait(monkeypatch) -> None:
    """Here at once; otherwise it first measures the throughput without far layers."""
    expected = vllm_tokens("gemma4_e", PROMPTS, max_tokens=60)
    monkeypatch.setattr(scheduler, "NEAR_TUNING", DEFAULT_TUNING)
    with engine("gemma4_e", {}, **TIGHT) as llm:
        tokens = generate(llm, PROMPTS, 60)
        assert metric("tiered_kv_level_changes") >= 1
        assert metric("tiered_kv_read_bytes") > 0
    assert tokens == expected


@pytest.mark.parametrize("policy", ["interleave", "on_demand", "blocks"])
def test_caches_shared_in_the_middle_of_the_stack(policy, share_caches) -> None:
    """Two staging buffers or more go from layer to layer, once their last readers are done."""
    share_caches(PAIRS)
    expected = deep_tokens()
    result = run_deep({"expansion": 3.0, "policy": policy})
    assert result.tokens == expected
    assert result.manifest["kv"]["num_layers"] == 30 - len(PAIRS)
    assert result.metrics["tiered_kv_read_bytes"] > 0


def test_a_buffer_is_released_when_its_last_reader_is_done(monkeypatch) -> None:
    """Layer 11 reads the pages of layer 8, the third of full attention."""
    done: list[str | int] = []
    attention_done, release = worker.TieredWorker.layer_done, Swapper.layer_done

    def layer_done(self, layer_name: str) -> None:
        done.append(layer_name.removesuffix(".self_attn.attn").removeprefix("model.layers."))
        attention_done(self, layer_name)

    def released(self, layer: int) -> None:
        done.append(layer)
        release(self, layer)

    monkeypatch.setattr(worker.TieredWorker, "layer_done", layer_done)
    monkeypatch.setattr(Swapper, "layer_done", released)
    run("gemma4_e", PROMPTS[:1], {"expansion": 3.0}, max_tokens=2, **TIGHT)
    step = ["0", "1", "2", 0, "3", "4", "5", 1, "6", "7", "8", "9", "10", "11", 2]
    assert done[: len(step)] == step


# What the tests above protect, damaged: each must change the tokens.


def _sharing_layers_read_vllms_blocks(monkeypatch) -> None:
    monkeypatch.setattr(LayerTranslator, "share", lambda self, targets: None)


def _sharing_layers_read_another_row(monkeypatch) -> None:
    share = LayerTranslator.share

    def wrong(self, targets) -> None:
        names = {"8": "5", "7": "4"}
        others = {
            name: ".".join(names.get(part, part) for part in target.split("."))
            for name, target in targets.items()
        }
        share(self, others)

    monkeypatch.setattr(LayerTranslator, "share", wrong)


@pytest.mark.parametrize(
    "damage", [_sharing_layers_read_vllms_blocks, _sharing_layers_read_another_row]
)
def test_these_tests_notice_other_pages(damage, monkeypatch) -> None:
    expected = vllm_tokens("gemma4_e", PROMPTS, max_tokens=60)
    damage(monkeypatch)
    result = run("gemma4_e", PROMPTS, {"expansion": 3.0}, max_tokens=60, **TIGHT)
    assert result.tokens != expected


def test_these_tests_notice_a_stale_page(share_caches, monkeypatch) -> None:
    """The buffer is released before its last reader, and filled with another layer at once."""
    share_caches(PAIRS)
    expected = deep_tokens()
    bind, release = worker.TieredWorker._bind_views, Swapper.layer_done

    def bound(self) -> None:
        self._last_readers = {name: name for name in self._last_readers}
        bind(self)

    def released(self, layer: int) -> None:
        release(self, layer)
        time.sleep(0.002)

    monkeypatch.setattr(worker.TieredWorker, "_bind_views", bound)
    monkeypatch.setattr(Swapper, "layer_done", released)
    assert run_deep({"expansion": 3.0}).tokens != expected
