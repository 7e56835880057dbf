# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: drafts that are rejected leave no trace in near or far pages."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.inputs.model import demo_model_dir
from tests.e2e.faults import flipping_device, poison_freed_pages, walk
from tests.e2e.harness import (
    PATHS,
    Tokens,
    engine,
    generate,
    metric,
    model_path,
    run,
    vllm_tokens,
)
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.kv import drafts, worker
from vllm_tiered.errors import IntegrityError

MIB = 1 << 20
SHORT = "demo-short"
"""The demo model without its last layer: some of its drafts are accepted."""
NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module", autouse=True)
def short_demo(tmp_path_factory: pytest.TempPathFactory) -> None:
    source, folder = demo_model_dir(), tmp_path_factory.mktemp(SHORT)
    config = json.loads((source / "config.json").read_text())
    kept = config["num_hidden_layers"] - 1
    weights = {
        name: tensor
        for path in sorted(source.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < kept
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_hidden_layers": kept}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(Path(source, name).read_bytes())
    PATHS[SHORT] = str(folder)


def repetitive_prompts(count: int, *, seed: int = 0) -> Tokens:
    """Return prompts with repeats, in which n-grams find drafts."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(count):
        base = [rng.randrange(1000, 40000) for _ in range(rng.randrange(5, 20))]
        prompts.append((base * 20)[: rng.randrange(20, 150)])
    return prompts


def ngram(num_tokens: int) -> dict[str, Any]:
    return NGRAM | {"num_speculative_tokens": num_tokens}


def draft_model(name: str, num_tokens: int = 3) -> dict[str, Any]:
    model = model_path(name)
    return {"method": "draft_model", "model": model, "num_speculative_tokens": num_tokens}


PROMPTS = repetitive_prompts(10)
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 96, "max_model_len": 320}
TIGHT = {"demo": 24 * MIB, "qwen2": 4 * MIB, "gemma3": 6 * MIB}


def speculating(model: str, speculation: dict[str, Any], **options: Any) -> dict[str, Any]:
    near = TIGHT[model] * (2 if speculation["method"] == "draft_model" else 1)
    return OPTIONS | {"kv_cache_memory_bytes": near, "speculative_config": speculation} | options


def accepted_and_drafted() -> tuple[float, float]:
    names = ("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens")
    accepted, drafted = (metric(name) for name in names)
    return accepted, drafted


@pytest.mark.parametrize(("expansion", "num_tokens"), [(1.5, 1), (3.0, 4), ("auto", 4), (1.5, 40)])
def test_ngrams(expansion, num_tokens) -> None:
    options = speculating("demo", ngram(num_tokens), enable_prefix_caching=True)
    with engine("demo", {"expansion": expansion}, **options) as llm:
        tokens = [generate(llm, PROMPTS, 60) for _ in range(2)]
        accepted, drafted = accepted_and_drafted()
        assert 0 < accepted < drafted
        assert metric("tiered_kv_read_bytes") > 0
    assert tokens == [vllm_tokens("demo", PROMPTS, max_tokens=60)] * 2


@pytest.mark.parametrize("draft", ["demo", SHORT, "deep"])
def test_a_draft_model(draft) -> None:
    """Its drafts are all accepted, some of them, or none.

    vLLM's CPU backend schedules one step at a time. Asynchronous scheduling is tested on a model of
    the engine (tests/unit/kv/test_machine.py).
    """
    options = speculating("demo", draft_model(draft))
    with engine("demo", {"expansion": 1.5}, **options) as llm:
        tokens = generate(llm, PROMPTS, 60)
        accepted, drafted = accepted_and_drafted()
        share = accepted / drafted
        assert {"demo": share == 1, "deep": share == 0, SHORT: 0.1 < share < 0.9}[draft], share
        assert metric("tiered_kv_read_bytes") > 0
    assert tokens == vllm_tokens("demo", PROMPTS, max_tokens=60)


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize("method", ["ngram", SHORT])
def test_a_walk_over_all_levels(method, delays, monkeypatch) -> None:
    """With delays, copies are late, and pages hold poison until they arrive and once freed."""
    walk(monkeypatch, seed=4, steps_per_level=2)
    poison_freed_pages(monkeypatch)
    if delays:
        monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(0, 2e-3))
    speculation = ngram(4) if method == "ngram" else draft_model(method)
    options = speculating("demo", speculation, enable_prefix_caching=True)
    with engine("demo", {}, **options) as llm:
        tokens = [generate(llm, PROMPTS, 60) for _ in range(2)]
        assert metric("tiered_kv_level_changes") > 5
        assert metric("tiered_kv_read_bytes") > 0
    assert tokens == [vllm_tokens("demo", PROMPTS, max_tokens=60)] * 2


def test_ngrams_beside_windows(force_far_layers) -> None:
    """With latent attention vLLM's CPU kernels alone give other tokens under speculation."""
    force_far_layers(3)
    result = run("gemma3", PROMPTS, {}, **speculating("gemma3", ngram(4)))
    assert result.tokens == vllm_tokens("gemma3", PROMPTS)
    assert result.metrics["tiered_kv_read_bytes"] > 0


def test_a_draft_models_layers_stay_near() -> None:
    options = speculating("qwen2", draft_model("llama1"))
    result = run("qwen2", PROMPTS, {"expansion": 1.2}, **options)
    kv = result.manifest["kv"]
    assert (kv["num_layers"], kv["near_only_layers"], kv["far_layers"]) == (4, 1, 3)
    assert max(kv["offloaded_layers"]) <= 3
    assert result.tokens == vllm_tokens("qwen2", PROMPTS)


def test_an_eagle_head(tmp_path) -> None:
    """One layer that also reads the target's hidden states; here, the demo model's last one."""
    source = demo_model_dir()
    config = json.loads((source / "config.json").read_text())
    prefix, width = f"model.layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    weights = {
        name.replace(prefix, "layers.0."): tensor
        for path in source.glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if name.startswith(prefix) and "input_layernorm" not in name
    }
    weights["fc.weight"] = torch.eye(width, dtype=torch.bfloat16).repeat(1, 2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    eagle = {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 3}
    options = speculating("demo", eagle, enable_prefix_caching=True)
    result = run("demo", PROMPTS, {"expansion": 1.5}, max_tokens=60, **options)
    assert result.tokens == vllm_tokens("demo", PROMPTS, max_tokens=60)
    kv = result.manifest["kv"]
    assert (kv["num_layers"], kv["near_only_layers"]) == (30, 1)
    assert kv["far_layers"] > 0 and result.metrics["tiered_kv_read_bytes"] > 0


def test_a_flipped_bit_in_far_memory(monkeypatch) -> None:
    """vLLM asks for lost pages before it ends the step: nothing that they gave is sampled."""
    monkeypatch.setattr(worker, "make_device", lambda: flipping_device({40, 300}))
    reported_late: list[set[int]] = []
    end_step = worker.TieredWorker.end_step

    def ended(self) -> None:
        end_step(self)
        reported_late.append(set(self._lost))

    monkeypatch.setattr(worker.TieredWorker, "end_step", ended)
    options = speculating("demo", ngram(4), enable_prefix_caching=True)
    with engine("demo", {"expansion": 3.0, "verify": "full"}, **options) as llm:
        tokens = [generate(llm, PROMPTS, 60) for _ in range(2)]
        assert metric("tiered_kv_recomputed_requests") >= 1
        assert metric("tiered_kv_lost_blocks") >= 1
    assert reported_late and not any(reported_late)
    assert tokens == [vllm_tokens("demo", PROMPTS, max_tokens=60)] * 2


# What the tests above protect, damaged: each must change the tokens.


def _drafts_count_as_certain(monkeypatch) -> None:
    def split(self, request_id, computed_tokens, scheduled_tokens, *, restarts):
        return drafts.Certain(computed_tokens, scheduled_tokens, 0)

    monkeypatch.setattr(drafts.Drafts, "split", split)


def _the_drafter_sees_block_ids(monkeypatch) -> None:
    monkeypatch.setattr(worker.TieredWorker, "translate_drafter", lambda self, context: None)


def test_these_tests_notice_damage(monkeypatch) -> None:
    expected = vllm_tokens("demo", PROMPTS, max_tokens=60)
    _drafts_count_as_certain(monkeypatch)
    options = speculating("demo", ngram(4))
    try:
        result = run("demo", PROMPTS, {"expansion": 1.5}, max_tokens=60, **options)
    except IntegrityError:  # which says that nothing else would have noticed it in time
        return
    assert result.tokens != expected


def test_without_translation_a_drafter_reads_other_pages(monkeypatch) -> None:
    """Its drafts are then worse, which no token shows."""
    _the_drafter_sees_block_ids(monkeypatch)
    with engine("demo", {"expansion": 1.5}, **speculating("demo", draft_model("demo"))) as llm:
        generate(llm, PROMPTS, 60)
        accepted, drafted = accepted_and_drafted()
    assert accepted < drafted
