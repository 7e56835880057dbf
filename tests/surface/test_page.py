# SPDX-License-Identifier: Apache-2.0
"""The page of GET /tiered in a real browser: live, in words, and safe."""

import contextlib
import shutil
import socket
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import sync_playwright

from tests.fakes.engine_client import FakeEngineClient, worker_state
from vllm_tiered.adapter.telemetry import endpoint, monitor, scrape
from vllm_tiered.adapter.telemetry.page import page, prefers_html, security_policy

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
GIB = 1 << 30
KV: dict[str, Any] = {
    "state": "on",
    "reason": None,
    "num_layers": 30,
    "near_bytes": GIB,
    "far_bytes": 3 * GIB,
    "storage_bytes": 0,
}


def busy(steps: int, **changes: Any) -> dict[str, Any]:
    """The state after so many steps of a tenth of a second, a fifth of it stall."""
    counters = {
        "kv_steps": steps,
        "kv_step_seconds": 0.1 * steps,
        "kv_stall_seconds": 0.02 * steps,
        "kv_read_bytes": steps << 20,
        "kv_read_seconds": 0.01 * steps,
    }
    gauges = {"kv_expansion": 2.5, "kv_far_layers": 20, "kv_blocks_released": 99}
    state = worker_state(kv=KV | {"counters": counters} | changes, gauges=gauges)
    return state | {"monotonic_seconds": 0.1 * steps}


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield started
        started.close()


@contextlib.contextmanager
def served(engine, **arguments):
    """The URL of the route under a real HTTP server."""
    plugin = endpoint.make_endpoint_plugin()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await plugin.init_state(engine, app.state, Namespace(**arguments))
        yield

    app = FastAPI(lifespan=lifespan)
    plugin.attach_router(app)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port}/tiered"
        finally:
            server.should_exit = True
            thread.join()
            scrape._unregister()


@pytest.fixture
def opened(browser):
    """Opens a page; afterwards it must have logged no error, and asked nobody else."""
    contexts = []

    def open_page(url, **options):
        context = browser.new_context(**options)
        shown = context.new_page()
        shown.set_default_timeout(20_000)
        found: dict[str, list[str]] = {"errors": [], "asked": []}
        shown.on("console", lambda m: found["errors"].extend([m.text] * (m.type == "error")))
        shown.on("pageerror", lambda error: found["errors"].append(str(error)))
        shown.on("request", lambda request: found["asked"].append(request.url))
        shown.goto(url)
        contexts.append((context, found, url))
        return shown

    yield open_page
    for context, found, url in contexts:
        context.close()
        refused = [e for e in found["errors"] if "401" not in e and "503" not in e]
        assert [e for e in refused if "ERR_CONNECTION" not in e] == []
        assert {asked for asked in found["asked"] if not asked.startswith("data:")} == {url}


def test_it_says_what_goes_on_and_follows_it(opened):
    engine = FakeEngineClient(busy(10), has_connector=True)
    with served(engine) as url:
        shown = opened(url)
        shown.wait_for_selector("text=2.50x")
        headline = shown.locator("#headline")
        assert "room for 2.50 times what near memory holds, with 20 layers far" in (
            headline.inner_text()
        )
        assert shown.locator("#stall").inner_text() == "not measured", "one answer has no rates"
        assert "4.0 GiB" not in shown.locator("#tiers").inner_text()
        assert "3.0 GiB" in shown.locator("#tiers").inner_text()
        engine.workers = [busy(110)]
        shown.wait_for_selector("text=Compute waits 20 % of the time for KV")
        assert shown.locator("#stall").inner_text() == "20 %"
        assert shown.locator("#read").inner_text() == "10.0 MiB/s"
        assert "100 MiB/s while copying" in shown.locator("#link").inner_text()
        engine.workers = [busy(111, reason="the storage tier failed and was given up")]
        shown.wait_for_selector("#events >> text=the storage tier failed and was given up")


