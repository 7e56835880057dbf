# SPDX-License-Identifier: Apache-2.0
"""Experts in slots give vLLM's tokens, wherever the others are, and however few slots there are."""

import os
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from tests.e2e import harness
from tests.e2e.harness import engine, generate, model_path, random_prompts, run, vllm_tokens
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.experts import copies
from vllm_tiered.adapter.experts import engine as experts_engine
from vllm_tiered.devices.base import Event
from vllm_tiered.errors import BudgetError, ConfigError, IntegrityError, UnsupportedError
from vllm_tiered.experts import layout
from vllm_tiered.experts.int4.packing import expand, quantise
from vllm_tiered.experts.layer import ExpertLayer
from vllm_tiered.experts.slot_table import Wave

PROMPTS = random_prompts(6, longest=60)
KV_OFF = {"enabled": False}
HIDDEN = 256
# Experts, layers that have some, and their intermediate size.
EXPERTS = {
    "mixtral": (8, 3, 256),
    "qwen3_moe": (16, 3, 128),
    "olmoe": (64, 4, 128),
    "granitemoe": (8, 3, 256),
    "gpt_oss": (8, 4, 256),
    "deepseek_v2": (16, 2, 128),
    "glm4_moe": (16, 2, 128),
}


def slots(model: str, count: int, **values: Any) -> dict[str, Any]:
    """The `experts` section with near memory for a number of slots a layer, in float32."""
    _, num_layers, intermediate = EXPERTS[model]
    expert_bytes = 3 * intermediate * HIDDEN * 4
    return {"near_gib": (count + 0.1) * num_layers * expert_bytes / 2**30, **values}


def stored(folder: Path, **values: Any) -> dict[str, Any]:
    return {"storage_path": str(folder), "far_gib": 0, **values}


def counters(llm: Any) -> dict[str, float]:
    (state,) = llm.collective_rpc("tiered_state")
    assert state["experts"]["state"] == "on"
    return dict(state["experts"]["counters"])


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("mixtral", 2),
        ("mixtral", 5),
        ("qwen3_moe", 4),
        ("olmoe", 8),
        ("olmoe", 40),
        ("granitemoe", 4),
        ("gpt_oss", 3),
        ("deepseek_v2", 6),
        ("glm4_moe", 5),
    ],
)
def test_tokens_equal_vllms_with_far_experts(model: str, count: int) -> None:
    with engine(model, KV_OFF, experts=slots(model, count)) as llm:
        tokens, used = generate(llm, PROMPTS), counters(llm)
    assert tokens == vllm_tokens(model, PROMPTS)
    assert used["experts_hits"] > 0 and used["experts_misses"] > 0
    assert used["experts_far_bytes"] > 0 == used["experts_storage_bytes"]


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("mixtral", 3),
        ("qwen3_moe", 6),
        ("olmoe", 20),
        ("granitemoe", 2),
        ("gpt_oss", 4),
        ("deepseek_v2", 5),
        ("glm4_moe", 16),
    ],
)
def test_tokens_equal_vllms_with_stored_experts(tmp_path: Path, model: str, count: int) -> None:
    experts = slots(model, count, **stored(tmp_path))
    result = run(model, PROMPTS, KV_OFF, experts=experts)
    stated = result.manifest["experts"]
    assert (stated["slots"], stated["num_experts"]) == (count, EXPERTS[model][0])
    # Biases are too small to be read from a disk one by one.
    assert 0 <= stated["far_bytes"] < 0.01 * stated["storage_bytes"]
    assert result.tokens == vllm_tokens(model, PROMPTS)
    (file,) = tmp_path.iterdir()
    written = file.stat()
    again = run(model, PROMPTS, KV_OFF, experts=experts)
    assert again.tokens == result.tokens and again.manifest["experts"] == stated
    assert file.stat().st_mtime_ns == written.st_mtime_ns and file.stat().st_ino == written.st_ino


def test_a_layer_is_far_and_the_others_are_stored(tmp_path: Path) -> None:
    layer_gib = 16 * 3 * 128 * HIDDEN * 4 / 2**30
    experts = slots("qwen3_moe", 6, **stored(tmp_path, far_gib=1.5 * layer_gib))
    for _ in range(2):
        result = run("qwen3_moe", PROMPTS, KV_OFF, experts=experts)
        stated = result.manifest["experts"]
        assert stated["far_bytes"] == pytest.approx(layer_gib * 2**30)
        assert stated["storage_bytes"] == pytest.approx(2 * layer_gib * 2**30)
        assert result.tokens == vllm_tokens("qwen3_moe", PROMPTS)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("caching", [False, True])
