# SPDX-License-Identifier: Apache-2.0
"""`vllm-tiered top`: a picture of a server, and what it says of one that is none."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.fakes.engine_client import worker_state
from vllm_tiered.cli import top
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
