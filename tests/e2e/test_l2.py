# SPDX-License-Identifier: Apache-2.0
"""Prefetching behind all-reduces on the real engine: two ranks, compiled.

Engines start twice, for 30 s and more each: a compiled model takes that long on two cores.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import engine, model_path, random_prompts, vllm_tokens
from tests.e2e.script_start import FORK
from vllm_tiered.adapter.telemetry import manifest
from vllm_tiered.errors import UnsupportedError

PROMPTS = random_prompts(4, seed=50)
ROOT = Path(__file__).parents[2]
LAYERS = 4
# qwen2 of benchmarks.inputs.shapes on two ranks, float32: qkv, out, gate and up, down.
LAYER_WEIGHTS = (256 * 256, 256 * 128, 256 * 512, 256 * 256)


def on_two_ranks(cache: Path, tiered: dict[str, Any], max_tokens: int) -> tuple[Any, str]:
    """Return the script's result and log; compiled graphs are kept in ``cache``."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "tiered",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        **FORK,
    }
    finished = subprocess.run(
        [sys.executable, "-m", "tests.e2e.l2_script", model_path("qwen2"),
         json.dumps(PROMPTS), str(max_tokens), json.dumps(tiered)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    log = finished.stdout + finished.stderr
    assert finished.returncode == 0, log[-4000:]
    (line,) = [line for line in finished.stdout.splitlines() if line.startswith("L2_RESULT ")]
    return json.loads(line.removeprefix("L2_RESULT ")), log


def _without_counters(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "counters"}


@pytest.mark.slow
@pytest.mark.ranks
def test_tokens_and_prefetches(tmp_path) -> None:
    tiered = {"l2": {"prefetch": "on", "budget_mib": 4}}
    result, _ = on_two_ranks(tmp_path, tiered, 24)
    assert len(list((tmp_path / "torch_compile_cache" / "torch_aot_compile").iterdir())) == 1
    assert result["tokens"] == vllm_tokens("qwen2", PROMPTS, max_tokens=24)
    stated = [found["l2"] for found in result["states"]]
    assert _without_counters(stated[0]) == _without_counters(stated[1])
    assert stated[0]["active"] and stated[0]["verdicts"] == []
    # The embedding is summed before the first layer; nothing follows the last FFN.
    assert stated[0]["num_weights"] == 4 * LAYERS and stated[0]["num_attentions"] == LAYERS
    assert stated[0]["weight_bytes"] == 4 * sum(LAYER_WEIGHTS) * LAYERS
    asked = result["metrics"]
    total = asked["vllm:tiered_l2_bytes{prefetched}"] + asked["vllm:tiered_l2_bytes{dropped}"]
    assert total >= 20 * 2 * stated[0]["weight_bytes"], "20 decode steps of two ranks"


@pytest.mark.slow
@pytest.mark.ranks
def test_auto_measures_and_both_ranks_decide_alike(tmp_path) -> None:
    """Packed float32 weights have no address: KV alone is prefetched, and weights stay packed."""
    result, log = on_two_ranks(tmp_path, {"kv": {"enabled": False}}, 72)
    assert result["tokens"] == vllm_tokens("qwen2", PROMPTS, max_tokens=72)
    first, second = (_without_counters(found["l2"]) for found in result["states"])
    assert first == second and first["num_attentions"] == LAYERS
    (verdict,) = first["verdicts"]
    assert verdict["batch_size"] == len(PROMPTS)
    assert min(verdict[phase] for phase in ("off_before", "on", "off_after")) > 0
    assert log.count(f"tiered l2: at {len(PROMPTS)} requests a decode step takes") == 1


def test_one_rank_says_so_and_does_nothing() -> None:
    with engine("llama1", {}):
        stated = (manifest.current() or {})["l2"]
    assert not stated["active"] and "no all-reduce" in stated["why_not"]
    assert "l2" not in (manifest.current() or {}), "an engine that is gone states nothing"


def test_off_says_nothing() -> None:
    with engine("llama1", None, additional_config={"tiered": {"l2": {"prefetch": "off"}}}):
        assert "l2" not in (manifest.current() or {})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "--tensor-parallel-size 1"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, "--enforce-eager"),
    ],
    ids=["one-rank", "eager"],
)
def test_on_is_refused_where_there_is_nothing_to_do(arguments, named) -> None:
    config = {"additional_config": {"tiered": {"l2": {"prefetch": "on"}}}}
    with (
        pytest.raises(UnsupportedError, match=rf"{named}: .*set tiered\.l2\.prefetch to auto"),
        engine("llama1", None, **config, **arguments),
    ):
        pass
