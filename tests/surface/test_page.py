# SPDX-License-Identifier: Apache-2.0
"""The page of GET /tiered in a real browser: live, in words, and safe."""

import contextlib
import itertools
import json
import os
import re
import threading
import time
from typing import Any

import pytest
import uvicorn

from tests.fakes.engine_client import BusyEngineClient, make_app
from tests.surface.browser import text_of, wait_for_text
from vllm_tiered.adapter.telemetry import endpoint, metrics, serving

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
KEY = "k-<b>1</b>"
LOST = ("ERR_CONNECTION", "ERR_EMPTY_RESPONSE", "ERR_INCOMPLETE", "ERR_SOCKET")


EXPERTS: dict[str, Any] = {
    "state": "on",
    "reason": None,
    "num_layers": 3,
    "num_experts": 64,
    "slots": 16,
    "top_k": 4,
    "policy": "lfu",
    "preload": {"state": "off", "reason": 'experts.prefetch is "off"', "verdicts": []},
    "grows": {"experts_far_bytes": 5 << 20},
}
FFN: dict[str, Any] = {
    "state": "on",
    "reason": None,
    "num_layers": 24,
    "neurons": 512,
    "cache": "atu",
    "predictor": "gate",
    "storage_bytes": 9 << 20,
    "preload": {"state": "off", "reason": "there is no room", "verdicts": []},
    "grows": {"ffn_far_bytes": 3 << 20, "ffn_storage_bytes": 7 << 20},
}
"""Parts that are on; `grows` are counters' increases each second."""


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(metrics, "latest_of_schedulers", dict)
    return BusyEngineClient()


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


def wait_for_polls(engine, num):
    """Wait until the engine was asked `num` more times."""
    until, end = engine.num_calls + num, time.monotonic() + 30
    while engine.num_calls < until:
        assert time.monotonic() < end
        time.sleep(0.05)


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


def test_hits_of_experts_are_shown_by_layer(opened, served, engine):
    engine.experts = EXPERTS | {
        "hit_ratio_by_layer": {
            f"model.layers.{layer}.mlp.experts": hits
            for layer, hits in ((1, 0.9), (2, 0.25), (3, 0.5))
        },
        "counters": {"experts_hits": 5.0, "experts_misses": 5.0},
    }
    url, _ = served()
    tab = opened(url)
    wait_for_text(tab, "#parts", "at least 25.0 %, in layer 2, at most 90.0 %")
    heights = tab.evaluate("[...document.querySelectorAll('.bars i')].map(b => b.style.height)")
    assert heights == ["90%", "25%", "50%"]
    titles = tab.evaluate("[...document.querySelectorAll('.bars i')].map(b => b.title)")
    assert titles[1].startswith("layer 2: 25")


def test_a_part_that_may_read_ahead_says_whether_it_does(opened, served, engine):
    engine.experts = EXPERTS
    engine.ffn = FFN
    url, _ = served()
    tab = opened(url)
    wait_for_text(tab, "#parts", "It does not read ahead: there is no room.")
    verdict = {"batch_size": 1, "ratio": 1.034, "kept": False}
    for state, verdicts, text in (
        ("trying", [], "It tries in decode steps whether reading ahead is faster."),
        ("on", [], "It reads ahead in every decode step."),
        (
            "off",
            [verdict],
            "does not read ahead: with it, steps took 1.03 of the time without (1 token a step).",
        ),
        (
            "on",
            [verdict, {"batch_size": 8, "ratio": 0.9, "kept": True}],
            "faster: steps took 1.03 of the time without (1 token a step), 0.90 (8).",
        ),
    ):
        told = {"state": state, "reason": None, "verdicts": verdicts}
        engine.experts = EXPERTS | {"preload": told}
        wait_for_text(tab, "#parts .card:has(h3:text('Experts'))", text)


def test_experts_and_neurons_have_bytes_and_no_peak_on_their_links(opened, served, engine):
    engine.link = {"peak_read_bytes_per_s": 400 << 20}
    engine.experts = EXPERTS
    engine.ffn = FFN
    url, _ = served()
    tab = opened(url)
    neither = "neither the time of copies nor a peak is measured for these"
    wait_for_text(tab, "#links tr", re.compile(r"neurons from storage7.0 MiB/s" + neither))
    links = text_of(tab, "#links")
    assert re.search(rf"experts from far memory\s+5.0 MiB/s\s+{neither}", links)
    assert re.search(rf"experts from storage\s+not measured\s+{neither}", links)
    assert links.count(neither) == 4 and "KV, far to near" in links


def test_files_of_embeddings_and_neurons_are_counted_as_storage(opened, served, engine):
    engine.experts = EXPERTS | {"storage_bytes": 1 << 20, "embedding_bytes": 2 << 20}
    engine.ffn = FFN
    url, _ = served()
    tab = opened(url)
    wait_for_text(tab, "#tiers", re.compile(r"storageExperts 3.0 MiB, FFN neurons 9.0 MiB"))


def test_a_links_rate_is_shown_against_its_measured_peak(opened, served, engine):
    url, _ = served()
    tab = opened(url)
    wait_for_text(tab, "#live", "live")
    stated = {"num_sublayers": 60, "far_sublayers": 20, "placement": "latency", "compress": "none"}
    engine.link = {"peak_read_bytes_per_s": 400 << 20}
    engine.weights = {"state": "on", "reason": None} | stated
    wait_for_text(tab, "#links", "400 MiB/s (50.0 % used)")
    wait_for_text(tab, "#headline", "Weights of 20 of 60 sublayers are read from far memory")


def test_a_planned_step_is_shown_beside_the_observed_one(opened, served, engine, monkeypatch):
    figures = serving.ServerFigures.read
    running = {"requests_running": 3, "requests_waiting": 0}
    monkeypatch.setattr(serving.ServerFigures, "read", lambda self: figures(self) | running)
    url, _ = served()
    tab = opened(url)
    wait_for_text(tab, "#live", "live")
    assert not tab.locator("#plan").is_visible()  # nothing was planned
    stated = {"num_sublayers": 60, "far_sublayers": 20, "placement": "latency", "compress": "none"}
    planned = {"expected_step": {"requests": 1, "seconds": 0.0125, "stall_share": 0.04}}
    engine.weights = {"state": "on", "reason": None} | stated | planned
    wait_for_text(tab, "#plan", "20.0 ms, 3 requests running")  # 50 steps a second
    assert re.search(r"time of a step\s+12.5 ms with 1 request\s+20.0 ms", text_of(tab, "#plan"))
    assert re.search(r"waiting for weights\s+4.0 %\s+25.0 %", text_of(tab, "#plan"))
    running["requests_running"] = 0
    wait_for_text(tab, "#plan", "idle")


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_change_of_the_time_of_day_changes_no_rate(opened, served, engine, monkeypatch):
    read = serving.ServerFigures.read
    jumps = itertools.count()
    monkeypatch.setattr(
        serving.ServerFigures,
        "read",
        lambda self: read(self) | {"time_seconds": 1e9 - 3600 * next(jumps)},
    )
    address, _ = served()
    tab = opened(address)
    wait_for_polls(engine, 3)
    wait_for_text(tab, "body", "5.7 MiB/s")  # 6e6 bytes per second of reading
