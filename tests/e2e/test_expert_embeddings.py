# SPDX-License-Identifier: Apache-2.0
"""Beside stored experts, embeddings move to files, and tokens stay vLLM's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers import utils

from tests.e2e import harness
from tests.e2e.harness import engine, generate, model_path, random_prompts, run, vllm_tokens
from tests.e2e.test_experts import HIDDEN, KV_OFF, slots, stored
from vllm_tiered.adapter.experts import embeddings
from vllm_tiered.adapter.telemetry import manifest
from vllm_tiered.errors import BudgetError
from vllm_tiered.storage.immutable_file import Draft

MODEL = "qwen3_moe"
PROMPTS = random_prompts(4, longest=60)


def model_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def embeddings_of(llm: Any) -> SimpleNamespace:
    model = model_of(llm)
    return SimpleNamespace(input=model.model.embed_tokens, output=model.lm_head)


def stated() -> int:
    current = manifest.current()
    assert current is not None
    return int(current["experts"]["embedding_bytes"])


@pytest.fixture
def experts(tmp_path: Path) -> dict[str, Any]:
    return slots(MODEL, 6, **stored(tmp_path))


def test_only_the_packed_output_stays_in_memory(experts: dict[str, Any]) -> None:
    expected = vllm_tokens(MODEL, PROMPTS)
    with engine(MODEL, KV_OFF, experts=experts) as llm:
        of = embeddings_of(llm)
        matrix_bytes = of.output.weight.nbytes
        assert stated() == 2 * matrix_bytes > 40_000 * HIDDEN * 4
        assert of.input.cpu_linear.func.__name__ == "_pack_at_first_use"  # nothing has used it
        of.output.weight.zero_()  # nothing reads it
        assert generate(llm, PROMPTS) == expected
        of.input.weight.zero_()
        assert generate(llm, PROMPTS) != expected


def test_rows_come_from_the_file(experts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []
    write_back = Draft.write_back

    def recording(draft: Draft, begin: int, end: int) -> None:
        write_back(draft, begin, end)
        written.append((begin, end))

    monkeypatch.setattr(Draft, "write_back", recording)
    monkeypatch.setattr(embeddings, "_CHUNK_BYTES", 4096 * 5000)
    result = run(MODEL, PROMPTS, KV_OFF, experts=experts)
    assert result.tokens == vllm_tokens(MODEL, PROMPTS)
    assert len(written) > 2 * 2 and written[:2] == [(0, 4096 * 5000), (4096 * 5000, 4096 * 10000)]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a name of the model with one matrix for both embeddings."""
    folder, source = tmp_path_factory.mktemp("tied"), Path(model_path(MODEL))
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            tensors.pop("lm_head.weight", None)
            save_file(tensors, folder / path.name, {"format": "pt"})
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    harness.PATHS["tied"] = str(folder)
    return "tied"


def test_a_matrix_that_is_both(experts: dict[str, Any], tied: str) -> None:
    expected = vllm_tokens(tied, PROMPTS)
    with engine(tied, KV_OFF, experts=experts) as llm:
        of = embeddings_of(llm)
        assert of.input.weight.data_ptr() == of.output.weight.data_ptr()
        assert stated() == of.input.weight.nbytes
        assert generate(llm, PROMPTS) == expected


def test_the_input_embedding_computes_the_output(experts: dict[str, Any], tied: str) -> None:
    """Some models share the module, and not only its matrix."""
    expected = vllm_tokens(tied, PROMPTS)
    with engine(tied, KV_OFF, experts=experts) as llm:
        model_of(llm).lm_head = embeddings_of(llm).input
        assert generate(llm, PROMPTS) == expected
        assert not hasattr(model_of(llm).lm_head.cpu_linear, "func")  # packed


def unpacked(layer: Any, remove_weight: bool) -> None:
    """Stand in for vLLM's choice of a GEMM: the one that reads the matrix."""
    layer.cpu_linear = torch.nn.functional.linear


def test_a_matrix_that_each_step_reads_stays_in_memory(
    experts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = vllm_tokens(MODEL, PROMPTS)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", unpacked)
    with engine(MODEL, KV_OFF, experts=experts) as llm:
        assert stated() == embeddings_of(llm).input.weight.nbytes
        assert generate(llm, PROMPTS) == expected


def test_so_does_one_that_is_both(
    experts: dict[str, Any], tied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = vllm_tokens(tied, PROMPTS)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", unpacked)
    with engine(tied, KV_OFF, experts=experts) as llm:
        assert stated() == 0
        assert generate(llm, PROMPTS) == expected


def test_with_an_output_of_another_dtype_they_stay_vllms(experts: dict[str, Any]) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "hf_overrides": {"head_dtype": "float32"}}
    with engine(MODEL, KV_OFF, experts=experts, **options) as llm:
        assert stated() == 0
        assert generate(llm, PROMPTS[:1])


def test_the_experts_file_has_the_disk_first(
    experts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog_vllm: Any
) -> None:
    """What is free holds an embedding, but not before the experts have their space."""
    expected = vllm_tokens(MODEL, PROMPTS)
    matrix_bytes = 49_152 * HIDDEN * 4
    usage = SimpleNamespace(free=matrix_bytes + 1000)
    monkeypatch.setattr(embeddings.shutil, "disk_usage", lambda folder: usage)
    with engine(MODEL, KV_OFF, experts=experts) as llm:
        assert stated() == matrix_bytes  # the output's, which is processed after the experts
        assert generate(llm, PROMPTS) == expected
    assert "an embedding of 48.00 MiB stays in memory: " in caplog_vllm.text
    assert " are free for it" in caplog_vllm.text
    with engine(MODEL, KV_OFF, experts=experts):
        assert stated() == 2 * matrix_bytes  # the file has its space


def test_a_disk_that_fails_costs_nothing_but_memory(
    experts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog_vllm: Any
) -> None:
    def fail(draft: Draft, begin: int, end: int) -> None:
        raise OSError(5, "Input/output error")

    expected = vllm_tokens(MODEL, PROMPTS)
    monkeypatch.setattr(Draft, "write_back", fail)
    with engine(MODEL, KV_OFF, experts=experts) as llm:
        assert stated() == 0
        assert generate(llm, PROMPTS) == expected
    assert "stays in memory: [Errno 5] Input/output error" in caplog_vllm.text


def test_on_a_full_disk_they_stay_in_memory(
    experts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog_vllm: Any
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise BudgetError("no space")

    monkeypatch.setattr(embeddings, "move_to_draft", full)
    expected = vllm_tokens(MODEL, PROMPTS)
    with engine(MODEL, KV_OFF, experts=experts) as llm:
        assert stated() == 0
        assert generate(llm, PROMPTS) == expected
    assert "stays in memory: no space" in caplog_vllm.text


def test_without_a_file_they_stay_vllms(tmp_path: Path) -> None:
    for where in ({}, {"storage_path": str(tmp_path), "far_gib": 1}):  # nothing is stored
        with engine(MODEL, KV_OFF, experts=slots(MODEL, 6, **where)) as llm:
            assert stated() == 0
            assert not hasattr(embeddings_of(llm).input.cpu_linear, "func")
