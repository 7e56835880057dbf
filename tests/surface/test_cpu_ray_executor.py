# SPDX-License-Identifier: Apache-2.0
"""Ranks in Ray's actors compute on cores of their own."""

import os
from typing import Any

import pytest
from vllm.utils import cpu_resource_utils
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc

from vllm_tiered.adapter.cpu_ray_executor import CpuRayWorkerProc, cores_of_rank
from vllm_tiered.errors import ConfigError


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("0|1", [[0], [1]]),
        ("0-2,5|3", [[0, 1, 2, 5], [3]]),
        ("auto", [[2, 3], [5, 7]]),
        ("nobind", [None, None]),
    ],
)
def test_each_rank_has_its_cores(bind, expected):
    available = {7, 2, 3, 5, 9}
    assert [cores_of_rank(rank, 2, bind, available) for rank in range(2)] == expected


def test_too_few_or_too_many_core_lists_are_refused():
    with pytest.raises(ConfigError, match="cores of 2 ranks, and 3 are on this machine"):
        cores_of_rank(0, 3, "0|1", {0, 1, 2})


def test_more_ranks_than_cores_are_refused():
    with pytest.raises(ConfigError, match="3 ranks on a machine of which Ray may use 2 cores"):
        cores_of_rank(0, 3, "auto", {0, 1})


@pytest.fixture
def initialized(monkeypatch):
    """The arguments with which vLLM's own `initialize_worker` was called, in order."""
    calls: list[Any] = []
    monkeypatch.setattr(
        RayWorkerProc, "initialize_worker", lambda _, *args, **kwargs: calls.append((args, kwargs))
    )
    return calls


def without_nodes() -> list[int]:
    return [0]


def with_nodes(assigned_node_ids=None) -> list[int]:
    return [0]


@pytest.mark.parametrize(
    ("visible_nodes", "ids"), [(without_nodes, [0, 1]), (with_nodes, None)], ids=["0.32", "0.33"]
)
def test_ranks_are_not_taken_for_nodes_and_all_else_reaches_vllm(
    monkeypatch, initialized, visible_nodes, ids
):
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", visible_nodes)
    rank, bind, driver = object.__new__(CpuRayWorkerProc), "VLLM_CPU_OMP_THREADS_BIND", {"B": "2"}
    given = (1, {bind: "nobind"}, "tcp://host:1", driver)
    rank.initialize_worker(*given, assigned_physical_gpu_ids=[0, 1])
    rank.initialize_worker(*given, [0, 1], "sixth", new=7)
    assert initialized == [((*given, ids), {}), ((*given, ids, "sixth"), {"new": 7})]


def test_a_rank_is_bound_before_vllm_initializes_it(monkeypatch, initialized):
    bound: list[Any] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    monkeypatch.setattr("torch.set_num_threads", lambda count: bound.append(count))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "5|6-8")
    rank = object.__new__(CpuRayWorkerProc)
    rank.initialize_worker(1, {}, "tcp://host:1", assigned_physical_gpu_ids=[0, 1])
    assert bound == [[6, 7, 8], 3]
    assert len(initialized) == 1
