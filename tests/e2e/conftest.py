# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that run real engines."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.inputs.shapes import random_model_dir
from tests.e2e import harness
from vllm_tiered.adapter.kv import plan as kv_plan
from vllm_tiered.kv.layout import KvLevels, Level

CPUS = os.sched_getaffinity(0)
"""CPUs of this process before vLLM bound its threads."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines compute in one thread, which is as fast for models and batches of this size.

    With a thread on every core, any other load on the machine delays all of them: one busy process
    during the tests made some of them take four times as long.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(min(os.sched_getaffinity(0))))


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return arguments for an engine in this process with two ranks, processes with a core each."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, sorted(CPUS)[:2])))
    os.sched_setaffinity(0, CPUS)  # ranks inherit it, and an earlier engine has left one core
    return {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "async_scheduling": False,
    }


@pytest.fixture
def force_far_layers(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the number of far layers, even one that no expansion gives."""

    def force(far_layers: int) -> None:
        monkeypatch.setattr(kv_plan, "resolve_num_far", lambda kv, num_layers: far_layers)

    return force


@pytest.fixture
def force_levels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that lets small models change levels, although staging eats their gain."""

    def keep_all(levels: KvLevels, num_far: int) -> KvLevels:
        limits = [levels.geometry(Level(m)).block_limit(0) for m in range(levels.num_layers)]
        return replace(levels, max_num_far=levels.num_layers - 1, max_blocks=min(limits))

    def force() -> None:
        monkeypatch.setattr(kv_plan, "with_max_num_far", keep_all)

    return force


@pytest.fixture
def share_caches(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, int]], None]:
    """Return a function that lets layers of the next models read KV caches of other layers.

    It takes the numbers of the layers, each with the one whose KV cache it reads.
    """

    def share(targets: dict[int, int]) -> None:
        from vllm.model_executor.layers.attention import Attention

        make = Attention.__init__

        def init(self, *args: Any, prefix: str = "", **kwargs: Any) -> None:
            for layer, target in targets.items():
                if prefix == f"model.layers.{layer}.self_attn.attn":
                    name = f"model.layers.{target}.self_attn.attn"
                    kwargs["kv_sharing_target_layer_name"] = name
            make(self, *args, prefix=prefix, **kwargs)

        monkeypatch.setattr(Attention, "__init__", init)

    return share


@pytest.fixture
def windowed(tmp_path: Path) -> str:
    """A Mistral whose layers all have a sliding window."""
    model = tmp_path / "mistral"
    shutil.copytree(random_model_dir("mistral"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"sliding_window": 64}))
    harness.PATHS["windowed"] = str(model)
    return "windowed"
