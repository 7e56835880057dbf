# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: two stages swap their layers by one plan, with two batches in flight."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.conftest import CPUS
from tests.e2e.harness import random_prompts, vllm_tokens
from tests.e2e.processes import ROOT
from tests.e2e.script_start import FORK

PROMPTS = random_prompts(5, seed=40, longest=100)
TOKENS = 16

pytestmark = pytest.mark.ranks


def serve(*runs: dict[str, Any], **variables: str) -> list[dict[str, Any]]:
    """Return what the script prints of each run of the 30-layer model."""
    environment = {
        **os.environ,
        **FORK,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, sorted(CPUS)[:2])),
        **variables,
    }
    os.sched_setaffinity(0, CPUS)  # processes inherit it, and an earlier engine has left one core
    finished = subprocess.run(
        [sys.executable, "-m", "tests.e2e.pipeline_script", "deep", json.dumps(PROMPTS),
         str(TOKENS), json.dumps(runs)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-4000:]
    lines = finished.stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"tokens"')]


def test_a_damaged_page_of_the_first_stage_is_computed_anew() -> None:
    """Only the last stage's output has tokens, and the loss is the first one's."""
    expected = vllm_tokens("deep", PROMPTS, TOKENS)
    (found,) = serve(
        {
            "kv": {"expansion": 2.0, "verify": "full"},
            "flips": [40],
            "arguments": {"enable_prefix_caching": True},
        }
    )
    assert found["tokens"] == [expected, expected]
    first, last = found["kv"]
    for kv in first, last:
        assert (kv["num_layers"], kv["far_layers"]) == (15, 10)
        assert kv["counters"]["kv_read_bytes"] > 0
    assert first["counters"]["kv_lost_blocks"] >= 1
    assert last["counters"].get("kv_lost_blocks", 0) == 0
    assert found["metrics"]["tiered_kv_recomputed_requests"] >= 1
    assert found["metrics"]["tiered_kv_near_bytes"] == first["near_bytes"] + last["near_bytes"]


def test_levels_change_under_two_batches_in_flight() -> None:
    expected = vllm_tokens("deep", PROMPTS, TOKENS)
    (found,) = serve({"kv": {"far_gib": 1.0}, "walk": 3})
    assert found["tokens"] == [expected, expected]
    assert found["metrics"]["tiered_kv_level_changes"] >= 4
    first, last = found["kv"]
    assert first["far_layers"] == last["far_layers"]
    assert all(kv["counters"]["kv_read_bytes"] > 0 for kv in found["kv"])


@pytest.mark.parametrize("flips", [[], [60]])
def test_each_stage_stores_its_layers_of_a_prefix(flips) -> None:
    """The second pass reads what the first one's requests evicted from each other."""
    expected = vllm_tokens("deep", PROMPTS, TOKENS)
    options = {"enable_prefix_caching": True, "kv_cache_memory_bytes": 6 << 20}
    store = {"expansion": 1.5, "prefix_store": True, "far_gib": 0.5, "verify": "full"}
    (found,) = serve({"kv": store, "flips": flips, "arguments": options})
    assert found["tokens"] == [expected, expected]
    assert found["metrics"]["external_prefix_cache_hits"] >= 64
    assert all(kv["counters"]["kv_read_bytes"] > 0 for kv in found["kv"])
    is_damaged = found["metrics"]["tiered_kv_recomputed_requests"] > 0
    assert is_damaged == bool(flips)


@pytest.mark.parametrize("partition", ["13,17", "17,13"])
def test_unequal_stages_follow_the_plan_of_the_largest(partition) -> None:
    """On a random walk over the levels, and at a fixed one."""
    expected = vllm_tokens("deep", PROMPTS, TOKENS)
    runs: list[dict[str, Any]] = [{"kv": {"far_gib": 1.0}, "walk": 5}, {"kv": {"expansion": 2.0}}]
    walked, fixed = serve(*runs, VLLM_PP_LAYER_PARTITION=partition)
    counts = list(map(int, partition.split(",")))
    for found in walked, fixed:
        assert found["tokens"] == [expected, expected]
        assert [kv["num_layers"] for kv in found["kv"]] == counts
        first, last = found["kv"]
        assert first["far_layers"] == last["far_layers"]
        assert first["near_bytes"] == last["near_bytes"]
        assert all(kv["counters"]["kv_read_bytes"] > 0 for kv in found["kv"])
    assert walked["metrics"]["tiered_kv_level_changes"] >= 4
    assert [kv["far_layers"] for kv in fixed["kv"]] == [11, 11]


def test_each_stage_places_the_weights_of_its_layers(tmp_path) -> None:
    expected = vllm_tokens("deep", PROMPTS, TOKENS)
    all_far: dict[str, Any] = {"placement": "all_far"}
    stored = {**all_far, "storage_path": str(tmp_path), "far_gib": 0}
    placements: tuple[dict[str, Any], ...] = (
        all_far,
        {"placement": "helm"},
        {"placement": "latency", "near_gib": 0.01},
        stored,
    )
    runs = [{"kv": {"enabled": False}, "weights": weights} for weights in placements]
    for found, weights in zip(serve(*runs), placements, strict=True):
        assert found["tokens"] == [expected, expected], weights
        for stated in found["weights"]:
            assert stated["placement"] == weights["placement"]
            assert stated["counters"]["weights_read_bytes"] > 0
            assert stated["far_sublayers"] == 2 * 15 or weights["placement"] != "all_far"
        assert stated["storage_bytes"] > 0 or weights is not stored
