# SPDX-License-Identifier: Apache-2.0
"""Metrics that a scrape of /metrics brings up to date, with and without vLLM's KV connector."""

import contextlib
import os
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY, make_asgi_app

from tests.fakes.engine_client import FakeEngineClient, worker_state
from vllm_tiered.adapter.telemetry import endpoint, figures, scrape


@contextlib.contextmanager
def served(engine, monkeypatch):
    monkeypatch.setattr(scrape, "_REFRESH_S", 0.0)
    app = FastAPI()
    made = endpoint.make_endpoint_plugin()
    made.attach_router(app)
    app.mount("/metrics", make_asgi_app())
    with TestClient(app) as client:
        client.portal.call(made.init_state, engine, app.state, Namespace())
        yield client
    scrape._unregister()


def lines_of(client, name):
    text = client.get("/metrics/").text
    return sorted(line for line in text.splitlines() if line.startswith(f"vllm:tiered_{name}"))


def test_without_a_connector_the_workers_counters_are_read_at_each_scrape(monkeypatch):
    engine = FakeEngineClient(worker_state(0), worker_state(1))
    with served(engine, monkeypatch) as client:
        series = 'vllm:tiered_weights_read_bytes_total{engine="0",model_name="a-model"}'
        assert lines_of(client, "weights_read_bytes_total") == [f"{series} 200.0"]
        before = engine.num_calls
        engine.workers[1]["weights"]["counters"]["weights_read_bytes"] = 250
        assert lines_of(client, "weights_read_bytes_total") == [f"{series} 350.0"]
        assert engine.num_calls == before + 1
        assert lines_of(client, "kv_bytes") == [], "there is no KV part"


def test_without_a_connector_all_counters_but_those_of_the_kv_part_are_there(monkeypatch):
    with served(FakeEngineClient(worker_state()), monkeypatch) as client:
        registered = {
            metric.name for metric in figures.COUNTER_METRICS if lines_of(client, metric.name)
        }
        names = {metric.name for metric in figures.COUNTER_METRICS}
    assert registered == {name for name in names if not name.startswith("kv_")}
    assert "embodied_co2e_grams" in registered


def test_nobody_is_asked_while_nobody_scrapes(monkeypatch):
    engine = FakeEngineClient(worker_state())
    with served(engine, monkeypatch) as client:
        before = engine.num_calls
        client.get("/docs")
        assert engine.num_calls == before


def test_with_a_connector_vllm_carries_the_counters(monkeypatch):
    with served(FakeEngineClient(worker_state(), has_connector=True), monkeypatch) as client:
        assert lines_of(client, "weights_read_bytes") == []
        assert len(lines_of(client, "part_active")) == len(scrape.PARTS)


def test_of_several_api_servers_the_first_counts(monkeypatch):
    with served(FakeEngineClient(worker_state(), client_index=1), monkeypatch) as client:
        assert lines_of(client, "") == []


def test_a_part_has_one_reason_at_a_time(monkeypatch):
    engine = FakeEngineClient(worker_state())
    with served(engine, monkeypatch) as client:
        series = 'vllm:tiered_part_active{engine="0",model_name="a-model",part="kv",reason='
        assert f'{series}"off"}} 1.0' in lines_of(client, "part_active")
        engine.workers[0]["kv"] = {"state": "on", "reason": None, "counters": {}}
        kv = [line for line in lines_of(client, "part_active") if 'part="kv"' in line]
        assert kv == [f'{series}"off"}} 0.0', f'{series}"on"}} 1.0']