def test_it_asks_nothing_while_nobody_looks(opened):
    engine = FakeEngineClient(busy(10), has_connector=True)
    with served(engine) as url:
        shown = opened(url)
        shown.wait_for_selector("text=2.50x")
        shown.evaluate("Object.defineProperty(document, 'hidden', {value: true})")
        time.sleep(2.5)
        before = engine.num_calls
        time.sleep(3)
        assert engine.num_calls == before


def test_a_hanging_worker_is_said_in_words_and_the_last_picture_stays(opened, monkeypatch):
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 0.2)
    process = {"name": "worker rank 1", "pid": 4711, "status": "stopped", "cpu_percent": 0}
    monkeypatch.setattr(monitor, "find_processes", lambda workers: [process])
    engine = FakeEngineClient(busy(10), has_connector=True)
    with served(engine) as url:
        shown = opened(url)
        shown.wait_for_selector("text=2.50x")
        engine.hangs = True
        shown.wait_for_selector("#problem >> text=worker rank 1 (pid 4711): stopped, 0 % CPU")
        assert "did not answer within 0.2 s" in shown.locator("#problem").inner_text()
        assert shown.locator("#expansion").inner_text() == "2.50x"
        assert shown.locator("#grid.stale").count() == 1
        engine.hangs = False
        shown.wait_for_selector("#events >> text=the server answers again")
        assert not shown.locator("#problem").is_visible()


def test_a_server_that_ends_is_said(opened):
    with served(FakeEngineClient(busy(10), has_connector=True)) as url:
        shown = opened(url)
        shown.wait_for_selector("text=2.50x")
    shown.wait_for_selector("text=The server cannot be reached")


def test_it_asks_for_the_key_and_keeps_it_in_the_tab(opened):
    with served(FakeEngineClient(busy(10), has_connector=True), api_key=["sesame"]) as url:
        shown = opened(url)
        shown.wait_for_selector("text=to who has its API key")
        shown.fill("#key", "wrong")
        shown.click("#ask button")
        shown.wait_for_selector("text=does not know this key")
        shown.fill("#key", "sesame")
        shown.click("#ask button")
        shown.wait_for_selector("text=2.50x")
        assert shown.evaluate("localStorage.length") == 0
        shown.reload()
        shown.wait_for_selector("text=2.50x")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_schemes(opened, scheme):
    long = {"reason": "a" * 300}
    with served(FakeEngineClient(busy(10, **long), has_connector=True)) as url:
        shown = opened(url, viewport={"width": 360, "height": 740}, color_scheme=scheme)
        shown.wait_for_selector("text=2.50x")
        assert shown.evaluate("document.documentElement.scrollWidth") <= 360
        dark = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(16, 20, 24)") is (scheme == "dark")


def test_texts_of_the_server_are_no_markup(opened):
    nasty = {"reason": "<img src=x onerror=alert(1)>"}
    with served(FakeEngineClient(busy(10, **nasty), has_connector=True)) as url:
        shown = opened(url)
        shown.wait_for_selector("#parts >> text=<img src=x")
        assert shown.locator("#parts img").count() == 0


def test_nothing_is_at_work(opened):
    off = {"state": "off", "reason": "kv.enabled is false", "counters": {}}
    state = worker_state(kv=off, weights=off | {"reason": 'weights.placement is "off"'})
    with served(FakeEngineClient(state)) as url:
        shown = opened(url)
        shown.wait_for_selector("text=this server runs as vLLM does by itself")
        assert shown.locator("#expansion").inner_text() == "not measured"
        assert not shown.locator("#weights-card").is_visible()


# Without a browser ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "is_html"),
    [
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", True),
        ("application/json", False),
        ("*/*", False),
        ("", False),
        ("text/html;q=0.5, application/json", False),
        ("application/json;q=0.5, text/html", True),
        ("text/html;q=nonsense", False),
    ],
)
def test_who_gets_the_page(accept, is_html):
    assert prefers_html(accept) is is_html


def test_the_page_asks_this_server_alone():
    assert "http://" not in page().replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page() and "innerHTML" not in page()
    policy = security_policy()
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "connect-src 'self'" in policy
