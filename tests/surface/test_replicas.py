# SPDX-License-Identifier: Apache-2.0
"""What the replicas of a data-parallel server share: memory, files and the route GET /tiered."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig
from vllm.distributed import parallel_state

from tests.fakes.engine_client import worker_state
from vllm_tiered.adapter.kv import plan
from vllm_tiered.adapter.replicas import (
    REPLICAS_KEY,
    Replicas,
    count_replicas,
    is_first_here,
    path_of_replica,
    paths_here,
    read_replicas,
)
from vllm_tiered.adapter.telemetry import energy, metrics
from vllm_tiered.adapter.telemetry.endpoint import _content
from vllm_tiered.adapter.telemetry.monitor import EngineMonitor
from vllm_tiered.config import KvConfig, ReportConfig
from vllm_tiered.units import GIB


def parallel(**fields: Any) -> ParallelConfig:
    return ParallelConfig(distributed_executor_backend="mp", **fields)


def engine_config(
    replicas: Replicas | None, *, rank: int = 0, local: int = 1, index: int = 0
) -> Any:
    additional = {} if replicas is None else {REPLICAS_KEY: replicas._asdict()}
    return SimpleNamespace(
        additional_config=additional,
        parallel_config=SimpleNamespace(
            data_parallel_rank=rank, data_parallel_size_local=local, data_parallel_index=index
        ),
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, Replicas(1, 1), id="none"),
        pytest.param(
            {"data_parallel_size": 4, "data_parallel_size_local": 4}, Replicas(4, 4), id="all here"
        ),
        pytest.param(
            {"data_parallel_size": 4, "data_parallel_size_local": 2}, Replicas(2, 4), id="two hosts"
        ),
        pytest.param(
            {"data_parallel_size": 4, "data_parallel_size_local": 1,
             "data_parallel_external_lb": True, "is_moe_model": True},
            Replicas(4, 4),
            id="a server each",
        ),
    ],
)  # fmt: skip
def test_replicas_are_counted_on_this_host(fields, expected):
    assert count_replicas(parallel(**fields)) == expected


def test_replicas_divide_the_hosts_memory_but_not_a_configured_size(monkeypatch):
    memory = SimpleNamespace(usable_bytes=64 * GIB)
    monkeypatch.setattr(plan, "read_host_memory", lambda: memory)
    auto, given = KvConfig(), KvConfig(far_gib=8.0)
    assert plan.far_budget_bytes(auto, 1, 1) == 32 * GIB
    assert plan.far_budget_bytes(auto, 2, 4) == 4 * GIB
    assert plan.far_budget_bytes(given, 2, 1) == plan.far_budget_bytes(given, 2, 4) == 4 * GIB


def test_the_first_engine_of_a_host_counts_the_energy_that_ranks_share(monkeypatch):
    monkeypatch.setattr(
        parallel_state, "get_world_group", lambda: SimpleNamespace(local_rank=0, rank=0)
    )
    found = []
    monkeypatch.setattr(energy, "EngineEnergy", lambda meter, *_, **__: found.append(meter))
    monkeypatch.setattr(energy, "_meter", lambda *, is_first: is_first)
    for rank_local in None, 0, 1:
        engine = SimpleNamespace(data_parallel_rank_local=rank_local)
        energy.open_energy(ReportConfig(), is_first_engine=is_first_here(engine))
    assert found == [True, True, False]


def test_an_engine_knows_the_replicas_although_vllm_has_forgotten_them():
    assert read_replicas(engine_config(None)) == Replicas()
    assert read_replicas(engine_config(Replicas(2, 4))) == Replicas(2, 4)


def test_each_replica_has_a_timeline_of_its_own():
    assert path_of_replica("a/t.jsonl", engine_config(None)) == "a/t.jsonl"
    assert path_of_replica("a/t.jsonl", engine_config(Replicas(2, 4), index=3)) == "a/t.dp3.jsonl"
    assert paths_here("t.jsonl", engine_config(None)) == ["t.jsonl"]
    second_host = engine_config(Replicas(2, 4), rank=2, local=2)
    assert paths_here("t.jsonl", second_host) == ["t.dp2.jsonl", "t.dp3.jsonl"]
    # Another replica's own server may already write to its path.
    assert paths_here("t.jsonl", engine_config(Replicas(4, 4), rank=2)) == ["t.dp2.jsonl"]


class ReplicatedClient:
    """Client of two replicas: vLLM's own `collective_rpc` would return the first one's answer."""

    def __init__(self) -> None:
        self.engine_core = self
        self.core_engines = [b"\0\0", b"\1\0"]
        self.vllm_config = SimpleNamespace(additional_config={"tiered": {}})

    async def call_utility_all_async(self, method: str, *args: Any) -> list[list[dict[str, Any]]]:
        assert (method, args[0]) == ("collective_rpc", "tiered_state")
        return [
            [worker_state(replica=replica, gauges={"kv_far_layers": 5 + replica})]
            for replica in range(2)
        ]


def test_the_route_shows_every_replica_with_its_own_gauges(monkeypatch):
    monkeypatch.setattr(metrics, "latest_of_schedulers", lambda: {1: {"kv_level_changes": 3}})
    monitor = EngineMonitor(ReplicatedClient())
    content = _content(monitor, asyncio.run(monitor.ask(5.0)), True)
    assert [worker["replica"] for worker in content["workers"]] == [0, 1]
    assert content["engines"] == [
        {"engine": 0, "kv_far_layers": 5},
        {"engine": 1, "kv_far_layers": 6, "kv_level_changes": 3},
    ]
