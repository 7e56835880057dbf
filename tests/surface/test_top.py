# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered top`: a picture of a server, the same as the page; and servers that are none."""

import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.fakes.engine_client import worker_state
from vllm_tiered.adapter.telemetry.figures import COUNTERS, GAUGES
from vllm_tiered.adapter.telemetry.page import load_page
from vllm_tiered.cli import top
from vllm_tiered.cli.live_rates import PARTS, events_between, rates_between
from vllm_tiered.cli.main import main
from vllm_tiered.units import format_bytes

KV: dict[str, Any] = {
    "state": "on",
    "reason": None,
    "near_bytes": 1 << 20,
    "far_bytes": 1 << 22,
    "counters": {},
}


class Server:
    """Answers `/tiered` with `status` and `body`; each answer is a second after the last."""

    def __init__(self) -> None:
        self.status, self.key, self.steps = 200, "", 0
        self.body: str | None = None
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = f"Bearer {owner.key}" if owner.key else None
                refused = wanted and self.headers["Authorization"] != wanted
                self.send_response(401 if refused else owner.status)
                self.end_headers()
                self.wfile.write((owner.body or owner.state()).encode())

            def log_message(self, *args: object) -> None: ...

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def state(self) -> str:
        self.steps += 1
        counters = {"kv_step_seconds": 1.0 * self.steps, "kv_stall_seconds": 0.3 * self.steps}
        worker = worker_state(kv=KV | {"counters": counters}) | {"monotonic_seconds": self.steps}
        engines = [{"kv_expansion": 2.5, "kv_far_layers": 20}]
        return json.dumps(
            {
                "version": "9.9",
                "workers": [worker],
                "engines": engines,
                "server": {"generated_tokens": 40},
            }
        )

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(top, "INTERVAL_S", 0.01)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    made = Server()
    yield made
    made.close()


def test_a_picture_has_the_parts_the_tiers_and_the_rates(server, capsys):
    assert main(["top", server.url, "--once"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "vllm-tiered 9.9",
        "KV cache",
        "2.50x, 20 layers far",
        "30.0%",
        format_bytes(1 << 22),
        "text",
    ):
        assert text in shown
    assert "KV read, written" in shown and "not measured" in shown


def test_the_key_is_sent(server, capsys, monkeypatch):
    server.key = "sesame"
    assert main(["top", server.url, "--once"]) == 1
    assert "give it with --api-key" in capsys.readouterr().err
    assert main(["top", server.url, "--once", "--api-key", "sesame"]) == 0
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert main(["top", server.url, "--once"]) == 0


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (404, "{}", "start the server with --plugin tiered"),
        (503, '{"error": "the workers did not answer within 10 s"}', "did not answer within 10 s"),
        (500, "oops", "the server answers 500"),
        (200, "<html>", "is it a vLLM server?"),
        (200, "[1]", "is not vllm-tiered's"),
        (200, "[" * 10**5, "is it a vLLM server?"),
        (500, "[" * 10**5, "the server answers 500"),
    ],
)
def test_another_answer_is_an_error_in_words(server, capsys, status, body, text):
    server.status, server.body = status, body
    assert main(["top", server.url, "--once"]) == 1
    assert text in capsys.readouterr().err


