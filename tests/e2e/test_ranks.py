# SPDX-License-Identifier: Apache-2.0
"""Two ranks in processes, the engine in this one: each part gives vLLM's tokens of one rank."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e import harness
from tests.e2e.harness import (
    engine,
    generate,
    metric,
    model_path,
    prepared,
    random_prompts,
    vllm_tokens,
)
from tests.fixtures.four_bit_grid import put_ffns_on_grid
from vllm_tiered.ffn.layout import Precision, bundle_stride
from vllm_tiered.ffn.prepare.pipeline import prepare

PROMPTS = random_prompts(8, seed=40)
KV_OFF = {"enabled": False}

pytestmark = pytest.mark.ranks


def test_kv_and_weights(two_ranks) -> None:
    """Each rank has its KV head, near pages and far tier, and loads its shard of every matrix."""
    arguments = {**two_ranks, "kv_cache_memory_bytes": 4 << 20}
    weights = {"placement": "helm"}
    expected = vllm_tokens("qwen2", PROMPTS)
    with engine("qwen2", {"expansion": 1.3}, weights=weights, **arguments) as llm:
        assert generate(llm, PROMPTS) == expected
        assert metric("tiered_kv_near_bytes") == 2 * (4 << 20)
        assert metric("tiered_kv_read_bytes") > 0
        assert metric("tiered_weights_read_bytes") > 0


def test_what_workers_find_in_their_model_is_left_to_vllm(two_ranks, windowed) -> None:
    expected = vllm_tokens(windowed, PROMPTS, 16)
    with engine(windowed, {}, **two_ranks) as llm:
        assert generate(llm, PROMPTS, 16) == expected
        states = [worker["kv"] for worker in llm.collective_rpc("tiered_state")]
    assert [kv["state"] for kv in states] == ["stepped aside"] * 2
    assert all("no layer has full attention" in kv["reason"] for kv in states)


@pytest.mark.slow
def test_ffn(two_ranks, tmp_path: Path) -> None:
    """Each rank opens its shard of the neurons, and loads no other."""
    store = prepared(Path(model_path("opt")), tmp_path / "store")
    store.close()
    ffn = {"store": str(tmp_path / "store"), "exact": True, "far_gib": 0}
    expected = vllm_tokens("opt", PROMPTS)
    with engine("opt", {"expansion": 1.0}, ffn=ffn, **two_ranks) as llm:
        assert generate(llm, PROMPTS) == expected
        shard_bytes = store.shape.neurons // 2 * bundle_stride(store.shape, Precision.FULL)
        layers = metric("tiered_ffn_dense_steps")  # summed over both ranks
        assert layers >= 2 * 39 * store.shape.num_layers
        ahead = 2 * store.shape.num_layers * shard_bytes
        read = metric("tiered_ffn_storage_bytes")
        assert layers * shard_bytes <= read <= layers * shard_bytes + ahead


@pytest.mark.slow
def test_sparse_steps_of_an_ffn(two_ranks, tmp_path: Path, monkeypatch) -> None:
    """Each rank's shard of the predictor names its own neurons, and they are the active ones."""
    shutil.copytree(model_path("llama3-relu"), tmp_path / "model")
    put_ffns_on_grid(tmp_path / "model")
    monkeypatch.setitem(harness.PATHS, "llama3-on-grid", str(tmp_path / "model"))
    prepare(tmp_path / "model", tmp_path / "store", dtype=torch.float32)
    ffn = {
        "store": str(tmp_path / "store"),
        "mix": [1, 0, 0],
        "deterministic": True,
        "far_gib": 0,
    }
    with engine("llama3-on-grid", KV_OFF, **two_ranks) as llm:
        expected = generate(llm, PROMPTS[:1])
    with engine("llama3-on-grid", {"expansion": 1.0}, ffn=ffn, **two_ranks) as llm:
        assert generate(llm, PROMPTS[:1]) == expected
        steps = metric("tiered_ffn_sparse_steps")
        assert steps == 2 * 3 * 39, "of both ranks, in 3 layers"
        named = (metric("tiered_ffn_hits") + metric("tiered_ffn_misses")) / steps
        (of_rank, _) = [state["ffn"]["neurons"] for state in llm.collective_rpc("tiered_state")]
    assert 0 < named < 0.7 * of_rank, "the rest is inactive"


@pytest.mark.slow
def test_stored_weights(two_ranks, tmp_path: Path) -> None:
    """Each rank measures for itself and has a file of its shards; all agree on one plan.

    They also agree on the inputs of a plan: none may lack them.
    """
    weights = {
        "placement": "throughput",
        "near_gib": 0.006,
        "far_gib": 0.0005,
        "storage_path": str(tmp_path),
    }
    arguments = {**two_ranks, "kv_cache_memory_bytes": None}
    expected = vllm_tokens("qwen2", PROMPTS)

    def start() -> list[int]:
        with engine("qwen2", KV_OFF, weights=weights, **arguments) as llm:
            assert generate(llm, PROMPTS) == expected
        files = sorted(tmp_path.iterdir())
        assert [file.name for file in files] == ["rank0of2.weights", "rank1of2.weights"]
        return [file.stat().st_mtime_ns for file in files]

    written = start()
    assert start() == written, "they were read only"
    (tmp_path / "rank1of2.weights").unlink()
    assert start()[0] != written[0]


def test_experts(two_ranks, tmp_path: Path) -> None:
    """Each rank has slots and a file for its shard of each expert, on the first start and later."""
    shard_bytes = 3 * 128 // 2 * 256 * 4
    experts = {
        "near_gib": 6.1 * 3 * shard_bytes / 2**30,
        "storage_path": str(tmp_path),
        "far_gib": 0,
    }
    expected = vllm_tokens("qwen3_moe", PROMPTS)
    for _ in range(2):
        with engine("qwen3_moe", {"enabled": False}, experts=experts, **two_ranks) as llm:
            assert generate(llm, PROMPTS) == expected
            for state in llm.collective_rpc("tiered_state"):
                assert state["experts"]["slots"] == 6
                assert state["experts"]["storage_bytes"] == 3 * 16 * shard_bytes
                assert state["experts"]["counters"]["experts_storage_bytes"] > 0
        names = {file.name for file in tmp_path.iterdir()}
        assert names == {"rank0of2.experts", "rank1of2.experts"}
