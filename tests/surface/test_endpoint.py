# SPDX-License-Identifier: Apache-2.0
"""GET /tiered: when it is served, and its answer."""

import asyncio
import logging
import os
from argparse import Namespace
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_tiered import __version__
from vllm_tiered.adapter import plugin
from vllm_tiered.adapter.telemetry import endpoint, manifest

MANIFEST = {"kv": {"active": True, "far_layers": 17}}


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


class FakeEngine:
    """Answers `collective_rpc` as an engine of several workers does."""

    def __init__(self, *manifests):
        self.manifests = list(manifests)
        self.vllm_config = SimpleNamespace(additional_config={"tiered": {"kv": {"far_gib": 8.0}}})

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert (method, args, kwargs) == ("tiered_manifest", (), None)
        assert timeout is not None
        return self.manifests


def answer(engine):
    app = FastAPI()
    served = endpoint.make_endpoint_plugin()
    served.attach_router(app)
    asyncio.run(served.init_state(engine, app.state, Namespace()))
    response = TestClient(app).get("/tiered")
    assert response.status_code == 200
    return response.json()


def test_the_answer_has_version_configuration_and_a_manifest_per_rank():
    assert answer(FakeEngine(MANIFEST, MANIFEST)) == {
        "version": __version__,
        "config": {"kv": {"far_gib": 8.0}},
        "workers": [MANIFEST, MANIFEST],
    }


def test_a_worker_that_took_nothing_over_is_left_out():
    assert answer(FakeEngine(None))["workers"] == []


def test_the_worker_method_is_found_by_name_and_gives_the_manifest(monkeypatch):
    from vllm.v1.serial_utils import run_method
    from vllm.v1.worker.worker_base import WorkerBase

    monkeypatch.setattr(manifest, "current", lambda: MANIFEST)
    worker = object.__new__(WorkerBase)
    assert run_method(worker, endpoint.WORKER_METHOD, (), {}) == MANIFEST
