# SPDX-License-Identifier: Apache-2.0
"""Models with layers of several kinds: full attention is swapped, the other layers stay near."""

from typing import Any

import numpy as np
import pytest

from tests.e2e.faults import flipping_device, poison_freed_pages, walk
from tests.e2e.harness import engine, generate, metric, random_prompts, run, vllm_tokens
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.kv import resident_groups as hooks
from vllm_tiered.adapter.kv import scheduler, worker
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.kv.near_pages import NearPages
from vllm_tiered.kv.state_columns import StateColumns
from vllm_tiered.kv.tuning import DEFAULT_TUNING

MIB = 1 << 20
PROMPTS = random_prompts(10, longest=200)
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 96, "max_model_len": 320}
FULL_LAYERS = {"gpt_oss": 2, "gemma3": 3, "llama4": 2, "granite_hybrid": 2}
TIGHT = {"gpt_oss": 3 * MIB, "gemma3": 6 * MIB, "llama4": 4 * MIB, "granite_hybrid": 4 * MIB}
"""Near bytes with which requests wait or are preempted."""
NO_CACHING = ("granite_hybrid",)
"""vLLM's CPU backend fails with prefix caching of recurrent states."""


def tight(model: str) -> dict[str, Any]:
    return OPTIONS | {"kv_cache_memory_bytes": TIGHT[model]}


@pytest.mark.parametrize(
    ("model", "caching"),
    [
        (model, on)
        for model in FULL_LAYERS
        for on in (False, True)
        if on <= (model not in NO_CACHING)
    ],
)
def test_all_layers_of_full_attention_far(model, caching, force_far_layers) -> None:
    far_layers = FULL_LAYERS[model]
    force_far_layers(far_layers)
    result = run(model, PROMPTS, {}, enable_prefix_caching=caching, max_tokens=60, **tight(model))
    assert result.tokens == vllm_tokens(model, PROMPTS, max_tokens=60)
    assert result.manifest["kv"]["far_layers"] == far_layers
    assert result.metrics["tiered_kv_read_bytes"] > 0
    assert result.metrics["num_preemptions"] > 0 or model in NO_CACHING


@pytest.mark.parametrize("policy", ["interleave", "on_demand"])
@pytest.mark.parametrize("far_layers", [0, 1, 2])
def test_some_layers_far(far_layers, policy, force_far_layers) -> None:
    force_far_layers(far_layers)
    result = run("gemma3", PROMPTS, {"policy": policy}, **tight("gemma3"))
    assert result.tokens == vllm_tokens("gemma3", PROMPTS)
    assert result.manifest["kv"]["far_layers"] == far_layers


def test_the_layers_between_spare_a_staging_buffer() -> None:
    """Three far layers and one buffer hold three times the blocks."""
    result = run("gemma3", PROMPTS[:2], {"expansion": 3.0}, **OPTIONS)
    kv = result.manifest["kv"]
    assert (kv["num_layers"], kv["staging_buffers"], kv["expansion"]) == (3, 1, 3.0)
    assert kv["offloaded_layers"] == [2, 5, 8]
    assert kv["near_only_layers"] == 6


@pytest.mark.parametrize(
    ("model", "policy"),
    [*((model, "interleave") for model in FULL_LAYERS), ("gemma3", "blocks")],
)
@pytest.mark.parametrize("delays", [False, True])
def test_a_walk_over_all_levels(model, policy, delays, monkeypatch) -> None:
    """With delays, copies are late, and pages hold poison until they arrive and once freed."""
    walk(monkeypatch, seed=3, steps_per_level=2)
    poison_freed_pages(monkeypatch)
    if delays:
        monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(0, 2e-3))
    options = tight(model) | {"enable_prefix_caching": model not in NO_CACHING}
    with engine(model, {"policy": policy}, **options) as llm:
        first = generate(llm, PROMPTS, 60)
        second = generate(llm, PROMPTS, 60)
        assert metric("tiered_kv_level_changes") > 5
        assert metric("tiered_kv_read_bytes") > 0
    assert first == second == vllm_tokens(model, PROMPTS, max_tokens=60)


