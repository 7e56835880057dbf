# SPDX-License-Identifier: Apache-2.0
"""GET /tiered: when it is served, and its answer."""

import asyncio
import contextlib
import functools
import json
import logging
import os
import signal
import socket
import subprocess
import time
from argparse import Namespace
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace

import psutil
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm_tiered import __version__
from vllm_tiered.adapter import plugin
from vllm_tiered.adapter.telemetry import endpoint, manifest, metrics, monitor
from vllm_tiered.adapter.telemetry.figures import read_figures

MANIFEST = {"kv": {"active": True, "far_layers": 17}}  # of a worker, in part


@pytest.fixture(autouse=True)
def not_announced(monkeypatch):
    plugin.register()
    monkeypatch.setattr(endpoint, "_announced", False)


@pytest.fixture
def caplog_vllm(caplog):
    """`caplog` that hears vLLM's loggers too: they do not propagate to the root."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def load_names():
    import vllm.plugins

    return lambda: [plugin.name for plugin in vllm.plugins.load_endpoint_plugins(("generate",))]


def test_not_served_unless_switched_on(load_names):
    assert load_names() == []


def test_served_once_an_engine_was_configured_with_it(load_names, make_engine_args):
    make_engine_args(additional_config={"tiered": {}}).create_engine_config()
    assert load_names() == ["tiered"]


def test_served_once_when_vllm_loads_it_by_name_too(load_names, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "tiered")
    assert load_names() == ["tiered"]
    endpoint.announce()
    assert load_names() == ["tiered"]


def test_vllm_plugins_is_unchanged(make_engine_args, monkeypatch):
    make_engine_args(additional_config={"tiered": {}}).create_engine_config()
    assert "VLLM_PLUGINS" not in os.environ


def test_vllm_does_not_warn_of_this_route_alone(load_names, caplog_vllm):
    assert load_names() == []
    endpoint.announce()
    assert load_names() == ["tiered"]
    assert "Found endpoint plugin(s)" not in caplog_vllm.text


def test_vllm_warns_where_another_package_has_a_route(load_names, caplog_vllm, monkeypatch):
    ours = EntryPoint("tiered", "vllm_tiered.adapter.endpoint:make_endpoint_plugin", "a")
    other = EntryPoint("other", "no_such_module:make", "a")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints((ours, other)))
    endpoint.announce()
    assert load_names() == ["tiered"]
    assert "Found endpoint plugin(s) ['tiered', 'other']" in caplog_vllm.text


def test_it_is_an_endpoint_plugin_to_vllm():
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

    assert isinstance(endpoint.make_endpoint_plugin(), EndpointPlugin)


GAUGES = {
    "kv_expansion": 1.0,
    "kv_far_layers": 0,
    "kv_near_bytes": 1 << 20,
    "kv_blocks_released": 7,
}


def state(rank=0, pid=None, **parts):
    """What a worker answers."""
    where = {"rank": rank, "pid": os.getpid() if pid is None else pid, "host": socket.gethostname()}
    return {"replica": 0} | where | MANIFEST | parts | {"gauges": GAUGES}


class FakeEngine:
    """Answers `collective_rpc` as an engine of several workers does."""

    def __init__(self, *states, config=None):
        self.states = list(states)
        config = {"kv": {"far_gib": 8.0}} if config is None else config
        self.vllm_config = SimpleNamespace(
            additional_config={"tiered": config},
            kv_transfer_config=SimpleNamespace(),
            model_config=SimpleNamespace(served_model_name="a-model"),
        )
        self.hangs = False
        self.error = None
        self.num_calls = 0

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert (method, args, kwargs) == ("tiered_state", (), None)
        # A shorter one would leave late answers in vLLM's queue, for the next call to take.
        assert timeout == 300
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        while self.hangs:
            await asyncio.sleep(0.01)
        return self.states


@contextlib.contextmanager
def served(engine, **args):
    """A client of a server with the route, whose loop goes on between requests as a server's."""
    app = FastAPI()
    plugin_ = endpoint.make_endpoint_plugin()
    plugin_.attach_router(app)
    with TestClient(app) as client:
        client.portal.call(plugin_.init_state, engine, app.state, Namespace(**args))
        yield client


def answer(engine, headers=None, **args):
    with served(engine, **args) as client:
        response = client.get("/tiered", headers=headers)
    assert response.status_code == 200
    return response.json()


def shown(rank=0):
    return {"replica": 0, "rank": rank, "pid": os.getpid()} | MANIFEST


