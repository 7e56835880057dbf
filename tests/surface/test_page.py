# SPDX-License-Identifier: Apache-2.0
"""The page of GET /tiered: who gets it, and what it shows in a real browser."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import threading
import time
from argparse import Namespace
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_tiered.adapter.telemetry import endpoint, metrics, page

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
KEY = "k-<b>1</b>"
LOST = ("ERR_CONNECTION", "ERR_EMPTY_RESPONSE", "ERR_INCOMPLETE", "ERR_SOCKET")


class FakeEngine:
    """Engine of one worker whose counters grow with each question."""

    def __init__(self):
        model = SimpleNamespace(served_model_name=["demo"])
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=None,
            additional_config={"tiered": {"kv": {"far_gib": 8.0}}},
            model_config=model,
        )
        self.hangs = False
        self.num_calls = 0
        self.far_layers = 12
        self.kv = {"state": "on", "reason": None}
        self.weights = {"state": "off", "reason": 'weights.placement is "off"'}

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.num_calls += 1
        while self.hangs:
            await asyncio.sleep(0.01)
        return [self.worker()]

    def worker(self):
        now = time.monotonic()
        counters = {
            "kv_read_bytes": 3e6 * now,
            "kv_write_bytes": 1e6 * now,
            "kv_read_seconds": 0.5 * now,
            "kv_step_seconds": 0.8 * now,
            "kv_stall_seconds": 0.2 * now,
            "kv_lost_blocks": 0,
        }
        copied = {"weights_read_bytes": (100 << 20) * now, "weights_read_seconds": 0.5 * now}
        kv = {
            "num_layers": 24,
            "far_layers": self.far_layers,
            "max_far_layers": 20,
            "policy": "interleave",
            "near_bytes": 64 << 20,
            "far_bytes": 256 << 20,
            "storage_bytes": 0,
            "tier": "far",
            "counters": counters,
        }
        energy = {"energy_joules": 20 * now, "energy_assumed_joules": 20 * now}
        return {
            "rank": 0,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "kv": kv | self.kv,
            "weights": self.weights | {"counters": copied},
            "ffn": {"state": "off", "reason": "ffn.store is <not> set", "counters": {}},
            "l2": {"state": "stepped aside", "reason": "one rank", "counters": {}},
            "energy": {"counters": energy},
            "gauges": {
                "kv_expansion": 24 / (26 - self.far_layers),
                "kv_far_layers": self.far_layers,
                "kv_blocks_released": 70 * self.far_layers,
                "kv_blocks_reserved": 100,
            },
        }


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(metrics, "latest_of_schedulers", dict)
    return FakeEngine()


def make_app(engine, **args):
    plugin = endpoint.make_endpoint_plugin()

    @contextlib.asynccontextmanager
    async def lifespan(app):
        await plugin.init_state(engine, app.state, Namespace(**args))
        yield

    app = FastAPI(lifespan=lifespan)
    plugin.attach_router(app)
    return app


# Who gets the page ----------------------------------------------------------------------------


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


# In a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs chromium (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture
def served(engine):
    """`served(**args)`: the address of a server of `engine`, and a function that ends it."""
    with contextlib.ExitStack() as running:

        def start(port=0, **args):
            config = uvicorn.Config(make_app(engine, **args), port=port, log_level="error")
            server = uvicorn.Server(config)
            listening = config.bind_socket()
            thread = threading.Thread(target=server.run, args=([listening],))

            def end():
                server.force_exit = server.should_exit = True
                thread.join()
                listening.close()

            thread.start()
            running.callback(end)
            while not server.started:
                time.sleep(0.01)
            return f"http://127.0.0.1:{listening.getsockname()[1]}/tiered", end

        yield start


@pytest.fixture
def opened(browser):
    """`opened(url, **options)`: the page in a window of its own, which must not log an error."""
    with contextlib.ExitStack() as windows:

        def open_page(url, *, may_fail=(), **options):
            options = {"viewport": {"width": 1280, "height": 900}} | options
            window = windows.enter_context(browser.new_context(**options))
            tab = window.new_page()
            tab.set_default_timeout(20_000)
            errors, requests = [], []
            tab.on("pageerror", lambda error: errors.append(str(error)))
            tab.on(
                "console",
                lambda said: errors.append(said.text) if said.type == "error" else None,
            )
            tab.on("request", lambda request: requests.append(request.url))

            def check():
                unexpected = [e for e in errors if not any(known in e for known in may_fail)]
                assert unexpected == []
                assert {u for u in requests if not u.startswith(("data:", "blob:"))} == {url}

            windows.callback(check)
            tab.goto(url)
            return tab

        yield open_page


def wait_for_polls(engine, num):
    """Wait until the engine was asked `num` more times."""
    until, end = engine.num_calls + num, time.monotonic() + 30
    while engine.num_calls < until:
        assert time.monotonic() < end
        time.sleep(0.05)


def text_of(tab, selector="body"):
    return tab.locator(selector).inner_text()


def wait_for_text(tab, selector, text):
    tab.locator(selector, has_text=text).first.wait_for()


def overflow(tab):
    return tab.evaluate("document.documentElement.scrollWidth - innerWidth")


def test_it_says_in_words_what_the_server_does(opened, served, engine):
    url, _ = served()
    tab = opened(url)
    wait_for_text(tab, "#headline", "12 of the KV cache's 24 layers live in far memory")
    assert tab.title() == "demo · vllm-tiered"
    parts = text_of(tab, "#parts")
    for words in ("ffn.store is <not> set", "Because one rank", 'weights.placement is "off"'):
        assert words in parts  # reasons, as text and not as HTML
    assert re.search(r"far\s+KV cache 256 MiB", text_of(tab, "#tiers"))
    assert re.search(r"storage\s+nothing", text_of(tab, "#tiers"))
    wait_for_text(tab, "#charts", "25.0 %")  # stall: 0.2 of 0.8 seconds
    charts = text_of(tab, "#charts")
    assert "KV read 2.9 MiB/s" in charts and "20.0 J/s" in charts
    assert re.search(r"Energy\s+assumed", charts)
    hits = text_of(tab, ".card:has(h3:text('Neuron hit ratio'))")
    assert "not measured: the part “FFN neurons” is off" in hits
    assert "not measured" in text_of(tab, "#links")  # the peak
    assert "This page was opened." in text_of(tab, "#events")


def test_a_links_rate_is_shown_against_its_measured_peak(opened, served, engine):
    url, _ = served()
    tab = opened(url)
    wait_for_text(tab, "#live", "live")
    stated = {"num_sublayers": 60, "far_sublayers": 20, "placement": "latency", "compress": "none"}
    peak = {"peak_read_bytes_per_s": 400 << 20}
    engine.weights = {"state": "on", "reason": None} | stated | peak
    wait_for_text(tab, "#links", "400 MiB/s (50.0 % used)")
    wait_for_text(tab, "#headline", "Weights of 20 of 60 sublayers are read from far memory")


def test_it_asks_every_two_seconds_while_it_is_visible_and_else_never(opened, served, engine):
    url, _ = served()
    tab = opened(url)
    wait_for_text(tab, "#live", "live")
    num_calls = engine.num_calls
    tab.wait_for_timeout(5000)
    assert 1 <= engine.num_calls - num_calls <= 3
    hide = """is => { Object.defineProperty(document, "hidden", {value: is, configurable: true});
              document.dispatchEvent(new Event("visibilitychange")); }"""
    tab.evaluate(hide, True)
    tab.wait_for_timeout(300)
    num_calls = engine.num_calls
    tab.wait_for_timeout(5000)
    assert engine.num_calls == num_calls
    assert text_of(tab, "#live") == "paused"
    tab.evaluate(hide, False)
    wait_for_polls(engine, 2)
    wait_for_text(tab, "#live", "live")


def test_changes_become_events(opened, served, engine):
    url, _ = served()
    tab = opened(url)
    wait_for_text(tab, "#events", "This page was opened.")
    engine.far_layers = 18
    wait_for_text(tab, "#events", "Far layers of the KV cache: 12 → 18, expansion 3.00")
    engine.kv = {"state": "stepped aside", "reason": "a <b>reason</b>"}
    wait_for_text(tab, "#events", "KV cache: was on, is stepped aside: a <b>reason</b>")


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(opened, served, engine, color_scheme):
    url, _ = served()
    tab = opened(url, viewport={"width": 360, "height": 740}, color_scheme=color_scheme)
    wait_for_text(tab, "#charts", "25.0 %")
    assert overflow(tab) <= 0
    tab.locator("summary", has_text="Everything the server says").click()
    assert overflow(tab) <= 0
    colors = tab.evaluate(
        "(({backgroundColor, color}) => [backgroundColor, color])(getComputedStyle(document.body))"
    )
    back, text = (sum(map(int, re.findall(r"\d+", color))) for color in colors)
    assert (back < text) is (color_scheme == "dark")


def test_a_hanging_engine_is_told_in_words_over_the_greyed_last_picture(
    opened, served, engine, monkeypatch
):
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 0.3)
    url, _ = served()
    tab = opened(url, may_fail=["503 (Service Unavailable)"])
    wait_for_text(tab, "#charts", "25.0 %")
    engine.hangs = True
    wait_for_text(tab, "#notice", "the workers did not answer within 0.3 s")
    notice = text_of(tab, "#notice")
    assert f"worker rank 0 (process {os.getpid()}): " in notice
    assert "No answer since" in notice and "What you see below is the state of" in notice
    assert tab.locator("main.stale").is_visible()
    assert "KV cache 256 MiB" in text_of(tab, "#tiers")
    assert overflow(tab) <= 0
    engine.hangs = False
    wait_for_text(tab, "#events", "The server answers again")
    assert not tab.locator("#notice").is_visible()
    assert tab.locator("main.stale").count() == 0


def test_a_server_that_ended_keeps_its_last_words(opened, served, engine, monkeypatch):
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 0.3)
    url, end = served()
    tab = opened(url, may_fail=[*LOST, "503 (Service Unavailable)"])
    wait_for_text(tab, "#live", "live")
    engine.hangs = True
    wait_for_text(tab, "#notice", "the workers did not answer within 0.3 s")
    engine.hangs = False
    end()
    wait_for_text(tab, "#notice", "The server cannot be reached")
    assert "Before that: The server answers, but the workers did not" in text_of(tab, "#notice")
    wait_for_text(tab, "#events", "The server cannot be reached")


def test_a_server_that_ended_is_told_and_asked_more_and_more_seldom(opened, served, engine):
    url, end = served()
    tab = opened(url, may_fail=LOST)
    wait_for_text(tab, "#live", "live")
    asked = []
    end()
    tab.on("request", lambda request: asked.append(time.monotonic()))
    wait_for_text(tab, "#notice", "The server cannot be reached")
    wait_for_text(tab, "#notice", "asks again in 8 s")
    assert len(asked) <= 3
    assert tab.locator("main.stale").is_visible()
    served(port=int(url.split(":")[2].split("/")[0]))
    wait_for_text(tab, "#live", "live")


def test_it_asks_for_the_key_and_keeps_it_in_this_tab_only(opened, served, engine):
    url, _ = served(api_key=[KEY])
    num_calls = engine.num_calls
    tab = opened(url, may_fail=["401 (Unauthorized)"])
    tab.locator("#key-field").wait_for()
    assert not tab.locator("#main").is_visible()
    tab.wait_for_timeout(2500)
    assert engine.num_calls == num_calls
    tab.locator("#key-field").fill("wrong")
    tab.get_by_role("button", name="Show").click()
    wait_for_text(tab, "#key-text", "The server refuses this key.")
    tab.locator("#key-field").fill(KEY)
    tab.locator("#key-field").press("Enter")
    wait_for_text(tab, "#live", "live")
    assert not tab.locator("#key-field").is_visible()
    tab.reload()
    wait_for_text(tab, "#live", "live")
    assert tab.evaluate("[document.cookie, localStorage.length]") == ["", 0]
    assert KEY not in tab.url


def test_what_it_collected_can_be_saved(opened, served, engine):
    url, _ = served()
    tab = opened(url)
    wait_for_text(tab, "#charts", "25.0 %")
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Download").click()
    saved = json.loads(download.value.path().read_text())
    assert [event["text"].split(".")[0] for event in saved["events"]] == ["This page was opened"]
    assert saved["samples"][-1]["kv_stall"] == pytest.approx(0.25)
    assert saved["samples"][-1].get("hit_ratio") is None
    assert saved["last_answer"]["workers"][0]["kv"]["far_layers"] == 12
