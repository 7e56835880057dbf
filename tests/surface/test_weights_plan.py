# SPDX-License-Identifier: Apache-2.0
"""Near memory that layers and KV cache share: its combinations, and the inputs of its plan."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm_tiered.adapter.weights import kv_sharing
from vllm_tiered.adapter.weights.kv_sharing import target_of, workload_of
from vllm_tiered.adapter.weights.measurements import ROWS, measure_machine
from vllm_tiered.config import WeightsConfig
from vllm_tiered.devices.base import Direction
from vllm_tiered.devices.cpu import CpuDevice
from vllm_tiered.devices.throttle import Throttle
from vllm_tiered.errors import ConfigError, UnsupportedError
from vllm_tiered.planner.machine import load_profile
from vllm_tiered.planner.measured_curves import GemmCurve, MeasuredCurves
from vllm_tiered.planner.step_time import far_link, storage_link
from vllm_tiered.weights.layout import sublayers_of

WEIGHTS = {"placement": "throughput", "near_gib": 0.25}
TIERED = {"tiered": {"kv": {"enabled": False}, "weights": WEIGHTS}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_cache_memory_bytes": 1 << 28}, "--kv-cache-memory-bytes is 268435456"),
        ({"num_gpu_blocks_override": 100}, "--num-gpu-blocks-override is 100"),
        ({"max_model_len": -1}, "--max-model-len -1 fits the longest request"),
    ],
)
def test_what_else_sizes_the_kv_cache_is_refused(make_engine_args, monkeypatch, fields, named):
    engine_args = make_engine_args(additional_config=TIERED, **fields)
    monkeypatch.setattr(
        type(engine_args), "create_model_config", lambda self: pytest.fail("vLLM had started")
    )
    with pytest.raises(UnsupportedError, match=named):
        engine_args.create_engine_config()


def test_so_is_the_variable_of_vllms_cpu_backend(make_engine_args, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    with pytest.raises(UnsupportedError, match=r"VLLM_CPU_KVCACHE_SPACE is 4, but .* leave it out"):
        make_engine_args(additional_config=TIERED).create_engine_config()


def test_no_worker_reserves_a_share_of_all_memory(make_engine_args):
    config = make_engine_args(additional_config=TIERED).create_engine_config()
    assert config.cache_config.kv_cache_memory_bytes == 1 << 28


def test_other_placements_leave_the_kv_cache_to_its_settings(make_engine_args):
    tiered = {"kv": {"enabled": False}, "weights": {"placement": "helm"}}
    args = make_engine_args(additional_config={"tiered": tiered}, kv_cache_memory_bytes=123 << 20)
    assert args.create_engine_config().cache_config.kv_cache_memory_bytes == 123 << 20


def vllm_config(mode="balanced", max_num_seqs=16, max_model_len=1000):
    scheduler = SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=4096)
    return SimpleNamespace(
        performance_mode=mode,
        scheduler_config=scheduler,
        model_config=SimpleNamespace(max_model_len=max_model_len),
        cache_config=SimpleNamespace(block_size=32),
    )


@pytest.mark.parametrize(
    ("mode", "max_num_seqs", "target"),
    [
        ("interactivity", 16, "latency"),
        ("throughput", 1, "throughput"),
        ("balanced", 1, "latency"),
        ("balanced", 2, "throughput"),
    ],
)
def test_the_target_is_vllms_performance_mode(mode, max_num_seqs, target):
    assert target_of(vllm_config(mode, max_num_seqs)) == target


def test_vllm_knows_these_modes():
    from typing import get_args

    from vllm.config.vllm import PerformanceMode

    assert set(get_args(PerformanceMode)) == {"balanced", "interactivity", "throughput"}


@pytest.mark.parametrize("longest", [1, 2, 999, 1000])
def test_the_load_is_of_the_longest_requests(monkeypatch, longest):
    monkeypatch.setattr(kv_sharing, "block_tokens", lambda config: config.cache_config.block_size)
    config = WeightsConfig(placement="throughput", near_gib=1)
    load = workload_of(vllm_config(max_model_len=longest), config)
    assert load.prompt_tokens + load.output_tokens == max(2, longest)
    assert load.block_tokens == 32 and load.max_requests == 16


def test_the_load_has_the_configured_prompts(monkeypatch):
    monkeypatch.setattr(kv_sharing, "block_tokens", lambda config: config.cache_config.block_size)
    config = WeightsConfig(placement="throughput", near_gib=1, prompt_tokens=900)
    load = workload_of(vllm_config(max_model_len=1000), config)
    assert (load.prompt_tokens, load.output_tokens) == (900, 100)
    with pytest.raises(ConfigError, match="prompt_tokens is 900, and requests have 900 tokens"):
        workload_of(vllm_config(max_model_len=900), config)


@pytest.fixture
def layers():
    layers = []
    for _ in range(2):
        layer = torch.nn.Module()
        layer.attn = torch.nn.Linear(512, 512)
        layer.fc1 = torch.nn.Linear(512, 2048)
        layer.fc2 = torch.nn.Linear(2048, 512)
        layers.append(layer)
    return layers


def measured(layers, throttles=None, compressed=(), folder=None):
    parts = [
        part
        for index, layer in enumerate(layers)
        for part in sublayers_of(index, {n: p.nbytes for n, p in layer.named_parameters()})
    ]
    on = CpuDevice(throttles=throttles)
    names = [set(compressed) for _ in layers]
    try:
        return measure_machine(
            on, layers, parts, torch.device("cpu"), compressed=names, storage_folder=folder
        )
    finally:
        on.close()


def curves_of(on):
    assert on.curves is not None
    return on.curves


@pytest.mark.slow
def test_the_link_is_measured_as_it_is(layers):
    """No copy is faster. What else the machine does makes it slower: the best of a few."""
    tries = [measured(layers, {Direction.READ: Throttle(200e6)}) for _ in range(3)]
    found = max(tries, key=lambda machine: machine.read_gb_per_s)
    assert 0.17 < found.read_gb_per_s <= 0.2 * (1 + 1e-6)
    assert found.near_gb_per_s > 0.2
    assert found.tflops > 0 and found.near_bytes_per_copied_byte >= 0
    assert 0 < min(far_link(machine, 0).latency_s for machine in tries) < 2e-3
    assert storage_link(found) is None


def test_products_are_measured_by_rows_near_and_far(layers):
    found = curves_of(measured(layers))
    for curve in (found.near, found.far):
        assert curve.rows == ROWS
        for points in curve.by_rows:
            assert [size for size, _ in points] == [512 * 512 * 4, 512 * 2048 * 4]
            assert all(seconds > 0 for _, seconds in points)
    assert found.compressed is None
    for key, seconds in found.near.points.items():
        assert found.far.points[key] >= seconds, "noise says nothing for far weights"
    assert found.compute_slowdown >= 1 and found.link_slowdown >= 1


def test_products_in_4_bit_are_measured_as_such(layers):
    """By the bytes they have in 32 bit; some matrices stay as they are."""
    found = curves_of(measured(layers, compressed=["fc1.weight", "fc2.weight"]))
    assert found.compressed
    assert [size for size, _ in found.compressed.by_rows[0]] == [512 * 2048 * 4]
    assert [size for size, _ in found.near.by_rows[0]] == [512 * 512 * 4]
    every = ["attn.weight", "fc1.weight", "fc2.weight"]
    found = curves_of(measured(layers, compressed=every))
    assert found.compressed and len(found.compressed.by_rows[0]) == 2
    assert [size for size, _ in found.near.by_rows[0]] == [512 * 2048 * 4]  # the head is as it is


def test_the_disk_is_measured_in_its_folder(layers, tmp_path):
    found = measured(layers, folder=tmp_path)
    link = storage_link(found)
    assert link and link.bytes_per_s > 1e6
    slower = curves_of(found).storage_slowdown
    assert slower and min(slower) >= 1
    assert not list(tmp_path.iterdir())


@pytest.fixture
def two_ranks(monkeypatch):
    """This one, and another whose figures the test gives."""
    import vllm.distributed

    other: list[float] = []

    def all_reduce(figures, op, group):
        assert op is torch.distributed.ReduceOp.MAX and group == "cpu"
        there = torch.tensor(other[: len(figures)], dtype=torch.float64)
        torch.maximum(figures, there, out=figures)

    group = SimpleNamespace(world_size=2, cpu_group="cpu")
    monkeypatch.setattr(vllm.distributed, "get_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return other


@pytest.mark.parametrize("compressed", [None, GemmCurve.of({(1, 100): 0.5, (4, 100): 0.5})])
def test_ranks_take_the_slowest_figures(two_ranks, compressed):
    near, far = (GemmCurve.of({(1, 100): at, (4, 100): 2 * at}) for at in (1.0, 2.0))
    curves = MeasuredCurves(
        near=near,
        far=far,
        compute_slowdown=1.5,
        link_slowdown=1.0,
        layer_overhead_us=0.0,
        compressed=compressed,
        storage_slowdown=(1.1, 1.4),
    )
    here = replace(
        load_profile("cpu-2core"),
        curves=curves,
        storage_read_gb_per_s=2.0,
        storage_latency_us=200.0,
    )
    # Its link reads 5 GB/s, its disk 4 with a longer latency, it has 700 bytes of far memory, and
    # one product is slow.
    two_ranks += [1 / 5, 1 / 100, 1 / 0.25, 10.0, 1 / 4, 300.0, 1.2, 1.3, 1.2, 1.3, -700.0]
    two_ranks += [9.0, 0.0, 0.0, 0.0, 0.0, 0.75]
    found, far_bytes = kv_sharing._of_all_ranks(here, 1000)
    assert far_bytes == 700
    assert (found.read_gb_per_s, found.near_gb_per_s) == (5.0, here.near_gb_per_s)
    assert (found.tflops, found.storage_read_gb_per_s) == (0.25, 2.0)
    assert found.storage_latency_us == 300.0
    assert found.far_layer_overhead_us == here.far_layer_overhead_us
    agreed = curves_of(found)
    assert (agreed.compute_slowdown, agreed.link_slowdown) == (1.5, 1.3)
    assert agreed.storage_slowdown == (1.2, 1.4)
    assert agreed.near == GemmCurve.of({(1, 100): 9.0, (4, 100): 2.0})
    assert agreed.far == far
    slowest = GemmCurve.of({(1, 100): 0.5, (4, 100): 0.75})
    assert agreed.compressed == (slowest if compressed else None)


@pytest.mark.parametrize(("here", "there"), [(True, True), (True, False), (False, True)])
def test_figures_that_one_rank_lacks_are_dropped_for_all(two_ranks, here, there):
    two_ranks.append(0.0 if there else 1.0)
    assert kv_sharing.all_ranks_have(here) == (here and there)


def test_the_budget_is_in_whole_bytes():
    assert kv_sharing._near_bytes(WeightsConfig(placement="auto", near_gib=0.1)) == 107374182