def test_no_server_and_no_address(capsys, server):
    server.close()
    assert main(["top", server.url, "--once"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert main(["top", "ftp://somewhere"]) == 1
    assert "no address of a server" in capsys.readouterr().err


@pytest.mark.parametrize("tail", ["", "/", "/tiered", "/tiered/"])
def test_the_routes_own_address_will_do(server, tail):
    assert top.ask(f"{server.url}{tail.rstrip('/')}", None)["version"] == "9.9"


SERVER = {"requests_running", "requests_waiting", "prompt_tokens", "generated_tokens"}
PEAKS = {"peak_read_bytes_per_s", "peak_write_bytes_per_s"}
FIGURES = COUNTERS.keys() | GAUGES.keys() | SERVER | PEAKS
BYTES = {f"{tier}_bytes" for tier in ("near", "far", "storage", "buffer", "embedding")}
STATED = BYTES | {"expected_step", "preload"}

ONLY_ON_THE_PAGE: set[str] = set()
ONLY_IN_TOP = {"kv_bookkeeping_seconds"}
"""Of use to who works on the plugin, and in a terminal already."""

NOWHERE = {
    *("prompt_tokens", "kv_partial_blocks_far", "kv_blocks_stored", "kv_blocks_kept"),
    *("co2e_grams", "embodied_co2e_grams"),  # of a run, not of a moment: the report has them
    *("ffn_sparse_steps", "ffn_dense_steps", "l2_prefetched_bytes", "l2_dropped_bytes"),
    *("kv_near_bytes", "kv_far_bytes", "kv_storage_bytes"),  # the manifest has them for each part
    *(f"experts_{name}" for name in ("layer_steps", "waves", "pairs", "fallback_pairs")),
    *("experts_ahead", "experts_ahead_used"),
}
"""Details for `/metrics` and its dashboard."""


def names_in(text: str) -> set[str]:
    """Return the figures, and the keys of what a part states, that the text of a program names."""
    words = set(re.findall(r"\w+", text))
    if "kv_page_errors_" in words:
        words |= {name for name in FIGURES if name.startswith("kv_page_errors_")}
    if "peak_${direction}_bytes_per_s" in text:
        words |= PEAKS
    return words & (FIGURES | STATED)


class Noted(dict[str, Any]):
    """A JSON object that adds the names that are read of it, and of those in it, to `names`."""

    def __init__(self, values: Mapping[str, Any], names: set[str]) -> None:
        super().__init__({key: noted(value, names) for key, value in values.items()})
        self._names = names

    def __getitem__(self, key: str) -> Any:
        self._names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._names.add(key)
        return super().get(key, default)


def noted(value: Any, names: set[str]) -> Any:
    if isinstance(value, Mapping):
        return Noted(value, names)
    return [noted(one, names) for one in value] if isinstance(value, list) else value


def everything(seconds: int) -> dict[str, Any]:
    """Return an answer with all parts on, and all figures but one growing with the time."""
    counters: dict[str, dict[str, float]] = {part: {} for part in (*PARTS, "energy")}
    for name in COUNTERS:
        counters.setdefault(name.partition("_")[0], {})[name] = float(seconds)
    del counters["kv"]["kv_lost_blocks"]  # no block was lost yet, so nobody has counted
    on = {"state": "on", "reason": None} | dict.fromkeys(sorted(BYTES), 1 << 20)
    worker = worker_state() | {part: on | {"counters": counters[part]} for part in PARTS}
    worker |= {"energy": {"counters": counters["energy"]}, "monotonic_seconds": seconds}
    worker["weights"]["expected_step"] = {"requests": 2, "seconds": 0.25, "stall_share": 0.125}
    verdict = {"batch_size": 4, "ratio": 0.875, "kept": True}
    worker["experts"]["preload"] = {"state": "on", "reason": None, "verdicts": [verdict]}
    worker["ffn"]["preload"] = {"state": "off", "reason": "a [red]reason", "verdicts": []}
    worker["link"] = dict.fromkeys(sorted(PEAKS), float(4 << 20))
    server = {name: 10.0 * seconds for name in SERVER} | {"requests_running": 3}
    engine = dict.fromkeys([*GAUGES, "kv_level_changes", "kv_recomputed_requests"], float(seconds))
    return {"version": "9.9", "workers": [worker], "engines": [engine], "server": server}


def test_it_reads_the_figures_that_the_page_reads():
    read: set[str] = set()
    before, now = (noted(everything(seconds), read) for seconds in (1, 2))
    rates = rates_between(before, now)
    top.picture(now, rates, events_between(before, now))
    on_page, in_top = names_in(load_page()), read & (FIGURES | STATED)
    assert on_page - in_top == ONLY_ON_THE_PAGE
    assert in_top - on_page == ONLY_IN_TOP
    assert FIGURES - on_page - in_top == NOWHERE


def test_a_picture_of_everything_has_a_row_for_each_figure(server, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    bodies = [everything(1), everything(2)]
    monkeypatch.setattr(server, "state", lambda: json.dumps(bodies.pop(0)))
    assert main(["top", server.url, "--once"]) == 0
    shown = re.sub(" +", " ", capsys.readouterr().out)
    for row in (
        "10 tokens/s 3 running 20 waiting",
        "KV blocks 2 usable, 2 held back",
        "while reading 1 B/s (0% of the measured peak, 4.00 MiB/s)",
        "while writing 1 B/s (0% of the measured peak, 4.00 MiB/s)",
        "far weights 1 B/s, compute waits 100.0%",
        "a step, planned 250.0 ms, of it waiting for weights 12.5%",
        "a step, observed 1000.0 ms, of it waiting for weights 100.0%",
        "experts found near 50.0%",
        "experts loaded 1 B/s from far memory, 1 B/s from storage, compute waits 100.0%",
        "experts read ahead on (0.88x the time at 4 tokens a step)",
        "neurons found near 50.0%",
        "neurons loaded 1 B/s from far memory, 1 B/s from storage, compute waits 100.0%",
        "neurons read ahead off (a [red]reason)",
        "power 1.0 W (assumed), 0.1 J/token",
        "1 requests computed again, because KV blocks were lost",
        "1 far pages lost (checksum)",
        "the KV cache's storage tier failed and is not used any more",
    ):
        assert row in shown
