# SPDX-License-Identifier: Apache-2.0
"""Narrow far pages in the real engine: attention reads exactly what the format makes of each page.

A witness keeps each page that leaves near memory. What is read back, and what a layer is about to
read, must be the reference's rounding of it. Copies are late, and targets of reads are poisoned.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.faults import flipping_device, poison_freed_pages, walk
from tests.e2e.harness import engine, generate, metric, random_prompts, run
from tests.fakes import page_witness
from tests.fakes.devices import DelayedDevice
from vllm_tiered.adapter.kv import worker
from vllm_tiered.devices.narrow_pages import NarrowCodec
from vllm_tiered.errors import UnsupportedError

MIB = 1 << 20
PROMPTS = random_prompts(8, seed=20)


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> page_witness.PageWitness:
    monkeypatch.setattr(worker, "make_device", lambda: DelayedDevice(1, 2e-3))
    return page_witness.install(monkeypatch)


@pytest.mark.parametrize(
    ("model", "near", "dtype", "far_dtype", "share"),
    [
        ("llama3", 3 * MIB, "float32", "int8", 66 / 256),
        ("opt", 7 * MIB, "bfloat16", "fp8", 66 / 128),
        ("qwen2", 4 * MIB, "float16", "int8", 66 / 128),
    ],
)
def test_attention_reads_rounded_pages(
    model, near, dtype, far_dtype, share, witness, force_far_layers
) -> None:
    force_far_layers(2)
    tiered = {"far_dtype": far_dtype}
    result = run(model, PROMPTS, tiered, dtype=dtype, kv_cache_memory_bytes=near)
    stated = result.manifest["kv"]
    assert stated["far_dtype"] == far_dtype
    assert stated["far_page_bytes"] == pytest.approx(share * stated["page_bytes"], rel=0.01)
    assert witness.num_seen > 0 < witness.num_written
    # The link carries narrow pages only.
    assert result.metrics["tiered_kv_read_bytes"] == witness.num_read * stated["far_page_bytes"]
    assert result.metrics["tiered_kv_write_bytes"] == witness.num_written * stated["far_page_bytes"]


def test_latent_attention(witness, force_far_layers) -> None:
    force_far_layers(1)
    result = run("deepseek_v2", PROMPTS[:4], {"far_dtype": "int8"}, max_model_len=256)
    assert result.metrics["tiered_kv_read_bytes"] > 0 < witness.num_seen


def test_layers_move_and_blocks_return(witness, monkeypatch) -> None:
    """Layers leave, return and leave again; content of evicted blocks is stored and fetched."""
    walk(monkeypatch, seed=5, steps_per_level=3)
    poison_freed_pages(monkeypatch)
    tiered = {"far_dtype": "fp8", "far_gib": 0.5, "prefix_store": True, "verify": "full"}
    arguments: dict[str, Any] = {
        "kv_cache_memory_bytes": 40 * MIB,
        "max_model_len": 384,
        "max_num_batched_tokens": 128,
        "enable_prefix_caching": True,
    }
    prompts = random_prompts(16, seed=3, longest=130)
    with engine("deep", tiered, **arguments) as llm:
        generate(llm, prompts)
        generate(llm, prompts)
        assert metric("external_prefix_cache_hits") > 0
        assert metric("tiered_kv_level_changes") > 5
        assert metric("tiered_kv_recomputed_requests") == 0
    assert witness.num_read > witness.num_seen > 0


def test_pages_in_a_file(witness, tmp_path: Path) -> None:
    tiered = {"far_dtype": "int8", "tier": "storage", "path": str(tmp_path), "far_gib": 0.005}
    tiered["expansion"] = 2.0
    result = run("deep", PROMPTS, tiered, max_model_len=256, kv_cache_memory_bytes=28 * MIB)
    stated = result.manifest["kv"]
    assert stated["storage_bytes"] > 0 < stated["far_bytes"]
    assert witness.num_seen > 0
    assert os.listdir(tmp_path) == []


ALONE: dict[str, Any] = {
    "kv_cache_memory_bytes": 28 * MIB,
    "max_model_len": 256,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 32,
}
"""A request at a time, and prompts a block at a time. Then a request that is computed anew reads
rounded pages where it read them before, and its outputs are the same."""


@pytest.mark.parametrize(
    ("far_dtype", "tier"), [("int8", "far"), ("fp8", "far"), ("int8", "storage")]
)
def test_a_damaged_page_is_found_and_its_request_computed_anew(
    far_dtype, tier, tmp_path: Path, monkeypatch
) -> None:
    tiered = {"far_dtype": far_dtype, "expansion": 2.0, "verify": "full", "tier": tier}
    if tier == "storage":
        tiered |= {"path": str(tmp_path), "far_gib": 0}
    expected = run("deep", PROMPTS[1:3], tiered, max_tokens=16, **ALONE).tokens
    flipping = flipping_device({20, 250})
    monkeypatch.setattr(worker, "make_device", lambda: flipping)
    with engine("deep", tiered, **ALONE) as llm:
        tokens = generate(llm, PROMPTS[1:3], 16)
        num_found = metric("tiered_kv_page_errors_checksum")
        assert num_found == metric("tiered_kv_recomputed_requests") >= 2
        # A damaged page that a step used all the same would be missed by the next step.
        assert metric("tiered_kv_page_errors_unwritten") == 0
    assert tokens == expected


def test_unverified_damage_changes_tokens(monkeypatch) -> None:
    """The test above depends on this: attention reads the damaged bytes."""
    tiered = {"far_dtype": "int8", "expansion": 2.0}
    expected = run("deep", PROMPTS[1:3], tiered, max_tokens=16, **ALONE).tokens
    flipping = flipping_device(set(range(20, 4000, 10)), whole_pages=True)
    monkeypatch.setattr(worker, "make_device", lambda: flipping)
    assert run("deep", PROMPTS[1:3], tiered, max_tokens=16, **ALONE).tokens != expected


def test_the_witness_notices_a_page_that_is_not_rounded(
    witness, force_far_layers, monkeypatch
) -> None:
    """The tests above depend on this."""
    decode = NarrowCodec.decode

    def damaged(self, far, far_ids, near, near_ids):
        decode(self, far, far_ids, near, near_ids)
        if self._kernels is not None:  # the witness's codec is the reference
            near[near_ids[:1], 0] ^= 1

    monkeypatch.setattr(NarrowCodec, "decode", damaged)
    force_far_layers(2)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        run("llama3", PROMPTS, {"far_dtype": "int8"}, kv_cache_memory_bytes=3 * MIB)


def test_a_narrow_kv_cache_is_refused(monkeypatch) -> None:
    with (
        pytest.raises(UnsupportedError, match=r'kv\.far_dtype="int8" cannot be: .* narrow itself'),
        engine("qwen2", {"far_dtype": "int8"}, kv_cache_dtype="fp8", dtype=torch.bfloat16),
    ):
        pass
