# SPDX-License-Identifier: Apache-2.0
"""Who gets the page of GET /tiered, and with which headers."""

import contextlib
import re
import shutil
import time

import pytest
from fastapi.testclient import TestClient

from tests.fakes.engine_client import BusyEngineClient, make_app
from vllm_tiered.adapter.telemetry import metrics, page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
KEY = "k-<b>1</b>"
LOST = ("ERR_CONNECTION", "ERR_EMPTY_RESPONSE", "ERR_INCOMPLETE", "ERR_SOCKET")


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(metrics, "latest_of_schedulers", dict)
    return BusyEngineClient()


@pytest.mark.parametrize(
    ("accept", "is_page"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("TEXT/HTML;q=0.5, application/json;q=0.4", True),
        ("*/*", False),  # curl, requests, httpx
        ("", False),
        ("application/json", False),
        ("application/json, text/html", False),  # no preference
        ("application/json, text/plain, */*", False),  # axios
        ("text/html;q=0, */*", False),
        ("text/html;q=x", False),
        ("text/html;q=nan;;,,", False),
        ("text/*", False),
    ],
)
def test_only_who_prefers_html_gets_the_page(accept, is_page):
    assert page.prefers_html(accept) is is_page


@contextlib.contextmanager
def client_of(engine, **args):
    with TestClient(make_app(engine, **args)) as client:
        yield client


def test_the_page_and_the_json_are_kept_apart_by_caches_and_by_nobody_stored(engine):
    with client_of(engine) as client:
        html = client.get("/tiered", headers={"Accept": BROWSER})
        found = client.get("/tiered", headers={"Accept": "*/*"})
    assert html.headers["content-type"] == "text/html; charset=utf-8"
    assert found.headers["content-type"] == "application/json"
    for response in (html, found):
        assert response.status_code == 200
        assert response.headers["vary"] == "Accept"
        assert response.headers["cache-control"] == "no-store"


def test_the_page_has_no_data_needs_no_key_and_asks_no_worker(engine):
    with client_of(engine, api_key=[KEY]) as client:
        num_calls = engine.num_calls
        html = client.get("/tiered", headers={"Accept": BROWSER})
        assert client.get("/tiered").status_code == 401
        assert engine.num_calls == num_calls
    assert html.status_code == 200
    assert html.text == page.load_page()


def test_the_page_may_load_nothing_and_run_only_its_own_script(engine):
    with client_of(engine) as client:
        html = client.get("/tiered", headers={"Accept": BROWSER})
    policy = html.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert "innerHTML" not in html.text and "document.write" not in html.text
    addresses = set(re.findall(r"https?://[\w./]+", html.text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a namespace
    assert html.text.count("<script") == html.text.count("<style") == 1
    assert " style=" not in html.text and not re.search(r"\son\w+=", html.text)


def test_the_server_says_its_time_and_model_and_what_it_does_not_know(engine):
    with client_of(engine) as client:
        begin = client.get("/tiered").json()["server"]
        time.sleep(0.02)
        end = client.get("/tiered").json()["server"]
    assert begin["model"] == "demo"
    assert 0 <= begin["uptime_seconds"] < end["uptime_seconds"]
    assert abs(end["time_seconds"] - time.time()) < 10
    engine.vllm_config.model_config.served_model_name = "/home/alice/opt-125m"
    with client_of(engine) as client:
        assert client.get("/tiered").json()["server"]["model"] == "opt-125m"