@pytest.mark.parametrize("model", FULL_LAYERS)
def test_grows_when_requests_wait(model, monkeypatch) -> None:
    """Here at once; otherwise it first measures the throughput without far layers."""
    assert scheduler.NEAR_TUNING.base_records > 0
    monkeypatch.setattr(scheduler, "NEAR_TUNING", DEFAULT_TUNING)
    with engine(model, {}, **tight(model)) as llm:
        tokens = generate(llm, PROMPTS, 60)
        assert metric("tiered_kv_level_changes") >= 1
        assert metric("tiered_kv_read_bytes") > 0
    assert tokens == vllm_tokens(model, PROMPTS, max_tokens=60)


@pytest.mark.parametrize("model", ["gpt_oss", "gemma3", "llama4"])
def test_windows_in_the_group_of_full_attention(model, monkeypatch) -> None:
    """Without vLLM's hybrid allocator all layers are one group; windows and chunks only mask."""
    walk(monkeypatch, seed=5, steps_per_level=2)
    options = tight(model) | {"disable_hybrid_kv_cache_manager": True}
    want = vllm_tokens(model, PROMPTS, max_tokens=60)
    with engine(model, {}, **options) as llm:
        assert generate(llm, PROMPTS, 60) == want
        assert metric("tiered_kv_level_changes") > 5
        assert metric("tiered_kv_read_bytes") > 0


def test_prefix_hits_are_vllms_own(force_far_layers) -> None:
    """With room for it, the blocks of windows stay cached; a hit needs the windows of its end."""
    prompts = [[*PROMPTS[0], *[prompt[0]] * 96, *prompt[1:40]] for prompt in PROMPTS[:4]]
    prompts = [prompt[:200] for prompt in prompts]
    options = OPTIONS | {"enable_prefix_caching": True}

    def hits_and_tokens(kv: dict[str, Any] | None) -> tuple[float, Any]:
        with engine("gemma3", kv, **options) as llm:
            tokens = [generate(llm, prompts) for _ in range(2)]
            return metric("prefix_cache_hits"), tokens

    want = vllm_tokens("gemma3", prompts)
    vllm_hits, _ = hits_and_tokens(None)
    force_far_layers(3)
    hits, tokens = hits_and_tokens({})
    assert tokens == [want, want]
    assert hits == vllm_hits > 0


def test_cached_windows_give_way_to_running_requests(force_far_layers, monkeypatch) -> None:
    dropped: list[int] = []
    drop_oldest = hooks.ResidentBlocks.drop_oldest

    def counted(self, count, keep):
        dropped.append(count)
        return drop_oldest(self, count, keep)

    monkeypatch.setattr(hooks.ResidentBlocks, "drop_oldest", counted)
    force_far_layers(3)
    options = tight("gemma3") | {"enable_prefix_caching": True}
    with engine("gemma3", {}, **options) as llm:
        tokens = [generate(llm, PROMPTS) for _ in range(3)]
        assert llm.reset_prefix_cache()
        tokens.append(generate(llm, PROMPTS))
        held = metric("tiered_kv_blocks_released") + metric("tiered_kv_blocks_reserved")
        assert held == llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1
    assert sum(dropped) > 0
    assert tokens == [vllm_tokens("gemma3", PROMPTS)] * 4


def test_a_flipped_bit_in_far_memory(monkeypatch) -> None:
    """Blocks of windows that were computed from the damaged page leave the cache too."""
    monkeypatch.setattr(worker, "make_device", lambda: flipping_device({150}))
    options = tight("gemma3") | {"enable_prefix_caching": True}
    with engine("gemma3", {"expansion": 3.0, "verify": "full"}, **options) as llm:
        tokens = generate(llm, PROMPTS)
        assert metric("tiered_kv_recomputed_requests") >= 1
        again = generate(llm, PROMPTS)
    assert tokens == again == vllm_tokens("gemma3", PROMPTS)


