# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: every replica swaps its own KV cache, and shares the host with the others."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import CPUS
from tests.e2e.harness import (
    engine,
    generate,
    metric,
    model_path,
    random_prompts,
    vllm_tokens,
)
from tests.e2e.processes import ROOT
from tests.e2e.script_start import FORK

PROMPTS = random_prompts(8, seed=40)


def serve(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run two replicas with a core each; return what the script prints."""
    environment = {
        **os.environ,
        **FORK,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, sorted(CPUS)[:2])),
    }
    os.sched_setaffinity(0, CPUS)  # processes inherit it, and an earlier engine has left one core
    finished = subprocess.run(
        [sys.executable, "-m", "tests.e2e.replicas_script", model_path("qwen2"),
         json.dumps(PROMPTS), json.dumps(arguments)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-4000:]
    (found,) = [line for line in finished.stdout.splitlines() if line.startswith('{"tokens"')]
    return json.loads(found)  # type: ignore[no-any-return]


@pytest.mark.ranks
def test_each_replica_swaps_for_itself(tmp_path: Path) -> None:
    """Tokens, states, metrics and timelines of two replicas of a dense model."""
    expected = vllm_tokens("qwen2", PROMPTS)
    tiered = {"kv": {"expansion": 1.3}, "report": {"path": str(tmp_path / "timeline.jsonl")}}
    found = serve({"kv_cache_memory_bytes": 4 << 20, "additional_config": {"tiered": tiered}})
    assert found["tokens"] == expected
    workers = found["workers"]
    assert [(worker["replica"], worker["rank"]) for worker in workers] == [(0, 0), (1, 0)]
    for worker in workers:
        in_metrics = found["figures"][str(worker["replica"])]
        assert worker["kv"]["far_layers"] == 3
        assert worker["kv"]["counters"]["kv_read_bytes"] > 0
        assert in_metrics["near"] == 4 << 20 and in_metrics["far"] == worker["kv"]["far_bytes"]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["timeline.dp0.jsonl", "timeline.dp1.jsonl"]


@pytest.mark.ranks
def test_each_replica_has_its_own_file(tmp_path: Path) -> None:
    expected = vllm_tokens("qwen2", PROMPTS)
    kv = {"expansion": 1.3, "tier": "storage", "path": str(tmp_path), "far_gib": 0}
    tiered = {"kv": kv}
    found = serve({"kv_cache_memory_bytes": 4 << 20, "additional_config": {"tiered": tiered}})
    assert found["tokens"] == expected
    for worker in found["workers"]:
        assert worker["kv"]["counters"]["kv_read_bytes"] > 0
        assert worker["kv"]["storage_bytes"] > 0 == worker["kv"]["far_bytes"]
    assert len(found["workers"]) == 2 and list(tmp_path.iterdir()) == []


def test_dummy_steps_between_real_ones_touch_no_page() -> None:
    """A replica of a mixture of experts runs them while it waits for the others.

    vLLM's CPU backend has no all-to-all for such replicas, so the steps are made here.
    """
    expected = vllm_tokens("qwen2", PROMPTS)
    with engine("qwen2", {"expansion": 1.3}, kv_cache_memory_bytes=4 << 20) as llm:
        core = llm.llm_engine.engine_core.engine_core
        execute, num_dummy = core.model_executor.execute_model, 0

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_dummy
            core.execute_dummy_batch()
            num_dummy += 1
            return execute(*args, **kwargs)

        core.model_executor.execute_model = execute_model
        assert generate(llm, PROMPTS) == expected
        assert metric("tiered_kv_read_bytes") > 0
        assert metric("tiered_kv_steps") == num_dummy >= 40