def test_a_reason_that_is_over_is_0_with_several_api_servers(tmp_path):
    code = """
from types import SimpleNamespace
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm_tiered.adapter.telemetry import scrape
off = {"state": "off", "reason": "text", "counters": {}}
state = {part: dict(off) for part in scrape.PARTS} | {"energy": {"counters": {}}, "gauges": {}}
state["replica"] = 0
scraped = scrape.Scraped(SimpleNamespace(), "m", has_connector=True)
scraped.show([state | {"kv": {"state": "starting"}}])
scraped.show([state | {"kv": {"state": "on"}}])
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
    shown = subprocess.run(
        [sys.executable, "-W", "error:Removal", "-c", code],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    kv = {line.partition("reason=")[2] for line in shown.splitlines() if 'part="kv"' in line}
    assert kv == {'"starting"} 0.0', '"on"} 1.0'}


def test_another_connector_does_not_carry_our_counters(monkeypatch):
    engine = FakeEngineClient(worker_state())
    engine.vllm_config.kv_transfer_config = SimpleNamespace(kv_connector="NixlConnector")
    with served(engine, monkeypatch) as client:
        assert len(lines_of(client, "weights_read_bytes_total")) == 1


@pytest.mark.parametrize(
    ("part", "state", "gauges", "reason"),
    [
        ("kv", {"state": "on"}, {}, "on"),
        ("kv", {"state": "on"}, {"kv_storage_failed": 1}, "storage_failed"),
        ("weights", {"state": "on"}, {"kv_storage_failed": 1}, "on"),
        ("kv", {"state": "stepped aside"}, {}, "nothing_to_swap"),
        ("kv", {"state": "stepped aside", "is_supported": False}, {}, "unsupported"),
        ("weights", {"state": "stepped aside"}, {}, "all_near"),
        ("l2", {"state": "stepped aside", "verdicts": [{}]}, {}, "no_gain"),
        ("l2", {"state": "stepped aside", "verdicts": []}, {}, "nothing_to_prefetch"),
        ("experts", {"state": "stepped aside"}, {}, "all_near"),
        ("ffn", {"state": "stepped aside"}, {}, "dense_is_smaller"),
        ("ffn", {"state": "starting"}, {}, "starting"),
        ("ffn", {"state": "off"}, {}, "off"),
    ],
)
def test_reasons_are_of_few_words(part, state, gauges, reason):
    assert scrape.part_reason(part, worker_state(**{part: state}, gauges=gauges)) == reason
    assert reason in figures.PART_REASONS


def test_workers_that_hang_delay_a_scrape_by_little(monkeypatch):
    monkeypatch.setattr(scrape, "PATIENCE_S", 0.1)
    engine = FakeEngineClient(worker_state())
    with served(engine, monkeypatch) as client:
        lines_of(client, "part_active")
        engine.hangs = True
        assert lines_of(client, "weights_read_bytes_total")[0].endswith(" 100.0"), "what was known"
        engine.hangs = False


def test_a_state_that_is_not_understood_costs_vllms_metrics_nothing(monkeypatch, caplog_vllm):
    engine = FakeEngineClient(worker_state())
    with served(engine, monkeypatch) as client:
        del engine.workers[0]["l2"]
        for _ in range(2):
            assert "python_info" in client.get("/metrics/").text
    assert caplog_vllm.text.count("could not be refreshed") == 1, "said once"


# The table ------------------------------------------------------------------------------------


def test_each_figure_is_one_series_of_one_metric():
    metrics = (*figures.COUNTER_METRICS, *figures.GAUGE_METRICS)
    names = [metric.name for metric in metrics]
    assert len(set(names)) == len(names)
    all_figures = [figure for metric in metrics for figure in metric.figures.values()]
    assert len(set(all_figures)) == len(all_figures)
    for metric in metrics:
        assert (metric.label is None) == (list(metric.figures) == [""])
        assert metric.help.endswith(".")


def test_a_sample_is_read_back_as_its_figure():
    labels = {"engine": "0", "model_name": "m"}
    read = {**labels, "direction": "read"}
    assert figures.figure_of("vllm:tiered_kv_bytes_total", read) == "kv_read_bytes"
    assert figures.figure_of("vllm:tiered_kv_expansion", labels) == "kv_expansion"
    assert figures.figure_of("vllm:tiered_kv_bytes_created", read) is None
    assert figures.figure_of("vllm:tiered_kv_step_stall_seconds_sum", labels) is None
    assert figures.figure_of("vllm:num_preemptions_total", labels) is None


def test_nothing_is_left_registered():
    scrape._unregister()
    names = [family.name for family in REGISTRY.collect()]
    assert not [name for name in names if name.startswith("vllm:tiered_part")]