# What the tests above protect, damaged: each must change the tokens.


def _only_the_first_group(monkeypatch) -> None:
    translate = worker.TieredWorker.translate

    def first(self, forward_context) -> None:
        self._translators = self._translators[:1]
        translate(self, forward_context)

    monkeypatch.setattr(worker.TieredWorker, "translate", first)


def _no_pages_for_windows(monkeypatch) -> None:
    def none(self, block_ids) -> float:
        return 0.0

    monkeypatch.setattr(NearPages, "alloc_partial", none)
    monkeypatch.setattr(NearPages, "free_partial", lambda self, block_ids: None)


def _windows_lose_their_pages_early(monkeypatch) -> None:
    free_partial = NearPages.free_partial

    def free(self, block_ids) -> None:
        free_partial(self, block_ids)
        if len(self.partial) > 20:
            free_partial(self, np.array(sorted(self.partial)[:1], dtype=np.int64))

    monkeypatch.setattr(NearPages, "free_partial", free)


def _states_take_pages_of_others(monkeypatch) -> None:
    monkeypatch.setattr(CpuDevice, "move_pages", lambda self, buffer, src, dst: None)


def _states_of_other_columns(monkeypatch) -> None:
    def rename(self, block_ids) -> list[int]:
        return [1 + column % 3 if column else 0 for column in rename_well(self, block_ids)]

    rename_well = StateColumns.rename
    monkeypatch.setattr(StateColumns, "rename", rename)


@pytest.mark.parametrize(
    ("model", "damage"),
    [
        ("gemma3", _only_the_first_group),
        ("gemma3", _no_pages_for_windows),
        ("gemma3", _windows_lose_their_pages_early),
        ("granite_hybrid", _states_take_pages_of_others),
        ("granite_hybrid", _states_of_other_columns),
    ],
)
def test_these_tests_notice_damage(model, damage, force_far_layers, monkeypatch) -> None:
    expected = vllm_tokens(model, PROMPTS)
    force_far_layers(1 if model in NO_CACHING else 3)
    poison_freed_pages(monkeypatch)
    damage(monkeypatch)
    try:
        result = run(model, PROMPTS, {}, **tight(model))
    except Exception:  # an integrity check may notice it first
        return
    assert result.tokens != expected


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("lfm2", "float32"), ("nemotron_h", "float32"), ("qwen3_next", "bfloat16")],
)
def test_other_recurrent_layers(model, dtype) -> None:
    """Short convolutions, Mamba beside layers of FFN alone, and gated delta nets.

    vLLM's CPU kernels take the last in bfloat16 alone. There is memory for all requests, so that
    both engines run the same batches.
    """
    prompts = random_prompts(6, longest=1100)
    options: dict[str, Any] = {"max_model_len": 1400, "dtype": dtype}
    expected = run(model, prompts, **options).tokens
    result = run(model, prompts, {"expansion": 2.0}, **options)
    assert result.tokens == expected
    assert result.manifest["kv"]["far_layers"] == 2
    assert result.metrics["tiered_kv_read_bytes"] > 0


def test_states_move_what_is_in_their_way(force_far_layers, monkeypatch) -> None:
    """The pages that they need may hold KV of other requests."""
    moved: list[int] = []
    move_pages = CpuDevice.move_pages

    def counted(self, buffer, src, dst) -> None:
        moved.append(len(src))
        move_pages(self, buffer, src, dst)

    monkeypatch.setattr(CpuDevice, "move_pages", counted)
    force_far_layers(1)
    result = run("granite_hybrid", PROMPTS, {}, **tight("granite_hybrid"))
    assert sum(moved) > 0
    assert result.tokens == vllm_tokens("granite_hybrid", PROMPTS)
