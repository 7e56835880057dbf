# SPDX-License-Identifier: Apache-2.0
"""The page of GET /tiered in a real browser, of a real `vllm serve` that works and then dies."""

import contextlib
import os
import re
import signal
import threading

import psutil
import pytest
from openai import OpenAI, OpenAIError

from tests.surface.browser import text_of, wait_for_text
from tests.surface.servers import KEY, serve, state

NUM_CLIENTS = 3
NOT_ZERO = r"(?=[\d.]*[1-9])[\d.]+"

LAST_ANSWERS = ("ERR_", "503 (Service Unavailable)", "500 (Internal Server Error)")
"""What the browser may log of the questions to a server that ends."""


@pytest.fixture
def server(clean_env, model_dir, tmp_path):
    """The address and the process of a server with half of its layers far."""
    with serve(clean_env, model_dir, tmp_path / "server.log", tmp_path) as found:
        yield found


@contextlib.contextmanager
def requests_without_end(address):
    """Keep some requests running until the block ends; the server's end ends them, too."""
    is_over = threading.Event()

    def ask(client):
        with contextlib.suppress(OpenAIError):
            while not is_over.is_set():
                client.completions.create(model="demo", prompt="A list: one," * 50, max_tokens=64)

    with OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
        threads = [threading.Thread(target=ask, args=(client,)) for _ in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()


def find_process(server, role):
    """Return the id of the engine core's process, or of its only worker's."""
    address, process = server
    worker = psutil.Process(state(address)["workers"][0]["pid"])
    core = worker.parent()
    assert core is not None and core.ppid() == process.pid
    return {"engine core": core, "worker": worker}[role].pid


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["engine core", "worker"])
def test_the_page_of_a_server_whose_engine_is_killed_keeps_its_last_picture(server, opened, victim):
    address, process = server
    tab = opened(f"{address}/tiered", may_fail=["401 (Unauthorized)", *LAST_ANSWERS])
    tab.set_default_timeout(120_000)
    tab.locator("#key-field").fill(KEY)
    tab.get_by_role("button", name="Show").click()
    wait_for_text(tab, "#live", "live")
    wait_for_text(tab, "#headline", "layers live in far memory")
    parts = text_of(tab, "#parts")
    assert re.search(r"KV cache\s+on\s", parts) and 'weights.placement is "off"' in parts
    assert re.search(r"far\s+KV cache \d", text_of(tab, "#tiers"))
    with requests_without_end(address):
        wait_for_text(tab, "#headline", re.compile(r"demo is served: \d+ requests? running"))
        wait_for_text(tab, "#charts", re.compile(rf"generated {NOT_ZERO}/s"))
        wait_for_text(tab, "#charts", re.compile(rf"KV read {NOT_ZERO} \w+/s"))
        wait_for_text(tab, "#links", re.compile(rf"KV, far to near\s*{NOT_ZERO} \w+/s"))
        tiers = text_of(tab, "#tiers")
        os.kill(find_process(server, victim), signal.SIGKILL)
        wait_for_text(tab, "#notice", re.compile(r"No answer since \d\d:\d\d:\d\d"))
        # vLLM's own, as docs/guides/monitoring.md says: a supervisor cannot tell this by the code.
        assert process.wait(timeout=120) == 0
    wait_for_text(tab, "#notice", "The server cannot be reached")
    assert re.search(
        r"What you see below is the state of \d\d:\d\d:\d\d\.", text_of(tab, "#notice")
    )
    assert text_of(tab, "#live") == "no answer"
    assert text_of(tab, "#headline") == "The server does not say what it does now."
    assert text_of(tab, "#tiers") == tiers
    assert tab.locator("main.stale").is_visible()
    styles = tab.locator("main.stale > :not(.record):visible").evaluate_all(
        "found => found.map(node => getComputedStyle(node).filter)"
    )
    assert len(styles) > 5 and set(styles) == {"grayscale(1)"}
    assert "The server cannot be reached" in text_of(tab, "#events")
