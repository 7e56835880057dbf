# SPDX-License-Identifier: Apache-2.0
"""Ranks as Ray actors: the same tokens with every part on, and nothing left when one is killed."""

import json
import re
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import model_path, prepared, vllm_tokens
from tests.e2e.processes import OWN_PROCESS, OWN_PROCESSES, PROMPTS, run_script, wait_for
from tests.e2e.processes import start as start  # the fixture


@pytest.mark.slow
@pytest.mark.ranks
def test_tensor_parallel_with_every_part(tmp_path, two_ranks: dict[str, Any]) -> None:
    """An unchanged script gives vLLM's tokens, with the engine in a process of its own.

    The KV cache is swapped, attention weights are far, and each rank opens its shard of the store.
    """
    prepared(Path(model_path("qwen2-relu")), tmp_path / "store").close()
    sections = {
        "kv": {"expansion": 1.3},
        "weights": {"placement": "all_far"},
        "ffn": {"store": str(tmp_path / "store"), "exact": True, "far_gib": 0},
    }
    config = tmp_path / "tiered.json"
    config.write_text(json.dumps(sections))
    result = run_script(
        OWN_PROCESS | {"VLLM_PLUGINS": "tiered", "VLLM_TIERED_CONFIG": str(config)},
        model="qwen2-relu",
        **{**two_ranks, "distributed_executor_backend": "ray", "kv_cache_memory_bytes": 4 << 20},
    )
    assert result["tokens"] == vllm_tokens("qwen2-relu", PROMPTS, max_tokens=24)
    metrics = result["metrics"]
    assert metrics["vllm:tiered_kv_memory_bytes{near}"] == 2 * (4 << 20)
    assert metrics["vllm:tiered_kv_bytes{read}"] > 0
    assert metrics["vllm:tiered_weights_read_bytes"] > 0
    assert metrics["vllm:tiered_ffn_loaded_bytes{storage}"] > 0


def not_ended(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return processes that should have ended, without Ray's agents (they check once a minute)."""
    return [each for each in processes if is_at_work(each)]


def is_at_work(process: psutil.Process) -> bool:
    """Return whether the process runs; zombies and Ray's agents do not count.

    In a container whose first process never waits for children, orphans stay zombies for ever.
    """
    try:
        is_agent = re.match(r"ray::\w+Agent", " ".join(process.cmdline()))
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE and not is_agent
    except psutil.NoSuchProcess:  # it ended since it was listed
        return False


@pytest.mark.slow
@pytest.mark.ranks
def test_a_killed_rank_ends_the_engine_with_an_error(start, tmp_path: Path) -> None:
    process = start("2.0", json.dumps({"distributed_executor_backend": "ray"}), **OWN_PROCESSES)
    wait_for(process, "generated")
    children = not_ended(psutil.Process(process.pid).children(recursive=True))
    ranks = [child for child in children if "CpuRayWorkerProc" in " ".join(child.cmdline())]
    assert ranks, [child.cmdline() for child in children]
    ranks[0].kill()
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0 and "EngineDeadError" in errors, errors[-3000:]
    deadline = time.monotonic() + 60
    while (alive := not_ended(children)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive
    assert not [path for path in tmp_path.iterdir() if path.name != "ray"]
