# SPDX-License-Identifier: Apache-2.0
"""The plugin's metrics as vLLM registers them, and as vLLM's own `get_metrics()` reads them."""

from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.metrics import reader

from vllm_tiered.adapter.telemetry import figures
from vllm_tiered.adapter.telemetry.metrics import TieredPromMetrics, TieredStats

NUM_RANKS = 2
ENGINES: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=NUM_RANKS), kv_transfer_config=object()
    )
    return TieredPromMetrics(config, types, ["model_name", "engine"], ENGINES)


def series(registry, name, engine="0", **labels):
    return registry.get_sample_value(
        f"vllm:tiered_{name}", {"model_name": "m", "engine": engine, **labels}
    )


def test_every_figure_has_a_series_of_each_engine_before_the_first_step(registry, metrics):
    for table, suffix in ((figures.COUNTERS, "_total"), (figures.GAUGES, "")):
        for figure, metric in table.items():
            (value,) = [v for v, f in metric.figures.items() if f == figure]
            own = {metric.label: value} if metric.label else {}
            for engine in ("0", "1"):
                assert series(registry, f"{metric.name}{suffix}", engine, **own) == 0.0, figure


def test_a_report_adds_to_counters_and_sets_gauges_of_its_engine(registry, metrics):
    for expansion in (3.0, 2.0):
        metrics.observe({"kv_read_bytes": 10, "kv_near_bytes": 7, "kv_expansion": expansion}, 1)
    assert series(registry, "kv_bytes_total", "1", direction="read") == 20
    assert series(registry, "kv_bytes_total", "1", direction="write") == 0
    assert series(registry, "kv_bytes_total", "0", direction="read") == 0
    assert series(registry, "kv_memory_bytes", "1", tier="near") == 7
    assert series(registry, "kv_expansion", "1") == 2.0


def test_the_stall_of_a_step_is_that_of_a_rank(registry, metrics):
    ranks = [TieredStats(data={"kv_steps": 1, "kv_stall_seconds": s}) for s in (0.002, 0.006)]
    metrics.observe(ranks[0].aggregate(ranks[1]).data)
    assert series(registry, "kv_step_stall_seconds_sum") == pytest.approx(0.004)
    assert series(registry, "kv_step_stall_seconds_bucket", le="0.003") == 0
    assert series(registry, "kv_step_stall_seconds_bucket", le="0.01") == 1


def test_a_step_without_a_stall_counts_and_a_part_that_did_not_run_does_not(registry, metrics):
    metrics.observe({"kv_steps": NUM_RANKS})
    assert series(registry, "kv_step_stall_seconds_count") == 1
    assert series(registry, "kv_step_stall_seconds_bucket", le="0.0001") == 1
    assert series(registry, "ffn_step_wait_seconds_count") == 0
    assert series(registry, "kv_step_stall_seconds_count", "1") == 0


def test_vllms_reader_returns_labels_and_histograms(registry, metrics, monkeypatch):
    monkeypatch.setattr(reader, "REGISTRY", registry)
    metrics.observe({"kv_steps": NUM_RANKS, "kv_stall_seconds": 0.04, "kv_read_bytes": 10})
    read = {
        (metric.name, metric.labels["engine"], metric.labels.get("direction")): metric
        for metric in reader.get_metrics_snapshot()
    }
    assert read["vllm:tiered_kv_bytes", "0", "read"].value == 10
    assert read["vllm:tiered_kv_bytes", "0", "write"].value == 0
    stall = read["vllm:tiered_kv_step_stall_seconds", "0", None]
    assert (stall.count, stall.sum) == (1, 0.02)
    assert (stall.buckets["0.01"], stall.buckets["0.03"], stall.buckets["+Inf"]) == (0, 1, 1)


def test_the_figures_are_read_back_summed_over_engines(registry, metrics):
    metrics.observe({"kv_read_bytes": 10}, 0)
    metrics.observe({"kv_read_bytes": 5}, 1)
    read = figures.read_figures(registry.collect())
    assert read["kv_read_bytes"] == 15
    assert set(read) == set(figures.COUNTERS) | set(figures.GAUGES)