def test_beside_kv_swapping_chunks_and_prefix_caching(policy: str, caching: bool) -> None:
    prompts = random_prompts(10, seed=1, longest=200)
    options: dict[str, Any] = {"max_num_batched_tokens": 64, "enable_prefix_caching": caching}
    experts = slots("olmoe", 24, policy=policy)
    with engine("olmoe", {}, experts=experts, **options) as llm:
        first, again = generate(llm, prompts), generate(llm, prompts)
    assert first == vllm_tokens("olmoe", prompts) == again


@pytest.mark.parametrize("tier", ["far", "stored"])
def test_late_copies_to_poisoned_slots(monkeypatch, tmp_path: Path, tier: str) -> None:
    monkeypatch.setattr(experts_engine, "make_device", lambda: DelayedDevice(0, 2e-3))
    experts = slots("qwen3_moe", 5, **(stored(tmp_path) if tier == "stored" else {}))
    result = run("qwen3_moe", PROMPTS, KV_OFF, experts=experts)
    assert result.tokens == vllm_tokens("qwen3_moe", PROMPTS)


def test_copies_that_nobody_waits_for_change_the_tokens(monkeypatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(experts_engine, "make_device", lambda: DelayedDevice(0, 2e-3))
    monkeypatch.setattr(ExpertLayer, "_wait", lambda layer, events: None)
    result = run("qwen3_moe", PROMPTS, KV_OFF, experts=slots("qwen3_moe", 5))
    assert result.tokens != vllm_tokens("qwen3_moe", PROMPTS)


def damage_slots(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Let one byte of the first slot that a wave loads be wrong."""
    load = ExpertLayer._load

    def damaging(layer: ExpertLayer, waves: dict[int, Wave]) -> dict[int, list[Event]]:
        loaded = load(layer, waves)
        for event in chain(*loaded.values()):
            event.wait()
        rows = layer._paged[0]
        for wave in waves.values():
            rows.slots.data[rows.slot_pages[wave.slots[0], 0], 3] ^= bits
        return loaded

    monkeypatch.setattr(ExpertLayer, "_load", damaging)


def test_one_wrong_byte_of_a_slot_changes_the_tokens(monkeypatch) -> None:
    """The control of all tests here: tokens depend on each expert's contents."""
    damage_slots(monkeypatch, 0x7F)
    result = run("qwen3_moe", PROMPTS, KV_OFF, experts=slots("qwen3_moe", 5))
    assert result.tokens != vllm_tokens("qwen3_moe", PROMPTS)


def test_a_damaged_bundle_ends_the_engine_and_names_the_expert(tmp_path: Path) -> None:
    experts = slots("qwen3_moe", 5, **stored(tmp_path))
    run("qwen3_moe", PROMPTS[:1], KV_OFF, experts=experts, max_tokens=1)
    (file,) = tmp_path.iterdir()
    with file.open("r+b") as damaged:
        for page in range(0, 3 * 16 * 3 * 128 * HIDDEN * 4, 4096):
            damaged.seek(page)
            damaged.write(os.urandom(8))
    with (
        pytest.raises(IntegrityError, match=r"\(expert \d+ of model\.layers\.0\..*is damaged"),
        engine("qwen3_moe", KV_OFF, experts=experts) as llm,
    ):
        generate(llm, PROMPTS[:1])
    again = run("qwen3_moe", PROMPTS, KV_OFF, experts=experts)  # the damaged file is set aside
    assert again.tokens == vllm_tokens("qwen3_moe", PROMPTS)


def test_another_configuration_fills_the_file_anew(tmp_path: Path, caplog_vllm) -> None:
    run("mixtral", PROMPTS[:1], KV_OFF, experts=slots("mixtral", 3, **stored(tmp_path)))
    layer_gib = 8 * 3 * 256 * HIDDEN * 4 / 2**30
    experts = slots("mixtral", 3, **stored(tmp_path, far_gib=1.5 * layer_gib))
    result = run("mixtral", PROMPTS, KV_OFF, experts=experts)
    assert "is of another configuration" in caplog_vllm.text
    assert result.tokens == vllm_tokens("mixtral", PROMPTS)


def test_a_file_of_other_pages_is_filled_anew(monkeypatch, tmp_path: Path, caplog_vllm) -> None:
    """Older versions cut experts into smaller pages."""
    experts = slots("qwen3_moe", 5, **stored(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(layout, "LARGEST_PAGE_BYTES", 8192)
        before = run("qwen3_moe", PROMPTS, KV_OFF, experts=experts).tokens
    assert run("qwen3_moe", PROMPTS, KV_OFF, experts=experts).tokens == before
    assert "is of another configuration" in caplog_vllm.text
    assert before == vllm_tokens("qwen3_moe", PROMPTS)


def test_another_models_file_is_refused(tmp_path: Path) -> None:
    run("mixtral", PROMPTS[:1], KV_OFF, experts=slots("mixtral", 3, **stored(tmp_path)))
    with (
        pytest.raises(ConfigError, match=r"holds experts of random-mixtral.* this model is random"),
        engine("qwen3_moe", KV_OFF, experts=slots("qwen3_moe", 5, **stored(tmp_path))),
    ):
        pass


def test_with_a_slot_for_each_expert_the_part_steps_aside() -> None:
    result = run("mixtral", PROMPTS, KV_OFF, experts=slots("mixtral", 9))
    assert not result.manifest["experts"]["active"]
    assert result.tokens == vllm_tokens("mixtral", PROMPTS)


@pytest.mark.slow
def test_compiled() -> None:
    experts = slots("qwen3_moe", 6)
    result = run("qwen3_moe", PROMPTS, KV_OFF, experts=experts, enforce_eager=False)
    theirs = run("qwen3_moe", PROMPTS, enforce_eager=False)
    assert result.tokens == theirs.tokens


def test_fewer_slots_than_a_token_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before the checkpoint's experts are loaded, when all layers are known."""
    loaded: list[object] = []
    weight_loader = RoutedExperts.weight_loader

    def load(*args: Any, **kwargs: Any) -> Any:
        loaded.append(args)
        return weight_loader(*args, **kwargs)

    load.supports_moe_loading = True  # type: ignore[attr-defined]
    monkeypatch.setattr(RoutedExperts, "weight_loader", load)
    with (
        pytest.raises(BudgetError, match=r"3 of 16 experts .* a token is routed to 4"),
        engine("qwen3_moe", KV_OFF, experts=slots("qwen3_moe", 3)),
    ):
        pass
    assert not loaded


def test_a_model_without_experts() -> None:
    with (
        pytest.raises(UnsupportedError, match="has no mixture of experts"),
        engine("llama3", KV_OFF, experts={"near_gib": 1}),
    ):
        pass


def test_the_checkpoints_experts_are_not_read_again(monkeypatch, tmp_path: Path) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    experts = slots("qwen3_moe", 5, **stored(tmp_path))
    loaded: list[str] = []

    def counting(name: str) -> Any:
        original = getattr(RoutedExperts, name)

        def load(self, *args, **kwargs):
            loaded.append(name)
            return original(self, *args, **kwargs)

        return load

    for name in ("_load_w13", "_load_w2"):
        monkeypatch.setattr(RoutedExperts, name, counting(name))
    run("qwen3_moe", PROMPTS[:1], KV_OFF, experts=experts, max_tokens=1)
    assert len(loaded) == 3 * 16 * 3  # layers, experts, matrices in the checkpoint
    loaded.clear()
    result = run("qwen3_moe", PROMPTS, KV_OFF, experts=experts)
    assert not loaded and result.tokens == vllm_tokens("qwen3_moe", PROMPTS)


def test_hits_of_each_layer_are_shown() -> None:
    with engine("qwen3_moe", KV_OFF, experts=slots("qwen3_moe", 10)) as llm:
        generate(llm, PROMPTS)
        (state,) = llm.collective_rpc("tiered_state")
    assert state["experts"]["preload"]["reason"] == 'experts.prefetch is "off"'
    counted = state["experts"]["counters"]
    names = state["experts"]["hit_ratio_by_layer"]
    assert [int(name.split(".")[2]) for name in names] == [0, 1, 2]
    by_layer = list(names.values())
    assert all(0 < hits < 1 for hits in by_layer)
    wanted = counted["experts_hits"] + counted["experts_misses"]
    assert min(by_layer) <= counted["experts_hits"] / wanted <= max(by_layer)


@pytest.mark.parametrize(
    ("model", "count", "tier"),
    [
        ("qwen3_moe", 6, "stored"),
        ("qwen3_moe", 6, "far"),
        ("olmoe", 12, "far"),
        ("mixtral", 4, "far"),
        ("gpt_oss", 5, "far"),
        ("glm4_moe", 8, "far"),
    ],
)
def test_tokens_with_experts_read_ahead(tmp_path: Path, model: str, count: int, tier: str) -> None:
    more = stored(tmp_path) if tier == "stored" else {}
    experts = slots(model, count, prefetch="on", **more)
    # One at a time, as steps of many tokens want all the slots.
    with engine(model, KV_OFF, experts=experts, max_num_seqs=1) as llm:
        tokens, used = generate(llm, PROMPTS[:2]), counters(llm)
    assert tokens == vllm_tokens(model, PROMPTS[:2])
    assert 0 < used["experts_ahead_used"] < used["experts_ahead"]


def test_reading_ahead_is_tried(caplog_vllm) -> None:
    prompts = random_prompts(1, longest=20)
    with engine("qwen3_moe", KV_OFF, experts=slots("qwen3_moe", 6, prefetch="auto")) as llm:
        (before,) = llm.collective_rpc("tiered_state")
        tokens = generate(llm, prompts, max_tokens=180)
        used = counters(llm)
        (after,) = llm.collective_rpc("tiered_state")
    assert before["experts"]["preload"]["state"] == "trying"
    (verdict,) = after["experts"]["preload"]["verdicts"]
    assert after["experts"]["preload"]["state"] == ("on" if verdict["kept"] else "off")
    assert verdict["batch_size"] == 1
    assert tokens == vllm_tokens("qwen3_moe", prompts, max_tokens=180)
    assert used["experts_ahead"] > 0
    assert "reading ahead takes" in caplog_vllm.text


def rounded(model: str, folder: Path) -> str:
    """Return a name of the model with experts that are what their copies in 4 bit compute."""
    source = Path(model_path(model))
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
            continue
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if ".experts." in name:
                tensors[name] = expand(quantise(tensor[None], copies.GROUP))[0]
        save_file(tensors, folder / path.name, {"format": "pt"})
    harness.PATHS[f"{model}-rounded"] = str(folder)
    return f"{model}-rounded"


@pytest.mark.parametrize("tier", ["far", "stored"])
@pytest.mark.parametrize(("model", "count"), [("qwen3_moe", 12), ("olmoe", 20)])
def test_a_fallback_that_loads_nothing_computes_in_4_bit(
    tmp_path: Path, model: str, count: int, tier: str
) -> None:
    """With a share of 1 each missing expert is computed in 4 bit, and no slot is ever filled."""
    (tmp_path / "store").mkdir()
    (tmp_path / "model").mkdir()
    more = stored(tmp_path / "store") if tier == "stored" else {}
    experts = slots(model, count, fallback="int4", fallback_share=1.0, **more)
    expected = vllm_tokens(rounded(model, tmp_path / "model"), PROMPTS)
    assert expected != vllm_tokens(model, PROMPTS)
    for _ in range(2):  # the second start reads stored copies
        with engine(model, KV_OFF, experts=experts) as llm:
            assert generate(llm, PROMPTS) == expected
            used = counters(llm)
        assert used["experts_hits"] == used["experts_misses"] == 0
        assert used["experts_fallback_pairs"] == used["experts_pairs"] > 0


def test_a_fallback_of_some_weight_loads_the_rest() -> None:
    experts = slots("qwen3_moe", 10, fallback="int4", fallback_share=0.3)
    with engine("qwen3_moe", KV_OFF, experts=experts) as llm:
        generate(llm, PROMPTS)
        used = counters(llm)
    assert 0 < used["experts_fallback_pairs"] < 0.5 * used["experts_pairs"]
    assert used["experts_misses"] > 0


def test_a_fallback_that_cannot_be() -> None:
    with pytest.raises(UnsupportedError, match="activation is swigluoai: leave"):
        run("gpt_oss", PROMPTS, KV_OFF, experts=slots("gpt_oss", 6, fallback="int4"))
    with pytest.raises(BudgetError, match="to copies in 4 bit: 0 of 16 experts"):
        run("qwen3_moe", PROMPTS, KV_OFF, experts=slots("qwen3_moe", 2, fallback="int4"))