def test_the_answer_has_version_configuration_and_a_state_per_rank(monkeypatch):
    monkeypatch.setattr(metrics, "latest_of_schedulers", dict)
    found = answer(FakeEngine(state(0), state(1)))
    assert found.pop("server").keys() >= {"time_seconds", "uptime_seconds", "model"}
    assert found == {
        "version": __version__,
        "config": {"kv": {"far_gib": 8.0}},
        "engines": [{"engine": 0} | GAUGES],
        "workers": [shown(0), shown(1)],
    }


def test_a_worker_without_the_plugin_is_left_out():
    assert answer(FakeEngine(None))["workers"] == []


def test_the_worker_method_is_found_by_name_and_gives_the_state(monkeypatch):
    from vllm.v1.serial_utils import run_method
    from vllm.v1.worker.worker_base import WorkerBase

    monkeypatch.setattr(manifest, "current", lambda: MANIFEST)
    worker = object.__new__(WorkerBase)
    worker.rank = 3
    parallel = SimpleNamespace(data_parallel_index=1)
    worker.vllm_config = SimpleNamespace(additional_config={"tiered": {}}, parallel_config=parallel)
    found = run_method(worker, monitor.WORKER_METHOD, (), {})
    assert (found["rank"], found["pid"], found["kv"]["far_layers"]) == (3, os.getpid(), 17)
    assert found["replica"] == 1


def test_the_schedulers_latest_figures_are_shown(monkeypatch):
    latest = {0: {"kv_expansion": 2.5, "kv_level_changes": 7}}
    monkeypatch.setattr(metrics, "latest_of_schedulers", lambda: latest)
    (engine,) = answer(FakeEngine(state()))["engines"]
    assert engine == {"engine": 0} | GAUGES | {"kv_expansion": 2.5, "kv_level_changes": 7}


# Who may read it ------------------------------------------------------------------------------

PATHS = {
    "kv": {"path": "/mnt/secret/kv", "tier": "storage"},
    "weights": {"storage_path": None},
    "ffn": {"store": "/home/alice/store"},
    "report": {"path": "/var/log/t.jsonl"},
}
KEY = {"Authorization": "Bearer k"}


def engine_with_paths():
    return FakeEngine(state(ffn={"store": "/home/alice/store", "neurons": 4}), config=PATHS)


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "k"}, {"Authorization": "Basic k"}, {"Authorization": "Bearer K"}],
    ids=["none", "bare", "basic", "wrong"],
)
def test_with_an_api_key_it_answers_like_the_guarded_routes(headers):
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    engine = engine_with_paths()
    with served(engine, api_key=["k", "other"]) as client:
        calls_at_start = engine.num_calls
        refused = client.get("/tiered", headers=headers)
        assert engine.num_calls == calls_at_start  # nobody without the key reaches the engine
        assert client.get("/tiered", headers=KEY).status_code == 200
        assert client.get("/tiered", headers={"Authorization": "Bearer other"}).status_code == 200
    guarded = FastAPI()
    guarded.add_middleware(AuthenticationMiddleware, tokens=["k"])
    as_vllm = TestClient(guarded).get("/v1/models", headers=headers)
    assert (refused.status_code, refused.json()) == (as_vllm.status_code, as_vllm.json())
    assert refused.status_code == 401


