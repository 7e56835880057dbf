# SPDX-License-Identifier: Apache-2.0
"""Layers whose KV takes different bytes per token, to which vLLM gives pages of one size.

It makes the blocks of layers with less KV larger, or pads their pages where that does not fit. The
full attention of "gemma4" has half the KV of its windows, as in MiMo-V2; that of "gemma4_e" has
twice as much (test_shared_caches.py), as in Gemma 4 E.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.inputs.shapes import SHAPES, write_model
from tests.e2e import harness
from tests.e2e.faults import poison_freed_pages, walk
from tests.e2e.harness import Tokens, engine, generate, metric, random_prompts, run, vllm_tokens
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.kv import groups, worker

MIB = 1 << 20
PROMPTS = random_prompts(10, longest=200)
MODEL = "gemma4"
PADDED = "gemma4-padded"
VOCABULARY = 49152
TIGHT: dict[str, Any] = {
    "max_num_batched_tokens": 96,
    "max_model_len": 320,
    "kv_cache_memory_bytes": 6 * MIB,
}
"""With this memory requests wait or are preempted."""


@pytest.fixture(scope="module", autouse=True)
def padded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A Gemma 4 whose pages outside the windows are 1.5 times as large as those of windows."""
    folder: Path = tmp_path_factory.mktemp(PADDED)
    write_model({**SHAPES["gemma4_e"], "global_head_dim": 96}, VOCABULARY, 0, folder)
    harness.PATHS[PADDED] = str(folder)


def specs(llm: Any) -> list[Any]:
    """Return the KV cache specs of the groups, those of the windows first."""
    core = llm.llm_engine.engine_core.engine_core
    return [group.kv_cache_spec for group in core.scheduler.kv_cache_config.kv_cache_groups]


@pytest.mark.parametrize(("model", "sizes"), [(MODEL, (32, 64)), (PADDED, (32, 32))])
def test_all_layers_of_full_attention_far(model, sizes) -> None:
    expected = vllm_tokens(model, PROMPTS, max_tokens=60)

    def drive(llm: Any) -> Tokens:
        *windows, full = specs(llm)
        assert (windows[0].block_size, full.block_size) == sizes
        assert windows[0].page_size_bytes == full.page_size_bytes
        assert (windows[0].page_size_padded is None) == (model != PADDED)
        return generate(llm, PROMPTS, 60)

    result = run(model, PROMPTS, {"expansion": 3.0}, drive=drive, **TIGHT)
    assert result.tokens == expected
    assert result.manifest["kv"]["far_layers"] == 3
    assert result.metrics["tiered_kv_read_bytes"] > 0
    assert result.metrics["num_preemptions"] > 0


@pytest.mark.parametrize("model", [MODEL, PADDED])
def test_a_walk_over_all_levels(model, monkeypatch) -> None:
    """Copies are late, and pages hold poison until they arrive and once freed."""
    expected = vllm_tokens(model, PROMPTS, max_tokens=60)
    walk(monkeypatch, seed=3, steps_per_level=2)
    poison_freed_pages(monkeypatch)
    monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(0, 2e-3))
    with engine(model, {}, **TIGHT, enable_prefix_caching=True) as llm:
        first = generate(llm, PROMPTS, 60)
        second = generate(llm, PROMPTS, 60)
        assert metric("tiered_kv_level_changes") > 5
        assert metric("tiered_kv_read_bytes") > 0
    assert first == second == expected


def test_prefix_hits_are_vllms_own() -> None:
    """A hit ends where the blocks of all groups end."""
    prompts = [[*PROMPTS[0], *[prompt[0]] * 96, *prompt[1:40]] for prompt in PROMPTS[:4]]
    prompts = [prompt[:200] for prompt in prompts]
    options = TIGHT | {"enable_prefix_caching": True, "kv_cache_memory_bytes": 64 * MIB}

    def hits_and_tokens(kv: dict[str, Any] | None) -> tuple[float, Any]:
        with engine(MODEL, kv, **options) as llm:
            tokens = [generate(llm, prompts) for _ in range(2)]
            return metric("prefix_cache_hits"), tokens

    vllm_hits, expected = hits_and_tokens(None)
    hits, tokens = hits_and_tokens({"expansion": 3.0})
    assert tokens == expected
    assert hits == vllm_hits > 0


def test_these_tests_notice_blocks_of_another_size(monkeypatch) -> None:
    """The windows are translated as if their blocks held half the tokens."""
    expected = vllm_tokens(MODEL, PROMPTS, max_tokens=60)
    read = groups.ResidentGroup.__init__

    def init(self, **kwargs: Any) -> None:
        read(self, **kwargs | {"block_tokens": 16})

    monkeypatch.setattr(groups.ResidentGroup, "__init__", init)
    result = run(MODEL, PROMPTS, {"expansion": 3.0}, max_tokens=60, **TIGHT)
    assert result.tokens != expected