def test_the_key_of_the_environment_guards_it_too(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    with served(FakeEngine(state())) as client:
        assert client.get("/tiered").status_code == 401
        assert client.get("/tiered", headers=KEY).status_code == 200
    with served(FakeEngine(state()), api_key=["other"]) as client:  # the command line wins
        assert client.get("/tiered", headers=KEY).status_code == 401


def test_who_has_the_key_sees_the_paths():
    found = answer(engine_with_paths(), KEY, api_key=["k"])
    assert found["config"] == PATHS
    assert found["workers"][0]["ffn"]["store"] == "/home/alice/store"


def test_a_server_without_a_key_shows_no_path():
    found = answer(engine_with_paths())
    assert found["config"]["kv"] == {"path": endpoint.HIDDEN, "tier": "storage"}
    assert found["config"]["weights"] == {"storage_path": None}
    assert found["workers"][0]["ffn"] == {"store": endpoint.HIDDEN, "neurons": 4}
    assert not any(word in json.dumps(found) for word in ("secret", "alice", "/var", "/home"))


def test_a_developers_server_shows_paths_as_it_shows_its_whole_configuration(monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert answer(engine_with_paths())["config"] == PATHS


# An engine that does not answer ---------------------------------------------------------------


@pytest.fixture
def short_limit(monkeypatch):
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 0.2)


@pytest.fixture
def halted_process():
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        yield process.pid
        process.kill()


def test_a_hanging_worker_is_named_in_time(short_limit, halted_process):
    engine = FakeEngine(state(0), state(1, pid=halted_process))
    with served(engine) as client:
        engine.hangs = True
        begin = time.monotonic()
        response = client.get("/tiered")
        assert time.monotonic() - begin < 5
        engine.hangs = False
    assert response.status_code == 503
    found = response.json()
    assert f"within 0.2 s: worker rank 1 (pid {halted_process}) is stopped" in found["error"]
    assert [p["status"] == "stopped" for p in found["processes"]] == [False, True]
    assert [worker["rank"] for worker in found["workers"]] == [0, 1]  # what is known
    assert found["workers_seen_seconds_ago"] >= 0.2
    assert found["config"] == {"kv": {"far_gib": 8.0}}


def test_a_worker_that_is_gone_is_named(short_limit):
    with subprocess.Popen(["true"]) as process:
        process.wait()
    engine = FakeEngine(state(0, pid=process.pid))
    with served(engine) as client:
        engine.hangs = True
        assert f"worker rank 0 (pid {process.pid}) is gone" in client.get("/tiered").json()["error"]
        engine.hangs = False


def test_while_a_call_hangs_no_second_one_is_made(short_limit):
    engine = FakeEngine(state())
    with served(engine) as client:
        engine.hangs = True
        num_calls = engine.num_calls
        for _ in range(3):
            assert client.get("/tiered").status_code == 503
        assert engine.num_calls == num_calls + 1
        engine.hangs = False
        engine.states = [state(0), state(1)]
        response = client.get("/tiered")
        while response.status_code == 503:
            response = client.get("/tiered")
        assert len(response.json()["workers"]) == 2


def test_a_dead_engine_is_a_503_without_its_message():
    engine = FakeEngine(state())
    with served(engine) as client:
        engine.error = RuntimeError("/mnt/secret/file is damaged")
        response = client.get("/tiered")
    assert response.status_code == 503
    assert "the engine failed (RuntimeError)" in response.json()["error"]
    assert "secret" not in response.text
    assert len(response.json()["workers"]) == 1


def test_an_engine_that_does_not_answer_at_start_does_not_stop_the_server(short_limit):
    engine = FakeEngine(state())
    engine.hangs = True
    with served(engine) as client:
        assert client.get("/tiered").status_code == 503
        engine.hangs = False


def test_a_server_without_an_engine_says_so():
    with served(None) as client:
        response = client.get("/tiered")
    assert (response.status_code, response.json()["error"]) == (503, "this server has no engine")


# Gauges of /metrics ---------------------------------------------------------------------------


@pytest.fixture
def served_metrics(monkeypatch):
    """This server's metrics, in a registry of their own."""
    registry = CollectorRegistry()
    types = {
        kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)
    }
    monkeypatch.setattr(metrics, "_served", [])
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        model_config=None,
        parallel_config=SimpleNamespace(world_size=2),
    )
    made = metrics.TieredPromMetrics(config, types, ["engine"], {0: ["0"]})
    return made, lambda figure: read_figures(registry.collect())[figure]


def test_a_steps_stall_is_a_histogram_per_rank(served_metrics):
    made, _ = served_metrics
    made.observe({"kv_steps": 2, "kv_stall_seconds": 0.01})  # two ranks, one step
    made.observe({"kv_steps": 2})
    made.observe({"kv_level_changes": 1})  # the scheduler's, of no step
    (found,) = made._histograms["kv_step_stall_seconds"][0].collect()
    values = {sample.name.rpartition("_")[2]: sample.value for sample in found.samples}
    assert (values["sum"], values["count"]) == (0.005, 2)


def test_gauges_are_set_at_start_and_then_by_steps(served_metrics):
    made, read = served_metrics
    assert read("kv_near_bytes") == 0
    with served(FakeEngine(state())):
        assert read("kv_near_bytes") == 1 << 20
        assert read("kv_expansion") == 1
        made.observe({"kv_expansion": 2.5, "kv_level_changes": 1, "kv_steps": 4})
        made.observe({"kv_level_changes": 2})
    with served(FakeEngine(state())) as client:  # a later start of the route takes nothing back
        assert read("kv_expansion") == 2.5
        (engine,) = client.get("/tiered").json()["engines"]
    assert (engine["kv_expansion"], engine["kv_level_changes"]) == (2.5, 3)
    assert engine["kv_near_bytes"] == 1 << 20
